# SPDX-License-Identifier: Apache-2.0
"""The worker's side of an engine: copies blocks between engine memory and the pool, on one thread.

The engine's thread submits jobs and collects results; it never waits for the guard. The deadline of a
load is kept here, on this process's own clock: :meth:`WorkerHandle.take_loads` ends a load that is late,
with or without a guard.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.client.fills import Fills
from kvcr.client.grants import SlotSet, send_holding, send_return
from kvcr.client.guard_socket import find_socket
from kvcr.client.handed import ForeignPools, Origin
from kvcr.client.jobs import LoadResult, LoadSpec, SaveSpec
from kvcr.client.link import GuardLink
from kvcr.client.loads import Load
from kvcr.client.mapping import PoolMapping, map_region
from kvcr.client.memory import BlockMemory
from kvcr.client.turns import Turns
from kvcr.config import EngineConfig
from kvcr.errors import KvcrError, Refused
from kvcr.layout import Layout
from kvcr.pool import checksum_parts
from kvcr.protocol import engine as msg
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.engine import BlockStatus

logger = logging.getLogger(__name__)

STEP_BYTES = 8 << 20
"""Longest piece copied without looking up: bounds how long a report waits for the copy thread."""

RETRY_S = 0.05
"""How often unfinished business is looked at when nothing wakes the thread."""

KEPT_PROGRESS = 1024
"""Pulls whose last report is kept for a load that has not been submitted yet."""


@dataclass
class _Save:
    spec: SaveSpec
    fence: Any
    slots: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    mapping: PoolMapping | None = None
    copied: int = 0
    checksums: list[npt.NDArray[np.uint64] | None] = field(default_factory=list)
    """of the blocks copied, step by step"""


@dataclass
class WorkerCounters:
    """What was done since the last :meth:`WorkerHandle.take_counters`."""

    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    saved_blocks: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    corrupt_blocks: int = 0
    failed_blocks: Counter[str] = field(default_factory=Counter)
    """by BlockStatus name"""


class WorkerHandle:
    """One per rank. ``submit_*``, ``cancel_load``, ``take_*`` and ``wait_saves`` are for the engine's thread;
    the copying happens on a thread of this handle's own, which is the only one that uses the connection.

    Raises LayoutMismatch when ``memory`` has not the size of a block that ``layout`` says.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        memory: BlockMemory,
        *,
        engine_id: str,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if memory.part_bytes != layout.part_bytes:
            raise ValueError(
                f"one block of engine memory has {memory.part_bytes} bytes on this rank, the layout says "
                f"{layout.part_bytes}"
            )
        self.layout = layout
        self._on_mismatch = config.on_mismatch
        self._memory = memory
        self._rank = rank
        self._verify = config.verify_loads
        self._clock = clock
        self._step_blocks = max(1, STEP_BYTES // layout.part_bytes)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._loads: dict[str, Load] = {}
        self._saves: deque[_Save] = deque()
        self._saving: Counter[str] = Counter()
        self._saved_jobs: list[int] = []
        self._ended: deque[Load] = deque()
        self._progress: OrderedDict[str, dict[int, msg.FetchProgress]] = OrderedDict()
        """request id -> first position of each part -> its last report"""
        self._handed: OrderedDict[str, list[msg.Handed]] = OrderedDict()
        """request id -> what was handed for it alone, and not looked at yet"""
        self._foreign = ForeignPools(layout, rank)
        self._transit: tuple[PoolMapping, Origin] | None = None
        """Our own pool, and its slots that are granted to the guard."""
        self._fills = Fills()
        self._returned: dict[tuple[int, int], SlotSet] = {}
        """(pool token, epoch) -> given back, until the directory says so: with no guard, or one that dies
        over it, the message is lost."""
        self._epoch = 0
        self._listed = True
        """This connection's Holding is sent."""
        self._alive_s = 0.0
        """When Alive was last sent."""
        self._counters = WorkerCounters()
        self._session_number = 0
        self._attached: PoolMapping | None = None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._turns = Turns(lambda: not (self._loads or self._saves or self._fills.unsent))
        self._link: GuardLink[PoolMapping] = GuardLink(
            find_socket=lambda: find_socket(config),
            hello=msg.Hello(
                msg.VERSION, msg.Role.WORKER, engine_id, rank, os.getpid(), layout, config.namespace
            ),
            attach=lambda welcome, previous: map_region(welcome, layout, engine_id, rank, previous),
            on_change=self._ring,
        )
        self._thread = threading.Thread(target=self._run, name="kvcr-copy", daemon=True)
        self._thread.start()

    # --- engine's thread ------------------------------------------------------------------------

    def wait_connected(self, timeout_s: float) -> bool:
        """Start-up only: wait for the first answer of the guard. False when there is none, or it refused."""
        return self._link.wait(timeout_s)

    @property
    def connected(self) -> bool:
        return self._link.session is not None

    @property
    def refused(self) -> Refused | None:
        return self._link.refused

    def require_start(self) -> None:
        """After :meth:`wait_connected`: raise MustFail if this engine must not start, see ``on_mismatch``."""
        self._link.require_start(self._on_mismatch)

    def submit_load(self, spec: LoadSpec) -> None:
        """Start a load. Its result comes exactly once from :meth:`take_loads`, by its deadline."""
        load = Load(spec, self._clock(), self._memory.fence())
        with self._lock:
            self._loads[spec.request_id] = load
        self._ring()

    def cancel_load(self, request_id: str) -> None:
        """The request is over: its load, if any, ends with the next :meth:`take_loads`."""
        with self._lock:
            load = self._loads.get(request_id)
            if load is not None:
                load.cancelled = True

    def take_loads(self) -> list[LoadResult]:
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
            self._count_failures(result)
        if over:
            self._ring()
        return results

    def submit_save(self, spec: SaveSpec) -> None:
        """Copy full blocks to granted slots. Call after the engine's writes to them were issued.

        The blocks must not change until the job is in :meth:`take_saved_jobs`.
        """
        save = _Save(
            spec, self._memory.fence(), np.frombuffer(spec.slots, "<i4"), np.frombuffer(spec.block_ids, "<i4")
        )
        with self._lock:
            self._saves.append(save)
            self._saving[spec.request_id] += 1
        self._ring()

    def saving(self, request_id: str) -> bool:
        """Whether saves of this request are queued or running."""
        return request_id in self._saving

    @property
    def any_saving(self) -> bool:
        """Whether any save is queued or running."""
        return bool(self._saving)

    def take_saved_jobs(self) -> list[int]:
        """Ids of save jobs whose blocks are the engine's again, copied or not."""
        if not self._saved_jobs:
            return []
        with self._lock:
            jobs, self._saved_jobs = self._saved_jobs, []
        return jobs

    def wait_saves(self, request_ids: Iterable[str] | None = None) -> None:
        """Wait until no save of these requests (None: of any) is queued or running.

        Bounded by memory speed: nothing in a save waits for the guard.
        """
        wanted = None if request_ids is None else set(request_ids)
        with self._idle:
            self._idle.wait_for(
                lambda: (
                    self._closing or (not self._saving if wanted is None else wanted.isdisjoint(self._saving))
                )
            )

    def borrowed(self) -> contextlib.AbstractContextManager[None]:
        """Do the copy thread's work on the calling thread, in :meth:`work_until`: for callers that would only
        wait. What is submitted meanwhile wakes no thread."""
        return self._turns.borrowed()

    def work_until(
        self, done: Callable[[], bool], deadline_s: float, also: Callable[[], int] = lambda: -1
    ) -> None:
        """Work until ``done()`` or, on the monotonic clock, the deadline. See :meth:`borrowed`.

        Input on the descriptor ``also()`` may change ``done()``.
        """
        with self._turns.borrowed():
            while not done() and (left_s := deadline_s - time.monotonic()) > 0.0:
                if not self._work() and not done():
                    self._sleep(min(left_s, RETRY_S), also())
            # Loads that done() took: their slots are leased until the guard hears that they are over, and the
            # copy thread may sleep on.
            self._tell_ended()

    def take_counters(self) -> WorkerCounters:
        with self._lock:
            counters, self._counters = self._counters, WorkerCounters()
        return counters

    @property
    def unconfirmed_fills(self) -> int:
        """Blocks copied to slots that the guard has not confirmed."""
        return self._fills.blocks

    def close(self) -> None:
        """End the copy thread and the connection. Loads in progress are dropped. Idempotent."""
        with self._idle:
            if self._closing:
                return
            self._closing = True
            self._idle.notify_all()
        self._ring()
        self._thread.join(10.0)
        self._link.close()
        if self._thread.is_alive():
            # It may still write to the pool, so the lock that says so stays until the process ends.
            logger.error("the copy thread does not end; keeping the writer lock")
            return
        if self._attached is not None and self._attached.region is not None:
            self._memory.detach(self._attached.region.array)
        for mapping in (self._attached, self._link.resources):
            if mapping is not None and mapping.region is not None and mapping.lock is not None:
                mapping.region.close()
                mapping.lock.release()
        self._attached = None
        os.close(self._wake)

    def _ring(self) -> None:
        if (not self._closing or self._thread.is_alive()) and self._turns.call():
            os.eventfd_write(self._wake, 1)

    def _count_failures(self, result: LoadResult) -> None:
        statuses, counts = np.unique(result.statuses, return_counts=True)
        with self._lock:
            for status, count in zip(statuses.tolist(), counts.tolist(), strict=True):
                if status != BlockStatus.OK:
                    self._counters.failed_blocks[BlockStatus(status).name] += count

    # --- copy thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._turns.await_own()
            with self._turns.lock:
                busy = self._work()
            if not busy:
                waiting = bool(self._loads) or self._fills.unsent or not self._listed or self._link.keeps
                self._sleep(RETRY_S if waiting else self._heartbeat_s or None)

    def _work(self) -> bool:
        """Hear the guard, copy one step; False when there is nothing to copy."""
        try:
            self._hear()
            if self._step_load() or self._step_save():
                return True
            self._fills.send(self._link.send)
            return False
        except Exception:
            # Nobody else ends copies: dying here would leave requests to their deadlines for ever after.
            # What was being done is dropped and the cause is told.
            logger.exception("copy thread: dropping the current job")
            self._drop_current()
            return True

    def _sleep(self, patience_s: float | None, also: int = -1) -> None:
        poller = select.poll()
        for descriptor in (self._wake, self._link.fileno(), also):
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(None if patience_s is None else 1000 * patience_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for load in list(self._loads.values()):
            load.dirty = True

    def _hear(self) -> None:
        messages = self._link.receive()
        session = self._link.session
        if session is not None and session.number != self._session_number:
            self._session_number = session.number
            self._join(session.resources, session.welcome.epoch)
        if not self._listed:
            self._list()
        self._say_alive()
        for message in messages:
            if isinstance(message, msg.Committed):
                self._fills.confirm(message)
            elif isinstance(message, msg.FetchProgress):
                self._progress.setdefault(message.request_id, {})[message.first] = message
                self._progress.move_to_end(message.request_id)
                if len(self._progress) > KEPT_PROGRESS:
                    self._progress.popitem(last=False)
                self._make_dirty(message.request_id)
            elif isinstance(message, msg.Handed):
                self._handed.setdefault(message.request_id, []).append(message)
                self._handed.move_to_end(message.request_id)
                if len(self._handed) > KEPT_PROGRESS:
                    self._handed.popitem(last=False)
                self._make_dirty(message.request_id)
        self._tell_ended()

    def _make_dirty(self, request_id: str) -> None:
        load = self._loads.get(request_id)
        if load is not None:
            load.dirty = True

    def _say_alive(self) -> None:
        every_s = self._heartbeat_s
        now_s = time.monotonic()
        if every_s and now_s - self._alive_s >= every_s and self._link.send(msg.Alive()):
            self._alive_s = now_s

    @property
    def _heartbeat_s(self) -> float:
        """How often the guard wants to hear from this process, 0: not at all."""
        session = self._link.session
        return session.welcome.heartbeat_s if session is not None else 0.0

    def _join(self, mapping: PoolMapping, epoch: int) -> None:
        """A guard came (back): it hears what it may have missed. Saves of an earlier epoch end here."""
        self._attach(mapping)
        self._epoch = epoch
        self._fills.settle(mapping.reader.still_granted)
        self._fills.resend(mapping.token, epoch)
        self._fills.send(self._link.send)
        # Those of other pools and epochs are nobody's any more.
        returned = self._returned.get((mapping.token, epoch), SlotSet())
        returned.drop_settled(mapping.reader)
        self._returned = {(mapping.token, epoch): returned}
        send_return(self._link.deliver, epoch, returned.slots, returned.generations)
        self._listed = False

    def _list(self) -> None:
        """List the grants we may still fill, to a guard that may not know of them all."""
        session, attached = self._link.session, self._attached
        if session is None or attached is None or session.number != self._session_number:
            return
        held = SlotSet()
        held.add(*self._fills.slots())
        with self._lock:
            waiting = [save for save in self._saves if self._current(save)]
        for save in waiting:
            held.add(save.slots, np.frombuffer(save.spec.generations, "<u8"))
        held.drop_settled(attached.reader)
        self._listed = send_holding(self._link.send, self._epoch, held.slots, held.generations)

    def _current(self, save: _Save) -> bool:
        """Whether the slots of this save are still ours to write to."""
        attached = self._attached
        return attached is not None and (save.spec.pool_token, save.spec.epoch) == (
            attached.token,
            self._epoch,
        )

    def _attach(self, mapping: PoolMapping) -> None:
        if mapping is self._attached or mapping.region is None:
            return
        if self._attached is not None and self._attached.region is not None:
            self._memory.detach(self._attached.region.array)
        self._memory.attach(mapping.region.array)
        self._attached = mapping

    def _step_load(self) -> bool:
        """Copy one step of one load; False when no load has anything to copy."""
        for load in list(self._loads.values()):
            if load.reported or load.done:
                continue
            if load.dirty:
                self._place(load)
                found = load.resolve(
                    self._attached,
                    self._progress.get(load.spec.request_id, {}).values(),
                    self._link.session is not None,
                )
                if len(found) > self._step_blocks:
                    self._announce(load, found)
            index = load.ready(self._step_blocks)
            if len(index):
                self._copy_in(load, index)
                return True
        return False

    def _place(self, load: Load) -> None:
        """Look at what was handed for this load alone."""
        for message in self._handed.pop(load.spec.request_id, ()):
            origin, unreachable = None, False
            try:
                origin = self._origin_of(message)
            except OSError as error:
                unreachable = True
                logger.warning("the pool in %s cannot be mapped here: %s", message.pool_dir, error)
            except KvcrError as error:
                logger.warning("the pool in %s cannot be read here: %s", message.pool_dir, error)
            useless = load.place(message, origin, self._rank)
            if len(useless):
                self._taken(load, message.first, useless, copied=False, unreachable=unreachable)

    def _origin_of(self, message: msg.Handed) -> Origin | None:
        if message.pool_dir:
            return self._foreign.origin(message)
        mapping = self._attached
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
            msg.Taken(load.spec.request_id, first, indices.tobytes(), copied, unreachable, corrupt)
        )

    def _copy_in(self, load: Load, index: npt.NDArray[np.intp]) -> None:
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
            sums = checksum_parts(origin.slots, slots, self.layout.part_bytes)
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
        arrived = int((good & alive).sum())
        with self._lock:
            self._counters.loaded_blocks += arrived
            self._counters.loaded_bytes += arrived * self.layout.part_bytes
            self._counters.load_seconds += self._clock() - started_s
            self._counters.corrupt_blocks += int(corrupt.sum())
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
                msg.LoadBegin(
                    load.spec.request_id, load.slots[part].tobytes(), load.generations[part].tobytes()
                )
            )

    def _tell_ended(self) -> None:
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
                msg.LoadEnd(
                    request_id=load.spec.request_id,
                    block_count=loaded,
                    byte_count=loaded * self.layout.part_bytes,
                    seconds=self._clock() - load.started_s,
                    failed_blocks=len(load.statuses) - loaded,
                    corrupt_slots=load.slots[corrupt].astype("<i4").tobytes(),
                    corrupt_generations=load.generations[corrupt].astype("<u8").tobytes(),
                )
            )

    def _step_save(self) -> bool:
        """Copy one step of the oldest save; False when there is none."""
        if not self._saves:
            return False
        save = self._saves[0]
        if save.mapping is None:
            save.mapping = self._attached
        mapping = save.mapping
        if mapping is None or mapping.region is None or not self._current(save):
            # Granted by a guard whose pool this process does not map (any more), or in an epoch that is over.
            self._finish_save(save, written=False)
            return True
        started_s = self._clock()
        step = slice(save.copied, save.copied + self._step_blocks)
        save.checksums.append(
            self._memory.store(mapping.region.array, save.slots[step], save.block_ids[step], save.fence)
        )
        save.copied = min(step.stop, len(save.slots))
        blocks = save.copied - step.start
        with self._lock:
            self._counters.saved_blocks += blocks
            self._counters.saved_bytes += blocks * self.layout.part_bytes
            self._counters.save_seconds += self._clock() - started_s
        if save.copied == len(save.slots):
            self._finish_save(save, written=True)
        return True

    def _finish_save(self, save: _Save, *, written: bool) -> None:
        if written:
            known = [sums.tobytes() for sums in save.checksums if sums is not None]
            whole = len(known) == len(save.checksums)
            self._fills.add(save.spec, self._rank, b"".join(known) if whole else b"")
            self._fills.send(self._link.send)
        else:
            self._give_back(save.spec)
        with self._idle:
            self._saves.popleft()
            self._saved_jobs.append(save.spec.job_id)
            self._saving[save.spec.request_id] -= 1
            if not self._saving[save.spec.request_id]:
                del self._saving[save.spec.request_id]
            self._idle.notify_all()

    def _give_back(self, spec: SaveSpec) -> None:
        slots, generations = np.frombuffer(spec.slots, "<i4"), np.frombuffer(spec.generations, "<u8")
        returned = self._returned.setdefault((spec.pool_token, spec.epoch), SlotSet())
        returned.add(slots, generations)
        if self._attached is not None and self._attached.token == spec.pool_token:
            returned.drop_settled_if_large(self._attached.reader)
        send_return(self._link.deliver, spec.epoch, slots, generations)

    def _drop_current(self) -> None:
        for load in list(self._loads.values()):
            if not load.done:
                load.fail(np.flatnonzero(load.statuses == BlockStatus.PENDING), BlockStatus.FAILED)
        if self._saves:
            self._finish_save(self._saves[0], written=False)
