# SPDX-License-Identifier: Apache-2.0
"""One Fetch as the engine sees it. Long ones travel as several messages; this is their sum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, u8
from kvcr.protocol.engine import BlockStatus, FetchLease, FetchProgress

_PENDING, _GONE = bytes([BlockStatus.PENDING]), bytes([BlockStatus.GONE])


@dataclass
class _Part:
    count: int
    available: int | None = None
    final: bool = False
    reason: str = ""


class FetchState:
    """What is known of one request's fetch. Changed by ``SchedulerHandle.poll`` only; read on that thread."""

    def __init__(self, request_id: str, first: int, count: int, sent_s: float) -> None:
        self.request_id = request_id
        self.first = first
        """Position of its first block."""
        self.sent_s = sent_s
        """Monotonic time it was sent."""
        self.statuses: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        """uint8 BlockStatus, one a block"""
        self.pulled_blocks = 0
        self.transport = ""
        self._parts = {
            first + start: _Part(min(MAX_BLOCKS_PER_MESSAGE, count - start))
            for start in range(0, count, MAX_BLOCKS_PER_MESSAGE)
        }

    @property
    def count(self) -> int:
        return len(self.statuses)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(position of the first block, number of blocks) of each message."""
        return [(first, part.count) for first, part in self._parts.items()]

    @property
    def reason(self) -> str:
        """Why fewer than asked are available, as the guard said last; empty when all are."""
        return next((part.reason for part in self._parts.values() if part.reason), "")

    @property
    def final(self) -> bool:
        """No status will change any more."""
        return all(part.final for part in self._parts.values())

    @property
    def answered(self) -> bool:
        """The guard has said what it vouches for."""
        return all(part.available is not None or part.final for part in self._parts.values())

    @property
    def settled(self) -> bool:
        """Of every block it is known whether it is here, vouched for, or not to be had.

        A first lease reply may come before a source was reached: what that source has is then still open.
        """
        return self.answered and not bool(((self.statuses == BlockStatus.PENDING) & ~self.expected()).any())

    def expected(self) -> npt.NDArray[np.bool_]:
        """Which of its blocks are here or on their way, as far as is known."""
        coming: npt.NDArray[np.bool_] = self.statuses == BlockStatus.OK
        for first, part in self._parts.items():
            if part.available and not part.final:
                leased = slice(first - self.first, first - self.first + part.available)
                coming[leased] |= self.statuses[leased] == BlockStatus.PENDING
        return coming

    def leased(self, message: FetchLease) -> None:
        part = self._parts.get(message.first)
        if part is not None:
            part.available = min(max(message.available, 0), part.count)
            part.reason = message.reason

    def progressed(self, message: FetchProgress) -> None:
        part = self._parts.get(message.first)
        statuses = message.statuses
        if part is None or part.final or len(statuses) != part.count:
            return
        start = message.first - self.first
        if message.final:
            part.final = True
            part.reason = message.reason
            # On bytes: for a few blocks an array operation takes longer than all of this.
            statuses = statuses.replace(_PENDING, _GONE)
            self.pulled_blocks += message.pulled_blocks
            self.transport = self.transport or message.transport
        self.statuses[start : start + part.count] = u8(statuses)

    def end(self, status: BlockStatus, reason: str) -> None:
        """Nothing more will come: what is pending gets ``status``."""
        self.statuses[self.statuses == BlockStatus.PENDING] = status
        for part in self._parts.values():
            if not part.final:
                part.final, part.reason = True, reason
