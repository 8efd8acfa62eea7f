# SPDX-License-Identifier: Apache-2.0
"""Checking blocks that somebody says are corrupt, and taking those out of use that are."""

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
    ) -> None:
        """``changed`` is called after blocks left the pool."""
        self._loop = loop
        self._movers = movers
        self._meters = meters
        self._current = current
        self._changed = changed

    def check(self, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64], where: str) -> None:
        """Hash these slots; quarantine, and count as ``where``, those that do not match their record.

        Raises ProtocolError when the arrays differ in length.
        """
        if len(slots) != len(generations):
            raise ProtocolError(f"{len(slots)} corrupt slots, {len(generations)} generations")
        current = self._current()
        if current is None:
            return
        pool, local = current
        inside = (slots >= 0) & (slots < pool.slots)
        slots, generations = slots[inside], generations[inside]
        # Leased, so that they are not evicted and filled anew while they are hashed.
        held = pool.lease(slots, generations)
        slots, generations = slots[held], generations[held]
        if not len(slots):
            return
        recorded = pool.checksums(slots)

        def hashed(found: npt.NDArray[np.uint64] | None) -> None:
            now = self._current()
            if now is None or now[0] is not pool:
                return
            pool.unlease(slots, generations)
            if found is None:
                return
            bad = (found != recorded).any(axis=1)
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

    def _requalify_later(
        self, pool: Pool, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64]
    ) -> None:
        def requalify() -> None:
            current = self._current()
            if current is not None and current[0] is pool:
                pool.requalify(slots, generations)

        self._loop.later(QUARANTINE_S, requalify)
