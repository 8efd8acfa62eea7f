# SPDX-License-Identifier: Apache-2.0
"""The authority thread's event loop: file descriptors, timers, and closures posted by other threads."""

from __future__ import annotations

import concurrent.futures
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

Callback = Callable[[], None]
T = TypeVar("T")


class Timer:
    """A callback to come. Cancelling twice, or after it ran, does nothing."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback

    def cancel(self) -> None:
        self._callback = None

    def take(self) -> Callback | None:
        callback, self._callback = self._callback, None
        return callback


class Loop:
    """Belongs to the thread that calls :meth:`run`, but for :meth:`post`, :meth:`call` and :meth:`stop`.

    An exception in a callback is logged and the loop goes on: the pool outlives a bad message.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._posted: deque[Callback] = deque()
        self._deferred: dict[Callback, None] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._running = True
        self._thread: threading.Thread | None = None

    def post(self, callback: Callback) -> None:
        """Run ``callback`` on the loop's thread. From any thread or signal handler; never waits."""
        self._posted.append(callback)
        os.eventfd_write(self._wake, 1)

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Run ``function`` on the loop's thread and wait for its result. From any thread.

        Raises TimeoutError, and what ``function`` raises.
        """
        if threading.current_thread() is self._thread:
            return function()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001, it is raised in the thread that called
                future.set_exception(error)

        self.post(work)
        return future.result(timeout_s)

    def stop(self) -> None:
        """End :meth:`run` after the current round. From any thread or signal handler."""
        self._running = False
        os.eventfd_write(self._wake, 1)

    def register(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(events)`` whenever ``fd`` has some of ``events`` (epoll's bits)."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Before closing ``fd``."""
        self._handlers.pop(fd, None)
        self._epoll.unregister(fd)

    def later(self, delay_s: float, callback: Callback) -> Timer:
        """Run ``callback`` once, ``delay_s`` from now."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def defer(self, callback: Callback) -> None:
        """Run ``callback`` at the end of this round, before waiting; once, however often asked."""
        self._deferred[callback] = None

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        self._thread = threading.current_thread()
        while self._running:
            self.run_once(None)

    def run_once(self, most_s: float | None) -> None:
        """One round: wait for events, ``most_s`` at the longest (None: as long as it takes), handle them."""
        for fd, events in self._epoll.poll(self._patience_s(most_s)):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif (handler := self._handlers.get(fd)) is not None:
                self._guarded(lambda handler=handler, events=events: handler(events))  # type: ignore[misc]
        for _ in range(len(self._posted)):
            self._guarded(self._posted.popleft())
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            callback = heapq.heappop(self._timers)[2].take()
            if callback is not None:
                self._guarded(callback)
        while self._deferred:
            callbacks, self._deferred = list(self._deferred), {}
            for callback in callbacks:
                self._guarded(callback)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wake)

    def _patience_s(self, most_s: float | None) -> float | None:
        if self._posted or self._deferred or not self._running:
            return 0.0
        while self._timers and self._timers[0][2]._callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return most_s
        # Rounded up to the millisecond, as epoll counts in those: no rounds that find nothing due.
        due_s = max(0.0, self._timers[0][0] - time.monotonic()) + 0.0005
        return due_s if most_s is None else min(due_s, most_s)

    @staticmethod
    def _guarded(callback: Callback) -> None:
        try:
            callback()
        except Exception:
            # The thread is the only writer of the pool: one callback that fails must not end the others.
            log.exception("a callback of the authority thread failed")
