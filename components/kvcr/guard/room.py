# SPDX-License-Identifier: Apache-2.0
"""Slots for what is pulled: who gets them where they are scarce, and who waits for some."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcr.guard.active import Active
from kvcr.guard.loop import Loop, Timer
from kvcr.guard.transit import Freed, TransitSlots
from kvcr.pool import Granted, Pool

NO_ROOM_S = 0.05
"""How often a pull that waits for slots looks for some."""


class Room:
    """Belongs to the authority thread."""

    def __init__(
        self,
        loop: Loop,
        transit: TransitSlots,
        pulls: Mapping[int, Active],
        changed: Callable[[], None],
        advance: Callable[[Active], None],
    ) -> None:
        """``pulls``: those under way, by number; ``changed`` is told when the pool has; ``advance`` lets one
        go on that waited."""
        self._loop = loop
        self._transit = transit
        self._pulls = pulls
        self._changed = changed
        self._advance = advance
        self._claimed = 0
        """Sum over the pulls of the blocks that are leased and need a slot."""
        self._hungry: set[int] = set()
        """Pulls that wait for slots."""
        self._feeding: Timer | None = None

    def take(self, active: Active, count: int, now_s: float) -> Granted:
        """Up to ``count`` slots. Where they are scarce, the pull that began first has the first claim: two
        pulls that share what is enough for one would both end in the middle."""
        pool = active.pool
        if active.handover is not None:
            granted = pool.allocate(min(count, self._transit.room(pool)), now_s)
            self._transit.used += len(granted.slots)
        else:
            pool.tick(now_s)
            if pool.free_count < self._claimed:
                older = sum(one.claim for one in self._pulls.values() if one.number < active.number)
                count = max(0, min(count, pool.free_count - older))
            granted = pool.allocate(count, now_s)
        self._changed()
        return granted

    def may_come(self, active: Active, got: int) -> bool:
        """Whether slots may come free while this pull waits. Its deadline ends it in any case."""
        if got or active.pool.cooling_count:
            return True
        if active.handover is not None and self._transit.used:
            return True
        return any(
            other.steps or (other.claim and other.number < active.number)
            for other in self._pulls.values()
            if other is not active
        )

    def count_claim(self, active: Active) -> None:
        """Note how many slots it has a claim on now."""
        claim = 0 if active.handover is not None else active.pull.leased_blocks
        self._claimed += claim - active.claim
        active.claim = claim

    def leave(self, active: Active) -> None:
        """It is over: it claims nothing any more, and waits for nothing."""
        self._claimed -= active.claim
        self._hungry.discard(active.number)

    def wait(self, active: Active) -> None:
        """It needs slots that are not there."""
        self._hungry.add(active.number)
        if self._feeding is None:
            self._feeding = self._loop.later(NO_ROOM_S, self._feed)

    def give_back(self, active: Active, freed: Freed, current: Pool | None) -> None:
        """Transit slots that are of no more use, in the guard's pool unless that was replaced."""
        if len(freed.slots):
            self._transit.used -= len(freed.slots)
            if active.pool is current:
                active.pool.give_back(freed.slots, freed.generations)
            if self._hungry:
                self._loop.defer(self._feed_now)

    def _feed_now(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
        self._feed()

    def _feed(self) -> None:
        """Let the pulls that wait for slots try again, those that began first first."""
        self._feeding = None
        hungry, self._hungry = sorted(self._hungry), set()
        for number in hungry:
            if number in self._pulls:
                self._advance(self._pulls[number])
