# SPDX-License-Identifier: Apache-2.0
"""Requests as turns of their sessions: what was announced of them, what their header says, and what they
leave behind. One event loop."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvcr.keys import KEY_BYTES, KeySpace
from kvcr.protocol.events import DEMOTE, DemotePayload
from kvcr.protocol.signals import BadSignal, Kind, Signal, read_signal
from router_hints import turns
from router_hints.actions import Order
from router_hints.chains import Chain, as_array
from router_hints.desk import Desk
from router_hints.letting_go import ACT_WITHIN_S, free_sources
from router_hints.messages import message_starts
from router_hints.metrics import Metrics
from router_hints.placement import Placed
from router_hints.prefetches import partly_moved
from router_hints.reading import merged, turn_of
from router_hints.requests import Prompt
from router_hints.sessions import Run, Session, SessionKey
from router_hints.shown import last_plan
from router_hints.signals import Audience, SignalHandler
from router_hints.turns import SessionView, Turn

log = logging.getLogger(__name__)

_END = frozenset({Kind.SUB_AGENT_DONE, Kind.SESSION_END})
_NOTHING = Turn()
_NOWHERE = SessionView()


@dataclass
class Visit:
    """One request, as a turn of its session. Without a session everything in it is empty."""

    turn: Turn = _NOTHING
    view: SessionView = _NOWHERE
    run: Run | None = None
    signal: Signal | None = None
    """What the request's header and the signal before it say of this turn."""
    final: bool = False
    """Its session ends with it."""
    plans: list[str] = field(default_factory=list)
    """Plans whose copies are on their way."""
    placed: Placed | None = None
    """The last plan of it."""

    @property
    def chain(self) -> Chain | None:
        return self.run.chain if self.run is not None else None


@dataclass
class Visits:
    """Begins and ends visits. A request that names no session costs it nothing."""

    desk: Desk
    handler: SignalHandler
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    audience: Audience | None = None
    markers: frozenset[int] = frozenset()
    """Tokens that open a message."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _complained: str = ""

    def arrive(self, prompt: Prompt) -> Visit:
        """A request is here. Raises nothing: a signal that is wrong is counted and ignored."""
        carried = self._carried(prompt)
        name = carried.session if carried is not None else prompt.session
        if not name:
            return Visit()
        now_s = self.clock()
        key = SessionKey(prompt.salt, name)
        parent = (carried.parent if carried is not None else "") or prompt.parent
        announced = self.handler.came(key)
        known = self.desk.sessions.get(key)
        idle_s = now_s - known.touched_s if known is not None and known.chain is not None else 0.0
        signal = announced.signal if announced is not None else carried
        if announced is not None and carried is not None:
            signal = merged(announced.signal, carried)
        turn = Turn(session=name, parent=parent, idle_s=idle_s)
        if signal is not None:
            turn = turn_of(signal, here=True)
            turn = msgspec.structs.replace(turn, parent=turn.parent or parent, idle_s=turn.idle_s or idle_s)
        session = self.desk.sessions.open(key, parent, now_s)
        space = self._space(prompt.salt, session) if prompt.keyed else None
        if space is None:
            return Visit(turn, SessionView(home=session.home), None, signal, prompt.final)
        tokens = as_array(prompt.tokens)
        run = self.desk.sessions.begin(key, parent, space, tokens, now_s)
        session.marks = message_starts(tokens, self.markers)
        final = prompt.final or turn.last or (carried is not None and carried.kind in _END)
        return Visit(turn, self.handler.view(session, run.chain.keys), run, signal, final)

    def planned(self, visit: Visit, placed: Placed) -> None:
        """It goes to this worker, with these copies."""
        run, made = visit.run, placed.plan
        if run is None:
            return
        visit.placed = placed
        session, guard = run.session, placed.target.name if placed.target is not None else ""
        session.rank = made.rank
        kind = visit.signal.kind.value if visit.signal is not None else "request"
        session.plan = last_plan(made, kind, guard)
        if guard:
            session.guards.add(guard)
            if not made.no_retain:
                session.home = guard
        self._told_of(session)
        if made.sources and guard and not made.no_retain:
            first = min(source.first for source in made.sources)
            end = max(source.first + source.count for source in made.sources)
            ready_s = self.clock() + made.copies_s
            self.desk.arrivals.begin(made.plan_id, guard, first, run.chain.cut(0, end), ready_s)
            visit.plans.append(made.plan_id)
        if visit.signal is not None and visit.signal.kind is Kind.COMPACTION:
            visit.signal = None  # of this request's further attempts, none drops anything again
            self._in_background(self.handler.compacted(session, uuid.uuid4().hex))

    def output(self, visit: Visit, tokens: Sequence[int]) -> None:
        """The worker put out these tokens; what it waited for has arrived."""
        for plan_id in visit.plans:
            self.desk.arrivals.end(plan_id)
        visit.plans.clear()
        if visit.run is not None and tokens:
            self.desk.sessions.decoded(visit.run, tokens)

    def arrived(self, placed: Placed) -> None:
        """What was copied for a request is where it runs: its sources need not keep what they have of it.

        Those that use it again before they are full keep it all the same.
        """
        made = placed.plan
        if placed.hint is None or not made.spare:
            return
        orders = [
            Order(run.guard, DEMOTE, DemotePayload(plan_id=made.plan_id, keys=keys, descendants=False))
            for run in made.spare
            if (keys := placed.keys[KEY_BYTES * run.first : KEY_BYTES * (run.first + run.count)])
        ]
        self._in_background(self.desk.actor.act(made.plan_id, orders, expires_in_s=ACT_WITHIN_S))

    def leave(self, visit: Visit) -> None:
        """The request is over, however it ended."""
        self.output(visit, ())
        run = visit.run
        if run is None or run.closed:
            return
        self.desk.sessions.finish(run, self.clock())
        if visit.placed is not None and partly_moved(visit.placed.plan):
            self._in_background(free_sources(self.desk, visit.placed, run.chain))
        if visit.turn.kind is turns.Kind.ONE_OFF:
            self.desk.sessions.forget(run.session.key)
        elif visit.final:
            self._in_background(self.handler.ended(run.session))
        else:
            self._told_of(run.session)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _carried(self, prompt: Prompt) -> Signal | None:
        if not prompt.signal:
            return None
        try:
            signal = read_signal(prompt.signal, {"session": prompt.session, "parent": prompt.parent})
        except BadSignal as error:
            self.metrics.refused("header", error.field)
            if self._complained != error.field:
                self._complained = error.field
                log.warning("signal of a request refused, the request goes on without: %s", error)
            return None
        self.metrics.signals.labels(signal.kind.value, "header").inc()
        return signal

    def _space(self, salt: str, session: Session) -> KeySpace | None:
        """The key space of its chain: the one it was in, while any guard still uses that."""
        spaces = {guard.key_space(salt) for guard in self.desk.guards.all()} - {None}
        if session.chain is not None and session.chain.space in spaces:
            return session.chain.space
        return min((s for s in spaces if s is not None), key=lambda s: (s.namespace, s.model), default=None)

    def _told_of(self, session: Session) -> None:
        if self.audience is not None:
            self.audience.session_changed(session)

    def _in_background(self, work: Awaitable[object]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception:
                # The request is answered by then: there is nobody else to tell.
                log.exception("an action that a request asked for failed")

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
