# SPDX-License-Identifier: Apache-2.0
"""A real guard in a real deployment: Dynamo sees it, NATS carries its inventory, and neither can hurt it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from deployment import (
    Deployment,
    call,
    heartbeats,
    inventories,
    listening,
)
from engine_client import EngineClient, chain
from waiting import BUSY_S, eventually

from kvcr.dynamo.leases import revoke_for_pid, revoke_worker
from kvcr.dynamo.records import encode, record_key
from kvcr.graph.infra import start_etcd, start_nats
from kvcr.keys import pack_keys
from kvcr.protocol.engine import BlockStatus, Source
from kvcr.protocol.events import Heartbeat, Inventory

pytestmark = pytest.mark.usefixtures("runtimes_end")

"""Within this long everyone must know that a guard is dead."""

SECRET = b"0123456789abcdef0123456789abcdef"


# --- registration ----------------------------------------------------------------------------------


async def test_a_stock_client_sees_the_guard_and_calls_its_endpoints(deployment: Deployment) -> None:
    with deployment.guard() as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(3, "tenant")
        engine.deposit(keys, root)
        status = await deployment.status("g0")
        assert status["name"] == "g0"
        assert status["cluster"]["runtimes"] == 1

        record = await deployment.registered()
        inspect = await deployment.client("inspect")
        await inspect.wait_for_instances()
        found = await call(inspect, record.lease_id, {"keys": [key.hex() for key in keys]})
        assert "error" not in found
        assert await call(inspect, record.lease_id, {"keys": pack_keys(keys)}) == found
        assert (await call(inspect, record.lease_id, {"keys": ["xyz"]}))["error"] == "ProtocolError"

        control = await deployment.client("control")
        await control.wait_for_instances()
        identity = await call(control, record.lease_id, {"op": "identity"})
        assert (identity["name"], identity["control_endpoint"]) == ("g0", guard.endpoint)
        beat = await call(control, record.lease_id, {"op": "heartbeat"})
        assert beat["count"] == 3
        assert (await call(control, record.lease_id, {"op": "dance"}))["error"] == "ProtocolError"


async def test_the_record_follows_the_guard(deployment: Deployment) -> None:
    (deployment.directory / "topology").mkdir()
    (deployment.directory / "topology" / "rdma_domain").write_text("rackA\n")
    topology = {
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": str(deployment.directory / "topology"),
    }
    with deployment.guard(env=topology) as guard:
        record = await deployment.registered()
        assert (record.pid, record.host) == (guard.pid, socket.gethostname())
        assert (record.layout, record.block_size, record.state) == (None, 0, "EMPTY")
        assert record.topology_domains == {"rdma_domain": "rackA"}
        async with await deployment.etcd() as etcd:
            stored = await etcd.get(record_key(deployment.namespace, "g0"))
            assert stored is not None
            assert stored.lease == record.lease_id
            instances = await etcd.get_prefix(f"v1/instances/{deployment.namespace}/kvcr/")
            assert {entry.lease for entry in instances.values} == {record.lease_id}
            assert len(instances.values) == 3
        with EngineClient(guard, "engine") as engine:

            async def attached() -> bool:
                now = await deployment.registered()
                return (now.layout, now.state, now.engine_namespace) == (engine.layout, "STANDBY", "test")

            await eventually(attached, "the record names the engine's layout")
            now = await deployment.registered()
            assert now.block_size == engine.layout.block_size
            assert now.layout_digest == engine.layout.digest()
            assert now.lease_id == record.lease_id


async def test_a_record_that_somebody_deleted_comes_back(deployment: Deployment) -> None:
    with deployment.guard():
        record = await deployment.registered()
        async with await deployment.etcd() as etcd:
            await etcd.delete(record_key(deployment.namespace, "g0"))
        assert await deployment.registered() == record


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_dead_guard_is_gone_from_every_client_long_before_its_lease_is_over(
    deployment: Deployment, how: signal.Signals
) -> None:
    with deployment.guard(env={"ETCD_LEASE_TTL": "300"}) as guard:
        client = await deployment.client("status")
        record = await deployment.registered()
        await eventually(lambda: record.lease_id in client.instance_ids(), "the client sees the guard")
        guard.process.send_signal(how)
        if how is signal.SIGKILL:
            await asyncio.to_thread(guard.process.wait)
            async with await deployment.etcd() as etcd:
                host = socket.gethostname()
                assert await revoke_for_pid(etcd, deployment.namespace, host, guard.pid + 1) == []
                assert await revoke_for_pid(etcd, deployment.namespace, "elsewhere", guard.pid) == []
                revoked = await revoke_for_pid(etcd, deployment.namespace, host, guard.pid)
                assert revoked == [record.lease_id]
        await eventually(lambda: not client.instance_ids(), "the client forgets the guard")
        async with await deployment.etcd() as etcd:

            async def left() -> bool:
                instances = await etcd.get_prefix(f"v1/instances/{deployment.namespace}/")
                record = await etcd.get(record_key(deployment.namespace, "g0"))
                return record is None and not instances.values

            # One that ends in good order takes its endpoints out one after the other.
            await eventually(left, "nothing of it is in etcd")
        if how is signal.SIGTERM:
            assert await asyncio.to_thread(guard.process.wait) == 0


async def test_a_restarted_guard_removes_its_predecessor(deployment: Deployment) -> None:
    with deployment.guard() as first:
        before = await deployment.registered()
        client = await deployment.client("status")
        await eventually(lambda: before.lease_id in client.instance_ids(), "the client sees the guard")
        first.process.kill()
        first.process.wait()
        with deployment.guard() as second:
            await eventually(lambda: before.lease_id not in client.instance_ids(), "the predecessor is gone")
            after = await deployment.registered()
            assert after.pid == second.pid
            assert after.incarnation != before.incarnation
            await eventually(lambda: client.instance_ids() == [after.lease_id], "only the successor is seen")


async def test_two_guards_of_one_name_do_not_fight(deployment: Deployment) -> None:
    with deployment.guard() as first:
        await deployment.registered()
        # Another pool, the same name: a mistake in a deployment.
        other = Deployment(
            deployment.etcd_url, deployment.nats_url, deployment.namespace, deployment.directory / "other"
        )
        other.directory.mkdir()
        with other.guard() as second:

            async def taken() -> bool:
                return (await deployment.registered()).pid == second.pid

            await eventually(taken, "the second takes the place")
            await eventually(lambda: "is taken by" in first.log_path.read_text(), "the first says so")
            lease = (await deployment.registered()).lease_id
            await asyncio.sleep(2)
            assert (await deployment.registered()).lease_id == lease

        # And when the second leaves, the first is back.
        async def back() -> bool:
            return (await deployment.registered()).pid == first.pid

        await eventually(back, "the first registers again")


async def test_a_lost_lease_makes_another_runtime(deployment: Deployment) -> None:
    with deployment.guard() as guard:
        before = await deployment.registered()
        async with await deployment.etcd() as etcd:
            record = await etcd.get(record_key(deployment.namespace, "g0"))
            assert record is not None
            assert await etcd.revoke(record.lease)

        async def again() -> bool:
            return (await deployment.registered()).lease_id != before.lease_id

        await eventually(again, "the guard registers again")
        assert (await deployment.status("g0"))["cluster"]["runtimes"] == 2
        assert guard.process.poll() is None


# --- peers -----------------------------------------------------------------------------------------


async def test_guards_learn_of_each_other_and_ignore_what_is_not_signed(deployment: Deployment) -> None:
    secret_file = deployment.directory / "secret"
    secret_file.write_bytes(SECRET)
    secured = ("--secret-file", str(secret_file))
    with deployment.guard("g0", *secured) as first, deployment.guard("g1", *secured) as second:
        record = await deployment.registered("g1", SECRET)
        assert record.curve_key == second.ready["public_key"]

        await eventually(lambda: _knows(deployment, "g0", second.endpoint), "g0 knows g1")
        await eventually(lambda: _knows(deployment, "g1", first.endpoint), "g1 knows g0")

        ignored = 'kvcr_cluster_records_ignored_total{reason="signature"}'
        forged = msgspec.structs.replace(record, name="evil", control_endpoint="tcp://127.0.0.1:9")
        async with await deployment.etcd() as etcd:
            for secret in (None, b"guessed by the attacker"):
                await etcd.put(record_key(deployment.namespace, "evil"), encode(forged, secret))
            await eventually(lambda: first.metrics().get(ignored) == 2, "two records are ignored and counted")
            assert not await _knows(deployment, "g0", "tcp://127.0.0.1:9")
            await etcd.put(record_key(deployment.namespace, "evil"), encode(forged, SECRET))
            await eventually(
                lambda: _knows(deployment, "g0", "tcp://127.0.0.1:9"), "the signed one is believed"
            )
            await etcd.delete(record_key(deployment.namespace, "evil"))


async def _knows(deployment: Deployment, name: str, endpoint: str) -> bool:
    """Whether a guard believes that there is a peer at ``endpoint``."""
    return endpoint in (await deployment.status(name))["cluster"]["peers"]


async def test_a_discovered_peer_is_read_from(deployment: Deployment) -> None:
    secret_file = deployment.directory / "secret"
    secret_file.write_bytes(SECRET)
    secured = ("--secret-file", str(secret_file))
    with (
        deployment.guard("g0", *secured) as target_guard,
        deployment.guard("g1", *secured) as source_guard,
        EngineClient(target_guard, "engine-0") as target,
        EngineClient(source_guard, "engine-1") as source,
    ):
        root, keys = chain(8, "tenant")
        source.deposit(keys, root)
        await eventually(lambda: _knows(deployment, "g0", source_guard.endpoint), "g0 knows g1")
        _, progress = await asyncio.to_thread(
            target.fetch, "r", keys, root, [Source(source_guard.endpoint, 0, len(keys))]
        )
        assert set(progress.statuses) == {BlockStatus.OK}
        assert all(target.right(keys))


async def test_routers_are_told_which_peers_a_guard_cannot_read_from(deployment: Deployment) -> None:
    """By the heartbeat: until the peer's canary verified, while it is silent, and no longer than that."""
    arguments = ("--transport", "shm")
    async with listening(deployment, "g0") as heard:

        def said(names: tuple[str, ...] = ()) -> bool:
            return bool(beats := heartbeats(heard)) and beats[-1].unready == names

        with (
            deployment.guard("g0", *arguments) as target_guard,
            deployment.guard("g1", *arguments) as source_guard,
            EngineClient(target_guard, "engine-0") as target,
        ):
            await eventually(lambda: said(("g1",)), "a peer without a pool has no canary")
            with EngineClient(source_guard, "engine-1") as source:
                root, keys = chain(32, "tenant")
                source.deposit(keys[:-1], root)
                await eventually(said, "its canary verified")
                os.kill(source_guard.pid, signal.SIGSTOP)
                try:
                    # One that it does not have: it has to be asked. The others are read without a message.
                    sources = [Source(source_guard.endpoint, 0, len(keys))]
                    await asyncio.to_thread(target.fetch, "r", keys, root, sources, deadline_ms=3000)
                    await eventually(lambda: said(("g1",)), "it is silent")
                finally:
                    os.kill(source_guard.pid, signal.SIGCONT)
                await eventually(said, "it answers again")


# --- engines that died -----------------------------------------------------------------------------


async def test_the_worker_of_a_dead_engine_is_revoked(deployment: Deployment) -> None:
    """Cards as ``dynamo.vllm`` writes them, one beside the guard and one beside another."""
    with deployment.guard() as guard:
        await deployment.registered()
        async with await deployment.etcd() as etcd:
            beside, elsewhere = await etcd.grant_lease(60), await etcd.grant_lease(60)
            prefix = f"v1/mdc/{deployment.namespace}/backend/generate/"
            await etcd.put(f"{prefix}{beside:x}", card(guard.endpoint), lease=beside)
            await etcd.put(f"{prefix}{elsewhere:x}", card("tcp://127.0.0.1:9"), lease=elsewhere)
            await etcd.put(f"{prefix}junk", b"\xff{")
            assert await revoke_worker(etcd, deployment.namespace, guard.endpoint, lambda: False) == []
            # An engine in a process of its own, so that it can die.
            engine = subprocess.Popen(
                [sys.executable, "-c", ENGINE, guard.ready["socket"], str(guard.pool_dir)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
            )
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"attached\n"
            await asyncio.sleep(2.5)
            assert await etcd.get(f"{prefix}{beside:x}") is not None
            engine.kill()
            engine.wait()
            engine.stdout.close()

            async def gone() -> bool:
                return await etcd.get(f"{prefix}{beside:x}") is None

            await eventually(gone, "the dead engine's worker is revoked")
            assert await etcd.get(f"{prefix}{elsewhere:x}") is not None
            await etcd.revoke(elsewhere)
            await etcd.delete(f"{prefix}junk")


def card(control_endpoint: str) -> bytes:
    ranks = msgspec.json.encode({"0": control_endpoint}).decode()
    runtime_config = {"runtime_data": {"router_hint_source_control_endpoints": ranks}}
    return msgspec.json.encode({"type": "Model", "card_json": {"runtime_config": runtime_config}})


ENGINE = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from engine_client import EngineClient
client = EngineClient(SimpleNamespace(ready={"socket": sys.argv[1]}), "mortal")
print("attached", flush=True)
time.sleep(60)
"""


# --- events ----------------------------------------------------------------------------------------


async def test_inventory_and_heartbeats_arrive_on_nats(deployment: Deployment) -> None:
    with deployment.guard() as guard, EngineClient(guard, "engine") as engine:
        async with listening(deployment, "g0") as heard:
            first = await eventually(lambda: heartbeats(heard), "a heartbeat")
            assert (first[0].guard, first[0].count, first[0].digest) == ("g0", 0, 0)
            root, keys = chain(5, "tenant")
            await asyncio.to_thread(engine.deposit, keys, root)
            await eventually(lambda: inventories(heard), "an inventory batch")
            await eventually(lambda: heartbeats(heard)[-1].count == 5, "a heartbeat that counts 5 blocks")
            batches = inventories(heard)
            assert [batch.sequence for batch in batches] == list(range(1, len(batches) + 1))
            assert b"".join(batch.stored_keys for batch in batches) == pack_keys(keys)
            beat = heartbeats(heard)[-1]
            assert beat.sequence == batches[-1].sequence
            digest = 0
            for key in keys:
                digest ^= int.from_bytes(key[:8], "little")
            assert beat.digest == digest
            # A heartbeat never tells of a batch that is still to come.
            seen = 0
            for message in heard:
                if isinstance(message, Inventory):
                    seen = message.sequence
                elif isinstance(message, Heartbeat):
                    assert message.sequence == seen


# --- servers that are late, or go ------------------------------------------------------------------


async def test_etcd_and_nats_may_start_after_the_guard(
    namespace: str, shm_dir: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    etcd_port, nats_port = free_port(), free_port()
    late = Deployment(f"http://127.0.0.1:{etcd_port}", f"nats://127.0.0.1:{nats_port}", namespace, shm_dir)
    with late.guard() as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(2, "tenant")
        # The guard serves its engine meanwhile.
        engine.deposit(keys, root)
        await asyncio.sleep(1.5)
        etcd = await asyncio.to_thread(start_etcd, tmp_path / "etcd", tmp_path / "etcd.log", port=etcd_port)
        try:
            # Registered before NATS is there.
            assert (await late.registered()).pid == guard.pid
            server = await asyncio.to_thread(
                start_nats, tmp_path / "nats", tmp_path / "nats.log", port=nats_port
            )
            try:
                async with listening(late, "g0") as heard:
                    beats = await eventually(lambda: heartbeats(heard), "a heartbeat")
                    # What was published before NATS was there is lost, and the heartbeat says so.
                    assert (beats[0].count, beats[0].sequence) == (2, 1)
                    # It is counted, if the cluster thread had started by then.
                    assert (await late.status("g0"))["cluster"]["batches_dropped"] <= 1
            finally:
                await asyncio.to_thread(server.stop)
        finally:
            await asyncio.to_thread(etcd.stop)


async def test_events_go_on_after_nats_was_restarted(deployment: Deployment, tmp_path: Path) -> None:
    server = await asyncio.to_thread(start_nats, tmp_path / "nats", tmp_path / "nats.log")
    own = Deployment(deployment.etcd_url, server.url, deployment.namespace, deployment.directory)
    try:
        with own.guard() as guard, EngineClient(guard, "engine") as engine:
            async with listening(own, "g0") as heard:
                await eventually(lambda: heartbeats(heard), "a heartbeat")
                await asyncio.to_thread(server.kill)

                async def noticed() -> bool:
                    return not (await own.status("g0"))["cluster"]["nats_connected"]

                await eventually(noticed, "the guard notices that NATS is gone")
                root, keys = chain(2, "lost")
                await asyncio.to_thread(engine.deposit, keys, root)
                await asyncio.sleep(1.5)
                server = await asyncio.to_thread(
                    start_nats, tmp_path / "nats", tmp_path / "nats.log", port=server.port
                )
                heard.clear()
                await eventually(lambda: heartbeats(heard), "a heartbeat after the restart")
                root, keys = chain(3, "kept")
                await asyncio.to_thread(engine.deposit, keys, root)
                batch = (await eventually(lambda: inventories(heard), "a batch after the restart"))[0]
                assert batch.stored_keys == pack_keys(keys)
                # The gap that routers repair.
                assert batch.sequence == 2
    finally:
        await asyncio.to_thread(server.stop)


async def test_the_guard_outlives_its_lease_when_etcd_stops(
    namespace: str, shm_dir: Path, tmp_path: Path
) -> None:
    """etcd stands still for longer than the lease lives: the runtime ends for good, the guard does not."""
    etcd = await asyncio.to_thread(start_etcd, tmp_path / "etcd", tmp_path / "etcd.log")
    own = Deployment(etcd.url, "nats://127.0.0.1:9", namespace, shm_dir)
    try:
        with own.guard(env={"ETCD_LEASE_TTL": "3"}) as guard, EngineClient(guard, "engine") as engine:
            before = await own.registered()
            etcd.pause()
            root, keys = chain(2, "tenant")
            engine.deposit(keys, root)
            await asyncio.sleep(8)
            etcd.resume()

            async def again() -> bool:
                return (await own.registered()).lease_id != before.lease_id

            await eventually(again, "the guard registers again")
            assert all(engine.right(keys))
            assert guard.metrics()["kvcr_cluster_runtimes_total"] >= 2
    finally:
        etcd.resume()
        await asyncio.to_thread(etcd.stop)


async def test_a_stop_does_not_wait_for_an_etcd_that_stands_still(
    namespace: str, shm_dir: Path, tmp_path: Path
) -> None:
    etcd = await asyncio.to_thread(start_etcd, tmp_path / "etcd", tmp_path / "etcd.log")
    own = Deployment(etcd.url, "nats://127.0.0.1:9", namespace, shm_dir)
    try:
        with own.guard() as guard:
            await own.registered()
            etcd.pause()
            guard.process.terminate()
            await asyncio.to_thread(guard.process.wait, BUSY_S)
    finally:
        etcd.resume()
        await asyncio.to_thread(etcd.stop)
