# SPDX-License-Identifier: Apache-2.0
"""Fills the guard has not confirmed: sent when it listens, sent again when it comes back."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcr.client.jobs import SaveSpec
from kvcr.keys import KEY_BYTES
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, i32, u64
from kvcr.protocol.engine import Committed, Filled, ToGuard

Mask = npt.NDArray[np.bool_]

MAX_UNCONFIRMED_BLOCKS = 16_384
"""Oldest fills are forgotten past this. Only the rank that fills a block last is told of the commit, so
the others drop theirs here; a fill that is really lost costs one granted slot until the engine leaves."""


class Fills:
    """Filled messages in order, by the pool they belong to. Used by the copy thread only."""

    def __init__(self) -> None:
        self._messages: OrderedDict[int, tuple[int, Filled, int]] = OrderedDict()
        """number -> (pool token, message, blocks not confirmed)"""
        self._by_slot: dict[tuple[int, int], int] = {}
        """(slot, generation) -> number"""
        self._unsent: deque[int] = deque()
        self._next = 0
        self.blocks = 0

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def slots(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
        """Slots and generations of everything not confirmed."""
        slots = np.fromiter((slot for slot, _ in self._by_slot), np.int32, len(self._by_slot))
        generations = np.fromiter((generation for _, generation in self._by_slot), np.uint64, len(slots))
        return slots, generations

    def settle(self, still_granted: Callable[[npt.NDArray[np.int32], npt.NDArray[np.uint64]], Mask]) -> None:
        """Take as confirmed what the directory says is granted no more."""
        slots, generations = self.slots()
        settled = ~np.asarray(still_granted(slots, generations), np.bool_)
        self.confirm(
            Committed(0, slots[settled].astype("<i4").tobytes(), generations[settled].astype("<u8").tobytes())
        )

    def add(self, spec: SaveSpec, rank: int, checksums: bytes, send: Callable[[ToGuard], bool]) -> None:
        """All blocks of ``spec`` are in their slots now: tell the guard, or keep it for :meth:`send`.

        ``checksums``: uint64 each, empty if not known.
        """
        for start in range(0, len(spec.slots) // 4, MAX_BLOCKS_PER_MESSAGE):
            message = _part(spec, rank, checksums, start)
            # Before the bookkeeping, as somebody may wait for the guard.
            sent = not self._unsent and send(message)
            pairs = _pairs(message)
            self._messages[self._next] = (spec.pool_token, message, len(pairs))
            self._by_slot.update(dict.fromkeys(pairs, self._next))
            self.blocks += len(pairs)
            if not sent:
                self._unsent.append(self._next)
            self._next += 1
        while self.blocks > MAX_UNCONFIRMED_BLOCKS:
            self._forget(next(iter(self._messages)))

    def send(self, send: Callable[[ToGuard], bool]) -> None:
        """Send what was not sent, as far as the guard takes it."""
        while self._unsent:
            entry = self._messages.get(self._unsent[0])
            if entry is not None and not send(entry[1]):
                return
            self._unsent.popleft()

    def resend(self, pool_token: int, epoch: int) -> None:
        """A guard came (back): queue everything unconfirmed again, drop what is of another pool or epoch."""
        for number, (token, message, _) in list(self._messages.items()):
            if token != pool_token or message.epoch != epoch:
                self._forget(number)
        self._unsent = deque(self._messages)

    def confirm(self, message: Committed) -> None:
        # A loop: confirmations come in any order and in parts, at most MAX_BLOCKS_PER_MESSAGE at a time.
        for pair in _pairs(message):
            number = self._by_slot.pop(pair, None)
            if number is None or number not in self._messages:
                continue
            token, filled, left = self._messages[number]
            self.blocks -= 1
            if left == 1:
                del self._messages[number]
            else:
                self._messages[number] = (token, filled, left - 1)

    def _forget(self, number: int) -> None:
        _, message, left = self._messages.pop(number)
        self.blocks -= left
        for pair in _pairs(message):
            self._by_slot.pop(pair, None)


def _part(spec: SaveSpec, rank: int, checksums: bytes, start: int) -> Filled:
    """What fits in one message, from block ``start`` on."""

    def part(blob: bytes, size: int) -> bytes:
        return blob[start * size : (start + MAX_BLOCKS_PER_MESSAGE) * size]

    return Filled(
        epoch=spec.epoch,
        rank=rank,
        slots=part(spec.slots, 4),
        generations=part(spec.generations, 8),
        keys=part(spec.keys, KEY_BYTES),
        parents=part(spec.parents, KEY_BYTES),
        engine_hashes=part(spec.engine_hashes, 8),
        positions=part(spec.positions, 4),
        drops=spec.drops,
        checksums=part(checksums, 8),
    )


def _pairs(message: Filled | Committed) -> list[tuple[int, int]]:
    return list(zip(i32(message.slots).tolist(), u64(message.generations).tolist(), strict=True))
