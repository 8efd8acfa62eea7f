# SPDX-License-Identifier: Apache-2.0
"""Keeps the location index in step with the guards: events from NATS, repairs straight from each guard.

Losing events, a guard or NATS for a while costs a replay or a snapshot over the control channel; the
blocks known before stay in the index meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

import zmq
import zmq.asyncio

from kvcr.errors import ConfigError, KvcrError, ProtocolError, Refused
from kvcr.protocol.curve import secure_client
from kvcr.protocol.events import Heartbeat, Inventory, event
from kvcr.protocol.peer import (
    VERSION,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Replay,
    Replayed,
    Snapshot,
    SnapshotChunk,
    ToServer,
    to_client,
    to_server,
)
from router_hints.guards import Guard, GuardDirectory
from router_hints.index import LocationIndex, Outcome, Repair, RepairKind
from router_hints.metrics import Metrics

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
REPAIRS_AT_ONCE = 4
"""Guards repaired at a time: a router that starts must not read every pool's directory at once."""
SILENT_S = 5.0
"""A guard beats once a second. One that is not heard for this long while others are is no source."""
_RETRY_S = 1.0
REBUILT = 0.99
"""Part of what the guards hold at which a router that started counts as knowing it."""

Answer = TypeVar("Answer", PeerWelcome, SnapshotChunk, Replayed)


class Conversation:
    """One DEALER to one guard's control socket, for one repair."""

    def __init__(self, context: zmq.asyncio.Context, guard: Guard, secret: bytes | None) -> None:
        """Raises ConfigError on an endpoint or key that cannot be used."""
        sock: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        sock.linger = 0
        sock.ipv6 = "[" in guard.endpoint
        try:
            if secret is not None and guard.curve_key:
                secure_client(cast("zmq.Socket[bytes]", sock), secret, bytes.fromhex(guard.curve_key))
            sock.connect(guard.endpoint)
        except (zmq.ZMQError, ValueError, ConfigError) as error:
            sock.close()
            raise ConfigError(
                f"control endpoint {guard.endpoint!r} of {guard.name} cannot be used: {error}"
            ) from error
        self._sock = sock
        self._guard = guard
        self._ops = itertools.count(1)

    async def hello(self, router: str) -> PeerWelcome:
        return await self._ask(PeerWelcome, lambda op: PeerHello(VERSION, op, router, 0, ""))

    async def snapshot(self, cursor: int) -> SnapshotChunk:
        return await self._ask(SnapshotChunk, lambda op: Snapshot(op, cursor))

    async def replay(self, first: int, last: int) -> Replayed:
        return await self._ask(Replayed, lambda op: Replay(op, first, last))

    def close(self) -> None:
        self._sock.close()

    async def _ask(self, kind: type[Answer], request: Callable[[int], ToServer]) -> Answer:
        """Raises Refused, ProtocolError on another answer, TimeoutError on none."""
        op = next(self._ops)
        await self._sock.send(to_server.encode(request(op)))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                answer = to_client.decode(await self._sock.recv())
                if answer.op == op:
                    break
        if isinstance(answer, PeerRefused):
            raise Refused(answer.code, answer.reason)
        if not isinstance(answer, kind):
            raise ProtocolError(
                f"{self._guard.name} answered {type(answer).__name__}, asked for {kind.__name__}"
            )
        return answer


class InventoryClient:
    """Feeds the index. One event loop."""

    def __init__(
        self,
        index: LocationIndex,
        guards: GuardDirectory,
        metrics: Metrics,
        router: str,
        secret: bytes | None,
        on_batch: Callable[[Inventory], None],
        on_snapshot: Callable[[SnapshotChunk, bool], None],
    ) -> None:
        """``on_batch`` sees every batch once; ``on_snapshot(chunk, first)`` every chunk that was taken."""
        self._index = index
        self._guards = guards
        self._metrics = metrics
        self._router = router
        self._secret = secret
        self._on_batch = on_batch
        self._on_snapshot = on_snapshot
        self._context = zmq.asyncio.Context()
        self._wake = asyncio.Event()
        self._limit = asyncio.Semaphore(REPAIRS_AT_ONCE)
        self._heard: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._complained: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        """blocks each guard says it has"""
        self._slots: dict[str, int] = {}
        """size of each guard's pool, as it said when it was last asked for anything"""
        self._started_s = time.monotonic()
        self._rebuilt = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._started_s = time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._repair_loop())

    async def close(self) -> None:
        tasks = [task for task in (self._task, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._context.destroy(linger=0)

    def admit(self, guard: Guard) -> None:
        """A guard registered, or came back under a new incarnation."""
        self._index.admit(guard.name, guard.incarnation)
        self._complained.pop(guard.name, None)
        self._heard.setdefault(guard.name, time.monotonic())
        self._wake.set()

    def retire(self, name: str) -> None:
        self._index.retire(name)
        self._heard.pop(name, None)
        self._counts.pop(name, None)
        self._slots.pop(name, None)

    def free_blocks(self) -> dict[str, int]:
        """Room in each pool whose size is known."""
        return {
            name: max(0, slots - self._index.blocks(name)) for name, slots in self._slots.items() if slots
        }

    def silent(self) -> set[str]:
        """Guards that seem dead: not heard, although events of others arrive. Nobody, when none do."""
        since = time.monotonic() - SILENT_S
        silent = {name for name, heard in self._heard.items() if heard < since}
        return silent if len(silent) < len(self._heard) else set()

    def received(self, raw: bytes) -> None:
        """One message from the inventory subjects."""
        try:
            message = event.decode(raw)
        except ProtocolError as error:
            self._metrics.inventory_messages.labels("undecodable").inc()
            self._complain("inventory", str(error))
            return
        if isinstance(message, Inventory):
            outcome = self._index.apply(message)
            if outcome in (Outcome.APPLIED, Outcome.WAITING):
                self._on_batch(message)
        elif isinstance(message, Heartbeat):
            outcome = self._index.beat(message)
            if outcome is not Outcome.UNKNOWN:
                self._counts[message.guard] = message.count
                self._guards.heard_unready(message.guard, message.unready)
                self._metrics.unready_sources.labels(message.guard).set(len(message.unready))
                self._look_whether_rebuilt()
        else:
            return
        self._metrics.inventory_messages.labels(outcome.value).inc()
        if message.guard in self._heard:
            self._heard[message.guard] = time.monotonic()
        if outcome in (Outcome.WAITING, Outcome.BEHIND, Outcome.DIFFERS):
            self._wake.set()

    async def _repair_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._wake.wait()
            self._wake.clear()
            for repair in self._index.repairs():
                guard = self._guards.get(repair.guard)
                if guard is None or repair.guard in self._running:
                    continue
                task = asyncio.get_running_loop().create_task(self._repair(repair, guard))
                self._running[repair.guard] = task
                task.add_done_callback(partial(self._repaired, repair.guard))

    def _repaired(self, guard: str, _task: asyncio.Task[None]) -> None:
        self._running.pop(guard, None)

    async def _repair(self, repair: Repair, guard: Guard) -> None:
        async with self._limit:
            self._metrics.index_resyncs.labels(repair.reason).inc()
            try:
                conversation = Conversation(self._context, guard, self._secret)
                try:
                    self._slots[guard.name] = (await conversation.hello(self._router)).slots
                    if repair.kind is RepairKind.REPLAY:
                        await self._replay(conversation, repair)
                    else:
                        await self._snapshot(conversation, repair)
                finally:
                    conversation.close()
            except (KvcrError, TimeoutError, OSError, ValueError) as error:
                self._complain(guard.name, f"{type(error).__name__} {error}".strip())
                # The loop asks again at its own pace; a guard that is away must not be hammered.
                await asyncio.sleep(_RETRY_S)
            else:
                self._complained.pop(guard.name, None)
                self._wake.set()

    async def _replay(self, conversation: Conversation, repair: Repair) -> None:
        try:
            replayed = await conversation.replay(repair.first, repair.last)
        except Refused as refusal:
            self._index.request_snapshot(repair.guard, f"replay refused: {refusal.code}")
            return
        if not replayed.batches:
            self._index.request_snapshot(repair.guard, "replay empty")
        for raw in replayed.batches:
            self.received(raw)

    async def _snapshot(self, conversation: Conversation, repair: Repair) -> None:
        self._index.begin_snapshot(repair.guard)
        cursor = 0
        try:
            while cursor >= 0:
                chunk = await conversation.snapshot(cursor)
                if chunk.guard != repair.guard:
                    raise ProtocolError(f"{chunk.guard} answers at the control endpoint of {repair.guard}")
                if not self._index.add_chunk(chunk):
                    # Another incarnation answered, or took over meanwhile: its own repair is listed.
                    self._index.admit(chunk.guard, chunk.incarnation)
                    return
                self._on_snapshot(chunk, cursor == 0)
                cursor = chunk.next_cursor
            self._counts[repair.guard] = chunk.count
            self._look_whether_rebuilt()
        finally:
            self._index.abort_snapshot(repair.guard)

    def _look_whether_rebuilt(self) -> None:
        """Say once how long it took from the start until the index had nearly all of what guards hold."""
        guards = self._index.guards()
        if self._rebuilt or not guards or not all(guard in self._counts for guard in guards):
            return
        held = sum(self._counts[guard] for guard in guards)
        known = sum(min(self._counts[guard], self._index.blocks(guard)) for guard in guards)
        if known < REBUILT * held:
            return
        self._rebuilt = True
        seconds = time.monotonic() - self._started_s
        self._metrics.index_rebuild_seconds.set(seconds)
        log.info("index knows %d of %d blocks of %d guards after %.3f s", known, held, len(guards), seconds)

    def _complain(self, about: str, problem: str) -> None:
        """Log once per cause, not once per attempt."""
        if self._complained.get(about) != problem:
            self._complained[about] = problem
            log.warning("inventory of %s cannot be read: %s; its known blocks stay in use", about, problem)
