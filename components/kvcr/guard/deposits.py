# SPDX-License-Identifier: Apache-2.0
"""From filled slots to published blocks: wait for every rank, hash on a mover, commit, acknowledge."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError
from kvcr.guard.meters import Meters
from kvcr.guard.tombstones import Tombstones
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, i32, u32, u64
from kvcr.protocol.engine import Committed, Filled, Return, ToEngine
from kvcr.transfer.base import INLINE_BYTES, LocalRegions
from kvcr.transfer.mover import MoverPool


class Host(Protocol):
    """What deposits need of the guard."""

    pool: Pool | None

    @property
    def local(self) -> LocalRegions | None: ...

    @property
    def epoch(self) -> int:
        """The pool's."""

    def pool_changed(self) -> None: ...


@dataclass(slots=True)
class _Partial:
    """A slot that some ranks are done with."""

    generation: int
    ranks: int = 0
    """bit mask"""
    failed: bool = False
    """One of them did not fill it."""


class _Fill(NamedTuple):
    """Blocks in their slots, one entry each."""

    slots: npt.NDArray[np.int32]
    generations: npt.NDArray[np.uint64]
    keys: bytes
    parents: bytes
    engine_hashes: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint32]
    epoch: int
    drops: int

    def at(self, chosen: npt.NDArray[np.intp]) -> _Fill:
        """Some of the blocks."""
        return _Fill(
            self.slots[chosen],
            self.generations[chosen],
            _take(self.keys, chosen),
            _take(self.parents, chosen),
            self.engine_hashes[chosen],
            self.positions[chosen],
            self.epoch,
            self.drops,
        )


class Deposits:
    """Belongs to the authority thread."""

    def __init__(self, host: Host, movers: MoverPool, meters: Meters, tombstones: Tombstones) -> None:
        self._host = host
        self._tombstones = tombstones
        self._movers = movers
        self._meters = meters
        self._partial: dict[int, _Partial] = {}

    def forget(self) -> None:
        """The engine is gone: what only some of its ranks filled will never be complete."""
        self._partial.clear()

    def filled(self, message: Filled, rank: int, answer: Callable[[ToEngine], None]) -> None:
        """A worker filled its rank's part of some slots. Raises ProtocolError on arrays of odd lengths."""
        _require_even(message)
        pool, local = self._host.pool, self._host.local
        if pool is None or local is None:
            return
        if message.epoch != pool.epoch:
            # Stores of the past: acknowledged, so that they are not sent again, and dropped.
            answer(Committed(pool.epoch, message.slots, message.generations))
            return
        if message.checksums and pool.layout.ranks == 1:
            # As they were stored. With more ranks each message has one part's only.
            stored = None
            if not len(self._tombstones):
                stored = pool.commit_filled(
                    message.slots,
                    message.generations,
                    message.keys,
                    message.parents,
                    message.engine_hashes,
                    message.positions,
                    message.checksums,
                    time.monotonic(),
                )
            if stored is None:
                self._publish(pool, local, _fill_of(message), u64(message.checksums), answer)
            else:
                self._stored(local, stored, message.slots, message.generations, answer)
            return
        fill = _fill_of(message)
        slots = fill.slots
        if pool.layout.ranks > 1 or slots.min(initial=0) < 0 or slots.max(initial=0) >= pool.slots:
            fill = fill.at(self._to_commit(pool, message, slots, fill.generations, rank, answer))
            slots = fill.slots
        if not len(slots):
            return

        def hashed(checksums: npt.NDArray[np.uint64] | None) -> None:
            if checksums is not None and pool is self._host.pool:
                self._publish(pool, local, fill, checksums, answer)

        if len(slots) * local.block_bytes <= INLINE_BYTES:
            hashed(local.checksums(slots))
        else:
            self._movers.submit(lambda: local.checksums(slots), hashed)

    def _publish(
        self,
        pool: Pool,
        local: LocalRegions,
        fill: _Fill,
        checksums: npt.NDArray[np.uint64],
        answer: Callable[[ToEngine], None],
    ) -> None:
        now_s = time.monotonic()
        slots, generations, keys, parents, hashes, positions, epoch, drops = fill
        if len(self._tombstones):
            dead = self._tombstones.dead(keys, parents, epoch, drops, now_s)
            # Not granted any more, they are passed over by the commit.
            self._meters.dead_fills.inc(pool.give_back(slots[dead], generations[dead]))
        result = pool.commit(slots, generations, keys, parents, hashes, positions, checksums, now_s)
        stored = int(np.count_nonzero(result.committed))
        self._stored(local, stored, slots.tobytes(), generations.tobytes(), answer)

    def _stored(
        self,
        local: LocalRegions,
        count: int,
        slots: bytes,
        generations: bytes,
        answer: Callable[[ToEngine], None],
    ) -> None:
        """These fills are done with, and ``count`` of them are published."""
        # First, as the engine may wait for it on this core.
        answer(Committed(self._host.epoch, slots, generations))
        self._meters.deposited_blocks.inc(count)
        self._meters.deposited_bytes.inc(count * local.block_bytes)
        self._host.pool_changed()

    def _to_commit(
        self,
        pool: Pool,
        message: Filled,
        slots: npt.NDArray[np.int32],
        generations: npt.NDArray[np.uint64],
        rank: int,
        answer: Callable[[ToEngine], None],
    ) -> npt.NDArray[np.intp]:
        """Entries that every rank has filled now. With one rank that is each; the commit knows the rest."""
        # Fills of before a guard's restart, or sent twice: published already, or never to be.
        found = pool.lookup(message.keys)
        settled = (found.slots == slots) & (found.generations == generations)
        settled |= (slots < 0) | (slots >= pool.slots)
        if settled.any():
            answer(Committed(pool.epoch, slots[settled].tobytes(), generations[settled].tobytes()))
        chosen = np.flatnonzero(~settled)
        whole, void = self._done(slots[chosen], generations[chosen], rank, pool.layout.ranks, failed=False)
        if void.any():
            self._free(pool, slots[chosen[void]], generations[chosen[void]])
            answer(Committed(pool.epoch, slots[chosen[void]].tobytes(), generations[chosen[void]].tobytes()))
        return chosen[whole]

    def returned(self, message: Return, rank: int | None) -> None:
        """Slots that will not be filled; ``rank`` is None for the scheduler, whose slots no rank was told of.

        What one rank returns is free only when every rank is done with it: another may still be writing its
        part, as a block that failed on one rank has failed on all. Raises ProtocolError on arrays of odd
        lengths.
        """
        pool = self._host.pool
        if pool is None or message.epoch != pool.epoch:
            return
        slots, generations = i32(message.slots), u64(message.generations)
        if len(slots) != len(generations):
            raise ProtocolError(f"Return has {len(slots)} slots, {len(generations)} generations")
        if rank is not None:
            # Sent twice, or of before a restart: settled already.
            granted = pool.still_granted(slots, generations)
            slots, generations = slots[granted], generations[granted]
            _, void = self._done(slots, generations, rank, pool.layout.ranks, failed=True)
            slots, generations = slots[void], generations[void]
        self._free(pool, slots, generations)

    def _free(self, pool: Pool, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64]) -> None:
        self._meters.returned_blocks.inc(pool.give_back(slots, generations))

    def _done(
        self,
        slots: npt.NDArray[np.int32],
        generations: npt.NDArray[np.uint64],
        rank: int,
        ranks: int,
        *,
        failed: bool,
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Note that ``rank`` is done with these. Masks of those that all ranks have filled now, and of those
        that all are done with and some have not filled."""
        whole, void = np.zeros(len(slots), bool), np.zeros(len(slots), bool)
        if ranks == 1:
            (void if failed else whole)[:] = True
            return whole, void
        every = (1 << ranks) - 1
        # A loop over blocks: only with several ranks, and about 0.3 us a block.
        for index, (slot, generation) in enumerate(zip(slots.tolist(), generations.tolist(), strict=True)):
            partial = self._partial.get(slot)
            if partial is None or partial.generation != generation:
                partial = self._partial[slot] = _Partial(generation)
            partial.ranks |= 1 << rank
            partial.failed |= failed
            if partial.ranks == every:
                (void if partial.failed else whole)[index] = True
                del self._partial[slot]
        return whole, void


def _require_even(message: Filled) -> None:
    """Raises ProtocolError on columns that do not fit each other."""
    count = len(message.slots) // 4
    if not (
        count <= MAX_BLOCKS_PER_MESSAGE
        and len(message.slots) == len(message.positions) == 4 * count
        and len(message.generations) == len(message.engine_hashes) == 8 * count
        and len(message.keys) == len(message.parents) == KEY_BYTES * count
        and len(message.checksums) in (0, 8 * count)
    ):
        raise ProtocolError(
            f"Filled names {count} slots with columns of other lengths, or over {MAX_BLOCKS_PER_MESSAGE}"
        )


def _fill_of(message: Filled) -> _Fill:
    return _Fill(
        i32(message.slots),
        u64(message.generations),
        message.keys,
        message.parents,
        u64(message.engine_hashes),
        u32(message.positions),
        message.epoch,
        message.drops,
    )


def _take(blob: bytes, indices: npt.NDArray[np.int64]) -> bytes:
    return np.frombuffer(blob, f"V{KEY_BYTES}")[indices].tobytes()
