# SPDX-License-Identifier: Apache-2.0
"""What keeps blocks in a pool, or marks them to go first: leases, pins, uses. None outlives the guard."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvcr.pool.contents import Contents
from kvcr.pool.meta import Meta
from kvcr.pool.record import Listing
from kvcr.pool.state import I32, U64, Mask, SlotState, as_slots, as_u64


class Holds(Contents):
    """The part of :class:`kvcr.pool.Pool` that says which blocks may be evicted, and when they were used."""

    def __init__(self, dir: Path, meta: Meta) -> None:
        super().__init__(dir, meta)
        self._last_used_s = meta.stored_at.copy()
        self._pinned_until_s = np.full(self.slots, -np.inf)
        self._demoted = np.zeros(self.slots, dtype=np.bool_)
        self._leases = np.zeros(self.slots, dtype=np.int32)
        self._leased_generation = np.zeros(self.slots, dtype=np.uint64)

    def touch(self, slots: I32, now_s: float) -> None:
        """Count a use of READY slots now, for eviction. It ends a :meth:`demote`."""
        # Some may come twice: to find that out takes longer than all the rest of a lease.
        used = self._in_state(as_slots(slots), SlotState.READY)
        self._last_used_s[used] = now_s
        self._demoted[used] = False

    def demote(self, slots: I32) -> int:
        """Make READY slots the first to be evicted, until their next use. Returns how many there were."""
        chosen = self._in_state(np.unique(as_slots(slots)), SlotState.READY)
        self._demoted[chosen] = True
        return len(chosen)

    def lease(self, slots: I32, generations: U64) -> Mask:
        """Hold slots: while a lease is on a slot it is neither chosen for eviction nor reused.

        Counted: each needs its own :meth:`unlease`. True where the slot was READY in that generation.
        """
        slots, generations = as_slots(slots), as_u64(generations)
        mask = self.still(slots, generations)
        self._leased_generation[slots[mask]] = generations[mask]
        np.add.at(self._leases, slots[mask], 1)
        return mask

    def unlease(self, slots: I32, generations: U64) -> None:
        """End one lease for each entry. What was not leased in that generation is ignored."""
        slots, generations = as_slots(slots), as_u64(generations)
        inside = (slots >= 0) & (slots < self.slots)
        slots, generations = slots[inside], generations[inside]
        ours = (self._leases[slots] > 0) & (self._leased_generation[slots] == generations)
        np.subtract.at(self._leases, slots[ours], 1)
        self._leases[slots[ours]] = np.maximum(self._leases[slots[ours]], 0)

    def pin(self, keys: bytes, until_s: float) -> int:
        """Keep blocks from being chosen for eviction until then. Returns how many are here."""
        slots = self.lookup(keys).slots
        slots = slots[slots >= 0]
        self._pinned_until_s[slots] = np.maximum(self._pinned_until_s[slots], until_s)
        return len(slots)

    def unpin(self, keys: bytes) -> int:
        """End every pin of these blocks. Returns how many are here."""
        slots = self.lookup(keys).slots
        slots = slots[slots >= 0]
        self._pinned_until_s[slots] = -np.inf
        return len(slots)

    def pinned(self, slots: I32, now_s: float) -> Mask:
        """Which of these slots a pin holds."""
        mask: Mask = self._pinned_until_s[as_slots(slots)] > now_s
        return mask

    def leased(self, slots: I32) -> Mask:
        """Which of these slots somebody reads, or may read, under a lease."""
        mask: Mask = self._leases[as_slots(slots)] > 0
        return mask

    def pinned_count(self, now_s: float) -> int:
        """Slots that pins hold. Any thread: reads only."""
        return int(np.count_nonzero(self._pinned_until_s > now_s))

    def unused(self, slots: I32, generations: U64) -> Mask:
        """Which of these blocks are still here and were not used since they were stored."""
        slots = as_slots(slots)
        unused: Mask = self._last_used_s[slots] <= self._meta.stored_at[slots]
        return unused & self.still(slots, generations)

    def listing(self, now_s: float) -> Listing:
        """Every READY block. Copies, about 80 bytes a block: to be looked at on another thread."""
        meta, slots = self._meta, self._ready_slots()
        return Listing(
            meta.keys[slots],
            meta.parents[slots],
            meta.positions[slots],
            now_s - self._last_used_s[slots],
            now_s - meta.stored_at[slots],
            self._leases[slots] > 0,
            self._pinned_until_s[slots] > now_s,
        )

    def _held(self, slots: I32, now_s: float) -> Mask:
        return (self._leases[slots] > 0) | (self._pinned_until_s[slots] > now_s)
