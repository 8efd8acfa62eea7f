# SPDX-License-Identifier: Apache-2.0
"""What the guard keeps in its own memory about slots: which are free, and which are cooling until when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcr.pool.state import COOLING_S, I32, Mask


class FreeList:
    """The free slots, as an array with the one freed last at its end."""

    def __init__(self, capacity: int) -> None:
        self._slots: I32 = np.empty(capacity, dtype=np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def slots(self) -> I32:
        """A view, valid until the next change."""
        return self._slots[: self._count]

    def push(self, slots: I32) -> None:
        """Add slots that are not in the list."""
        self._slots[self._count : self._count + len(slots)] = slots
        self._count += len(slots)

    def take(self, indices: npt.NDArray[np.intp]) -> I32:
        """Remove and return the slots at distinct ``indices``."""
        taken = self._slots[indices]
        left = self._count - len(indices)
        # As a list: a reduction of a few entries takes longer than that.
        if not len(indices) or min(indices.tolist()) >= left:
            self._count = left
            return taken
        # Fill the holes with what would be cut off at the end.
        tail = np.ones(self._count - left, dtype=np.bool_)
        tail[indices[indices >= left] - left] = False
        self._slots[indices[indices < left]] = self._slots[left : self._count][tail]
        self._count = left
        return taken


class CoolingQueue:
    """Evicted slots in batches, oldest first, each with the time from which it may be reused."""

    def __init__(self) -> None:
        self._batches: deque[tuple[float, I32]] = deque()
        self._undated: list[I32] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, slots: I32, now_s: float) -> None:
        """Slots evicted at ``now_s``."""
        if len(slots):
            self._batches.append((now_s + COOLING_S, slots))
            self._count += len(slots)

    def push_undated(self, slots: I32) -> None:
        """Slots found cooling by an attach, which has no clock: they cool from the next :meth:`pop` on."""
        if len(slots):
            self._undated.append(slots)
            self._count += len(slots)

    def due(self, now_s: float) -> bool:
        """Whether :meth:`pop` may have something to return, or a batch to date."""
        return bool(self._undated) or (bool(self._batches) and self._batches[0][0] <= now_s)

    def pop(self, now_s: float, held: Callable[[I32], Mask]) -> I32:
        """Remove and return the slots that cooled long enough; those still ``held`` wait another round."""
        while self._undated:
            self._batches.append((now_s + COOLING_S, self._undated.pop()))
        if not self._batches or self._batches[0][0] > now_s:
            return np.empty(0, dtype=np.int32)
        ready: list[I32] = []
        waiting: list[I32] = []
        while self._batches and self._batches[0][0] <= now_s:
            slots = self._batches.popleft()[1]
            mask = held(slots)
            ready.append(slots[~mask])
            waiting.append(slots[mask])
        if waiting and any(len(slots) for slots in waiting):
            self._batches.appendleft((now_s, np.concatenate(waiting)))
        cooled = np.concatenate(ready) if ready else np.empty(0, dtype=np.int32)
        self._count -= len(cooled)
        return cooled

    def slots(self) -> I32:
        """Every slot in the queue."""
        parts = [*self._undated, *(slots for _, slots in self._batches)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
