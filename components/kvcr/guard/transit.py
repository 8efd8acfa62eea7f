# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way to one request alone (no-retain): in no directory, and gone once the engine has them.

Either in *transit slots* of our pool, which stay granted to the guard and are never published, or, where the
engine can map the source's pool, in place: the engine copies from there under our lease, and nothing of it is
ever in our pool. No I/O, no clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcr.guard.pulls import Indices
from kvcr.pool import Pool

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]


class TransitSlots:
    """How many slots of the pool are in transit, and how many may be. Belongs to the authority thread."""

    def __init__(self, most: int, most_share: float) -> None:
        """``most`` slots, and no more than ``most_share`` of the pool."""
        self._most = most
        self._most_share = most_share
        self.used = 0

    def limit(self, pool: Pool) -> int:
        """Slots that may be in transit in this pool: at least one, as with none nothing could pass."""
        return max(1, min(self._most, int(pool.slots * self._most_share)))

    def room(self, pool: Pool) -> int:
        """Slots that may still be taken."""
        return max(0, self.limit(pool) - self.used)


class Freed(NamedTuple):
    """What every rank has taken now, or nobody will."""

    slots: I32
    """transit slots to give back"""
    generations: U64
    in_place: npt.NDArray[np.intp]
    """blocks read in the source's pool"""


class Handover:
    """The blocks of one Fetch that were handed to the engine and not taken by all its ranks yet."""

    def __init__(self, count: int, ranks: int) -> None:
        self._slots: I32 = np.full(count, -1, np.int32)
        self._generations: U64 = np.zeros(count, np.uint64)
        self._open = np.zeros(count, bool)
        self._waiting = np.zeros((count, ranks), bool)

    @property
    def left(self) -> int:
        """Blocks handed and not freed."""
        return int(self._open.sum())

    def hand(self, indices: Indices, slots: I32, generations: U64, *, in_place: bool) -> None:
        """These are the engine's to read. ``slots`` are of our pool, unless ``in_place``."""
        self._slots[indices] = -1 if in_place else slots
        self._generations[indices] = generations
        self._open[indices] = True
        self._waiting[indices] = True

    def taken(self, indices: Indices, rank: int) -> Freed:
        """A rank has copied these, or given them up. What it was not handed is ignored."""
        inside = indices[(indices >= 0) & (indices < len(self._open))]
        if 0 <= rank < self._waiting.shape[1]:
            self._waiting[inside, rank] = False
        mine = np.unique(inside)
        return self._free(mine[self._open[mine] & ~self._waiting[mine].any(axis=1)])

    def drop(self) -> Freed:
        """Nobody will take what is left; who is in the middle of it finds out by the generation."""
        return self._free(np.flatnonzero(self._open))

    def _free(self, indices: npt.NDArray[np.intp]) -> Freed:
        self._open[indices] = False
        here = self._slots[indices] >= 0
        return Freed(self._slots[indices[here]], self._generations[indices[here]], indices[~here])
