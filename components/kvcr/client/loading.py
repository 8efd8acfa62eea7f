# SPDX-License-Identifier: Apache-2.0
"""Pool to engine memory: copies what requests load, as it arrives, and tells the guard what it took."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcr.client.handed import ForeignPools, Origin
from kvcr.client.jobs import LoadResult, LoadSpec
from kvcr.client.link import GuardLink
from kvcr.client.loads import Load
from kvcr.client.mapping import Attachment, PoolMapping
from kvcr.client.memory import BlockMemory
from kvcr.client.tally import Tally
from kvcr.errors import KvcrError
from kvcr.layout import Layout
from kvcr.pool import checksum_parts
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.engine import (
    BlockStatus,
    FetchProgress,
    Handed,
    LoadBegin,
    LoadEnd,
    Taken,
)

logger = logging.getLogger(__name__)

KEPT_PROGRESS = 1024
"""Pulls whose last report is kept for a load that has not been submitted yet."""


class Loader:
    """The loads of one rank. Methods are for the copy thread, but for those said to be the engine's."""

    def __init__(
        self,
        attached: Attachment,
        layout: Layout,
        memory: BlockMemory,
        rank: int,
        step_blocks: int,
        verify: bool,
        link: GuardLink[PoolMapping],
        clock: Callable[[], float],
        tally: Tally,
    ) -> None:
        self._attached = attached
        self._layout = layout
        self._memory = memory
        self._rank = rank
        self._step_blocks = step_blocks
        self._verify = verify
        self._link = link
        self._clock = clock
        self._tally = tally
        self._lock = threading.Lock()
        self._loads: dict[str, Load] = {}
        self._ended: deque[Load] = deque()
        self._progress: OrderedDict[str, dict[int, FetchProgress]] = OrderedDict()
        """request id -> first position of each part -> its last report"""
        self._handed: OrderedDict[str, list[Handed]] = OrderedDict()
        """request id -> what was handed for it alone, and not looked at yet"""
        self._foreign = ForeignPools(layout, rank)
        self._transit: tuple[PoolMapping, Origin] | None = None
        """Our own pool, and its slots that are granted to the guard."""

    # --- engine's thread ------------------------------------------------------------------------

    def submit(self, spec: LoadSpec) -> None:
        load = Load(spec, self._clock(), self._memory.fence())
        with self._lock:
            self._loads[spec.request_id] = load

    def cancel(self, request_id: str) -> None:
        """The load of this request, if any, ends with the next :meth:`take`."""
        with self._lock:
            load = self._loads.get(request_id)
            if load is not None:
                load.cancelled = True

    def take(self) -> list[LoadResult]:
        """Loads that are complete, failed, cancelled or late. After this no byte is written for them."""
        if not self._loads:
            return []
        now_s = self._clock()
        results = []
        with self._lock:
            over = [
                load
                for load in self._loads.values()
                if load.cancelled or now_s >= load.deadline_s or load.done
            ]
            for load in over:
                results.append(load.report())
                del self._loads[load.spec.request_id]
                self._ended.append(load)
        for result in results:
            self._tally.ended(result)
        return results

    # --- copy thread ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any load is under way. Any thread."""
        return bool(self._loads)

    def look_again(self) -> None:
        """The directory may have changed: with the next step, loads look for what they miss."""
        for load in list(self._loads.values()):
            load.dirty = True

    def progressed(self, message: FetchProgress) -> None:
        """The guard's report on a pull."""
        self._progress.setdefault(message.request_id, {})[message.first] = message
        self._progress.move_to_end(message.request_id)
        if len(self._progress) > KEPT_PROGRESS:
            self._progress.popitem(last=False)
        self._make_dirty(message.request_id)

    def handed(self, message: Handed) -> None:
        """Blocks for one request alone."""
        self._handed.setdefault(message.request_id, []).append(message)
        self._handed.move_to_end(message.request_id)
        if len(self._handed) > KEPT_PROGRESS:
            self._handed.popitem(last=False)
        self._make_dirty(message.request_id)

    def step(self, guard: bool) -> bool:
        """Copy one step of one load; False when no load has anything to copy. ``guard``: there is one."""
        for load in list(self._loads.values()):
            if load.reported or load.done:
                continue
            if load.dirty:
                self._place(load)
                found = load.resolve(
                    self._attached.mapping, self._progress.get(load.spec.request_id, {}).values(), guard
                )
                if len(found) > self._step_blocks:
                    self._announce(load, found)
            index = load.ready(self._step_blocks)
            if len(index):
                self._copy(load, index)
                return True
        return False

    def drop(self) -> None:
        """Give every load up."""
        for load in list(self._loads.values()):
            if not load.done:
                load.fail(np.flatnonzero(load.statuses == BlockStatus.PENDING), BlockStatus.FAILED)

    def tell_ended(self) -> None:
        """Tell the guard which loads are over: what it leases for them is free."""
        while self._ended:
            load = self._ended.popleft()
            self._progress.pop(load.spec.request_id, None)
            self._place(load)
            if load.origins:
                for first, indices in load.take(np.arange(len(load.statuses))):
                    self._taken(load, first, indices, copied=False)
            loaded = int(np.count_nonzero(load.statuses == BlockStatus.OK))
            corrupt = np.array(load.corrupt, np.intp)
            self._link.deliver(
                LoadEnd(
                    request_id=load.spec.request_id,
                    block_count=loaded,
                    byte_count=loaded * self._layout.part_bytes,
                    seconds=self._clock() - load.started_s,
                    failed_blocks=len(load.statuses) - loaded,
                    corrupt_slots=load.slots[corrupt].astype("<i4").tobytes(),
                    corrupt_generations=load.generations[corrupt].astype("<u8").tobytes(),
                )
            )

    def _make_dirty(self, request_id: str) -> None:
        load = self._loads.get(request_id)
        if load is not None:
            load.dirty = True

    def _place(self, load: Load) -> None:
        """Look at what was handed for this load alone."""
        for message in self._handed.pop(load.spec.request_id, ()):
            origin, unreachable = None, False
            try:
                origin = self._origin_of(message)
            except (OSError, KvcrError) as error:
                # Also where another pool is at that path: processes may see different mounts.
                unreachable = True
                logger.warning("the pool in %s cannot be read here: %s", message.pool_dir, error)
            useless = load.place(message, origin, self._rank)
            if len(useless):
                self._taken(load, message.first, useless, copied=False, unreachable=unreachable)

    def _origin_of(self, message: Handed) -> Origin | None:
        if message.pool_dir:
            return self._foreign.origin(message)
        mapping = self._attached.mapping
        if mapping is None or mapping.region is None:
            return None
        if self._transit is None or self._transit[0] is not mapping:
            # Granted to the guard, and in no directory: they change their generation when they are freed.
            self._transit = (mapping, Origin(mapping.region.array, mapping.reader.still_granted))
        return self._transit[1]

    def _taken(
        self,
        load: Load,
        first: int,
        indices: npt.NDArray[np.int32],
        *,
        copied: bool,
        unreachable: bool = False,
        corrupt: bytes = b"",
    ) -> None:
        self._link.deliver(
            Taken(load.spec.request_id, first, indices.tobytes(), copied, unreachable, corrupt)
        )

    def _copy(self, load: Load, index: npt.NDArray[np.intp]) -> None:
        started_s = self._clock()
        slots, generations = load.slots[index], load.generations[index]
        number = int(load.origin[index[0]])
        handed = number >= 0
        if handed:
            origin = load.origins[number]
        else:
            mapping = load.mapping
            assert mapping is not None
            assert mapping.region is not None
            origin = Origin(mapping.region.array, mapping.reader.still)
        good = np.ones(len(index), np.bool_)
        if self._verify or origin.foreign:
            # Before the copy: the bytes are then in the cache, and bad ones never reach the engine.
            sums = checksum_parts(origin.slots, slots, self._layout.part_bytes)
            if handed:
                good = sums == load.checksums[index]
            else:
                assert mapping is not None
                good = sums == mapping.reader.checksums(slots)[:, self._rank]
        with load.lock:
            if load.reported:
                return
            self._memory.load(origin.slots, slots[good], load.block_ids[index[good]], load.fence)
            # The control words are read again after the copy: a slot that was evicted and reused under
            # it has another generation by now.
            alive = np.asarray(origin.still(slots, generations), np.bool_)
            load.statuses[index[good & alive]] = BlockStatus.OK
        corrupt = ~good & alive
        if handed:
            self._tell_taken(load, index, good & alive, corrupt if origin.foreign else None)
        else:
            load.corrupt += index[corrupt].tolist()
        load.fail(index[~alive], BlockStatus.GONE)
        load.fail(index[corrupt], BlockStatus.FAILED)
        self._tally.loaded(
            int(np.count_nonzero(good & alive)), int(np.count_nonzero(corrupt)), self._clock() - started_s
        )
        if corrupt.any():
            logger.error(
                "request %s: %d resident blocks do not match their checksum and will be recomputed",
                load.spec.request_id,
                int(corrupt.sum()),
            )

    def _tell_taken(
        self,
        load: Load,
        index: npt.NDArray[np.intp],
        copied: npt.NDArray[np.bool_],
        corrupt: npt.NDArray[np.bool_] | None,
    ) -> None:
        """The guard may free these: they are in engine memory, or will never be."""
        for first, indices in load.take(index[copied]):
            self._taken(load, first, indices, copied=True)
        if corrupt is not None:
            for first, indices in load.take(index[corrupt]):
                self._taken(load, first, indices, copied=False, corrupt=indices.tobytes())
        for first, indices in load.take(index[~copied]):
            self._taken(load, first, indices, copied=False)

    def _announce(self, load: Load, found: npt.NDArray[np.intp]) -> None:
        """Tell the guard which slots are about to be read, of a load in several steps. Not waited for, and
        not done for what is copied at once: cooling covers the first 2 s."""
        for start in range(0, len(found), MAX_BLOCKS_PER_MESSAGE):
            part = found[start : start + MAX_BLOCKS_PER_MESSAGE]
            self._link.send(
                LoadBegin(load.spec.request_id, load.slots[part].tobytes(), load.generations[part].tobytes())
            )
