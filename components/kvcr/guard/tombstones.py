# SPDX-License-Identifier: Apache-2.0
"""Keys that were invalidated while fills of them may be under way.

The rule: a fill is dead if its request began before the engine had carried out the drop that belongs to the
invalidation. What a request computes that began later is as good as any other block. The scheduler numbers
its requests by the last drop it carried out, and every Filled carries that number, so that it takes no clock
to tell the two apart. A block right after a dead one is dead too, and is remembered: a request that goes on
decoding after its context was compacted leaves nothing behind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcr.keys import KEY_BYTES

TTL_S = 120.0
"""A request that was running when its blocks were invalidated may fill more for as long as it decodes; the
engine stops it by itself once it heard of the drop, so this covers the message and the saves under way."""

MAX_TOMBSTONES = 65_536
"""About 12 MB. The oldest are forgotten first; a block that comes back for it costs its place in the pool."""


class _Tombstone(NamedTuple):
    epoch: int
    drop_id: int
    until_s: float


class Tombstones:
    """Belongs to the authority thread."""

    def __init__(self) -> None:
        # In order of insertion, which is the order in which they expire.
        self._dead: dict[bytes, _Tombstone] = {}

    def __len__(self) -> int:
        return len(self._dead)

    def bury(self, keys: bytes, epoch: int, drop_id: int, now_s: float) -> None:
        """Fills of these blocks by requests from before drop ``drop_id`` are dead."""
        self._expire(now_s)
        stone = _Tombstone(epoch, drop_id, now_s + TTL_S)
        for at in range(0, len(keys), KEY_BYTES):
            self._put(keys[at : at + KEY_BYTES], stone)

    def dead(
        self, keys: bytes, parents: bytes, epoch: int, drops: int, now_s: float
    ) -> npt.NDArray[np.bool_]:
        """Which of these fills are dead. ``drops``: the last drop carried out before their request began."""
        count = len(keys) // KEY_BYTES
        mask = np.zeros(count, np.bool_)
        self._expire(now_s)
        if not self._dead:
            return mask
        # A loop over blocks, in the two minutes after an invalidation only: 0.2 us a block.
        for index in range(count):
            key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            parent = parents[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            stone = self._dead.get(key) or self._dead.get(parent)
            if stone is not None and stone.epoch == epoch and drops < stone.drop_id:
                mask[index] = True
                if key not in self._dead:
                    self._put(key, stone._replace(until_s=now_s + TTL_S))
        return mask

    def _put(self, key: bytes, stone: _Tombstone) -> None:
        self._dead.pop(key, None)
        self._dead[key] = stone
        if len(self._dead) > MAX_TOMBSTONES:
            del self._dead[next(iter(self._dead))]

    def _expire(self, now_s: float) -> None:
        while self._dead:
            oldest = next(iter(self._dead))
            if self._dead[oldest].until_s > now_s:
                return
            del self._dead[oldest]
