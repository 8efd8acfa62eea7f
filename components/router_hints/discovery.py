# SPDX-License-Identifier: Apache-2.0
"""Finds guards and worker cards in etcd, and keeps following them.

etcd may be away: what was known stays in use, and the watch lists again when etcd is back. A record that
does not verify is ignored and logged once: whoever can write to etcd must not be able to serve KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvcr.dynamo.etcd import (
    EtcdClient,
    EtcdError,
    KeyChanges,
    KeyValue,
    connect,
    credentials_from_environment,
)
from kvcr.dynamo.orders import Orders, orders_prefix
from kvcr.dynamo.records import InstanceRecord, decode, guards_prefix
from kvcr.errors import KvcrError, ProtocolError
from router_hints.cards import card_prefix, parse_card
from router_hints.guards import Guard, GuardDirectory
from router_hints.settings import RouterSettings
from router_hints.topology import HOST, RDMA_DOMAIN, ZONE
from router_hints.workers import WorkerTable

log = logging.getLogger(__name__)

_RETRY_S = 2.0


class Discovery:
    """Feeds the guard directory and the worker table. One event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        workers: WorkerTable,
        guards: GuardDirectory,
        on_guard: Callable[[Guard], None],
        on_guard_gone: Callable[[str], None],
        orders: Orders,
    ) -> None:
        """``on_guard`` is called for new and changed records, ``on_guard_gone`` with a name."""
        self._settings = settings
        self._workers = workers
        self._guards = guards
        self._on_guard = on_guard
        self._on_guard_gone = on_guard_gone
        self._orders = orders
        self._orders_prefix = orders_prefix(settings.namespace)
        self._guard_prefix = guards_prefix(settings.namespace)
        self._card_prefix = card_prefix(
            settings.namespace, settings.worker_component, settings.worker_endpoint
        )
        self._refused: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._etcd: EtcdClient | None = None

    async def start(self) -> None:
        """Begin to follow; returns at once, also when etcd is away."""
        self._etcd = await connect(self._settings.etcd_endpoints, credentials=credentials_from_environment())
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._follow(self._etcd, self._guard_prefix, self._guard_changes)),
            loop.create_task(self._follow(self._etcd, self._card_prefix, self._card_changes)),
            loop.create_task(self._follow(self._etcd, self._orders_prefix, self._order_changes)),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._etcd is not None:
            await self._etcd.close()

    async def _follow(self, etcd: EtcdClient, prefix: str, apply: Callable[[KeyChanges], None]) -> None:
        while True:
            try:
                async for changes in etcd.watch_prefix(prefix):
                    apply(changes)
            except EtcdError as error:
                log.warning("etcd refuses the watch of %s: %s; trying again", prefix, error)
                await asyncio.sleep(_RETRY_S)

    # --- guards ------------------------------------------------------------------------------------

    def _guard_changes(self, changes: KeyChanges) -> None:
        for key in changes.deletes:
            self._guard_gone(key.removeprefix(self._guard_prefix))
        for entry in changes.puts:
            self._guard_changed(entry)

    def _guard_changed(self, entry: KeyValue) -> None:
        try:
            guard = _guard(decode(entry.key, entry.value, self._settings.secret))
        except KvcrError as error:
            self._refuse(entry.key, f"guard record {entry.key} is ignored: {error}")
            return
        self._refused.pop(entry.key, None)
        known = self._guards.get(guard.name)
        if known is not None and known.incarnation > guard.incarnation:
            return
        self._guards.put(guard)
        self._on_guard(guard)

    def _guard_gone(self, name: str) -> None:
        if self._guards.drop(name) is not None:
            log.info("guard %s is gone", name)
            self._on_guard_gone(name)

    # --- orders ------------------------------------------------------------------------------------

    def _order_changes(self, changes: KeyChanges) -> None:
        before = self._orders.mode
        for line in self._orders.apply(self._orders_prefix, changes):
            log.error("%s", line)
        if self._orders.mode is not before:
            log.warning("mode is %s now, it was %s", self._orders.mode, before)

    # --- workers -----------------------------------------------------------------------------------

    def _card_changes(self, changes: KeyChanges) -> None:
        for key in changes.deletes:
            with contextlib.suppress(ValueError):
                self._workers.drop_card(int(key.removeprefix(self._card_prefix).split("/")[0], 16))
        for entry in changes.puts:
            if "/" in entry.key.removeprefix(self._card_prefix):
                # Adapters register below their worker's card (dynamo 1.6.1); the worker itself counts here.
                continue
            try:
                refusal = self._workers.put_card(parse_card(entry.value))
            except ProtocolError as error:
                refusal = f"worker card {entry.key} is ignored: {error}"
            if refusal:
                self._refuse(entry.key, refusal)

    def _refuse(self, key: str, text: str) -> None:
        if self._refused.get(key) != text:
            self._refused[key] = text
            log.error("%s", text)


def _guard(record: InstanceRecord) -> Guard:
    return Guard(
        name=record.name,
        incarnation=record.incarnation,
        endpoint=record.control_endpoint,
        namespace=record.engine_namespace,
        layout=record.layout,
        curve_key=record.curve_key,
        boot_id=record.boot_id,
        host=record.topology_domains.get(HOST, ""),
        zone=record.topology_domains.get(ZONE, ""),
        rdma_domain=record.topology_domains.get(RDMA_DOMAIN, ""),
        state=record.state,
        epoch=record.epoch,
    )
