# SPDX-License-Identifier: Apache-2.0
"""Carrying out the actions of hints: those that ride on a request, and those that come for this guard alone.

Both ways in end here. The actions of one envelope run one after the other, each to its end; envelopes run
beside each other. Every action ends with exactly one :class:`ActionResult`, whatever was wrong with it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvcr.errors import ProtocolError
from kvcr.guard.active import Ended
from kvcr.guard.fetches import Fetches
from kvcr.guard.invalidate import Invalidations, resident
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.moves import free_sources
from kvcr.guard.pins import Pins
from kvcr.guard.prefetches import Prefetches
from kvcr.guard.reports import End, Outcome, Reports, code_of_copy
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol import engine
from kvcr.protocol.events import (
    ACTION_VERSION,
    CANCEL,
    DEMOTE,
    FETCH,
    INVALIDATE,
    PIN,
    PREFETCH,
    UNPIN,
    Act,
    ActionCode,
    ActionResult,
    CancelPayload,
    DemotePayload,
    InvalidatePayload,
    PinPayload,
    PrefetchPayload,
    UnpinPayload,
)
from kvcr.transfer.base import LocalRegions

MAX_ACTIONS = 64
"""In one envelope."""

MAX_BLOCKS = 32_768
"""In one action."""

MAX_REMEMBERED = 4096
"""Results kept, so that what is delivered twice is carried out once."""

Key = tuple[str, str, str]
"""Plan, action, type."""

NO_POOL = Outcome(ActionCode.MISS, detail="no pool: no engine has attached yet")


class Host(Protocol):
    """What actions need of the guard."""

    name: str
    pool: Pool | None

    @property
    def local(self) -> LocalRegions | None: ...


class _Envelope(msgspec.Struct):
    actions: list[msgspec.Raw]
    message_id: str = ""


class _Action(msgspec.Struct):
    action_id: str
    action_type: str
    action_version: str
    payload: msgspec.Raw


@dataclass(slots=True)
class _Run:
    """One envelope."""

    plan_id: str
    asked_by: str
    expires_unix_s: float
    actions: deque[msgspec.Raw]
    done: Callable[[], None]


class Actions:
    """Belongs to the authority thread."""

    def __init__(
        self,
        host: Host,
        loop: Loop,
        meters: Meters,
        fetches: Fetches,
        pins: Pins,
        invalidations: Invalidations,
        reports: Reports,
    ) -> None:
        self._host = host
        self._loop = loop
        self._meters = meters
        self._pins = pins
        self._invalidations = invalidations
        self._reports = reports
        self._prefetches = Prefetches(host, fetches, meters)
        self._results: OrderedDict[Key, ActionResult] = OrderedDict()
        self._running: dict[Key, list[Callable[[], None]]] = {}
        """Under way -> who else waits for its end."""
        self._handlers: dict[str, tuple[Any, Callable[[Any, float, End], None]]] = {
            PREFETCH: (PrefetchPayload, self._prefetch),
            INVALIDATE: (InvalidatePayload, self._invalidate),
            PIN: (PinPayload, self._pin),
            UNPIN: (UnpinPayload, self._unpin),
            DEMOTE: (DemotePayload, self._demote),
            CANCEL: (CancelPayload, self._cancel),
        }

    # --- ways in ----------------------------------------------------------------------------------

    def act(self, act: Act, done: Callable[[], None]) -> None:
        """From the router. ``done`` is called once when every action has ended, or was refused."""
        self._start(act.envelope, act.plan_id, f"router {act.router}", act.expires_unix_s, done)

    def act_for_request(self, message: engine.Act) -> None:
        """From the engine: what rode on a request beside a fetch."""
        pool = self._host.pool
        if pool is not None and message.epoch == pool.epoch:
            self._start(message.envelope, "", f"request {message.request_id}", float("inf"), _nothing)

    def fetch_ended(self, ended: Ended) -> None:
        """A fetch is over: free the sources of a move, then say how it went."""
        fetch = ended.fetch
        if not (fetch.plan_id or fetch.action_id or fetch.move or self._prefetches.has(fetch.request_id)):
            # An engine's own, of which nobody wants to hear.
            return

        def freed(count: int, asked: int, reason: str) -> None:
            code, detail = code_of_copy(ended), "; ".join(filter(None, [ended.reason, reason]))
            if self._prefetches.part_ended(ended, code, reason or ended.reason):
                return
            if not ended.fetch.plan_id and not ended.fetch.action_id:
                return
            if code is ActionCode.DONE and count < asked:
                code = ActionCode.PARTIAL
            self._reports.ended(
                ended.fetch.plan_id,
                ended.fetch.action_id,
                FETCH,
                code,
                asked_by=f"request {ended.fetch.request_id}",
                blocks=ended.copied_blocks,
                byte_count=ended.byte_count,
                seconds=ended.seconds,
                detail=detail,
            )

        free_sources(ended, self._host.name, self._meters, lambda f: freed(f.dropped, f.asked, f.reason))

    # --- one envelope -----------------------------------------------------------------------------

    def _start(
        self, raw: bytes, plan_id: str, asked_by: str, expires_unix_s: float, done: Callable[[], None]
    ) -> None:
        try:
            envelope = msgspec.json.decode(raw, type=_Envelope)
            if len(envelope.actions) > MAX_ACTIONS:
                raise ProtocolError(f"{len(envelope.actions)} actions, at most {MAX_ACTIONS} are allowed")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ProtocolError) as error:
            self._reports.ended(plan_id, "", "", ActionCode.REFUSED, asked_by=asked_by, detail=str(error))
            done()
            return
        plan_id = plan_id or envelope.message_id
        self._next(_Run(plan_id, asked_by, expires_unix_s, deque(envelope.actions), done))

    def _next(self, run: _Run) -> None:
        if not run.actions:
            run.done()
            return
        started_s = time.monotonic()
        action_id = action_type = ""

        def end(outcome: Outcome) -> None:
            result = self._reports.ended(
                run.plan_id,
                action_id,
                action_type,
                outcome.code,
                asked_by=run.asked_by,
                blocks=outcome.blocks,
                byte_count=outcome.byte_count,
                seconds=time.monotonic() - started_s,
                detail=outcome.detail,
            )
            self._ended((run.plan_id, action_id, action_type), result)
            # From a round of its own: a long list of actions is no deep stack of calls.
            self._loop.defer(lambda: self._next(run))

        try:
            action = msgspec.json.decode(run.actions.popleft(), type=_Action)
            action_id, action_type = action.action_id, action.action_type
            key = (run.plan_id, action_id, action_type)
            if self._seen(key, lambda: self._next(run)):
                return
            self._running[key] = []
            self._carry_out(action, run, end)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ProtocolError) as error:
            end(Outcome(ActionCode.REFUSED, detail=str(error)))

    def _carry_out(self, action: _Action, run: _Run, end: End) -> None:
        """Raises ProtocolError or a MsgspecError, before anything is done, on what cannot be carried out."""
        if action.action_type not in self._handlers:
            raise ProtocolError(f"unknown action {action.action_type!r} is skipped")
        if action.action_version != ACTION_VERSION:
            raise ProtocolError(f"version {action.action_version!r}, this guard knows {ACTION_VERSION!r}")
        if not action.action_id:
            raise ProtocolError("action_id is empty")
        left_s = run.expires_unix_s - time.time()
        if left_s <= 0:
            end(Outcome(ActionCode.EXPIRED, detail=f"read {-left_s:.1f} s too late"))
            return
        kind, handler = self._handlers[action.action_type]
        payload = msgspec.json.decode(action.payload, type=kind)
        keys = getattr(payload, "keys", b"")
        if len(keys) % KEY_BYTES or len(keys) > MAX_BLOCKS * KEY_BYTES:
            raise ProtocolError(
                f"{len(keys)} bytes of keys: {KEY_BYTES} a key, and at most {MAX_BLOCKS} keys, are allowed"
            )
        handler(payload, time.monotonic() + left_s, end)

    def _seen(self, key: Key, go_on: Callable[[], None]) -> bool:
        """Whether this action came before. Then it is told of again, or waited for, and not carried out."""
        result = self._results.get(key)
        if result is not None:
            self._meters.repeated_actions.inc()
            self._reports.tell(result)
            self._loop.defer(go_on)
            return True
        waiting = self._running.get(key)
        if waiting is not None:
            self._meters.repeated_actions.inc()
            waiting.append(go_on)
            return True
        return False

    def _ended(self, key: Key, result: ActionResult) -> None:
        self._results[key] = result
        if len(self._results) > MAX_REMEMBERED:
            self._results.popitem(last=False)
        for go_on in self._running.pop(key, []):
            self._loop.defer(go_on)

    # --- the actions ------------------------------------------------------------------------------

    def _prefetch(self, payload: PrefetchPayload, deadline_s: float, end: End) -> None:
        deadline_s = min(deadline_s, time.monotonic() + payload.deadline_ms / 1000)
        self._prefetches.start(payload.plan_id, payload, deadline_s, end)

    def _cancel(self, payload: CancelPayload, _: float, end: End) -> None:
        stopped = self._prefetches.cancel(payload.plan_id)
        end(Outcome(ActionCode.DONE if stopped else ActionCode.MISS))

    def _invalidate(self, payload: InvalidatePayload, _: float, end: End) -> None:
        pool = self._host.pool
        if pool is None:
            end(NO_POOL)
        else:
            self._invalidations.invalidate(pool, payload, end)

    def _pin(self, payload: PinPayload, _: float, end: End) -> None:
        pool = self._host.pool
        if pool is None:
            end(NO_POOL)
            return
        count, refusal = self._pins.pin(pool, payload.pin_id, payload.keys, payload.ttl_s, time.monotonic())
        if refusal:
            end(Outcome(ActionCode.REFUSED, detail=refusal))
        else:
            end(self._outcome(count, len(payload.keys) // KEY_BYTES))

    def _unpin(self, payload: UnpinPayload, _: float, end: End) -> None:
        pool = self._host.pool
        count = None if pool is None else self._pins.unpin(pool, payload.pin_id, time.monotonic())
        if count is None:
            end(Outcome(ActionCode.MISS, detail=f"no pin {payload.pin_id!r}"))
        else:
            end(Outcome(ActionCode.DONE, count))

    def _demote(self, payload: DemotePayload, _: float, end: End) -> None:
        pool = self._host.pool
        if pool is None:
            end(NO_POOL)
            return
        found = pool.through(payload.keys) if payload.descendants else resident(pool, payload.keys)
        end(self._outcome(pool.demote(found), len(payload.keys) // KEY_BYTES))

    def _outcome(self, blocks: int, asked: int) -> Outcome:
        local = self._host.local
        byte_count = blocks * local.block_bytes if local is not None else 0
        if not blocks:
            return Outcome(ActionCode.MISS)
        if blocks < asked:
            return Outcome(ActionCode.PARTIAL, blocks, byte_count, f"{asked - blocks} blocks are not here")
        return Outcome(ActionCode.DONE, blocks, byte_count)


def _nothing() -> None:
    """Nobody waits for the actions of a request."""
