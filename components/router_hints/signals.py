# SPDX-License-Identifier: Apache-2.0
"""What the router does with a signal: plan it, tell guards to act, and say what came of it.

A signal never fails a request: whatever cannot be done is an answer with a reason. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvcr.protocol.events import (
    CANCEL,
    DEMOTE,
    INVALIDATE,
    PIN,
    PREFETCH,
    UNPIN,
    ActionCode,
    ActionResult,
    CancelPayload,
    PinPayload,
    UnpinPayload,
)
from kvcr.protocol.signals import (
    Kind,
    LastPlan,
    SessionInfo,
    Signal,
    SignalReply,
)
from router_hints.actions import PENDING, Order
from router_hints.chains import Chain
from router_hints.desk import Desk
from router_hints.forward import Announced, State, TurnId, load_id
from router_hints.letting_go import ACT_WITHIN_S, let_go
from router_hints.placement import Placed
from router_hints.plans import Mode, NoWorker, Reason
from router_hints.prefetches import prefetches
from router_hints.reading import already_compacted, kept_tokens, turn_of
from router_hints.sessions import Session, SessionKey
from router_hints.shown import decision_of, describe, keys_of, last_plan
from router_hints.turns import SessionView

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""How long an answer waits for the guards, unless the caller says otherwise."""
KEPT_REPLIES = 20_000

_AHEAD = frozenset({Kind.FORK, Kind.WAKE_UP, Kind.NEXT_TURN, Kind.ONE_OFF})
_END = frozenset({Kind.SUB_AGENT_DONE, Kind.SESSION_END})


class Audience(Protocol):
    """Who has to know of changes: the other replicas."""

    def session_changed(self, session: Session) -> None: ...
    def turn_planned(self, turn: Announced, first: int = 0, end: int = 0, ready_s: float = 0.0) -> None: ...
    def turn_over(self, turn: Announced) -> None: ...


@dataclass
class _Answer:
    """What is known of one signal, as it changes."""

    signal: Signal
    plan_id: str
    decision: str
    result: str
    reason: str
    blocks: int = 0
    byte_count: int = 0
    worker_id: int = 0
    guard: str = ""
    acted: bool = False
    """Guards were told: their answers count."""
    planned: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class SignalHandler:
    """Handles signals that ride on no request, and the part of those on requests that is an action."""

    desk: Desk
    clock: Callable[[], float] = time.monotonic
    audience: Audience | None = None
    _answers: OrderedDict[TurnId, _Answer] = field(default_factory=OrderedDict)

    # --- signals ---------------------------------------------------------------------------------

    async def handle(self, signal: Signal, tenant: str, wait_s: float = WAIT_S) -> SignalReply:
        """Act on a signal and answer, after ``wait_s`` at the latest. Once: again, it has the same plan."""
        turn_id = TurnId(tenant, signal.signal_id)
        answer = self._answers.get(turn_id)
        if answer is None:
            answer = _Answer(signal, uuid.uuid4().hex, Mode.NONE.value, "noted", "")
            self._answers[turn_id] = answer
            while len(self._answers) > KEPT_REPLIES:
                self._answers.popitem(last=False)
            try:
                await self._carry_out(turn_id, answer)
            finally:
                answer.planned.set()
            log.info(
                "signal %s: %s of session %s: %s (%s)",
                signal.signal_id, signal.kind.value, signal.session, answer.decision, answer.reason,
            )  # fmt: skip
        await answer.planned.wait()
        batch = self.desk.actor.batch(answer.plan_id)
        if batch is not None:
            await batch.settled(wait_s)
        return self._reply(turn_id, answer)

    def reply(self, tenant: str, signal_id: str) -> SignalReply | None:
        """What is known of an earlier signal now."""
        turn_id = TurnId(tenant, signal_id)
        answer = self._answers.get(turn_id)
        return self._reply(turn_id, answer) if answer is not None else None

    async def withdraw(self, tenant: str, signal_id: str, wait_s: float = WAIT_S) -> SignalReply | None:
        """The turn does not come, or the pin is not needed: stop what can be stopped. None: unknown."""
        turn_id = TurnId(tenant, signal_id)
        answer = self._answers.get(turn_id)
        if answer is None:
            return None
        turn = self._drop(turn_id)
        orders: list[Order] = []
        if turn is not None and turn.state is State.MOVING:
            orders.append(Order(turn.guard, CANCEL, CancelPayload(plan_id=answer.plan_id)))
        if turn is not None:
            orders += [
                Order(guard, UNPIN, UnpinPayload(plan_id=answer.plan_id, pin_id=_pin_id(turn_id)))
                for guard in turn.pinned
            ]
        answer.result, answer.reason = "withdrawn", "withdrawn"
        if orders:
            batch = await self.desk.actor.act(answer.plan_id, orders, expires_in_s=ACT_WITHIN_S)
            await batch.settled(wait_s)
        return self._reply(turn_id, answer)

    async def tick(self) -> None:
        """Once a second: plan again what was too early, forget what does not come."""
        now_s = self.clock()
        for turn in self.desk.forward.late(now_s):
            self._drop(turn.id)
        self.desk.arrivals.expire(now_s)
        for turn in self.desk.forward.due(now_s):
            # Of a turn that another replica had planned nothing is known here but the signal.
            answer = self._answers.setdefault(
                turn.id, _Answer(turn.signal, turn.plan_id, Mode.NONE.value, "noted", "")
            )
            answer.planned.set()
            await self._plan_ahead(turn, answer)

    # --- requests --------------------------------------------------------------------------------

    def came(self, key: SessionKey) -> Announced | None:
        """The request of a session is here: its announced turn is load no longer. None: not announced."""
        for turn in self.desk.forward.of(key):
            if turn.signal.kind in _AHEAD:
                self.desk.forward.take(turn.id)
                self.desk.ledger.withdraw(load_id(turn.id))
                if self.audience is not None:
                    self.audience.turn_over(turn)
                return turn
        return None

    def view(self, session: Session | None, keys: bytes | bytearray) -> SessionView:
        """What the planner has to know of a session whose chain has these keys."""
        return SessionView(
            home=session.home if session else "",
            arriving=self.desk.arrivals.of(keys, self.clock()),
            shared_blocks=self.desk.sessions.shared_blocks(session) if session else 0,
        )

    async def compacted(self, session: Session, plan_id: str) -> None:
        """Its compacted request is here: what it left behind is dead."""
        pieces = self.desk.sessions.own_blocks(session, session.chain.blocks if session.chain else 0)
        session.stale = []
        await let_go(self.desk, session, pieces, plan_id, INVALIDATE)

    async def ended(self, session: Session) -> None:
        """The last request of a session is over."""
        await self._end(session, uuid.uuid4().hex)

    def describe(self, tenant: str, name: str) -> SessionInfo | None:
        """Where a session's blocks are, its last plan and the reason. None: unknown to this tenant."""
        return describe(self.desk, tenant, name, self.clock())

    def keys(self, tenant: str, name: str) -> list[str] | None:
        """Keys of a session's blocks in order, hex. None: unknown to this tenant."""
        return keys_of(self.desk, tenant, name)

    # --- by kind ---------------------------------------------------------------------------------

    async def _carry_out(self, turn_id: TurnId, answer: _Answer) -> None:
        signal, now_s = answer.signal, self.clock()
        key = SessionKey(turn_id.tenant, signal.session)
        if signal.kind in _AHEAD:
            self.desk.sessions.open(key, signal.parent, now_s)
            turn = Announced(turn_id, key, signal, now_s, answer.plan_id)
            if (oldest := self.desk.forward.put(turn)) is not None:
                self.desk.ledger.withdraw(load_id(oldest.id))
            await self._plan_ahead(turn, answer)
            return
        session = self.desk.sessions.get(key)
        if session is None or session.chain is None:
            answer.result, answer.reason = "unknown_session", "no request of this session was seen here"
            return
        if signal.kind is Kind.COMPACTION:
            await self._compact(session, answer)
        elif signal.kind in _END:
            answer.decision, answer.reason = Mode.DEMOTE.value, Reason.ENDED.value
            sent = await self._end(session, answer.plan_id)
            self._told(answer, session, sent)
        else:
            await self._pin(turn_id, session, answer)

    async def _plan_ahead(self, turn: Announced, answer: _Answer) -> None:
        """Find a worker for an announced turn, and move its blocks there when it is time."""
        desk, now_s = self.desk, self.clock()
        turn.act_at_s = None
        session = desk.sessions.get(turn.key)
        chain = desk.chain_of(turn)
        spoken = turn_of(turn.signal, now_s - turn.received_s)
        desk.ledger.withdraw(load_id(turn.id))
        try:
            placed = desk.placement().place_ahead(
                answer.plan_id,
                spoken,
                self.view(session, chain.keys if chain else b""),
                chain,
            )
        except NoWorker as error:
            answer.result, answer.reason = "no_worker", str(error)
            return
        made = placed.plan
        desk.plans.record(made, f"signal {turn.id.signal_id}", 0, None, placed.inputs)
        desk.plans.ended(made.plan_id, "announced")
        turn.rank = made.rank
        turn.guard = placed.target.name if placed.target is not None else ""
        turn.prefill_tokens = made.prefill_tokens
        desk.ledger.announce(
            load_id(turn.id), made.rank, starts_at_s=turn.starts_s, prefill_tokens=made.prefill_tokens
        )
        answer.worker_id, answer.guard = made.rank[0], turn.guard
        answer.decision, answer.reason = decision_of(made), made.reason.value
        answer.blocks, answer.byte_count = sum(r.count for r in made.sources), made.moved_bytes
        if session is not None:
            session.plan = last_plan(made, turn.signal.kind.value, turn.guard)
        if made.again_in_s is not None:
            turn.state, answer.result = State.SCHEDULED, "scheduled"
            turn.act_at_s = now_s + made.again_in_s
        elif made.sources and chain is not None and not made.chosen.joined:
            await self._move(turn, answer, placed, chain)
        else:
            turn.state, answer.result = State.NOTED, "noted"
        if self.audience is not None and turn.state is not State.MOVING:
            self.audience.turn_planned(turn)

    async def _move(self, turn: Announced, answer: _Answer, placed: Placed, chain: Chain) -> None:
        desk, made, now_s = self.desk, placed.plan, self.clock()
        deadline_s = ACT_WITHIN_S
        if turn.signal.deadline_s is not None:
            deadline_s = max(0.1, turn.received_s + turn.signal.deadline_s - now_s)
        orders = prefetches(desk, turn.guard, made, chain, deadline_s)
        first = min(run.first for run in made.sources)
        end = max(run.first + run.count for run in made.sources)
        turn.state, answer.result, answer.acted = State.MOVING, PENDING, True
        ready_s = now_s + made.copies_s
        desk.arrivals.begin(answer.plan_id, turn.guard, first, chain.cut(0, end), ready_s)
        if self.audience is not None:
            self.audience.turn_planned(turn, first, end, ready_s)
        session = desk.sessions.get(turn.key)
        if session is not None:
            session.guards.add(turn.guard)
        await desk.actor.act(
            answer.plan_id,
            orders,
            expires_in_s=deadline_s,
            on_result=lambda result: self._moved(turn, result),
        )

    def _moved(self, turn: Announced, result: ActionResult) -> None:
        if result.action_type != PREFETCH:
            return
        batch = self.desk.actor.batch(turn.plan_id)
        if batch is not None and batch.pending:
            return
        self.desk.arrivals.end(turn.plan_id)
        arrived = (batch.result() if batch else result.code) in (ActionCode.DONE, ActionCode.PARTIAL)
        turn.state = State.READY if arrived else State.FAILED
        if self.audience is not None and self.desk.forward.get(turn.id) is turn:
            self.audience.turn_planned(turn)
        session = self.desk.sessions.get(turn.key)
        if arrived and session is not None:
            session.home = turn.guard
            self._told_of(session)

    async def _compact(self, session: Session, answer: _Answer) -> None:
        signal, desk = answer.signal, self.desk
        chain = session.chain
        assert chain is not None
        answer.decision, answer.reason = Mode.INVALIDATE.value, Reason.COMPACTED.value
        if already_compacted(signal, chain.tokens):
            keep = chain.blocks
        else:
            kept = kept_tokens(signal, session.marks)
            if kept is None:
                answer.decision = Mode.NONE.value
                answer.reason = (
                    "what is kept is not known: give keeps, keeps_messages or isl_after, or send the signal "
                    "with the compacted request"
                )
                return
            keep = kept // chain.block_size
        orders = [
            Order(turn.guard, CANCEL, CancelPayload(plan_id=turn.plan_id))
            for turn in desk.forward.of(session.key)
            if turn.state is State.MOVING
        ]
        if orders:
            # They would bring dead blocks, after those were dropped.
            await desk.actor.act(uuid.uuid4().hex, orders, expires_in_s=ACT_WITHIN_S)
        pieces = desk.sessions.own_blocks(session, keep)
        desk.sessions.compact(session, max(keep, desk.sessions.shared_blocks(session)))
        self._told_of(session)
        self._told(answer, session, await let_go(self.desk, session, pieces, answer.plan_id, INVALIDATE))

    async def _end(self, session: Session, plan_id: str) -> int:
        """Whatever only this session uses may be evicted first, wherever it is."""
        for turn in self.desk.forward.of(session.key):
            self._drop(turn.id)
        pieces = self.desk.sessions.own_blocks(session, 0)
        session.ended = True
        sent = await let_go(self.desk, session, pieces, plan_id, DEMOTE)
        self._told_of(session)
        self.desk.sessions.forget(session.key)
        return sent

    async def _pin(self, turn_id: TurnId, session: Session, answer: _Answer) -> None:
        desk, signal, chain = self.desk, answer.signal, session.chain
        assert chain is not None
        assert signal.ttl_s is not None
        answer.decision, answer.reason = Mode.NONE.value, "no guard has its blocks"
        held = desk.index.lookup(bytes(chain.keys))
        counts = {guard: int(held.held[row].sum()) for row, guard in enumerate(held.guards)}
        if not counts:
            return
        guard = session.home if counts.get(session.home) else max(sorted(counts), key=lambda g: counts[g])
        row = held.row(guard)
        assert row is not None
        keys = b"".join(chain.key(i) for i in row.nonzero()[0].tolist())
        answer.decision, answer.reason, answer.guard, answer.acted = "pin", "asked for", guard, True
        answer.blocks = counts[guard]
        desk.forward.put(
            Announced(
                turn_id, session.key, signal, self.clock(), answer.plan_id, guard=guard, pinned=(guard,)
            )
        )
        payload = PinPayload(plan_id=answer.plan_id, keys=keys, pin_id=_pin_id(turn_id), ttl_s=signal.ttl_s)
        answer.result = PENDING
        await desk.actor.act(answer.plan_id, [Order(guard, PIN, payload)], expires_in_s=ACT_WITHIN_S)

    # --- shared ----------------------------------------------------------------------------------

    def _told(self, answer: _Answer, session: Session, guards: int) -> None:
        answer.acted = guards > 0
        answer.result = PENDING if guards else "noted"
        session.plan = LastPlan(
            plan_id=answer.plan_id,
            signal=answer.signal.kind.value,
            decision=answer.decision,
            reason=answer.reason,
        )

    def _drop(self, turn_id: TurnId) -> Announced | None:
        turn = self.desk.forward.take(turn_id)
        if turn is not None:
            self.desk.ledger.withdraw(load_id(turn_id))
            self.desk.arrivals.end(turn.plan_id)
            if self.audience is not None:
                self.audience.turn_over(turn)
        return turn

    def _told_of(self, session: Session) -> None:
        if self.audience is not None:
            self.audience.session_changed(session)

    def _reply(self, turn_id: TurnId, answer: _Answer) -> SignalReply:
        batch = self.desk.actor.batch(answer.plan_id)
        result, blocks, byte_count = answer.result, answer.blocks, answer.byte_count
        if batch is not None and answer.acted:
            if result == PENDING:
                result = batch.result()
            if result not in (PENDING, "withdrawn"):
                blocks, byte_count = batch.blocks, batch.byte_count
        return SignalReply(
            signal_id=turn_id.signal_id,
            session=answer.signal.session,
            plan_id=answer.plan_id,
            decision=answer.decision,
            result=result,
            reason=answer.reason,
            blocks=blocks,
            bytes=byte_count,
            worker_id=answer.worker_id,
            guard=answer.guard,
            actions=list(batch.reports.values()) if batch is not None else [],
        )


def _pin_id(turn_id: TurnId) -> str:
    # Tenants choose their signal ids: one must not unpin what another pinned.
    return f"{turn_id.tenant}/{turn_id.signal_id}"
