# SPDX-License-Identifier: Apache-2.0
"""A guard's changes of state on JetStream: kept while NATS is away, published in order when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

import nats
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from kvcr.metrics import Counter
from kvcr.protocol.events import StateChange, event, state_subject, stream_name

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Changes kept while NATS is away; then the oldest are dropped, and counted."""
MAX_AGE_S = 7 * 24 * 3600.0
MAX_BYTES = 16 << 20
"""A change is about 120 bytes: a hundred thousand of them."""
ACKNOWLEDGED_S = 2.0
RETRY_S = 0.5

_NO_JETSTREAM = (10039, 10076)
"""Error codes of nats-server: JetStream is not enabled, for the account or at all."""


class StatePublisher:
    """:meth:`offer` may be called from any thread; the rest belongs to one event loop."""

    def __init__(
        self,
        namespace: str,
        guard: str,
        connection: Callable[[], Client | None],
        published: Counter,
        dropped: Counter,
    ) -> None:
        """``connection`` gives a live connection to NATS, or None."""
        self._subject = state_subject(namespace, guard)
        self._subjects = state_subject(namespace, ">")
        self._stream = stream_name(namespace, "state")
        self._connection = connection
        self._published = published
        self._dropped = dropped
        self._waiting: deque[StateChange] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._ready_for: tuple[int, int] | None = None
        """Connection, and how often it was made again, on which the stream was seen."""
        self._kept = False
        self._reported = ""

    @property
    def waiting(self) -> int:
        """Changes that are not published yet."""
        return len(self._waiting)

    def offer(self, change: StateChange) -> None:
        """Take a change without waiting, and without ever raising: the authority thread calls this."""
        self._waiting.append(change)
        if len(self._waiting) > MAX_WAITING:
            with contextlib.suppress(IndexError):
                self._waiting.popleft()
                self._dropped.inc()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        """Publish what is offered, one after the other, until cancelled; a lost connection loses none."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._wake.set()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    change = self._waiting[0]
                    if not await self._publish(change):
                        await asyncio.sleep(RETRY_S)
                        continue
                    # It may have been dropped meanwhile, as too many came behind it.
                    if self._waiting and self._waiting[0] is change:
                        self._waiting.popleft()
                    self._published.inc()
        finally:
            self._loop = None

    async def _publish(self, change: StateChange) -> bool:
        client = self._connection()
        if client is None:
            return False
        # The server drops a change that was stored and whose acknowledgement was lost.
        once = {"Nats-Msg-Id": f"{change.guard}-{change.incarnation}-{change.epoch}-{change.unix_s}"}
        try:
            # A publish without a stream is only told apart from a slow server where nobody subscribes.
            connection = (id(client), client.stats["reconnects"])
            if connection != self._ready_for:
                self._kept = await self._make_stream(client)
                self._ready_for = connection
            if self._kept:
                await client.jetstream(timeout=ACKNOWLEDGED_S).publish(
                    self._subject, event.encode(change), headers=once
                )
            else:
                await client.publish(self._subject, event.encode(change))
        except (nats.errors.Error, TimeoutError, OSError) as error:
            # The stream may be gone, with the disk of its server.
            self._ready_for = None
            self._report(f"{type(error).__name__} {error}".strip())
            return False
        if self._kept:
            self._reported = ""
        return True

    async def _make_stream(self, client: Client) -> bool:
        """Make the stream if it is not there. False when this server has no JetStream.

        Raises nats.errors.Error, TimeoutError.
        """
        jetstream = client.jetstream(timeout=ACKNOWLEDGED_S)
        try:
            try:
                await jetstream.stream_info(self._stream)
            except nats.js.errors.NotFoundError:
                await jetstream.add_stream(
                    StreamConfig(
                        name=self._stream,
                        subjects=[self._subjects],
                        retention=RetentionPolicy.LIMITS,
                        storage=StorageType.FILE,
                        discard=DiscardPolicy.OLD,
                        max_age=MAX_AGE_S,
                        max_bytes=MAX_BYTES,
                    )
                )
                log.info("created stream %s on %s", self._stream, self._subjects)
        except (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError):
            self._report("this server has no JetStream: changes of state are told and not kept")
            return False
        except nats.js.errors.APIError as error:
            if error.err_code not in _NO_JETSTREAM:
                raise
            self._report("this account has no JetStream: changes of state are told and not kept")
            return False
        return True

    def _report(self, trouble: str) -> None:
        """Once per cause."""
        if trouble != self._reported:
            self._reported = trouble
            log.warning("state changes: %s", trouble)
