# SPDX-License-Identifier: Apache-2.0
"""Which granted slots this process answers for, so that none is lost with a guard or a message."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcr.pool import PoolReader
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.engine import Holding, Return, ToGuard

KEPT_SLOTS = 4096
"""A set is compared with the directory, to drop what is settled, when it is larger than this."""


class SlotSet:
    """Granted slots in order, as (slot, generation). For one thread."""

    def __init__(self) -> None:
        self._slots: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._generations: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._added: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]] = []
        """Behind those: joined when they are looked at."""
        self._count = 0
        self._next_look = KEPT_SLOTS

    def __len__(self) -> int:
        return self._count

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        self._join()
        return self._slots

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        self._join()
        return self._generations

    def add(self, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64]) -> None:
        self._added.append((slots, generations))
        self._count += len(slots)

    def take(self, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
        """The first ``count``, no longer in the set."""
        slots, generations = self.slots, self._generations
        self._slots, self._generations = slots[count:], generations[count:]
        self._count = len(self._slots)
        return slots[:count], generations[:count]

    def discard(self, slots: npt.NDArray[np.int32]) -> None:
        """Drop these slots, in whatever generation."""
        self._keep(~np.isin(self.slots, slots))

    def drop_settled(self, reader: PoolReader) -> None:
        """Drop what is granted no more: published, or taken back."""
        self._keep(np.asarray(reader.still_granted(self.slots, self.generations), np.bool_))

    def drop_settled_if_large(self, reader: PoolReader) -> None:
        """Bounds the set at a cost that is small for each slot added."""
        if len(self) > self._next_look:
            self.drop_settled(reader)
            self._next_look = max(KEPT_SLOTS, 2 * len(self))

    def _keep(self, mask: npt.NDArray[np.bool_]) -> None:
        self._slots, self._generations = self.slots[mask], self._generations[mask]
        self._count = len(self._slots)

    def _join(self) -> None:
        if self._added:
            self._slots = np.concatenate([self._slots, *(slots for slots, _ in self._added)])
            self._generations = np.concatenate(
                [self._generations, *(generations for _, generations in self._added)]
            )
            self._added.clear()


def send_holding(
    send: Callable[[ToGuard], bool],
    epoch: int,
    slots: npt.NDArray[np.int32],
    generations: npt.NDArray[np.uint64],
) -> bool:
    """List grants, in as many messages as it takes. False if the guard did not take them all."""
    starts = range(0, max(len(slots), 1), MAX_BLOCKS_PER_MESSAGE)
    return all(
        send(
            Holding(
                epoch,
                slots[start : start + MAX_BLOCKS_PER_MESSAGE].astype("<i4").tobytes(),
                generations[start : start + MAX_BLOCKS_PER_MESSAGE].astype("<u8").tobytes(),
                final=start == starts[-1],
            )
        )
        for start in starts
    )


def send_return(
    deliver: Callable[[ToGuard], object],
    epoch: int,
    slots: npt.NDArray[np.int32],
    generations: npt.NDArray[np.uint64],
) -> None:
    """Give granted slots back. Not waited for, and not known to arrive."""
    for start in range(0, len(slots), MAX_BLOCKS_PER_MESSAGE):
        part = slice(start, start + MAX_BLOCKS_PER_MESSAGE)
        deliver(Return(epoch, slots[part].astype("<i4").tobytes(), generations[part].astype("<u8").tobytes()))
