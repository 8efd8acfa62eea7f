# SPDX-License-Identifier: Apache-2.0
"""What the authority thread hands to the cluster thread's loop, in order: bounded, and never waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvcr.metrics import Counter

T = TypeVar("T")


class Outbox(Generic[T]):
    """:meth:`offer` may be called from any thread; the rest belongs to one event loop at a time."""

    def __init__(self, limit: int, dropped: Counter) -> None:
        """Beyond ``limit`` the oldest are dropped, and counted in ``dropped``."""
        self._limit = limit
        self._dropped = dropped
        self._items: deque[T] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: T) -> None:
        """Take an item without waiting, and without ever raising."""
        self._items.append(item)
        if len(self._items) > self._limit:
            # The loop may have taken them all in this moment.
            with contextlib.suppress(IndexError):
                self._items.popleft()
                self._dropped.inc()
        loop = self._loop
        if loop is not None:
            # The loop is closed while a thread that ended with an error is started again.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake.set)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """While the running loop takes what is offered."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        # Some may have come while there was no loop to wake.
        self._wake.set()
        try:
            yield
        finally:
            self._loop = None

    async def wait(self) -> None:
        """Until something may have been offered."""
        await self._wake.wait()
        self._wake.clear()

    def first(self) -> T | None:
        """The oldest, which stays; None when there is none."""
        with contextlib.suppress(IndexError):
            return self._items[0]
        return None

    def take(self, item: T) -> None:
        """Remove the oldest if it is still ``item``: it may have been dropped, as too many came behind it."""
        with contextlib.suppress(IndexError):
            if self._items[0] is item:
                self._items.popleft()
