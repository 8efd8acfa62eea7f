# SPDX-License-Identifier: Apache-2.0
"""Threads that copy and hash, so that the authority thread never does."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvcr.transfer.base import Post

log = logging.getLogger(__name__)

R = TypeVar("R")

Job = Callable[[], None]


class MoverPool:
    """A few threads on one queue. Idle threads block in it and use no CPU.

    ``submit`` may be called from any thread; ``close`` from the authority thread.
    """

    def __init__(self, threads: int, post: Post) -> None:
        self._post = post
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvcr-mover-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], R], done: Callable[[R | None], None]) -> None:
        """Run ``job`` on a mover, then ``done(result)`` on the authority thread; None when it raised."""

        def work() -> None:
            result: R | None = None
            try:
                result = job()
            except Exception:
                # The thread lives on, and ``done`` is called: a copy that failed is a result.
                log.exception("a mover's job failed")
            self._post(lambda: done(result))

        self._queue.put(work)

    def close(self, timeout_s: float) -> bool:
        """Let the threads finish what they do; True when all ended in time."""
        for _ in self._threads:
            self._queue.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
