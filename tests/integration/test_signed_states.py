# SPDX-License-Identifier: Apache-2.0
"""A guard signs its changes of state; a router with the deployment's secret believes no others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import pytest
from deployment import Deployment, eventually
from engine_client import EngineClient
from prometheus_client import CollectorRegistry

from kvcr.protocol.events import StateChange, event, state_subject
from kvcr.protocol.signatures import HEADER, STATE_CHANGE, sign
from router_hints.bus import Bus
from router_hints.cards import WorkerCard
from router_hints.failover import Failovers
from router_hints.guards import Guard, GuardDirectory
from router_hints.metrics import Metrics
from router_hints.workers import WorkerTable

SECRET = b"0123456789abcdef0123456789abcdef"
WORKER = 17


class Router:
    """The part of a router that hears of states, on real NATS."""

    def __init__(self, deployment: Deployment, guard: Guard, secret: bytes | None = SECRET) -> None:
        self.metrics = Metrics()
        self.workers = WorkerTable(16)
        self.workers.put_card(WorkerCard(WORKER, block_size=16, control_endpoints={0: guard.endpoint}))
        guards = GuardDirectory()
        guards.put(guard)
        self.failovers = Failovers(deployment.namespace, self.workers, guards, self.metrics, secret)
        self.bus = Bus(deployment.nats_url, "router of a test", lambda: None)
        self.bus.subscribe_headed(state_subject(deployment.namespace, ">"), self.failovers.received)
        self.bus.on_connect(self.failovers.catch_up)

    def counted(self, state: str) -> float:
        registry: CollectorRegistry = self.metrics.registry
        return registry.get_sample_value("kvcr_router_state_changes_total", {"state": state}) or 0.0


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return path


async def test_a_router_with_a_secret_believes_signed_changes_only(
    deployment: Deployment, secret_file: Path, runtimes_end: None
) -> None:
    with deployment.guard("g0", "--secret-file", str(secret_file)) as guard:
        record = await deployment.registered("g0", SECRET)
        known = Guard("g0", record.incarnation, record.control_endpoint, "test")
        router = Router(deployment, known)
        router.bus.start()
        await eventually(lambda: router.bus.connected, "the router is on NATS")
        subject = state_subject(deployment.namespace, "g0")
        forged = event.encode(
            StateChange("g0", record.incarnation, 99, "CHECKING", "ACTIVE", WORKER, unix_s=2e9, seconds=0.1)
        )
        stranger = await nats.connect(deployment.nats_url)
        for headers in (
            None,
            {HEADER: "00" * 32},
            {HEADER: sign(STATE_CHANGE, subject, forged, b"another secret, long enough")},
            # Signed by a guard of ours, for another guard's subject.
            {HEADER: sign(STATE_CHANGE, subject.replace("g0", "g1"), forged, SECRET)},
        ):
            await stranger.publish(subject, forged, headers=headers)
        await stranger.close()
        await eventually(lambda: router.counted("unsigned") == 4, "the forged changes are counted")
        assert not router.workers.is_dead(WORKER)
        assert router.failovers.state("g0") != "ACTIVE"

        engine = await asyncio.to_thread(EngineClient, guard, "engine")
        await eventually(lambda: router.failovers.state("g0") == "STANDBY", "what the guard says is believed")
        engine.close()
        await eventually(lambda: router.failovers.state("g0") == "ACTIVE", "and that the engine is gone")
        assert router.counted("unsigned") == 4
        await router.bus.close()

        # One of a release that did not look at signatures reads signed changes all the same.
        older = Router(deployment, known, secret=None)
        older.bus.start()
        await eventually(lambda: older.failovers.state("g0") == "ACTIVE", "an older router believes it")
        await older.bus.close()
