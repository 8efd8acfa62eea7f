# SPDX-License-Identifier: Apache-2.0
"""A failover as the deployment hears of it: changes of state on NATS, the epoch in etcd, the worker's lease.

Real guards, engines, etcd and NATS; any of them may be away, and the guard's own work never waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from deployment import Deployment
from engine_client import GuardProcess
from mortal_engine import MortalEngine
from waiting import PATIENCE_S, eventually

from kvcr.dynamo.epochs import TTL_S, EpochRecord, decode, encode, epoch_key
from kvcr.dynamo.states import MAX_AGE_S, MAX_BYTES
from kvcr.graph.infra import Server, start_etcd, start_nats
from kvcr.protocol.events import StateChange, event, state_subject, stream_name

pytestmark = pytest.mark.usefixtures("runtimes_end")

"""The benchmark measures milliseconds; this machine may be busy."""


_engines: list[MortalEngine] = []


@pytest.fixture(autouse=True)
def _engines_end() -> Iterator[None]:
    """Also when a test fails between starting an engine and using it."""
    yield
    while _engines:
        _engines.pop().__exit__()


@contextlib.asynccontextmanager
async def state_changes(nats_url: str, namespace: str, guard: str = "g0") -> AsyncIterator[list[StateChange]]:
    """What a subscriber hears of a guard's states."""
    heard: list[StateChange] = []

    async def take(message: Any) -> None:
        change = event.decode(message.data)
        assert isinstance(change, StateChange)
        heard.append(change)

    connection = await nats.connect(nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    await connection.subscribe(state_subject(namespace, guard), cb=take)
    await connection.flush()
    try:
        yield heard
    finally:
        await connection.close()


def states(heard: list[StateChange]) -> list[str]:
    return [change.state for change in heard]


async def kept(nats_url: str, namespace: str, guard: str = "g0") -> list[StateChange]:
    """What the stream has, in order."""
    connection = await nats.connect(nats_url)
    try:
        jetstream, stream = connection.jetstream(), stream_name(namespace, "state")
        found: list[StateChange] = []
        with contextlib.suppress(nats.js.errors.NotFoundError):
            last = (await jetstream.stream_info(stream)).state.last_seq
            for sequence in range(1, last + 1):
                message = await jetstream.get_msg(stream, sequence)
                if message.subject == state_subject(namespace, guard):
                    change = event.decode(message.data or b"")
                    assert isinstance(change, StateChange)
                    found.append(change)
        return found
    finally:
        await connection.close()


async def epoch_of(deployment: Deployment, guard: str = "g0") -> EpochRecord | None:
    async with await deployment.etcd() as etcd:
        key = epoch_key(deployment.namespace, guard)
        found = await etcd.get(key)
        return None if found is None else decode(key, found.value, None)


async def mirrored(deployment: Deployment, epoch: int) -> EpochRecord:
    async def same() -> EpochRecord | None:
        record = await epoch_of(deployment)
        return record if record is not None and record.epoch == epoch else None

    found: EpochRecord = await eventually(same, f"etcd has epoch {epoch}")
    return found


def state(guard: GuardProcess) -> str:
    return next(
        name.partition('"')[2].rstrip('"}')
        for name, value in guard.metrics().items()
        if name.startswith("kvcr_guard_state{") and value
    )


def epoch(guard: GuardProcess) -> int:
    return int(guard.metrics()["kvcr_pool_epoch"])


async def attached(guard: GuardProcess) -> MortalEngine:
    engine = await asyncio.to_thread(MortalEngine, guard.ready["socket"])
    _engines.append(engine)
    await eventually(lambda: state(guard) == "standby", "the engine is attached")
    return engine


async def register_worker(deployment: Deployment, guard: GuardProcess) -> int:
    """A worker's card as ``dynamo.vllm`` writes it; its instance id, which is its lease."""
    ranks = msgspec.json.encode({"0": guard.endpoint}).decode()
    runtime_config = {"runtime_data": {"router_hint_source_control_endpoints": ranks}}
    card = msgspec.json.encode({"type": "Model", "card_json": {"runtime_config": runtime_config}})
    async with await deployment.etcd() as etcd:
        worker_id = await etcd.grant_lease(120)
        key = f"v1/mdc/{deployment.namespace}/backend/generate/{worker_id:x}"
        await etcd.put(key, card, lease=worker_id)
    return worker_id


async def is_registered(deployment: Deployment, worker_id: int) -> bool:
    async with await deployment.etcd() as etcd:
        key = f"v1/mdc/{deployment.namespace}/backend/generate/{worker_id:x}"
        return await etcd.get(key) is not None


# --- all is well ------------------------------------------------------------------------------------------


async def test_a_failover_is_told_in_order_with_the_worker_it_is_about(deployment: Deployment) -> None:
    async with state_changes(deployment.nats_url, deployment.namespace) as heard:
        with deployment.guard() as guard:
            await deployment.registered()
            first = await attached(guard)
            worker_id = await register_worker(deployment, guard)

            async def known() -> bool:
                return (await deployment.status("g0"))["cluster"]["worker_id"] == worker_id

            await eventually(known, "the guard knows its worker")
            with first:
                await asyncio.to_thread(first.kill)
                await eventually(lambda: "ACTIVE" in states(heard), "ACTIVE is told")
            with await attached(guard):
                await eventually(lambda: states(heard)[-1] == "STANDBY", "the hand-off is told")

            assert states(heard) == ["EMPTY", "STANDBY", "CHECKING", "ACTIVE", "STANDBY"]
            assert [change.previous for change in heard] == ["EMPTY", *states(heard)[:-1]]
            assert {change.incarnation for change in heard} == {(await deployment.registered()).incarnation}
            active, back = heard[3], heard[4]
            assert active.worker_id == worker_id
            assert back.worker_id == 0, "the worker that comes is not known before it registers"
            assert [change.epoch for change in heard] == sorted(change.epoch for change in heard)
            assert heard[2].epoch < active.epoch < back.epoch
            assert 0 <= active.seconds < PATIENCE_S

            async def gone() -> bool:
                return not await is_registered(deployment, worker_id)

            await eventually(gone, "the dead worker is revoked")
            assert await kept(deployment.nats_url, deployment.namespace) == heard

            connection = await nats.connect(deployment.nats_url)
            info = await connection.jetstream().stream_info(stream_name(deployment.namespace, "state"))
            await connection.close()
            assert (info.config.max_age, info.config.max_bytes) == (MAX_AGE_S, MAX_BYTES)


async def test_the_epoch_is_mirrored_and_outlives_the_pool(deployment: Deployment) -> None:
    with deployment.guard() as guard:
        with await attached(guard) as engine:
            record = await mirrored(deployment, epoch(guard))
            assert record.pool
            await asyncio.to_thread(engine.kill)
            await eventually(lambda: state(guard) == "active", "ACTIVE")
        before = await mirrored(deployment, epoch(guard))
        assert (before.pool, before.epoch) == (record.pool, record.epoch + 1)
        guard.process.kill()
        guard.process.wait()
        shutil.rmtree(guard.pool_dir)
    # The pool is lost, and etcd remembers what epoch it had.
    with deployment.guard() as guard:
        await deployment.registered()
        with await attached(guard):

            async def above() -> EpochRecord | None:
                found = await epoch_of(deployment)
                return found if found is not None and found.pool != before.pool else None

            after = await eventually(above, "the new pool's epoch is mirrored")
            assert after.epoch == epoch(guard) > before.epoch
    # For a while: guards of pods that never come back under their name do not pile up.
    async with await deployment.etcd() as etcd:
        found = await etcd.get(epoch_key(deployment.namespace, "g0"))
        assert found is not None
        assert 3600 < await etcd.refresh_lease(found.lease) <= TTL_S


async def test_a_record_that_is_no_epoch_is_replaced(deployment: Deployment) -> None:
    key = epoch_key(deployment.namespace, "g0")
    async with await deployment.etcd() as etcd:
        # A number that no pool can go above would be the end of this guard, were it believed.
        await etcd.put(key, encode(key, EpochRecord((1 << 64) - 1, "elsewhere"), None))
    with deployment.guard() as guard, await attached(guard):
        await mirrored(deployment, epoch(guard))
        assert epoch(guard) == 1


async def test_an_epoch_that_is_not_signed_is_not_believed_where_there_is_a_secret(
    deployment: Deployment,
) -> None:
    secret = b"0123456789abcdef0123456789abcdef"
    (deployment.directory / "secret").write_bytes(secret)
    key = epoch_key(deployment.namespace, "g0")
    async with await deployment.etcd() as etcd:
        for signed_with in (None, b"guessed by somebody else"):
            forged = encode(key, EpochRecord(41, "forged"), signed_with)
            assert decode(key, forged, secret) is None
        await etcd.put(key, forged)
        with deployment.guard("g0", "--secret-file", str(deployment.directory / "secret")) as guard:
            with await attached(guard):

                async def ours() -> EpochRecord | None:
                    found = await etcd.get(key)
                    return None if found is None else decode(key, found.value, secret)

                record = await eventually(ours, "a signed record replaces it")
                assert record.epoch == epoch(guard) == 1
            # A signed one is believed, and is of no use under another guard's key.
            later = encode(key, EpochRecord(41, "another pool"), secret)
            assert decode(epoch_key(deployment.namespace, "g1"), later, secret) is None


async def test_a_nats_server_without_jetstream_is_told_and_keeps_nothing(
    deployment: Deployment, tmp_path: Path
) -> None:
    server = await asyncio.to_thread(start_nats, tmp_path / "nats", tmp_path / "nats.log", False)
    own = Deployment(deployment.etcd_url, server.url, deployment.namespace, deployment.directory)
    try:
        async with state_changes(own.nats_url, own.namespace) as heard:
            with own.guard() as guard:
                await own.registered()
                await attached(guard)
                await eventually(lambda: states(heard) == ["EMPTY", "STANDBY"], "both are told")
                assert "no JetStream" in guard.log_path.read_text()
    finally:
        await asyncio.to_thread(server.stop)


# --- servers that are away --------------------------------------------------------------------------------


async def test_changes_wait_for_nats_and_for_a_stream_that_was_lost(
    deployment: Deployment, tmp_path: Path
) -> None:
    server = await asyncio.to_thread(start_nats, tmp_path / "nats", tmp_path / "nats.log")
    own = Deployment(deployment.etcd_url, server.url, deployment.namespace, deployment.directory)
    try:
        with own.guard() as guard:
            await own.registered()
            engine = await attached(guard)

            async def two() -> bool:
                return len(await kept(own.nats_url, own.namespace)) == 2

            await eventually(two, "EMPTY and STANDBY are kept")
            await asyncio.to_thread(server.kill)
            with engine:
                await asyncio.to_thread(engine.kill)
                await eventually(lambda: state(guard) == "active", "ACTIVE without NATS")
            assert guard.metrics()["kvcr_failover_events_waiting"] == 2
            with await attached(guard) as successor:
                assert await asyncio.to_thread(successor.deposit, "x", 4) == 4
                # It comes back without what it stored.
                server = await asyncio.to_thread(
                    start_nats, tmp_path / "other", tmp_path / "nats.log", port=server.port
                )

                async def told() -> bool:
                    return states(await kept(own.nats_url, own.namespace)) == [
                        "CHECKING",
                        "ACTIVE",
                        "STANDBY",
                    ]

                await eventually(told, "what happened meanwhile is told in order")
                assert guard.metrics().get("kvcr_failover_events_dropped_total", 0) == 0
                await eventually(
                    lambda: guard.metrics()["kvcr_failover_events_waiting"] == 0, "none waits any more"
                )
                assert guard.metrics()["kvcr_cluster_nats_connects_total"] == 2
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_take_over_and_hand_off_do_not_wait_for_servers_that_are_away(
    how: str, namespace: str, shm_dir: Path, tmp_path: Path
) -> None:
    """Both servers go, then the engine dies, and its successor comes; afterwards all is told."""
    etcd: Server = await asyncio.to_thread(start_etcd, tmp_path / "etcd", tmp_path / "etcd.log")
    bus: Server = await asyncio.to_thread(start_nats, tmp_path / "nats", tmp_path / "nats.log")
    own = Deployment(etcd.url, bus.url, namespace, shm_dir)
    try:
        with own.guard() as guard:
            await own.registered()
            engine = await attached(guard)
            assert await asyncio.to_thread(engine.deposit, "x", 16) == 16
            worker_id = await register_worker(own, guard)

            async def known() -> bool:
                found = await epoch_of(own)
                return found is not None and found.worker_id == worker_id

            await eventually(known, "the worker is known and kept")
            started_at = epoch(guard)
            if how == "stopped":
                etcd.pause()
                bus.pause()
            else:
                await asyncio.to_thread(etcd.kill)
                await asyncio.to_thread(bus.kill)
            with engine:
                await asyncio.to_thread(engine.kill)
                await eventually(lambda: state(guard) == "active", "ACTIVE with both away")
            with await attached(guard) as successor:
                # It serves what the dead one stored, and stores.
                assert await asyncio.to_thread(successor.read, "x", 16) == 16
                assert await asyncio.to_thread(successor.deposit, "y", 16) == 16
                assert epoch(guard) == started_at + 2
                if how == "stopped":
                    etcd.resume()
                    bus.resume()
                else:
                    etcd = await asyncio.to_thread(
                        start_etcd, tmp_path / "etcd", tmp_path / "etcd.log", port=etcd.port
                    )
                    bus = await asyncio.to_thread(
                        start_nats, tmp_path / "nats", tmp_path / "nats.log", port=bus.port
                    )
                await mirrored(own, epoch(guard))

                async def gone() -> bool:
                    return not await is_registered(own, worker_id)

                await eventually(gone, "the dead worker is revoked, though its successor is here")

                async def told() -> bool:
                    found = states(await kept(own.nats_url, own.namespace))
                    return found == ["EMPTY", "STANDBY", "CHECKING", "ACTIVE", "STANDBY"]

                await eventually(told, "all changes are told, once and in order")
                active = (await kept(own.nats_url, own.namespace))[3]
                assert (active.state, active.worker_id) == ("ACTIVE", worker_id)

                async def record_follows() -> bool:
                    record = await own.registered()
                    return (record.state, record.epoch) == ("STANDBY", epoch(guard))

                await eventually(record_follows, "the guard's record is up to date")
    finally:
        for server in (etcd, bus):
            if server.exit_code is None:
                server.resume()
            await asyncio.to_thread(server.stop)


async def test_an_engine_goes_on_when_etcd_comes_back_with_a_higher_epoch(
    namespace: str, shm_dir: Path, tmp_path: Path
) -> None:
    """The pool was lost while etcd is away: the engine of the new one, in epoch 1, must end up above."""
    etcd = await asyncio.to_thread(start_etcd, tmp_path / "etcd", tmp_path / "etcd.log")
    own = Deployment(etcd.url, "nats://127.0.0.1:9", namespace, shm_dir)
    key = epoch_key(namespace, "g0")
    async with await own.etcd() as client:
        await client.put(key, encode(key, EpochRecord(41, "a pool that was lost"), None))
    etcd.pause()
    try:
        with own.guard() as guard, await attached(guard) as engine:
            assert await asyncio.to_thread(engine.deposit, "x", 16) == 16
            assert epoch(guard) == 1
            etcd.resume()
            record = await mirrored(own, 42)
            assert (record.epoch, record.pool != "a pool that was lost") == (epoch(guard), True)
            await eventually(lambda: state(guard) == "standby", "the engine attached again")
            assert await asyncio.to_thread(engine.read, "x", 16) == 16
            assert await asyncio.to_thread(engine.deposit, "y", 16) == 16
            # What it had been granted in the epoch before is free again, but for its standing grants.
            await eventually(
                lambda: guard.metrics()['kvcr_pool_slots{state="granted"}'] <= 8, "no grant is lost"
            )
            engine.signal(signal.SIGKILL)
            await eventually(lambda: state(guard) == "active", "ACTIVE")
            await mirrored(own, 43)
    finally:
        etcd.resume()
        await asyncio.to_thread(etcd.stop)
