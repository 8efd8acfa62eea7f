# SPDX-License-Identifier: Apache-2.0
"""Who is busy with what: our own bookings, corrected by what workers report about themselves.

A request is booked the moment it is planned, so that the next plan already sees it; its prefill (and the
copies it asked for) are released at its first output, the rest when it ends, however it ends. Pure: the
time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router_hints.costs import Rank

REPORT_TTL_S = 10.0
"""A worker that stops reporting is believed for this long."""


@dataclass(frozen=True)
class Load:
    """What one rank is busy with."""

    prefill_tokens: int = 0
    """Prompt tokens still to be computed before a new request's turn."""
    requests: int = 0
    blocks: int = 0
    """KV blocks of the requests it runs."""


@dataclass(frozen=True)
class Loads:
    """All of it, as of one moment."""

    ranks: Mapping[Rank, Load] = field(default_factory=dict)
    outgoing_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes each guard is asked for and has probably not sent yet."""

    def of(self, rank: Rank) -> Load:
        return self.ranks.get(rank, Load())


@dataclass
class Booking:
    """One request on one rank."""

    rank: Rank
    prefill_tokens: int
    blocks: int
    copies: Mapping[str, int]
    """bytes asked of each source guard"""
    prefilling: bool = True


@dataclass(frozen=True)
class _Foreign:
    """Load a rank reports beyond what we booked on it: other routers' requests."""

    prefill_tokens: int
    blocks: int
    until_s: float


class Ledger:
    """Bookings by request id. One thread."""

    def __init__(self) -> None:
        self._bookings: dict[str, Booking] = {}
        self._foreign: dict[Rank, _Foreign] = {}

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
    ) -> None:
        """Book, or move to another rank what was booked under this id."""
        self._bookings[request_id] = Booking(rank, prefill_tokens, blocks, dict(copies))

    def first_output(self, request_id: str) -> Booking | None:
        """The prefill is over. Returns the booking the first time, None after that or when unknown."""
        booking = self._bookings.get(request_id)
        if booking is None or not booking.prefilling:
            return None
        booking.prefilling = False
        return booking

    def release(self, request_id: str) -> None:
        """The request is over, or never started; releasing it again changes nothing."""
        self._bookings.pop(request_id, None)

    def report(self, rank: Rank, *, prefill_tokens: int, blocks: int, now_s: float) -> None:
        """What a rank says about itself, whoever sent it its requests."""
        own = self._own(rank)
        self._foreign[rank] = _Foreign(
            max(0, prefill_tokens - own.prefill_tokens), max(0, blocks - own.blocks), now_s + REPORT_TTL_S
        )

    def forget_worker(self, worker_id: int) -> None:
        """The worker is gone: its bookings end with their streams, its reports count no more."""
        self._foreign = {rank: seen for rank, seen in self._foreign.items() if rank[0] != worker_id}

    def loads(self, now_s: float) -> Loads:
        """Everything booked and reported, as of now."""
        ranks: dict[Rank, Load] = {}
        outgoing: dict[str, int] = {}
        for booking in self._bookings.values():
            load = ranks.get(booking.rank, Load())
            ranks[booking.rank] = Load(
                load.prefill_tokens + booking.prefill_tokens * booking.prefilling,
                load.requests + 1,
                load.blocks + booking.blocks,
            )
            if booking.prefilling:
                for guard, byte_count in booking.copies.items():
                    outgoing[guard] = outgoing.get(guard, 0) + byte_count
        for rank, foreign in self._foreign.items():
            if foreign.until_s > now_s:
                load = ranks.get(rank, Load())
                ranks[rank] = Load(
                    load.prefill_tokens + foreign.prefill_tokens, load.requests, load.blocks + foreign.blocks
                )
        return Loads(ranks, outgoing)

    def _own(self, rank: Rank) -> Load:
        mine = [booking for booking in self._bookings.values() if booking.rank == rank]
        return Load(
            sum(b.prefill_tokens for b in mine if b.prefilling), len(mine), sum(b.blocks for b in mine)
        )
