# SPDX-License-Identifier: Apache-2.0
"""Blocks that a request was promised stay in our pool until it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcr.guard.active import Active
from kvcr.guard.loop import Loop
from kvcr.pool import Pool

AFTERLIFE_S = 1.0
"""After its deadline a request takes no more blocks; what was handed to it is freed then."""


@dataclass(slots=True, eq=False)
class _Kept:
    """Blocks of one Fetch in our pool, leased until its request is over or its time is."""

    pool: Pool
    origin: object
    number: int
    """Of the Fetch."""
    held: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]] = field(default_factory=list)


class Keeping:
    """Belongs to the authority thread."""

    def __init__(self, loop: Loop, current: Callable[[], Pool | None]) -> None:
        """``current`` gives the guard's pool."""
        self._loop = loop
        self._current = current
        self._kept: dict[str, list[_Kept]] = {}
        """request id -> what is kept for each of its Fetches"""

    def finish(self, request_id: str) -> None:
        """The request is over."""
        for kept in self._kept.pop(request_id, ()):
            self._unkeep(kept)

    def requests_of(self, origin: object) -> set[str]:
        """Requests of this connection for which something is kept."""
        return {
            request_id for request_id, kept in self._kept.items() if any(one.origin is origin for one in kept)
        }

    def keep(self, active: Active, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64]) -> None:
        """Lease what the request was promised until it is over, or its time is: no later pull evicts it."""
        request_id, now_s = active.fetch.request_id, time.monotonic()
        left_s = active.pull.deadline_s + AFTERLIFE_S - now_s
        if not len(slots) or left_s <= 0 or active.cancelled:
            return
        kept = next((one for one in self._kept.get(request_id, ()) if one.number == active.number), None)
        if kept is None:
            kept = _Kept(active.pool, active.origin, active.number)
            self._kept.setdefault(request_id, []).append(kept)
            self._loop.later(left_s, lambda: self._forget_kept(request_id, kept))
        held = active.pool.lease(slots, generations)
        kept.held.append((slots[held], generations[held]))

    def _forget_kept(self, request_id: str, kept: _Kept) -> None:
        remaining = self._kept.get(request_id, [])
        if kept in remaining:
            remaining.remove(kept)
            self._unkeep(kept)
        if not remaining:
            self._kept.pop(request_id, None)

    def _unkeep(self, kept: _Kept) -> None:
        if kept.pool is self._current():
            for slots, generations in kept.held:
                kept.pool.unlease(slots, generations)
        kept.held.clear()
