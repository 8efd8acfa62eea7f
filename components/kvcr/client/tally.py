# SPDX-License-Identifier: Apache-2.0
"""What a worker handle did, counted on its copy thread and taken by the engine's."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvcr.client.jobs import LoadResult
from kvcr.protocol.engine import BlockStatus


@dataclass
class WorkerCounters:
    """What was done since the last :meth:`kvcr.client.WorkerHandle.take_counters`."""

    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    saved_blocks: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    corrupt_blocks: int = 0
    failed_blocks: Counter[str] = field(default_factory=Counter)
    """by BlockStatus name"""


class Tally:
    """For any thread."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._counters = WorkerCounters()

    def take(self) -> WorkerCounters:
        with self._lock:
            counters, self._counters = self._counters, WorkerCounters()
        return counters

    def saved(self, blocks: int, seconds: float) -> None:
        with self._lock:
            counters = self._counters
            counters.saved_blocks += blocks
            counters.saved_bytes += blocks * self._block_bytes
            counters.save_seconds += seconds

    def loaded(self, blocks: int, corrupt: int, seconds: float) -> None:
        with self._lock:
            counters = self._counters
            counters.loaded_blocks += blocks
            counters.loaded_bytes += blocks * self._block_bytes
            counters.load_seconds += seconds
            counters.corrupt_blocks += corrupt

    def ended(self, result: LoadResult) -> None:
        """Count the blocks of a load that did not arrive."""
        statuses = result.statuses[result.statuses != BlockStatus.OK]
        if not len(statuses):
            return
        kinds, counts = np.unique(statuses, return_counts=True)
        with self._lock:
            for status, count in zip(kinds.tolist(), counts.tolist(), strict=True):
                self._counters.failed_blocks[BlockStatus(status).name] += count
