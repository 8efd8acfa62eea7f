# SPDX-License-Identifier: Apache-2.0
"""What a pool holds, as its guard sees it: blocks by key, records by slot, slots by state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcr.layout import Layout
from kvcr.pool import chains, native
from kvcr.pool.meta import DATA, Meta
from kvcr.pool.reader import Hits, look_up
from kvcr.pool.record import Granted, Record, SnapshotPage
from kvcr.pool.region import DataRegion, RegionInfo
from kvcr.pool.state import (
    GENERATION_MASK,
    I32,
    U64,
    Mask,
    SlotState,
    as_slots,
    as_u64,
    control_words,
    generations_of,
    states_of,
)


class Contents:
    """The part of :class:`kvcr.pool.Pool` that reads directory and data. Nothing of it changes a slot but
    :meth:`_set`."""

    def __init__(self, dir: Path, meta: Meta) -> None:
        geometry = meta.geometry
        self.dir = dir
        self.layout: Layout = geometry.body.layout
        self.slots: int = geometry.slots
        self.slot_part_bytes: int = geometry.part_stride
        self._meta = meta
        self._backend = native.backend()
        self._regions = [
            DataRegion.map(dir / DATA, geometry, rank, writable=True, populate=False)
            for rank in range(geometry.ranks)
        ]

    def lookup(self, keys: bytes) -> Hits:
        """Slot (-1: miss) and generation of each 16-byte key."""
        return look_up(self._backend, self._meta, keys)[0]

    def hits(self, keys: bytes) -> int:
        """How many of these blocks are here."""
        return look_up(self._backend, self._meta, keys)[1]

    def still(self, slots: I32, generations: U64) -> Mask:
        """Whether each slot is READY in that generation."""
        mask = np.empty(len(slots), dtype=np.bool_)
        self._backend.still(self._meta.control, as_slots(slots), as_u64(generations), mask)
        return mask

    def still_granted(self, slots: I32, generations: U64) -> Mask:
        """Whether each slot is granted in that generation; True once for a slot that is named twice."""
        mask = np.zeros(len(slots), dtype=np.bool_)
        mask[self._select(slots, generations, SlotState.GRANTED)] = True
        return mask

    def checksums(self, slots: I32) -> U64:
        """uint64 [n, ranks]: xxh3-64 of each part."""
        return self._meta.checksums[as_slots(slots)]

    def engine_hashes(self, slots: I32) -> U64:
        """uint64 [n]: the engine's own hashes of READY slots."""
        return self._meta.engine_hashes[as_slots(slots)]

    def record(self, slots: I32) -> Record:
        """What the directory says about slots; true of those that are READY."""
        slots, meta = as_slots(slots), self._meta
        return Record(
            meta.keys[slots].tobytes(),
            meta.parents[slots].tobytes(),
            meta.engine_hashes[slots],
            meta.positions[slots],
        )

    def through(self, keys: bytes) -> I32:
        """READY slots of these blocks and of all blocks whose chain goes through one of them.

        A block of ``keys`` need not be here itself for the ones right after it to be found. A chain with a
        block missing further on is followed up to there.
        """
        named = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
        ready = self._ready_slots()
        here = self.lookup(keys).slots
        return chains.after(self._meta, ready, here[here >= 0], named)

    def data(self, rank: int) -> DataRegion:
        """One rank's region, writable. Any thread."""
        return self._regions[rank]

    def part(self, rank: int, slot: int) -> memoryview:
        """The ``layout.part_bytes`` bytes of one rank's part of a slot, writable. Any thread."""
        return self._regions[rank].part(slot)

    def region(self, rank: int) -> RegionInfo:
        """Address in this process, bytes, and stride of one rank's slots. Any thread."""
        return self._regions[rank].info

    def counts(self) -> dict[SlotState, int]:
        """Slots by state."""
        counted = np.bincount(states_of(self._meta.control), minlength=len(SlotState))
        return {state: int(counted[state]) for state in SlotState}

    def snapshot(self, cursor: int, limit: int) -> SnapshotPage:
        """Up to ``limit`` READY blocks from slot ``cursor`` on. Start at 0, go on at ``next_cursor``."""
        found = self.ready_from(cursor, limit + 1).slots
        slots = found[: max(limit, 1)]
        record = self.record(slots)
        more = len(found) > len(slots)
        return SnapshotPage(
            record.keys, record.engine_hashes, record.positions, int(slots[-1]) + 1 if more else -1
        )

    def ready_from(self, cursor: int, limit: int) -> Granted:
        """Up to ``limit`` READY slots from slot ``cursor`` on, ascending, with their generations."""
        cursor = min(max(cursor, 0), self.slots)
        ready = np.flatnonzero(states_of(self._meta.control[cursor:]) == SlotState.READY)
        slots = (ready[: max(limit, 1)] + cursor).astype(np.int32)
        return Granted(slots, generations_of(self._meta.control[slots]))

    def _set(self, slots: I32, state: SlotState, generations: U64) -> None:
        self._backend.store_words(self._meta.control, slots, control_words(state, generations))

    def _select(self, slots: I32, generations: U64, state: SlotState) -> npt.NDArray[np.intp]:
        """Ascending indices of the entries that are in ``state`` and generation, each slot once."""
        slots, generations = as_slots(slots), as_u64(generations)
        if len(slots) != len(generations):
            raise ValueError(f"generations has {len(generations)} entries, slots has {len(slots)}")
        inside = np.flatnonzero(
            (slots >= 0) & (slots < self.slots) & (generations <= np.uint64(GENERATION_MASK))
        )
        words = control_words(state, generations[inside])
        chosen: npt.NDArray[np.intp] = inside[self._meta.control[slots[inside]] == words]
        if len(chosen) < 2:
            return chosen
        once = np.unique(slots[chosen], return_index=True)[1]
        return np.sort(chosen[once])

    def _in_state(self, slots: I32, state: SlotState) -> I32:
        """The slots of the pool among ``slots`` that are in ``state``."""
        inside = slots[(slots >= 0) & (slots < self.slots)]
        chosen: I32 = inside[states_of(self._meta.control[inside]) == state]
        return chosen

    def _ready_slots(self) -> I32:
        return np.flatnonzero(states_of(self._meta.control) == SlotState.READY).astype(np.int32)

    def _parents_of(self, slots: I32) -> I32:
        """For each of all READY slots the index of its parent among them, -1 when that one is not here."""
        index_of = np.full(self.slots + 1, -1, dtype=np.int32)
        index_of[slots] = np.arange(len(slots), dtype=np.int32)
        # A parent that is not here is slot -1, the last entry, which is -1.
        parents: I32 = index_of[self.lookup(self._meta.parents[slots].tobytes()).slots]
        return parents
