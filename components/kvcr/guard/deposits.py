# SPDX-License-Identifier: Apache-2.0
"""From filled slots to published blocks: wait for every rank, hash on a mover, commit, acknowledge."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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

    def pool_changed(self) -> None: ...


@dataclass(slots=True)
class _Partial:
    """A slot that some ranks are done with."""

    generation: int
    ranks: int = 0
    """bit mask"""
    failed: bool = False
    """One of them did not fill it."""


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
        pool, local = self._host.pool, self._host.local
        slots, generations = i32(message.slots), u64(message.generations)
        count = len(slots)
        hashes, positions = u64(message.engine_hashes), u32(message.positions)
        sums = u64(message.checksums)
        if not (
            len(generations) == len(hashes) == len(positions) == count <= MAX_BLOCKS_PER_MESSAGE
            and len(sums) in (0, count)
            and len(message.keys) == len(message.parents) == KEY_BYTES * count
        ):
            raise ProtocolError(
                f"Filled names {count} slots with columns of other lengths, or over {MAX_BLOCKS_PER_MESSAGE}"
            )
        if pool is None or local is None:
            return
        if message.epoch != pool.epoch:
            # Stores of the past: acknowledged, so that they are not sent again, and dropped.
            answer(Committed(pool.epoch, message.slots, message.generations))
            return
        keys, parents = message.keys, message.parents
        # As they were stored. With more ranks each message has one part's only.
        is_hashed = pool.layout.ranks == 1 and len(sums) > 0
        if not is_hashed and (
            pool.layout.ranks > 1 or slots.min(initial=0) < 0 or slots.max(initial=0) >= pool.slots
        ):
            chosen = self._to_commit(pool, message, slots, generations, rank, answer)
            slots, generations, hashes, positions = (
                slots[chosen],
                generations[chosen],
                hashes[chosen],
                positions[chosen],
            )
            keys, parents = _take(keys, chosen), _take(parents, chosen)
        if not len(slots):
            return

        def hashed(checksums: npt.NDArray[np.uint64] | None) -> None:
            if checksums is None or pool is not self._host.pool:
                return
            now_s = time.monotonic()
            if len(self._tombstones):
                dead = self._tombstones.dead(keys, parents, message.epoch, message.drops, now_s)
                # Not granted any more, they are passed over by the commit.
                self._meters.dead_fills.inc(pool.give_back(slots[dead], generations[dead]))
            result = pool.commit(
                slots,
                generations,
                keys,
                parents,
                hashes,
                positions,
                checksums,
                now_s,
            )
            # First, as the engine may wait for it on this core.
            answer(Committed(pool.epoch, slots.tobytes(), generations.tobytes()))
            stored = int(np.count_nonzero(result.committed))
            self._meters.deposited_blocks.inc(stored)
            self._meters.deposited_bytes.inc(stored * local.block_bytes)
            self._host.pool_changed()

        if is_hashed:
            hashed(sums)
        elif len(slots) * local.block_bytes <= INLINE_BYTES:
            hashed(local.checksums(slots))
        else:
            self._movers.submit(lambda: local.checksums(slots), hashed)

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


def _take(blob: bytes, indices: npt.NDArray[np.int64]) -> bytes:
    return np.frombuffer(blob, f"V{KEY_BYTES}")[indices].tobytes()
