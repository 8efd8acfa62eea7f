# SPDX-License-Identifier: Apache-2.0
"""One pull in flight for each block: whoever else wants it waits for that."""

from __future__ import annotations

import numpy as np

from kvcr.guard.active import Active
from kvcr.protocol.engine import BlockStatus

_PENDING = np.uint8(BlockStatus.PENDING)


class Sharing:
    """Belongs to the authority thread."""

    def __init__(self) -> None:
        self.getting: dict[bytes, Active] = {}
        """Key -> the pull that is getting it."""
        self._waiting: dict[bytes, list[tuple[Active, int]]] = {}

    def claim(self, active: Active) -> None:
        """Blocks that another pull is getting are waited for, the others are ours to get."""
        joined = []
        for index in np.flatnonzero(active.pull.phase == 0).tolist():
            key = active.keys[index]
            if active.handover is not None and key not in self.getting:
                # What comes for one request alone is found by no other.
                continue
            owner = self.getting.setdefault(key, active)
            if owner is active:
                active.owned[index] = True
            else:
                joined.append(index)
                self._waiting.setdefault(key, []).append((active, index))
        active.pull.join(joined)

    def resolve(self, active: Active) -> list[Active]:
        """Tell those who wait for its blocks what became of them; returns those that may go on now."""
        statuses = active.pull.statuses
        # A pull of 2,048 blocks is told of in as many steps as it takes: only what is new is looped over.
        ended = active.owned & (statuses != _PENDING)
        if not ended.any():
            return []
        active.owned &= ~ended
        waiting: dict[int, Active] = {}
        for index in np.flatnonzero(ended).tolist():
            key = active.keys[index]
            if self.getting.get(key) is active:
                del self.getting[key]
            for other, position in self._waiting.pop(key, []):
                other.pull.leave(position, BlockStatus(int(statuses[index])))
                waiting[other.number] = other
        return list(waiting.values())
