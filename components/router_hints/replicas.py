# SPDX-License-Identifier: Apache-2.0
"""Several routers that behave as one: each tells the others its bookings, sessions and announced turns.

Their indexes need no sharing, each is built from the guards. What one replica says about itself replaces
what it said before, so order and loss do not matter for long; what a dead one said is forgotten. A replica
that knows of no other says only that it is alive, and whoever it hears of is told everything. One event
loop; ``publish`` must not block.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvcr.errors import ProtocolError
from kvcr.keys import KeySpace
from kvcr.protocol.signals import LastPlan, Signal
from router_hints.chains import Chain
from router_hints.costs import Rank
from router_hints.desk import Desk
from router_hints.forward import Announced, State, TurnId, load_id
from router_hints.ledger import Booking
from router_hints.metrics import Metrics
from router_hints.news import (
    Alive,
    Booked,
    Hello,
    Leaving,
    News,
    Released,
    SessionNews,
    Started,
    TurnNews,
    TurnOver,
    Wanted,
    news,
)
from router_hints.sessions import Session, SessionKey

log = logging.getLogger(__name__)

SILENT_S = 5.0
"""A replica says once a second that it is alive."""
BOOKING_TTL_S = 600.0
"""What another replica booked is believed this long without a word about it."""
LOST_AFTER = 3
"""Heartbeats that may count other bookings before all are asked for again."""
TOLD_ON_HELLO_S = 900.0
"""Sessions idle for longer are not told to a replica that starts; it learns of them when they go on."""


@dataclass
class _Peer:
    heard_s: float
    bookings: dict[str, float] = field(default_factory=dict)
    """ids in our ledger, and when they were booked"""
    differing: int = 0
    """heartbeats in a row that counted other bookings than these"""


@dataclass
class Replicas:
    """What this replica knows of the others, and tells them."""

    name: str
    desk: Desk
    publish: Callable[[bytes], None]
    connected: Callable[[], bool]
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _own: dict[str, Booking] = field(default_factory=dict)
    _told: dict[SessionKey, tuple[int, bytes]] = field(default_factory=dict)
    """blocks and last key of what was told of a session"""

    # --- who is there ------------------------------------------------------------------------------

    def others(self) -> list[str]:
        """Replicas that are alive, without this one, by name."""
        return sorted(self._peers)

    def owner(self, key: SessionKey) -> str:
        """The replica that plans ahead for a session; empty for this one."""
        owner = max([self.name, *self._peers], key=lambda name: _weight(name, key))
        return "" if owner == self.name else owner

    @property
    def stale_s(self) -> float:
        """How long ago the others were last heard."""
        now_s = self.clock()
        return max((now_s - peer.heard_s for peer in self._peers.values()), default=0.0)

    def hello(self) -> None:
        """NATS is there, for the first time or again."""
        self._say(Hello(self.name))
        self._tell_all()

    def tick(self) -> None:
        """Once a second."""
        self._say(Alive(self.name, len(self._own)))
        now_s = self.clock()
        # Without NATS nobody is heard, and nobody is dead for that.
        silent = [n for n, peer in self._peers.items() if peer.heard_s + SILENT_S < now_s]
        for name in silent if self.connected() else ():
            log.info("router %s is not heard any more", name)
            self._forget(name)
        for peer in self._peers.values():
            for booking_id in [b for b, at_s in peer.bookings.items() if at_s + BOOKING_TTL_S < now_s]:
                self._release(peer, booking_id)
        self.metrics.replicas.set(1 + len(self._peers))

    async def leave(self) -> None:
        """Say that this replica stops; nothing of it is in flight any more."""
        self._say(Leaving(self.name))
        # The outbox needs a moment; who misses it notices the silence.
        await asyncio.sleep(0.05)

    def adopt_orphans(self) -> None:
        """Plan for turns whose planner is gone, if they are this replica's now."""
        for turn in self.desk.forward:
            gone = bool(turn.router) and turn.router not in self._peers
            if gone and not self.owner(turn.key):
                turn.router = ""
                if turn.state is State.SCHEDULED:
                    turn.act_at_s = self.clock()

    # --- own news ----------------------------------------------------------------------------------

    def book(
        self,
        request_id: str,
        rank: Rank,
        *,
        prefill_tokens: int,
        blocks: int,
        copies: Mapping[str, int],
        copied_by_s: float = math.inf,
    ) -> None:
        """Book a request here and at the others."""
        booking = self.desk.ledger.book(
            request_id,
            rank,
            prefill_tokens=prefill_tokens,
            blocks=blocks,
            copies=copies,
            copied_by_s=copied_by_s,
        )
        self._own[request_id] = booking
        if self._peers:
            self._say(self._booked(request_id, booking))

    def first_output(self, request_id: str) -> None:
        self.desk.ledger.first_output(request_id)
        if request_id in self._own and self._peers:
            self._say(Started(self.name, request_id))

    def release(self, request_id: str) -> None:
        self.desk.ledger.release(request_id)
        if self._own.pop(request_id, None) is not None and self._peers:
            self._say(Released(self.name, request_id))

    def session_changed(self, session: Session) -> None:
        """Its chain or its home changed here."""
        session.changed_unix_s = time.time()
        session.writer = self.name
        if self._peers:
            self._tell_session(session)

    def turn_planned(self, turn: Announced, first: int = 0, end: int = 0, ready_s: float = 0.0) -> None:
        """An announced turn was planned here, or what is moved for it got on."""
        moving = turn.state is State.MOVING
        now_s = self.clock()
        self._say(
            TurnNews(
                self.name,
                turn.id.tenant,
                msgspec.json.encode(turn.signal),
                turn.plan_id,
                now_s - turn.received_s,
                turn.rank[0] if turn.rank else 0,
                turn.rank[1] if turn.rank else 0,
                turn.guard,
                turn.state.value,
                turn.prefill_tokens,
                first if moving else 0,
                end if moving else 0,
                max(0.0, ready_s - now_s) if moving else 0.0,
            )
        )

    def turn_over(self, turn: Announced) -> None:
        self._say(TurnOver(self.name, turn.id.tenant, turn.id.signal_id))

    # --- others' news ------------------------------------------------------------------------------

    def received(self, raw: bytes) -> None:
        """One message from the news subject. Raises ProtocolError."""
        message = news.decode(raw)
        if message.router == self.name:
            return
        if isinstance(message, Leaving):
            self._forget(message.router)
            return
        peer = self._peers.get(message.router)
        if peer is None:
            log.info("router %s is there", message.router)
            peer = self._peers[message.router] = _Peer(self.clock())
            if not isinstance(message, Hello):
                # It knew us, or was told by nobody that we are here.
                self._say(Hello(self.name))
                self._tell_all()
        peer.heard_s = self.clock()
        self._take(message, peer)

    def _take(self, message: News, peer: _Peer) -> None:
        match message:
            case Hello():
                self._say(Alive(self.name, len(self._own)))
                self._tell_all()
            case Alive():
                self._compare(message, peer)
            case Booked():
                self._take_booking(message, peer)
            case Started():
                self.desk.ledger.first_output(_foreign(message.router, message.request_id))
            case Released():
                self._release(peer, _foreign(message.router, message.request_id))
            case TurnNews():
                self._take_turn(message)
            case TurnOver():
                self._take_end(TurnId(message.tenant, message.signal_id))
            case SessionNews():
                self._take_session(message)
            case Wanted():
                session = self.desk.sessions.get(SessionKey(message.tenant, message.session))
                if session is not None and session.writer == self.name:
                    self._told.pop(session.key, None)
                    self._tell_session(session)

    def _compare(self, message: Alive, peer: _Peer) -> None:
        """A count that differs for a while is no message under way, but one that was lost."""
        peer.differing = peer.differing + 1 if message.bookings != len(peer.bookings) else 0
        if peer.differing > LOST_AFTER:
            peer.differing = 0
            for booking_id in list(peer.bookings):
                self._release(peer, booking_id)
            self._say(Hello(self.name))

    def _take_booking(self, message: Booked, peer: _Peer) -> None:
        booking_id = _foreign(message.router, message.request_id)
        peer.bookings[booking_id] = self.clock()
        self.desk.ledger.book(
            booking_id,
            (message.worker_id, message.dp_rank),
            prefill_tokens=message.prefill_tokens,
            blocks=message.blocks,
            copies=message.copies,
            copied_by_s=self.clock() + message.copied_in_s,
        )
        if not message.prefilling:
            self.desk.ledger.first_output(booking_id)

    def _take_turn(self, message: TurnNews) -> None:
        desk, now_s = self.desk, self.clock()
        try:
            signal = msgspec.json.decode(message.signal, type=Signal)
            state = State(message.state)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"turn of router {message.router} does not decode: {error}") from error
        key = SessionKey(message.tenant, signal.session)
        turn = Announced(
            TurnId(message.tenant, signal.signal_id),
            key,
            signal,
            now_s - message.age_s,
            message.plan_id,
            (message.worker_id, message.dp_rank) if message.worker_id else None,
            message.guard,
            state,
            router=message.router,
            prefill_tokens=message.prefill_tokens,
        )
        session = desk.sessions.open(key, signal.parent, now_s)
        if (oldest := desk.forward.put(turn)) is not None:
            desk.ledger.withdraw(load_id(oldest.id))
        if turn.rank is not None:
            desk.ledger.announce(
                load_id(turn.id), turn.rank, starts_at_s=turn.starts_s, prefill_tokens=message.prefill_tokens
            )
        chain = desk.chain_of(turn)
        if state is State.MOVING and chain is not None:
            session.guards.add(message.guard)
            keys = chain.cut(0, message.end)
            desk.arrivals.begin(turn.plan_id, turn.guard, message.first, keys, now_s + message.ready_in_s)
        else:
            desk.arrivals.end(turn.plan_id)

    def _take_end(self, turn_id: TurnId) -> None:
        turn = self.desk.forward.take(turn_id)
        if turn is not None:
            self.desk.ledger.withdraw(load_id(turn_id))

    def _take_session(self, message: SessionNews) -> None:
        desk, key = self.desk, SessionKey(message.tenant, message.session)
        if message.ended:
            known = desk.sessions.get(key)
            if known is not None and known.changed_unix_s < message.unix_s and not known.running:
                desk.sessions.forget(key)
            return
        known = desk.sessions.get(key)
        head, head_names = b"", b""
        if message.first:
            chain = known.chain if known is not None else None
            if chain is None or chain.cut(message.first - 1, message.first) != message.before:
                self._say(Wanted(self.name, message.tenant, message.session))
                return
            head, head_names = chain.cut(0, message.first), chain.cut_names(0, message.first)
        space = KeySpace(message.namespace, message.model, group=message.group, salt=message.tenant)
        chain = None
        if head or message.keys or message.tail:
            size = desk.sessions.block_size
            keys, names = head + message.keys, head_names + message.names
            chain = Chain.restored(space, size, keys, message.tail, message.mark, names)
        session = desk.sessions.adopt(key, message.parent, chain, message.unix_s, self.clock())
        if session is None:
            return
        session.writer = message.router
        session.home = message.home
        session.guards |= set(message.guards)
        session.rank = (message.worker_id, message.dp_rank) if message.worker_id else session.rank
        session.turns = max(session.turns, message.turns)
        if message.plan:
            session.plan = msgspec.json.decode(message.plan, type=LastPlan)

    # --- inside ------------------------------------------------------------------------------------

    def _tell_all(self) -> None:
        for request_id, booking in self._own.items():
            self._say(self._booked(request_id, booking))
        recent_s = self.clock() - TOLD_ON_HELLO_S
        for session in list(self.desk.sessions.all()):
            if session.writer == self.name and session.touched_s > recent_s:
                self._told.pop(session.key, None)
                self._tell_session(session)
        for turn in self.desk.forward:
            if not turn.router:
                self.turn_planned(turn)

    def _tell_session(self, session: Session) -> None:
        chain = session.chain
        space = chain.space if chain is not None else KeySpace("", "")
        first, before = self._told.get(session.key, (0, b""))
        if chain is None or chain.cut(first - 1, first) != before or not first:
            first, before = 0, b""
        message = SessionNews(
            self.name,
            session.key.tenant,
            session.key.session,
            session.parent,
            session.changed_unix_s,
            space.namespace,
            space.model,
            space.group,
            first,
            before,
            chain.cut(first) if chain is not None else b"",
            chain.tail if chain is not None else [],
            chain.mark() if chain is not None else b"",
            session.home,
            sorted(session.guards),
            session.rank[0] if session.rank else 0,
            session.rank[1] if session.rank else 0,
            session.turns,
            msgspec.json.encode(session.plan) if session.plan is not None else b"",
            session.ended,
            chain.cut_names(first) if chain is not None else b"",
        )
        if self._say(message) and chain is not None and chain.blocks:
            self._told[session.key] = (chain.blocks, chain.cut(chain.blocks - 1))
        if session.ended:
            self._told.pop(session.key, None)
        while len(self._told) > self.desk.sessions.max_sessions:
            del self._told[next(iter(self._told))]

    def _booked(self, request_id: str, booking: Booking) -> Booked:
        return Booked(
            self.name,
            request_id,
            booking.rank[0],
            booking.rank[1],
            booking.prefill_tokens,
            booking.blocks,
            dict(booking.copies),
            booking.prefilling,
            booking.copied_by_s - self.clock(),
        )

    def _release(self, peer: _Peer, booking_id: str) -> None:
        peer.bookings.pop(booking_id, None)
        self.desk.ledger.release(booking_id)

    def _forget(self, router: str) -> None:
        peer = self._peers.pop(router, None)
        for booking_id in list(peer.bookings) if peer is not None else ():
            self.desk.ledger.release(booking_id)

    def _say(self, message: News) -> bool:
        try:
            self.publish(news.encode(message))
        except ProtocolError as error:
            log.debug("not told to other routers: %s", error)
            return False
        return True


def _foreign(router: str, request_id: str) -> str:
    return f"{router}/{request_id}"


def _weight(router: str, key: SessionKey) -> bytes:
    return hashlib.blake2b(f"{router}/{key.tenant}/{key.session}".encode(), digest_size=8).digest()
