# SPDX-License-Identifier: Apache-2.0
"""A deployment for tests of the cluster thread: where the servers are, and what routers hear and see."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from dynamo.runtime import Client, DistributedRuntime
from engine_client import GuardProcess
from waiting import PATIENCE_S, eventually

from kvcr.dynamo.etcd import EtcdClient, connect
from kvcr.dynamo.records import InstanceRecord, decode, record_key
from kvcr.graph.infra import Server
from kvcr.protocol.events import Event, Heartbeat, Inventory, event, inventory_subject


class Deployment:
    """Where the servers are, and what a process of the deployment needs in its environment."""

    def __init__(self, etcd_url: str, nats_url: str, namespace: str, directory: Path) -> None:
        self.etcd_url = etcd_url
        self.nats_url = nats_url
        self.namespace = namespace
        self.directory = directory

    @property
    def environment(self) -> dict[str, str]:
        return {
            "ETCD_ENDPOINTS": self.etcd_url,
            "NATS_SERVER": self.nats_url,
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_LOG": "error",
        }

    def guard(
        self, name: str = "g0", *arguments: str, env: dict[str, str] | None = None, wait: bool = True
    ) -> GuardProcess:
        return GuardProcess(
            self.directory,
            name,
            "--cluster",
            "--namespace",
            self.namespace,
            *arguments,
            slots=64,
            env={**self.environment, **(env or {})},
            wait=wait,
        )

    async def etcd(self) -> EtcdClient:
        return await connect(self.etcd_url)

    async def registered(self, name: str = "g0", secret: bytes | None = None) -> InstanceRecord:
        async with await self.etcd() as etcd:
            key = record_key(self.namespace, name)

            async def look() -> InstanceRecord | None:
                found = await etcd.get(key)
                return decode(key, found.value, secret) if found is not None else None

            return await eventually(look, f"guard {name} registers")

    async def status(self, name: str) -> dict[str, Any]:
        """What a stock Dynamo client gets from the guard's endpoint."""
        client = await self.client("status")
        record = await self.registered(name)
        async with asyncio.timeout(PATIENCE_S):
            while record.lease_id not in client.instance_ids():
                await asyncio.sleep(0.02)
        return await call(client, record.lease_id, {})

    async def client(self, endpoint: str) -> Client:
        return await runtime(self).endpoint(f"{self.namespace}.kvcr.{endpoint}").client()


_runtimes: dict[int, DistributedRuntime] = {}


def runtime(deployment: Deployment) -> DistributedRuntime:
    """One per event loop, with nothing of KVCR in it."""
    loop = asyncio.get_running_loop()
    if id(loop) not in _runtimes:
        os.environ.update(deployment.environment)
        _runtimes[id(loop)] = DistributedRuntime(loop, "etcd", "tcp", event_plane="zmq")
    return _runtimes[id(loop)]


@pytest.fixture
async def runtimes_end() -> AsyncIterator[None]:
    yield
    made = _runtimes.pop(id(asyncio.get_running_loop()), None)
    if made is not None:
        made.shutdown()


@pytest.fixture
def deployment(etcd: Server, nats_server: Server, namespace: str, shm_dir: Path) -> Deployment:
    return Deployment(etcd.url, nats_server.url, namespace, shm_dir)


async def call(client: Client, instance: int, request: dict[str, Any]) -> dict[str, Any]:
    answers = [answer async for answer in await client.direct(request, instance, annotated=False)]
    assert len(answers) == 1
    found: dict[str, Any] = answers[0]
    return found


@contextlib.asynccontextmanager
async def listening(deployment: Deployment, guard: str) -> AsyncIterator[list[Event]]:
    """What a router hears of one guard."""
    heard: list[Event] = []

    async def take(message: Any) -> None:
        heard.append(event.decode(message.data))

    connection = await nats.connect(deployment.nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    await connection.subscribe(inventory_subject(deployment.namespace, guard), cb=take)
    await connection.flush()
    try:
        yield heard
    finally:
        await connection.close()


def inventories(heard: list[Event]) -> list[Inventory]:
    return [message for message in heard if isinstance(message, Inventory)]


def heartbeats(heard: list[Event]) -> list[Heartbeat]:
    return [message for message in heard if isinstance(message, Heartbeat)]
