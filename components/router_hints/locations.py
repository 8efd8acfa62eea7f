# SPDX-License-Identifier: Apache-2.0
"""Block-location events: the router's merged view of where blocks are, for whoever wants to watch.

G1 comes from Dynamo's KV events of the workers, G2 and up from the guards' inventory. Output only. The
stream is JetStream with bounded age and bytes; without JetStream the events are plain NATS messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Iterable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.events import Inventory, Locations, event, locations_subject, stream_name
from kvcr.protocol.peer import SnapshotChunk
from router_hints.bus import Bus
from router_hints.kv_events import G1Batch
from router_hints.metrics import Metrics

log = logging.getLogger(__name__)

MAX_AGE_S = 3600.0
MAX_BYTES = 64 << 20
_CHECK_S = 30.0
_QUEUE = 4096

_G1 = 1
_G2 = 2


class LocationPublisher:
    """Turns both kinds of events into :class:`Locations`. One event loop.

    ``publishes`` says whether this replica is the one that publishes; it is asked for every event.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        router: str,
        metrics: Metrics,
        publishes: Callable[[], bool],
        worker_of: Callable[[str], int],
        guard_of: Callable[[int], str],
    ) -> None:
        """``worker_of(guard)`` and ``guard_of(worker_id)`` join the two; 0 and empty when unknown."""
        self._bus = bus
        self._namespace = namespace
        self._subject = locations_subject(namespace)
        self._router = router
        self._metrics = metrics
        self._publishes = publishes
        self._worker_of = worker_of
        self._guard_of = guard_of
        self._queue: asyncio.Queue[Locations] = asyncio.Queue(_QUEUE)
        self._tasks: list[asyncio.Task[None]] = []
        self._plain = False
        bus.on_connect(self._ensure_stream)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._send_all()), loop.create_task(self._keep_stream())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def kv_events(self, batch: G1Batch) -> None:
        """One message of the workers' KV events, as it came."""
        for change in batch.changes:
            worker_id = change.rank[0]
            guard = self._guard_of(worker_id)
            if change.cleared:
                self._put(self._event(guard, worker_id, _G1))
            for stored in _pages(tuple(block_hash for block_hash, _ in change.stored)):
                self._put(self._event(guard, worker_id, _G1, stored_hashes=_pack(stored)))
            for removed in _pages(change.removed):
                self._put(self._event(guard, worker_id, _G1, removed_hashes=_pack(removed)))

    def inventory(self, batch: Inventory) -> None:
        """One batch of a guard, as it came."""
        if not batch.stored_keys and not batch.removed_keys:
            return
        self._put(
            self._event(
                batch.guard,
                self._worker_of(batch.guard),
                batch.tier,
                stored_keys=batch.stored_keys,
                stored_hashes=batch.stored_hashes,
                removed_keys=batch.removed_keys,
            )
        )

    def snapshot(self, chunk: SnapshotChunk, first: bool) -> None:
        """One chunk of a guard's whole inventory; the first one starts over."""
        worker_id = self._worker_of(chunk.guard)
        if first:
            self.gone(chunk.guard)
        step = MAX_BLOCKS_PER_MESSAGE
        for at in range(0, len(chunk.keys) // 16, step):
            self._put(
                self._event(
                    chunk.guard,
                    worker_id,
                    _G2,
                    stored_keys=chunk.keys[16 * at : 16 * (at + step)],
                    stored_hashes=chunk.engine_hashes[8 * at : 8 * (at + step)],
                )
            )

    def gone(self, guard: str) -> None:
        """Nothing of this guard can be relied on: an event without blocks."""
        self._put(self._event(guard, self._worker_of(guard), _G2))

    def worker_gone(self, worker_id: int) -> None:
        """A worker left, and its engine memory with it."""
        self._put(self._event(self._guard_of(worker_id), worker_id, _G1))

    def _event(self, guard: str, worker_id: int, tier: int, **blocks: bytes) -> Locations:
        empty = dict.fromkeys(("stored_keys", "stored_hashes", "removed_keys", "removed_hashes"), b"")
        return Locations(self._router, guard, worker_id, tier, **(empty | blocks))

    def _put(self, location: Locations) -> None:
        if not self._publishes():
            return
        try:
            self._queue.put_nowait(location)
        except asyncio.QueueFull:
            self._metrics.bus_dropped.inc()

    async def _send_all(self) -> None:
        while True:
            location = await self._queue.get()
            await self._bus.publish(self._subject, event.encode(location))
            self._metrics.locations.labels(f"g{location.tier}").inc()

    async def _keep_stream(self) -> None:
        """A server that lost its storage comes back without the stream: look from time to time."""
        while True:
            await asyncio.sleep(_CHECK_S)
            if self._bus.client is not None and self._bus.connected:
                await self._ensure_stream(self._bus.client)

    async def _ensure_stream(self, client: Client) -> None:
        name = stream_name(self._namespace, "locations")
        jetstream = client.jetstream()
        try:
            try:
                await jetstream.stream_info(name)
            except NotFoundError:
                await jetstream.add_stream(
                    StreamConfig(
                        name=name,
                        subjects=[self._subject],
                        retention=RetentionPolicy.LIMITS,
                        storage=StorageType.FILE,
                        discard=DiscardPolicy.OLD,
                        max_age=MAX_AGE_S,
                        max_bytes=MAX_BYTES,
                    )
                )
                log.info("created stream %s on %s", name, self._subject)
        except (nats.errors.Error, TimeoutError) as error:
            if not self._plain:
                log.warning("no JetStream for %s (%s): location events are not kept", self._subject, error)
            self._plain = True
        else:
            self._plain = False


def _pages(hashes: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    for at in range(0, len(hashes), MAX_BLOCKS_PER_MESSAGE):
        yield hashes[at : at + MAX_BLOCKS_PER_MESSAGE]


def _pack(hashes: Iterable[int]) -> bytes:
    values: list[Any] = [each & 0xFFFFFFFFFFFFFFFF for each in hashes]
    return struct.pack(f"<{len(values)}Q", *values)
