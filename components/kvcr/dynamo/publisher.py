# SPDX-License-Identifier: Apache-2.0
"""A guard's inventory and heartbeats on core NATS. Lossy by design: routers see gaps and ask the guard."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import nats
from nats.aio.client import Client

from kvcr.dynamo.nats_options import nats_options
from kvcr.dynamo.outbox import Outbox
from kvcr.errors import ProtocolError
from kvcr.metrics import Counter
from kvcr.protocol.events import Heartbeat, Inventory, event, inventory_subject

log = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Batches kept while the loop is busy; then the oldest are dropped."""
RECONNECT_WAIT_S = 0.5
PUBLISH_TIMEOUT_S = 1.0


class Publisher:
    """Connects, reconnects and publishes until cancelled.

    :meth:`offer` may be called from any thread; the rest belongs to one event loop.
    """

    def __init__(
        self, namespace: str, guard: str, published: Counter, dropped: Counter, connects: Counter
    ) -> None:
        self._subject = inventory_subject(namespace, guard)
        self._guard = guard
        self._published = published
        self._dropped = dropped
        self._connects = connects
        self._waiting: Outbox[Inventory] = Outbox(MAX_WAITING, dropped)
        self._order = asyncio.Lock()
        self._connection: Client | None = None
        self._reported = ""

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._connection.is_connected

    @property
    def connection(self) -> Client | None:
        """The connection while it is up, for what else a guard says on NATS."""
        return self._connection if self.connected else None

    def offer(self, batch: Inventory) -> None:
        """Take a batch without waiting, and without ever raising: the authority thread calls this."""
        self._waiting.offer(batch)

    async def run(self) -> None:
        """Publish what is offered, until cancelled. While NATS is away, batches are dropped."""
        self._order = asyncio.Lock()
        with self._waiting.opened():
            connecting = asyncio.get_running_loop().create_task(self._connect())
            try:
                while True:
                    await self._waiting.wait()
                    await self._drain()
            finally:
                connecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await connecting
                await self._close()

    async def heartbeat(self, beat: Heartbeat) -> None:
        """Publish ``beat`` behind every batch that it counts. Dropped while NATS is away."""
        # The authority offers a batch before it counts it, so all that the beat counts is in the queue.
        await self._drain()
        async with self._order:
            await self._publish(beat)

    async def _drain(self) -> None:
        async with self._order:
            while (batch := self._waiting.first()) is not None:
                self._waiting.take(batch)
                if await self._publish(batch):
                    self._published.inc()
                else:
                    self._dropped.inc()

    async def _publish(self, message: Inventory | Heartbeat) -> bool:
        # The library would keep what is published while it reconnects, and deliver it when routers have
        # long repaired the gap.
        if not self.connected or self._connection is None:
            return False
        try:
            # A server that is stopped blocks the sender once its socket and the library's buffer are full.
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                await self._connection.publish(self._subject, event.encode(message))
        except ProtocolError as error:
            log.error("inventory of guard %s cannot be published: %s", self._guard, error)
            return False
        except (TimeoutError, nats.errors.Error) as error:
            self._report(f"NATS: {type(error).__name__}: {error}")
            return False
        return True

    async def _connect(self) -> None:
        async def trouble(error: Exception) -> None:
            self._report(f"NATS: {type(error).__name__}: {error}")

        async def connected() -> None:
            self._reported = ""
            self._connects.inc()
            log.info("NATS: connected again")

        while True:
            try:
                self._connection = await nats.connect(
                    **nats_options(),
                    name=f"kvcr guard {self._guard}",
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_WAIT_S,
                    connect_timeout=2,
                    # A server that stopped without closing its connections is noticed after 10 s.
                    ping_interval=5,
                    max_outstanding_pings=2,
                    error_cb=trouble,
                    reconnected_cb=connected,
                )
                self._connects.inc()
                return
            except Exception as error:  # noqa: BLE001, keys and files that are wrong raise what they like
                self._report(f"NATS: {type(error).__name__}: {error}")
                await asyncio.sleep(RECONNECT_WAIT_S)

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError, TimeoutError, nats.errors.Error):
                async with asyncio.timeout(0.2):
                    await connection.close()

    def _report(self, trouble: str) -> None:
        """Once per cause: the library repeats it at every attempt."""
        if trouble != self._reported:
            self._reported = trouble
            log.warning("%s; batches are dropped until it is back", trouble)
