# SPDX-License-Identifier: Apache-2.0
"""The way out for the outputs of requests: pushed to Dynamo from threads, in order, one stream at a time.

Dynamo takes an output at a time from a handler that yields them, and wakes the event loop for each: twice the
processor time of handing it over (:class:`dynamo._core.ResponseSender`, since 1.6). But that blocks while the
client reads more slowly than its worker writes, and the event loop must never wait for one client: the first
outputs, for which there is room in any case, are handed over at once, and later ones by a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

AT_ONCE = 120
"""Outputs of a request that fit between us and Dynamo whatever its client does: it keeps 128 (1.6.1)."""
MAX_WAITING = 256
"""Outputs kept for a client that does not read; then its worker waits."""
_WAIT_S = 0.01


class Sender(Protocol):
    """Dynamo's sink of one request."""

    def send(self, obj: Any, /) -> None: ...


class Outlet:
    """The outputs of one request. Filled by the event loop, emptied by whichever thread is free."""

    def __init__(self, sender: Sender, threads: ThreadPoolExecutor) -> None:
        self._sender = sender
        self._threads = threads
        self._outputs: deque[Any] = deque()
        self._sent_at_once = 0
        self._lock = threading.Lock()
        self._sending = False
        self._error: Exception | None = None
        self._idle: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    async def put(self, output: Any) -> None:
        """Send this next. Waits only while the client is far behind.

        Raises what the sender raised for an earlier one: RuntimeError when the client left, ValueError for
        an output that is none.
        """
        if self._sent_at_once < AT_ONCE:
            self._sent_at_once += 1
            self._sender.send(output)
            return
        while len(self._outputs) >= MAX_WAITING and self._error is None:
            await asyncio.sleep(_WAIT_S)
        if self._error is not None:
            raise self._error
        with self._lock:
            self._outputs.append(output)
            if self._sending:
                return
            self._sending = True
        self._threads.submit(self._send)

    async def flush(self) -> None:
        """Wait until all is sent. Raises as :meth:`put` does."""
        with self._lock:
            if self._sending:
                loop = asyncio.get_running_loop()
                self._idle = loop, loop.create_future()
        if self._idle is not None:
            await self._idle[1]
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        while True:
            with self._lock:
                if not self._outputs or self._error is not None:
                    self._sending = False
                    if self._idle is not None:
                        loop, idle = self._idle
                        loop.call_soon_threadsafe(_set, idle)
                    return
                output = self._outputs.popleft()
            try:
                self._sender.send(output)
            except Exception as error:  # noqa: BLE001 - it belongs to the request, not to this thread
                self._error = error


def _set(idle: asyncio.Future[None]) -> None:
    if not idle.done():
        idle.set_result(None)
