# SPDX-License-Identifier: Apache-2.0
"""Checking blocks, reported ones at once and all others in time, and taking corrupt ones out of use."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.pool import Pool
from kvcr.transfer.base import LocalRegions
from kvcr.transfer.mover import MoverPool

log = logging.getLogger(__name__)

SCRUB = "scrub"
"""Label of what the round over all blocks found."""

QUARANTINE_S = 61.0
"""Longer than any lease (60 s): whoever reads a quarantined slot is through with it when it is freed."""


class Scrubber:
    """Belongs to the authority thread; hashing is done by movers. Made for one pool."""

    def __init__(
        self,
        loop: Loop,
        movers: MoverPool,
        meters: Meters,
        current: Callable[[], tuple[Pool, LocalRegions] | None],
        changed: Callable[[], None],
        bytes_per_s: int = 0,
    ) -> None:
        """``changed`` is called after blocks left the pool. ``bytes_per_s`` is for :meth:`tick`; 0: off."""
        self._loop = loop
        self._movers = movers
        self._meters = meters
        self._current = current
        self._changed = changed
        self._bytes_per_s = bytes_per_s
        self._budget_bytes = 0.0
        self._ticked_s: float | None = None
        self._cursor = 0
        self._busy = False

    def tick(self, now_s: float) -> None:
        """Go on with the round over all blocks, as far as the time since the last call allows."""
        current = self._current()
        passed_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        if current is None or not self._bytes_per_s:
            return
        # Saved up for one second, or one block, at the most: no burst after a pause.
        most = max(self._bytes_per_s, current[1].block_bytes)
        self._budget_bytes = min(self._budget_bytes + passed_s * self._bytes_per_s, most)
        self._scrub_step()

    def _scrub_step(self) -> None:
        current = self._current()
        if current is None or self._busy:
            return
        pool, local = current
        count = min(int(self._budget_bytes // local.block_bytes), local.blocks_per_step)
        if count < 1:
            return
        slots, generations = pool.ready_from(self._cursor, count)
        self._cursor = int(slots[-1]) + 1 if len(slots) == count else 0
        if not len(slots):
            return
        self._budget_bytes -= len(slots) * local.block_bytes
        self._busy = True

        def done() -> None:
            self._busy = False
            self._meters.scrubbed_bytes.inc(len(slots) * local.block_bytes)
            if self._cursor:
                self._scrub_step()

        self.check(slots, generations, SCRUB, done)

    def check(
        self,
        slots: npt.NDArray[np.int32],
        generations: npt.NDArray[np.uint64],
        where: str,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Hash these slots; quarantine, and count as ``where``, those that do not match their record.

        ``done`` is called afterwards. Raises ProtocolError when the arrays differ in length.
        """
        named = self._named(slots, generations)
        if named is None:
            return
        pool, local, slots, generations = named
        # Leased, so that they are not evicted and filled anew while they are hashed.
        held = pool.lease(slots, generations)
        slots, generations = slots[held], generations[held]
        if not len(slots):
            self._loop.defer(done)
            return
        recorded = pool.checksums(slots)

        def hashed(found: npt.NDArray[np.uint64] | None) -> None:
            now = self._current()
            if now is None or now[0] is not pool:
                done()
                return
            pool.unlease(slots, generations)
            if found is not None:
                judge(found)
            done()

        def judge(found: npt.NDArray[np.uint64]) -> None:
            bad = (found != recorded).any(axis=1)
            if not bad.any() and where == SCRUB:
                return
            if not bad.any():
                log.info("%d blocks reported corrupt verify here: damaged on the way", len(slots))
                return
            count = pool.quarantine(slots[bad], generations[bad])
            log.error(
                "%d blocks in %s do not have the bytes they were stored with; quarantined", count, pool.dir
            )
            self._meters.corrupt_blocks.inc(count, where=where)
            self._changed()
            self._requalify_later(pool, slots[bad], generations[bad])

        self._movers.submit(lambda: local.checksums(slots), hashed)

    def distrust(self, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64], where: str) -> None:
        """The engine read other bytes than were stored: out of use at once, and then looked at.

        At once, because the engine computes these blocks again: what it stores next must be no duplicate.
        Raises ProtocolError when the arrays differ in length.
        """
        named = self._named(slots, generations)
        if named is None:
            return
        pool, local, slots, generations = named
        here = pool.still(slots, generations)
        slots, generations = slots[here], generations[here]
        if not pool.quarantine(slots, generations):
            return
        self._changed()
        self._requalify_later(pool, slots, generations)
        recorded = pool.checksums(slots)

        def hashed(found: npt.NDArray[np.uint64] | None) -> None:
            bad = 0 if found is None else int((found != recorded).any(axis=1).sum())
            log.error(
                "%d of %d blocks that the engine could not verify are damaged in the pool", bad, len(slots)
            )
            self._meters.corrupt_blocks.inc(bad, where=where)

        self._movers.submit(lambda: local.checksums(slots), hashed)

    def _named(
        self, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64]
    ) -> tuple[Pool, LocalRegions, npt.NDArray[np.int32], npt.NDArray[np.uint64]] | None:
        """The pool and what reads it, and the pairs that name slots of it; None without a pool."""
        if len(slots) != len(generations):
            raise ProtocolError(f"{len(slots)} corrupt slots, {len(generations)} generations")
        current = self._current()
        if current is None:
            return None
        inside = (slots >= 0) & (slots < current[0].slots)
        return *current, slots[inside], generations[inside]

    def found(self, pool: Pool) -> None:
        """A pool was attached: what the guard before had in quarantine, and would have freed."""
        self._requalify_later(pool, *pool.quarantined())

    def _requalify_later(
        self, pool: Pool, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64]
    ) -> None:
        def requalify() -> None:
            current = self._current()
            if current is not None and current[0] is pool:
                pool.requalify(slots, generations)
                # Still read, as by a load that takes long; or in a new life, which this does not concern.
                read = pool.leased(slots)
                if read.any():
                    self._requalify_later(pool, slots[read], generations[read])

        self._loop.later(QUARANTINE_S, requalify)
