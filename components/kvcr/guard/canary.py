# SPDX-License-Identifier: Apache-2.0
"""The canary: a block of known bytes that every guard reads from a peer before it trusts the way there.

It is outside of the pool's capacity and directory: the spare rows of each region hold the block that peers
read, and the places for what we read from them. A trial asks the peer for it as for any block, reads it
by the transport that pulls will use, from the same regions, verifies it, and reads it again to see how fast
that is. So a link that is ready has moved bytes, and its first pull finds it warm.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvcr.guard.loop import Timer
from kvcr.pool import SPARE_ROWS
from kvcr.protocol.engine import BlockStatus
from kvcr.protocol.peer import Leased
from kvcr.transfer.base import LocalRegions, Step, StepResult, Transport

MEASURED_BYTES = 2 << 20
"""Read to measure, at most, unless one block is larger: 1 ms at 2 GB/s."""

MEASURED_BLOCKS = 16


class Canary:
    """Our own canary block, and places for peers'. Belongs to the authority thread."""

    def __init__(self, local: LocalRegions, slots: int, incarnation: int) -> None:
        """``slots``: of the directory; the rows of ``local`` behind them are ours."""
        self.slot = slots
        # Other bytes at each start: who still maps or reads a predecessor's memory finds out.
        words = np.arange(local.layout.part_bytes // 8 + 1, dtype=np.uint64)
        for rank, array in enumerate(local.arrays):
            seed = np.uint64((incarnation * 0x9E3779B97F4A7C15 + rank) % (1 << 64))
            content = (words * np.uint64(0xBF58476D1CE4E5B9)) ^ seed
            array[slots, : local.layout.part_bytes] = content.view(np.uint8)[: local.layout.part_bytes]
        self.checksums = local.checksums(np.array([slots], np.int32))
        """[1, ranks]"""
        self._places = deque(range(slots + 1, slots + SPARE_ROWS))
        self._waiting: deque[Callable[[int], None]] = deque()

    def take(self, use: Callable[[int], None]) -> None:
        """``use(row)`` with a row to read into, now or once one is free; it comes back by :meth:`give`."""
        if self._places:
            use(self._places.popleft())
        else:
            self._waiting.append(use)

    def give(self, row: int) -> None:
        if self._waiting:
            self._waiting.popleft()(row)
        else:
            self._places.append(row)


class Outcome(NamedTuple):
    """Of a trial."""

    reason: str
    """Why the way cannot be used; empty when it can."""
    first_s: float
    """The first read, contact included."""
    seconds: float
    """The measured read."""
    blocks: int
    nbytes: int
    """What it moved."""

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


class Trial:
    """One canary read over one transport. ``done`` is called once, on the authority thread."""

    def __init__(
        self,
        canary: Canary,
        local: LocalRegions,
        transport: Transport,
        leased: Leased,
        timeout_s: float,
        done: Callable[[Outcome], None],
        timer: Callable[[float, Callable[[], None]], Timer],
        reads: int = 1,
    ) -> None:
        """``reads``: how often to measure; the best counts."""
        self._reads_left = reads
        self._best_s = math.inf
        self._canary = canary
        self._local = local
        self._transport = transport
        self._leased = leased
        # A read that begins late ends with the lease: then nobody works for it at its source.
        self._until_s = time.monotonic() + min(timeout_s, leased.lease_ms / 1000)
        self._done: Callable[[Outcome], None] | None = done
        self._first_s = 0.0
        self._row = -1
        self._in_use = False
        self._remote_slot = int(np.frombuffer(leased.slots, "<i4")[0])
        self._checksums = np.frombuffer(leased.checksums, "<u8").reshape(1, -1)
        # For the wait for a row only; a read that began ends by itself.
        self._timer = timer(timeout_s, self._waited)
        canary.take(self._begin)

    def cancel(self) -> None:
        """Say nothing more; the row comes back when nothing can write to it."""
        self._done = None

    def _waited(self) -> None:
        if self._row < 0:
            self._end("no place to read its canary block into was free in time")

    def _begin(self, row: int) -> None:
        if self._done is None:
            self._canary.give(row)
            return
        self._row = row
        self._read(1, self._contacted)

    def _read(self, blocks: int, then: Callable[[StepResult], None]) -> None:
        # Rows may repeat: every block of the step lands in the same place and is the same.
        step = Step(
            pull=0,
            source=0,
            indices=np.arange(blocks),
            local_slots=np.full(blocks, self._row, np.int32),
            local_generations=np.zeros(blocks, np.uint64),
            remote_slots=np.full(blocks, self._remote_slot, np.int32),
            remote_generations=np.zeros(blocks, np.uint64),
            checksums=np.repeat(self._checksums, blocks, axis=0),
            deadline_s=self._until_s,
        )
        self._in_use = True

        def ended(result: StepResult) -> None:
            self._in_use = result.slots_in_flight
            if self._done is None:
                self._end("cancelled")
            elif bool((result.statuses == BlockStatus.OK).all()):
                then(result)
            else:
                status = BlockStatus(int(result.statuses[0])).name.lower()
                self._end(result.reason or f"its canary block is {status}")

        self._transport.read(step, ended, lambda _: self._quiet())

    def _contacted(self, result: StepResult) -> None:
        self._first_s = result.seconds
        self._measure()

    def _measure(self) -> None:
        block_bytes = self._local.block_bytes
        blocks = max(1, min(MEASURED_BLOCKS, MEASURED_BYTES // block_bytes, self._local.blocks_per_step))
        self._read(blocks, self._measured)

    def _measured(self, result: StepResult) -> None:
        self._best_s = min(self._best_s, result.seconds)
        self._reads_left -= 1
        if self._reads_left > 0:
            self._measure()
        else:
            self._end("", self._best_s, len(result.step))

    def _end(self, reason: str, seconds: float = 0.0, blocks: int = 0) -> None:
        self._timer.cancel()
        if not self._in_use:
            self._free()
        done, self._done = self._done, None
        if done is not None:
            done(Outcome(reason, self._first_s, seconds, blocks, blocks * self._local.block_bytes))

    def _quiet(self) -> None:
        """Nothing can write to the row any more."""
        self._in_use = False
        self._free()

    def _free(self) -> None:
        row, self._row = self._row, -1
        if row >= 0:
            self._canary.give(row)
