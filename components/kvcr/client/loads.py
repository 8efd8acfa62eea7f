# SPDX-License-Identifier: Apache-2.0
"""One load in progress: which blocks arrived, which may still come, and who may still write."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.client.handed import Origin
from kvcr.client.jobs import LoadResult, LoadSpec
from kvcr.client.mapping import PoolMapping
from kvcr.keys import KEY_BYTES
from kvcr.protocol.codec import i32, u8, u64
from kvcr.protocol.engine import BlockStatus, FetchProgress, Handed

PENDING = int(BlockStatus.PENDING)
OK = int(BlockStatus.OK)


class Load:
    """State of one request's load on one rank.

    The copy thread moves it on; the engine's thread may end it at any time by :meth:`report`. ``lock`` is
    held while blocks are written, and ``reported`` is checked under it: after a report no byte is written.
    """

    def __init__(self, spec: LoadSpec, now_s: float, fence: Any = None) -> None:
        """``fence``: of the engine memory, as of now."""
        self.spec = spec
        self.fence = fence
        self.lock = threading.Lock()
        self.reported = False
        self.cancelled = False
        self.started_s = now_s
        self.deadline_s = now_s + spec.deadline_s
        self.block_ids: npt.NDArray[np.int32] = np.frombuffer(spec.block_ids, "<i4")
        count = len(self.block_ids)
        self.statuses: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.slots: npt.NDArray[np.int32] = np.full(count, -1, np.int32)
        self.generations: npt.NDArray[np.uint64] = np.zeros(count, np.uint64)
        self.mapping: PoolMapping | None = None
        self.origins: list[Origin] = []
        """What :attr:`origin` counts."""
        self.origin: npt.NDArray[np.int16] = np.full(count, -1, np.int16)
        """Where a block of which the slot is known is read; -1: from :attr:`mapping`."""
        self.part: npt.NDArray[np.int32] = np.full(count, -1, np.int32)
        """``first`` of the Fetch that a block was handed for; -1: it was not, or was taken."""
        self.checksums: npt.NDArray[np.uint64] = np.zeros(count, np.uint64)
        """Of handed blocks: this rank's part."""
        self.dirty = True
        """The directory or the pull may have changed since the last :meth:`resolve`."""
        self.corrupt: list[int] = []
        """Indexes of blocks that were resident but did not verify."""

    @property
    def done(self) -> bool:
        return not bool((self.statuses == PENDING).any())

    def resolve(
        self, mapping: PoolMapping | None, progress: Iterable[FetchProgress], guard: bool
    ) -> npt.NDArray[np.intp]:
        """Look up what is missing; returns the indexes newly found. Copy thread.

        A missing block fails at once unless a running pull may still bring it: ``guard`` says whether
        somebody is there to run one, ``progress`` are its latest reports, one a part.
        """
        self.dirty = False
        missing = np.flatnonzero((self.statuses == PENDING) & (self.slots < 0))
        if not len(missing):
            return missing
        if mapping is None:
            self.fail(missing, BlockStatus.GONE)
            return missing[:0]
        # Read the report before the directory: a block reported OK is then found, or was evicted since.
        coming = self._coming(missing, progress, guard)
        keys = np.frombuffer(self.spec.keys, np.uint8).reshape(-1, KEY_BYTES)[missing].tobytes()
        slots, generations = mapping.reader.lookup(keys)
        found = slots >= 0
        if self.mapping is not None and self.mapping is not mapping:
            # The pool was replaced in mid-load: what was found before is copied from the old files, what
            # is still missing will not appear there.
            found[:] = False
            coming[:] = GONE_STATUS
        else:
            self.mapping = mapping
        self.slots[missing[found]] = slots[found]
        self.generations[missing[found]] = generations[found]
        lost = ~found & (coming != PENDING)
        for status in np.unique(coming[lost]).tolist():
            self.fail(missing[lost & (coming == status)], BlockStatus(status))
        return missing[found]

    def place(self, message: Handed, origin: Origin | None, rank: int) -> npt.NDArray[np.int32]:
        """Take in what was handed for this load; None: it cannot be read. Returns what is of no use to it, as
        indices of the Fetch."""
        indices = i32(message.indices)
        at = indices.astype(np.int64) + message.first - self.spec.first
        use = (at >= 0) & (at < len(self.statuses))
        use[use] = (self.statuses[at[use]] == PENDING) & (self.slots[at[use]] < 0)
        if origin is None:
            self.fail(at[use], BlockStatus.FAILED)
            return indices
        chosen = at[use]
        if origin not in self.origins:
            self.origins.append(origin)
        self.origin[chosen] = self.origins.index(origin)
        self.slots[chosen] = i32(message.slots)[use]
        self.generations[chosen] = u64(message.generations)[use]
        self.checksums[chosen] = u64(message.checksums).reshape(len(indices), -1)[use, rank]
        self.part[chosen] = message.first
        return indices[~use]

    def take(self, index: npt.NDArray[np.intp]) -> list[tuple[int, npt.NDArray[np.int32]]]:
        """Those of these blocks that were handed, and are taken now: (first of the Fetch, indices)."""
        index = index[self.part[index] >= 0]
        taken = [
            (first, (index[self.part[index] == first] + self.spec.first - first).astype(np.int32))
            for first in np.unique(self.part[index]).tolist()
        ]
        self.part[index] = -1
        return taken

    def _coming(
        self, missing: npt.NDArray[np.intp], progress: Iterable[FetchProgress], guard: bool
    ) -> npt.NDArray[np.uint8]:
        """For each missing block, the status it takes if the directory does not have it."""
        if not self.spec.fetching:
            return np.full(len(missing), BlockStatus.MISS, np.uint8)
        if not guard:
            return np.full(len(missing), BlockStatus.GONE, np.uint8)
        coming = np.full(len(missing), BlockStatus.MISS, np.uint8)
        position = missing + self.spec.first
        fetched = (position >= self.spec.fetch_first) & (
            position < self.spec.fetch_first + self.spec.fetch_count
        )
        coming[fetched] = PENDING
        for report in progress:
            statuses = u8(report.statuses)
            index = position - report.first
            inside = (index >= 0) & (index < len(statuses))
            coming[inside] = statuses[index[inside]]
            if report.final:
                coming[inside & (coming == PENDING)] = BlockStatus.GONE
        # Committed by the pull, but not found a moment later: evicted again.
        coming[coming == OK] = BlockStatus.GONE
        return coming

    def ready(self, limit: int) -> npt.NDArray[np.intp]:
        """Indexes of up to ``limit`` blocks that can be copied now, in prefix order, all from one origin."""
        found = np.flatnonzero((self.statuses == PENDING) & (self.slots >= 0))[:limit]
        return found[self.origin[found] == self.origin[found[0]]] if len(found) else found

    def fail(self, index: npt.NDArray[np.intp], status: BlockStatus) -> None:
        """Give these blocks up; with ``prefix_only`` also everything after the first of them."""
        if not len(index):
            return
        with self.lock:
            if self.reported:
                return
            self.statuses[index] = status
            if self.spec.prefix_only:
                tail = self.statuses[int(index.min()) :]
                tail[tail == PENDING] = status

    def report(self) -> LoadResult:
        """End the load, whatever its state. Engine's thread. Waits for a copy step in progress, at most."""
        with self.lock:
            self.reported = True
            self.statuses[self.statuses == PENDING] = BlockStatus.TOO_SLOW
            keys = self.spec.keys
            corrupt = frozenset(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in self.corrupt)
            return LoadResult(self.spec.request_id, self.statuses, self.block_ids, corrupt)


GONE_STATUS = int(BlockStatus.GONE)
