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
from collections.abc import Callable, Iterable

from kvcr.client.guard_socket import find_socket
from kvcr.client.jobs import LoadResult, LoadSpec, SaveSpec
from kvcr.client.link import GuardLink
from kvcr.client.loading import Loader
from kvcr.client.mapping import Attachment, PoolMapping, map_region
from kvcr.client.memory import BlockMemory
from kvcr.client.saving import Saver
from kvcr.client.tally import Tally, WorkerCounters
from kvcr.client.turns import Turns
from kvcr.config import EngineConfig
from kvcr.errors import Refused
from kvcr.layout import Layout
from kvcr.protocol.engine import VERSION, Alive, Committed, FetchProgress, Handed, Hello, Role

logger = logging.getLogger(__name__)

STEP_BYTES = 8 << 20
"""Longest piece copied without looking up: bounds how long a report waits for the copy thread."""

RETRY_S = 0.05
"""How often unfinished business is looked at when nothing wakes the thread."""


class WorkerHandle:
    """One per rank. ``submit_*``, ``cancel_load``, ``take_*`` and ``wait_saves`` are for the engine's thread;
    the copying happens on a thread of this handle's own, which is the only one that uses the connection.

    Raises ValueError when a block of ``memory`` has another size than ``layout`` says.
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
        self._attached = Attachment()
        self._session_number = 0
        """Of the connection that :meth:`_join` was called for."""
        self._alive_s = 0.0
        """When Alive was last sent."""
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._turns = Turns(lambda: not (self._loader.busy or self._saver.busy or self._saver.unsent))
        self._link: GuardLink[PoolMapping] = GuardLink(
            find_socket=lambda: find_socket(config),
            hello=Hello(VERSION, Role.WORKER, engine_id, rank, os.getpid(), layout, config.namespace),
            attach=lambda welcome, previous: map_region(welcome, layout, engine_id, rank, previous),
            on_change=self._ring,
        )
        self._tally = Tally(layout.part_bytes)
        step_blocks = max(1, STEP_BYTES // layout.part_bytes)
        self._loader = Loader(
            self._attached,
            layout,
            memory,
            rank,
            step_blocks,
            config.verify_loads,
            self._link,
            clock,
            self._tally,
        )
        self._saver = Saver(self._attached, memory, rank, step_blocks, self._link, clock, self._tally)
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
        self._loader.submit(spec)
        self._ring()

    def cancel_load(self, request_id: str) -> None:
        """The request is over: its load, if any, ends with the next :meth:`take_loads`."""
        self._loader.cancel(request_id)

    def take_loads(self) -> list[LoadResult]:
        """Loads that are complete, failed, cancelled or late. After this no byte is written for them."""
        results = self._loader.take()
        if results:
            self._ring()
        return results

    def submit_save(self, spec: SaveSpec) -> None:
        """Copy full blocks to granted slots. Call after the engine's writes to them were issued.

        The blocks must not change until the job is in :meth:`take_saved_jobs`.
        """
        self._saver.submit(spec)
        self._ring()

    def saving(self, request_id: str) -> bool:
        """Whether saves of this request are queued or running."""
        return self._saver.saving(request_id)

    def take_saved_jobs(self) -> list[int]:
        """Ids of save jobs whose blocks are the engine's again, copied or not."""
        return self._saver.take_over()

    def wait_saves(self, request_ids: Iterable[str] | None = None) -> None:
        """Wait until no save of these requests (None: of any) is queued or running.

        Bounded by memory speed: nothing in a save waits for the guard.
        """
        self._saver.wait(request_ids)

    def borrowed(self) -> contextlib.AbstractContextManager[None]:
        """Do the copy thread's work on the calling thread, in :meth:`save_now` and :meth:`work_until`: for
        callers that would only wait. What is submitted meanwhile wakes no thread."""
        return self._turns.borrowed()

    def save_now(self, spec: SaveSpec) -> None:
        """:meth:`submit_save`, and copy. See :meth:`borrowed`. Nothing in it waits for the guard."""
        with self._turns.borrowed():
            self._saver.submit(spec)
            session = self._link.session
            if session is not None and session.number == self._session_number and not self._loader.busy:
                # Before hearing the guard, as nothing that it may have said changes what is copied.
                self._guarded(self._saver.step)
            while self._saver.busy:
                self._work()

    def work_until(
        self,
        done: Callable[[], bool],
        deadline_s: float,
        also: Callable[[], int] = lambda: -1,
        spin_s: float = 0.0,
    ) -> None:
        """Work until ``done()`` or, on the monotonic clock, the deadline. See :meth:`borrowed`.

        Input on the descriptor ``also()`` may change ``done()``. ``spin_s``: before it sleeps, it asks for
        so long.
        """
        with self._turns.borrowed():
            while True:
                busy = self._work()
                if done() or (left_s := deadline_s - time.monotonic()) <= 0.0:
                    break
                if not busy and not (spin_s and _spin(done, min(spin_s, left_s))):
                    self._sleep(min(left_s, RETRY_S), also())
            # Loads that done() took: their slots are leased until the guard hears that they are over, and the
            # copy thread may sleep on.
            self._loader.tell_ended()

    def take_counters(self) -> WorkerCounters:
        return self._tally.take()

    @property
    def unconfirmed_fills(self) -> int:
        """Blocks copied to slots that the guard has not confirmed."""
        return self._saver.unconfirmed

    def close(self) -> None:
        """End the copy thread and the connection. Loads in progress are dropped. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._saver.close()
        self._ring()
        self._thread.join(10.0)
        self._link.close()
        if self._thread.is_alive():
            # It may still write to the pool, so the lock that says so stays until the process ends.
            logger.error("the copy thread does not end; keeping the writer lock")
            return
        attached, self._attached.mapping = self._attached.mapping, None
        if attached is not None and attached.region is not None:
            self._memory.detach(attached.region.array)
        for mapping in (attached, self._link.resources):
            if mapping is not None and mapping.region is not None and mapping.lock is not None:
                mapping.region.close()
                mapping.lock.release()
        os.close(self._wake)

    def _ring(self) -> None:
        if (not self._closing or self._thread.is_alive()) and self._turns.call():
            os.eventfd_write(self._wake, 1)

    # --- copy thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._turns.await_own()
            with self._turns.lock:
                busy = self._work()
            if not busy:
                waiting = (
                    self._loader.busy or self._saver.unsent or not self._saver.listed or self._link.keeps
                )
                self._sleep(RETRY_S if waiting else self._heartbeat_s or None)

    def _work(self) -> bool:
        """Hear the guard, copy one step; False when there is nothing to copy."""
        return self._guarded(self._hear_and_step)

    def _guarded(self, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except Exception:
            # Nobody else ends copies: dying here would leave requests to their deadlines for ever after.
            # What was being done is dropped and the cause is told.
            logger.exception("copy thread: dropping the current job")
            self._loader.drop()
            self._saver.drop()
            return True

    def _hear_and_step(self) -> bool:
        self._hear()
        if self._loader.step(self._link.session is not None) or self._saver.step():
            return True
        self._saver.flush()
        return False

    def _sleep(self, patience_s: float | None, also: int = -1) -> None:
        poller = select.poll()
        for descriptor in (self._wake, self._link.fileno(), also):
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(None if patience_s is None else 1000 * patience_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._loader.look_again()

    def _hear(self) -> None:
        messages = self._link.receive()
        session = self._link.session
        if session is not None and session.number != self._session_number:
            self._session_number = session.number
            self._join(session.resources, session.welcome.epoch)
        if session is not None and not self._saver.listed:
            self._saver.list_grants()
        self._say_alive()
        for message in messages:
            if isinstance(message, Committed):
                self._saver.confirm(message)
            elif isinstance(message, FetchProgress):
                self._loader.progressed(message)
            elif isinstance(message, Handed):
                self._loader.handed(message)
        self._loader.tell_ended()

    def _say_alive(self) -> None:
        every_s = self._heartbeat_s
        now_s = time.monotonic()
        if every_s and now_s - self._alive_s >= every_s and self._link.send(Alive()):
            self._alive_s = now_s

    @property
    def _heartbeat_s(self) -> float:
        """How often the guard wants to hear from this process, 0: not at all."""
        session = self._link.session
        return session.welcome.heartbeat_s if session is not None else 0.0

    def _join(self, mapping: PoolMapping, epoch: int) -> None:
        """A guard came (back)."""
        before = self._attached.mapping
        if mapping is not before and mapping.region is not None:
            if before is not None and before.region is not None:
                self._memory.detach(before.region.array)
            self._memory.attach(mapping.region.array)
            self._attached.mapping = mapping
        self._attached.epoch = epoch
        self._saver.join(mapping)


def _spin(done: Callable[[], bool], most_s: float) -> bool:
    """Ask again and again, ``most_s`` at the most: going to sleep and being woken takes longer than what is
    waited for."""
    until_s = time.monotonic() + most_s
    while time.monotonic() < until_s:
        if done():
            return True
    return False
