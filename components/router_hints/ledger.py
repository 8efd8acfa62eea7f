# SPDX-License-Identifier: Apache-2.0
"""Who is busy with what: our own bookings, corrected by what workers report about themselves, and the turns
that were announced.

A request is booked the moment it is planned, so that the next plan already sees it. The copies it asked for
are released when they should be over, its prefill at its first output, the rest when it ends, however it
ends. Each rank's queue also has a fast and a slow average: a spike is not a trend. Pure: the time is an
argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from router_hints.costs import Rank

REPORT_TTL_S = 10.0
"""A worker that stops reporting is believed for this long."""
FAST_S = 3.0
SLOW_S = 60.0
"""Time constants of the two averages of a rank's queue."""
_STEP_S = 0.02
"""Averages are not brought up to date more often than this."""
ANNOUNCED_GRACE_S = 30.0
"""An announced turn that is this late does not come."""
MAX_ANNOUNCED = 10_000


class Load(msgspec.Struct, frozen=True):
    """What one rank is busy with."""

    prefill_tokens: int = 0
    """Prompt tokens still to be computed before a new request's turn."""
    requests: int = 0
    blocks: int = 0
    """KV blocks of the requests it runs."""
    fast_tokens: float = 0.0
    """Average of ``prefill_tokens`` over the last seconds."""
    slow_tokens: float = 0.0
    """The same over about a minute: the trend."""
    tokens_per_s: float = 0.0
    """Prefill sent to it in a second, over about a minute."""
    head_tokens: int = 0
    """Of ``prefill_tokens``, those of the request whose turn it is,"""
    head_s: float = 0.0
    """and for how long it has been."""


class Announced(msgspec.Struct, frozen=True):
    """A turn that will come to a rank: load that nobody has sent yet."""

    rank: Rank
    starts_in_s: float
    prefill_tokens: int


class Loads(msgspec.Struct, frozen=True):
    """All of it, as of one moment."""

    ranks: Mapping[Rank, Load] = {}
    outgoing_bytes: Mapping[str, int] = {}
    """Bytes each guard is asked for and has probably not sent yet."""
    announced: tuple[Announced, ...] = ()
    copied_bytes_per_s: float = 0.0
    """All copies asked for, averaged over about a minute."""
    free_blocks: Mapping[str, int] = {}
    """Room in the pools of guards, where it is known."""
    unseen_tokens: float = 0.0
    """Prefill that other routers may have sent since this router last heard of them."""

    def of(self, rank: Rank) -> Load:
        return self.ranks.get(rank, _IDLE)


_IDLE = Load()


@dataclass
class Booking:
    """One request on one rank."""

    rank: Rank
    prefill_tokens: int
    blocks: int
    copies: Mapping[str, int]
    """bytes asked of each source guard"""
    copied_by_s: float = math.inf
    """when the sources should have sent them; at the first output they have"""
    prefilling: bool = True


@dataclass(frozen=True)
class _Foreign:
    """Load a rank reports beyond what we booked on it: other routers' requests."""

    prefill_tokens: int
    blocks: int
    until_s: float


@dataclass
class _Flow:
    """A rate, averaged over :data:`SLOW_S`."""

    per_s: float = 0.0
    pending: float = 0.0

    def step(self, seconds: float) -> None:
        if seconds > 0:
            kept = math.exp(-seconds / SLOW_S)
            self.per_s = self.per_s * kept + self.pending / SLOW_S
            self.pending = 0.0


@dataclass
class _Rank:
    """Sums of the bookings of one rank, and the averages of its queue."""

    prefill_tokens: int = 0
    requests: int = 0
    blocks: int = 0
    fast: float = 0.0
    slow: float = 0.0
    prefilling: dict[str, int] = field(default_factory=dict)
    """tokens by request, in the order they were booked"""
    sent: _Flow = field(default_factory=_Flow)
    head: str = ""
    head_since_s: float = 0.0


@dataclass(frozen=True)
class _Coming:
    rank: Rank
    starts_at_s: float
    prefill_tokens: int


@dataclass
class Ledger:
    """Bookings by request id. One thread."""

    _bookings: dict[str, Booking] = field(default_factory=dict)
    _ranks: dict[Rank, _Rank] = field(default_factory=dict)
    _foreign: dict[Rank, _Foreign] = field(default_factory=dict)
    _copying: dict[str, Booking] = field(default_factory=dict)
    """those of the bookings whose copies are not over"""
    _coming: dict[str, _Coming] = field(default_factory=dict)
    _copied: _Flow = field(default_factory=_Flow)
    _booked: _Flow = field(default_factory=_Flow)
    _stepped_s: float | None = None

    def __len__(self) -> int:
        return len(self._bookings)

    def book(
        self,
        request_id: str,
        rank: Rank,
        *,
        prefill_tokens: int,
        blocks: int,
        copies: Mapping[str, int],
        copied_by_s: float = math.inf,
    ) -> Booking:
        """Book, or move to another rank what was booked under this id.

        ``copied_by_s``: when its copies should be over, on the clock of :meth:`loads`."""
        self.release(request_id)
        booking = Booking(rank, prefill_tokens, blocks, dict(copies), copied_by_s)
        self._bookings[request_id] = booking
        if copies:
            self._copying[request_id] = booking
        sums = self._ranks.setdefault(rank, _Rank())
        sums.prefill_tokens += prefill_tokens
        sums.prefilling[request_id] = prefill_tokens
        sums.sent.pending += prefill_tokens
        sums.requests += 1
        sums.blocks += blocks
        self._copied.pending += sum(copies.values())
        self._booked.pending += prefill_tokens
        return booking

    def first_output(self, request_id: str) -> Booking | None:
        """The prefill is over. Returns the booking the first time, None after that or when unknown."""
        booking = self._bookings.get(request_id)
        if booking is None or not booking.prefilling:
            return None
        self._prefilled(request_id, booking)
        return booking

    def release(self, request_id: str) -> None:
        """The request is over, or never started; releasing it again changes nothing."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        if booking.prefilling:
            self._prefilled(request_id, booking)
        sums = self._ranks[booking.rank]
        sums.requests -= 1
        sums.blocks -= booking.blocks

    def announce(self, turn_id: str, rank: Rank, *, starts_at_s: float, prefill_tokens: int) -> None:
        """A turn is expected on ``rank``: part of the load that plans see until it comes."""
        self._coming.pop(turn_id, None)
        self._coming[turn_id] = _Coming(rank, starts_at_s, prefill_tokens)
        if len(self._coming) > MAX_ANNOUNCED:
            del self._coming[next(iter(self._coming))]

    def withdraw(self, turn_id: str) -> None:
        """It came, and is booked now; or it will not come."""
        self._coming.pop(turn_id, None)

    def report(self, rank: Rank, *, prefill_tokens: int, blocks: int, now_s: float) -> None:
        """What a rank says about itself, whoever sent it its requests."""
        own = self._ranks.get(rank, _Rank())
        self._foreign[rank] = _Foreign(
            max(0, prefill_tokens - own.prefill_tokens), max(0, blocks - own.blocks), now_s + REPORT_TTL_S
        )

    def admit(self, newcomers: Collection[Rank], among: Collection[Rank]) -> None:
        """Ranks have come: what those ``among`` whom they come had to do in the last minute is theirs, too.

        By trend a newcomer would be idle, and for a minute everybody would be sent there, busy or not.
        """
        share = len(newcomers) / max(1, len(newcomers) + len(among))
        slow = per_s = 0.0
        for sums in (self._ranks[rank] for rank in among if rank in self._ranks):
            slow, per_s = slow + share * sums.slow, per_s + share * sums.sent.per_s
            sums.slow *= 1 - share
            sums.sent.per_s *= 1 - share
        for rank in newcomers:
            sums = self._ranks.setdefault(rank, _Rank())
            sums.slow += slow / len(newcomers)
            sums.sent.per_s += per_s / len(newcomers)

    def forget_worker(self, worker_id: int) -> None:
        """The worker is gone: its bookings end with their streams, its reports count no more."""
        self._foreign = {rank: seen for rank, seen in self._foreign.items() if rank[0] != worker_id}
        self._coming = {key: turn for key, turn in self._coming.items() if turn.rank[0] != worker_id}
        for rank, sums in self._ranks.items():
            if rank[0] == worker_id:
                sums.fast = sums.slow = 0.0

    def loads(
        self,
        now_s: float,
        *,
        routers: int = 1,
        stale_s: float = 0.0,
        free_blocks: Mapping[str, int] | None = None,
    ) -> Loads:
        """Everything booked, reported and announced, as of now, beside the room in pools.

        ``routers`` share the workers and last told each other of their bookings ``stale_s`` ago.
        """
        self._step(now_s)
        ranks = {}
        for rank in self._used():
            sums = self._ranks[rank]
            head = next(iter(sums.prefilling), "")
            if head != sums.head:
                sums.head, sums.head_since_s = head, now_s
            queue, foreign_blocks = self._queue(rank, sums, now_s)
            if sums.requests or queue or foreign_blocks or sums.slow > 1.0 or sums.sent.per_s > 1.0:
                ranks[rank] = Load(
                    queue,
                    sums.requests,
                    sums.blocks + foreign_blocks,
                    sums.fast,
                    sums.slow,
                    sums.sent.per_s,
                    sums.prefilling.get(head, 0),
                    now_s - sums.head_since_s if head else 0.0,
                )
            elif not sums.sent.pending:
                del self._ranks[rank]
        return Loads(
            ranks,
            self._outgoing_bytes(now_s),
            tuple(
                Announced(turn.rank, max(0.0, turn.starts_at_s - now_s), turn.prefill_tokens)
                for turn in self._coming.values()
            ),
            self._copied.per_s,
            free_blocks or {},
            self._booked.per_s * stale_s * max(0, routers - 1),
        )

    def _used(self) -> list[Rank]:
        """Ranks with anything to tell."""
        for rank in self._foreign:
            if rank not in self._ranks:
                self._ranks[rank] = _Rank()
        return list(self._ranks)

    def _outgoing_bytes(self, now_s: float) -> dict[str, int]:
        """Queues of the guards as sources. A request goes on waiting for its turn when its copies are there:
        counted until its first output, they would make a source look busy that is not."""
        for request_id in [name for name, each in self._copying.items() if each.copied_by_s <= now_s]:
            del self._copying[request_id]
        outgoing: Counter[str] = Counter()
        for booking in self._copying.values():
            outgoing.update(booking.copies)
        return dict(outgoing)

    def _queue(self, rank: Rank, sums: _Rank, now_s: float) -> tuple[int, int]:
        """Tokens queued on a rank, and blocks in use by requests that are not ours."""
        foreign = self._foreign.get(rank)
        if foreign is None:
            return sums.prefill_tokens, 0
        if foreign.until_s <= now_s:
            del self._foreign[rank]
            return sums.prefill_tokens, 0
        return sums.prefill_tokens + foreign.prefill_tokens, foreign.blocks

    def _step(self, now_s: float) -> None:
        """Bring the averages up to now. The queue is taken to have been since then what it is now."""
        if self._stepped_s is None or now_s < self._stepped_s:
            # The first time, or on another clock than before: nothing is known of what was between.
            self._stepped_s = now_s
        seconds = now_s - self._stepped_s
        if 0 <= seconds < _STEP_S:
            return
        self._stepped_s = now_s
        if seconds < 0:
            return
        self._copied.step(seconds)
        self._booked.step(seconds)
        fast, slow = 1 - math.exp(-seconds / FAST_S), 1 - math.exp(-seconds / SLOW_S)
        for rank in self._used():
            sums = self._ranks[rank]
            queue, _ = self._queue(rank, sums, now_s)
            sums.sent.step(seconds)
            sums.fast += fast * (queue - sums.fast)
            sums.slow += slow * (queue - sums.slow)
        late = [key for key, turn in self._coming.items() if turn.starts_at_s + ANNOUNCED_GRACE_S < now_s]
        for key in late:
            del self._coming[key]

    def _prefilled(self, request_id: str, booking: Booking) -> None:
        booking.prefilling = False
        sums = self._ranks[booking.rank]
        sums.prefill_tokens -= booking.prefill_tokens
        sums.prefilling.pop(request_id, None)
        self._copying.pop(request_id, None)
