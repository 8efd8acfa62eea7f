# SPDX-License-Identifier: Apache-2.0
"""Copy out of a peer's pool whose files are reachable on this host."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcr.errors import LayoutMismatch, PoolCorrupt
from kvcr.pool import DataRegion, Found, PoolReader, copy_parts
from kvcr.protocol.engine import BlockStatus
from kvcr.transfer.base import LocalRegions, Step, StepResult, failed, verified
from kvcr.transfer.mover import MoverPool

OPTIMISTIC_BLOCKS = 8
"""Pulls of up to this many blocks read the peer's directory instead of asking for a lease: an evicted
slot is not reused for 2 s, and the copy is checked against the checksum and the control word."""


class ShmTransport:
    """A peer's directory and data, mapped read-only. The maps stay valid when the peer dies or removes its
    files; what was in them then is still named by its key and verified."""

    name = "shm"

    def __init__(self, pool_dir: Path, incarnation: int, local: LocalRegions, movers: MoverPool) -> None:
        """Map the pool of the guard of this ``incarnation``.

        Raises FileNotFoundError, PermissionError, PoolError or LayoutMismatch when the files do not do.
        """
        self.pool_dir = str(pool_dir)
        self.incarnation = incarnation
        self._reader = PoolReader.open(pool_dir)
        if self._reader.incarnation != incarnation:
            raise PoolCorrupt(f"the pool in {pool_dir}, as seen from here, is another guard's")
        local.layout.require_same(self._reader.layout, ours="this guard", theirs=f"the pool in {pool_dir}")
        if self._reader.layout.ranks != len(local.arrays):
            raise LayoutMismatch(f"the pool in {pool_dir} has {self._reader.layout.ranks} ranks")
        self._regions = [
            DataRegion.open(pool_dir, self._reader, rank, writable=False, populate=False)
            for rank in range(len(local.arrays))
        ]
        for region in self._regions:
            region.populate_aside()
        self._local = local
        self._movers = movers

    def lookup(self, keys: bytes) -> Found:
        """Find blocks without a message. Cheap; called by the authority thread."""
        return self._reader.find(keys)

    def read(self, step: Step, done: Callable[[StepResult], None], quiet: Callable[[Step], None]) -> None:
        """See :class:`kvcr.transfer.base.Transport`. A copy is never in flight after its result."""
        started_s = time.monotonic()

        def finished(result: StepResult | None) -> None:
            done(
                result
                or failed(step, BlockStatus.FAILED, "the copy raised an error", time.monotonic() - started_s)
            )

        self._movers.submit(lambda: self.copy(step), finished)

    def close(self) -> None:
        """The maps are dropped with the last step that uses them."""

    def take(self, found: Found, local_slots: npt.NDArray[np.int32], part: slice) -> bool:
        """Copy ``part`` of what :meth:`lookup` found to as many of the slots, on the calling thread; whether
        every block of it arrived and verified."""
        width, sums = self._local.layout.part_bytes, found.checksums[part]
        remote, slots = found.slots[part], local_slots[part]
        for rank, (target, region) in enumerate(zip(self._local.arrays, self._regions, strict=True)):
            got = copy_parts(region.rows, remote, target, slots, width)
            if got.tobytes() != sums[:, rank].tobytes():
                return False
        # Verified against checksums that go with the key, whatever became of the source's slot since.
        return True

    def copy(self, step: Step) -> StepResult:
        """Do a step on the calling thread. Any thread, without the GIL while bytes move."""
        started_s = time.monotonic()
        if started_s >= step.deadline_s:
            return failed(step, BlockStatus.TOO_SLOW, "the deadline passed before the copy began", 0.0)
        part = self._local.layout.part_bytes
        found = np.empty_like(step.checksums)
        for rank, (target, region) in enumerate(zip(self._local.arrays, self._regions, strict=True)):
            found[:, rank] = copy_parts(region.rows, step.remote_slots, target, step.local_slots, part)
        result = verified(step, found, started_s, time.monotonic())
        if step.remote_slots[0] >= self._reader.slots:
            # The canary's row, of which the directory knows nothing; no other is in such a step.
            return result
        gone = ~self._reader.still(step.remote_slots, step.remote_generations)
        if gone.any():
            # Evicted while we copied: whatever we have is not what was promised, and no corruption either.
            result.statuses[gone] = BlockStatus.GONE
            result.corrupt[gone] = False
        return result
