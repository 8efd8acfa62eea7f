# SPDX-License-Identifier: Apache-2.0
"""A deployment in the middle of an upgrade: at each seam one side is a process of another release.

What fits works, and pools stay warm; what does not is refused with both versions named, and computed instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import other_release
import pytest
from deployment import Deployment
from engine_client import LAYOUT, EngineClient, GuardProcess, chain, statuses
from waiting import PATIENCE_S, eventually, until

from kvcr.api import EngineConfig, HostBlockMemory, Kvcr
from kvcr.dynamo.records import encode, record_key
from kvcr.keys import BlockKey
from kvcr.pool import META, meta
from kvcr.protocol import engine, peer
from kvcr.protocol.codec import Codec, Message
from kvcr.protocol.engine import BlockStatus, Source
from kvcr.protocol.events import (
    FETCH,
    FETCH_VERSION,
    FetchPayload,
    FetchSource,
    Heartbeat,
    Inventory,
    action,
    envelope,
    event,
)
from tests.integration.router_stack import BLOCK, Stack
from tests.integration.tiny_tokenizer import write_model

OK, MISS = BlockStatus.OK, BlockStatus.MISS
SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """``other({"kvcr.protocol.engine.VERSION": 2})``: environment of a process in which that holds."""

    def make(constants: Mapping[str, Any]) -> dict[str, str]:
        return other_release.environment(tmp_path / "other", constants)

    return make


def open_engine(guard: GuardProcess) -> Kvcr:
    memory = HostBlockMemory([np.zeros((32, LAYOUT.part_bytes), np.uint8)])
    config = EngineConfig(socket=guard.ready["socket"], namespace="test")
    return Kvcr.open(config, LAYOUT, memory, standing_blocks=8, wait_s=PATIENCE_S)


# --- engine and guard ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [engine.VERSION - 1, engine.VERSION + 1], ids=["older", "newer"])
def test_an_engine_meets_a_guard_of_another_protocol_and_serves_cold(
    shm_dir: Path, other: Any, version: int
) -> None:
    root, keys = chain(3, "cold")
    with GuardProcess(shm_dir, "g0", env=other({"kvcr.protocol.engine.VERSION": version})) as guard:
        kv = open_engine(guard)
        try:
            assert not kv.connected
            refused = kv._scheduler.refused
            assert refused is not None
            assert refused.code == "version"
            assert f"engine protocol {engine.VERSION}, this guard speaks {version}" in str(refused)
            # It goes on without: every block is a miss, and nothing waits.
            assert (kv.query(keys) == MISS).all()
            assert (kv.deposit(keys, range(3), root=root) != OK).all()
        finally:
            kv.close()


def test_an_engine_that_names_blocks_otherwise_is_refused(shm_dir: Path, other: Any) -> None:
    with GuardProcess(shm_dir, "g0", env=other({"kvcr.keys._PERSON": b"kvcr-other"})) as guard:
        kv = open_engine(guard)
        try:
            refused = kv._scheduler.refused
            assert refused is not None
            assert refused.code == "keys"
            assert "compute other block keys" in str(refused)
        finally:
            kv.close()


# --- guard and guard ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [peer.VERSION - 1, peer.VERSION + 1], ids=["older", "newer"])
def test_a_guard_pulls_nothing_from_one_of_another_protocol_and_says_why(
    shm_dir: Path, other: Any, version: int
) -> None:
    with (
        GuardProcess(shm_dir, "a", env=other({"kvcr.protocol.peer.VERSION": version})) as a,
        GuardProcess(shm_dir, "b") as b,
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        root, keys = chain(4, "pull")
        source.deposit(keys, root)
        _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 4)], deadline_ms=20_000)
        assert set(statuses(progress)) == {BlockStatus.GONE}
        assert a.wait_metric('kvcr_peer_refusals_total{code="version"}', 1) >= 1
        told = f"peer protocol {peer.VERSION}, this guard speaks {version}"
        until(lambda: told in b.log_path.read_text(), "the guard says why it does not pull")
        # Each goes on with its own engine.
        target.deposit(keys, root)
        assert all(target.right(keys))


# --- router and guard ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [peer.VERSION - 1, peer.VERSION + 1], ids=["older", "newer"])
def test_a_router_of_another_protocol_is_not_told_what_a_guard_holds_and_serves(
    tmp_path: Path, shm_dir: Path, other: Any, version: int
) -> None:
    stack = Stack(tmp_path, write_model(tmp_path / "tiny"))
    try:
        guard = stack.real_guard("g0", shm_dir / "g0")
        worker = stack.worker("w0", "--control", guard.control, "--guard-socket", guard.socket)
        stack.frontend()
        # Whoever starts after the guard asks it for what is there.
        router = stack.router(**other({"kvcr.protocol.peer.VERSION": version}))
        stack.ready()
        assert stack.ask("a long story. ".ljust(20 * BLOCK, "x"))[0] == 200
        worker.expect("served")
        refusals = 'kvcr_peer_refusals_total{code="version"}'
        until(lambda: guard.metrics().get(refusals, 0) >= 1, "the guard refuses the router, and counts it")
        told = f"peer protocol {version}, this guard speaks {peer.VERSION}"
        until(
            lambda: told in router.log.read_text(), "the router says why it does not know the guard's blocks"
        )
        assert stack.ask("a long story. ".ljust(20 * BLOCK, "x"))[0] == 200
        assert "kv_hint" not in worker.expect("request")["request"]
    finally:
        stack.close()


def test_a_router_goes_by_the_record_of_a_guard_that_does_not_sign_its_changes_yet(
    tmp_path: Path, shm_dir: Path, other: Any
) -> None:
    stack = Stack(tmp_path, write_model(tmp_path / "tiny"))
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    try:
        router = stack.router("--secret-file", str(secret))
        # A router serves, and counts, from the first worker on.
        stack.worker("w0")
        until(lambda: _metrics(stack), "the router is there")
        stack.environment |= other({"kvcr.dynamo.states.HEADER": "Of-No-Meaning"})
        guard = stack.real_guard("g0", shm_dir / "g0", "--secret-file", str(secret))
        with attached(guard.socket):
            until(lambda: _metrics(stack).get('kvcr_router_guards{state="standby"}') == 1, "STANDBY is known")
        # Who goes without a word is dead.
        until(lambda: _metrics(stack).get('kvcr_router_guards{state="active"}') == 1, "and so is ACTIVE")
        until(
            lambda: "is not signed and not believed" in router.log.read_text(),
            "the router says that it goes by the record alone",
        )
        # None of its changes was believed.
        counted = {name for name in _metrics(stack) if name.startswith("kvcr_router_state_changes_total")}
        assert counted == {'kvcr_router_state_changes_total{state="unsigned"}'}
    finally:
        stack.close()


def test_a_router_does_not_use_a_record_of_another_version(tmp_path: Path, shm_dir: Path) -> None:
    stack = Stack(tmp_path, write_model(tmp_path / "tiny"))
    deployment = Deployment(stack.etcd.url, stack.nats.url, "dynamo", shm_dir)

    async def put(version: int) -> None:
        record = await deployment.registered("g0")
        twin = msgspec.structs.replace(
            record, name="g1", control_endpoint="tcp://127.0.0.1:9", version=record.version + version
        )
        async with await deployment.etcd() as etcd:
            await etcd.put(record_key("dynamo", "g1"), encode(twin, None))

    def known(count: int) -> bool:
        return _metrics(stack).get('kvcr_router_guards{state="empty"}') == count

    try:
        router = stack.router()
        stack.worker("w0")
        stack.real_guard("g0", shm_dir / "g0")
        until(lambda: known(1), "the router knows one guard")
        asyncio.run(put(1))
        until(lambda: "guards/g1 is ignored: " in router.log.read_text(), "the router says what it ignores")
        assert known(1)
        asyncio.run(put(0))
        until(lambda: known(2), "one that it reads is a guard")
    finally:
        stack.close()


def _metrics(stack: Stack) -> dict[str, float]:
    """Of the router; none while it starts."""
    with contextlib.suppress(OSError):
        return stack.metrics()
    return {}


# --- hints --------------------------------------------------------------------------------------------


def test_hints_of_a_newer_router_are_used_as_far_as_they_are_understood(shm_dir: Path) -> None:
    root, keys = chain(4, "hint")
    with (
        GuardProcess(shm_dir, "a") as a,
        GuardProcess(shm_dir, "b") as b,
        EngineClient(a, "engine-a") as source,
    ):
        source.deposit(keys, root)
        payload = FetchPayload(
            plan_id="p",
            sources=[FetchSource(a.endpoint, 0, 4)],
            last_key=keys[-1].hex(),
            deadline_ms=20_000.0,
        )
        known = action("p.1", FETCH, FETCH_VERSION, payload)
        newer = {**known, "action_id": "p.0", "action_version": "9.0"}
        grown = {**known, "payload": {**known["payload"], "of_a_later_release": [1, 2]}}
        kv = open_engine(b)
        try:
            hint = {**envelope("m", [newer, grown]), "also_new": True}
            kv.submit_hint("r", hint, [BlockKey(key) for key in keys])
            got = kv.deliver("r", keys, range(4), deadline_s=20.0)
            assert (got == OK).all(), got
            assert dict(kv.skipped_hints) == {"unknown action": 1}
        finally:
            kv.close()


# --- messages and events ------------------------------------------------------------------------------

SAMPLES: list[tuple[Codec[Any], Message]] = [
    (event, Inventory("g", 1, 2, 2, b"k" * 16, b"h" * 8, b"p" * 4, b"")),
    (event, Heartbeat("g", 1, 2, 3, 4)),
    (peer.to_server, peer.Lease(1, "g", 1, b"k" * 16, 100, "shm")),
    (peer.to_client, peer.Leased(1, 1, 1, b"\x01", b"s" * 4, b"g" * 8, b"c" * 8, 100)),
    (engine.to_guard, engine.Fetch(1, "r", 0, b"p" * 16, b"k" * 16, b"h" * 8, [], 0.0, 100.0)),
    (engine.to_engine, engine.Welcome(1, "g", 1, "/d", 4, 4096, "tcp://x:1")),
]


@pytest.mark.parametrize(("codec", "message"), SAMPLES, ids=[type(m).__name__ for _, m in SAMPLES])
def test_a_field_of_a_later_release_is_skipped(codec: Codec[Any], message: Message) -> None:
    fields = msgspec.msgpack.decode(codec.encode(message))
    assert codec.decode(msgspec.msgpack.encode([*fields, "of a later release"])) == message


# --- the pool -----------------------------------------------------------------------------------------


def stored(shm_dir: Path, env: dict[str, str] | None = None) -> tuple[bytes, list[BlockKey]]:
    """A pool of a guard that has ended, with blocks."""
    root, keys = chain(6, "pool")
    with GuardProcess(shm_dir, "g0", env=env) as guard, EngineClient(guard, "engine") as client:
        client.deposit(keys, root)
    assert (guard.pool_dir / META).exists()
    return root, keys


def test_a_pool_stays_warm_through_an_upgrade_that_did_not_change_it(shm_dir: Path, other: Any) -> None:
    _, keys = stored(shm_dir)
    with (
        GuardProcess(shm_dir, "g0", env=other({"kvcr.__version__": "9.9.9"})) as guard,
        EngineClient(guard, "engine-of-the-new-release") as client,
    ):
        assert all(client.right(keys))


@pytest.mark.parametrize("version", [meta.VERSION - 1, meta.VERSION + 1], ids=["older", "newer"])
def test_a_pool_of_another_format_is_kept_until_an_engine_comes_and_both_versions_are_named(
    shm_dir: Path, other: Any, version: int
) -> None:
    """To a guard of a newer release, or to one of an older one after a way back."""
    _, keys = stored(shm_dir)
    another = other({"kvcr.pool.meta.VERSION": version})
    with GuardProcess(shm_dir, "g0", env=another) as guard:
        told = guard.log_path.read_text()
        assert "cannot be used and will be replaced" in told
        assert f"is a pool of version {meta.VERSION}, this program knows version {version}" in told
    # Who notices in time goes back, and has lost nothing.
    with GuardProcess(shm_dir, "g0") as guard, EngineClient(guard, "engine-2") as client:
        assert all(client.right(keys))
    with GuardProcess(shm_dir, "g0", env=another) as guard, attached(guard.ready["socket"]):
        assert guard.metrics()['kvcr_pool_slots{state="ready"}'] == 0
    with GuardProcess(shm_dir, "g0") as guard, EngineClient(guard, "engine-4") as client:
        assert not any(client.right(keys))


@contextlib.contextmanager
def attached(guard_socket: str) -> Iterator[None]:
    """An engine that has said hello, and was taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(guard_socket)
        hello = engine.Hello(
            engine.VERSION, engine.Role.SCHEDULER, "engine-3", 0, os.getpid(), LAYOUT, "test"
        )
        sock.send(engine.to_guard.encode(hello))
        assert isinstance(engine.to_engine.decode(sock.recv(1 << 18)), engine.Welcome)
        yield


# --- records in etcd ----------------------------------------------------------------------------------


async def test_a_record_of_another_version_is_not_used_and_counted(
    deployment: Deployment, runtimes_end: None
) -> None:
    with deployment.guard("g0") as guard:
        record = await deployment.registered("g0")
        newer = msgspec.structs.replace(record, name="g1", control_endpoint="tcp://127.0.0.1:9", version=9)
        async with await deployment.etcd() as etcd:
            await etcd.put(record_key(deployment.namespace, "g1"), encode(newer, None))
            ignored = 'kvcr_cluster_records_ignored_total{reason="format"}'
            await eventually(lambda: guard.metrics().get(ignored), "the guard counts what it does not read")
            assert (await deployment.status("g0"))["cluster"]["peers"] == {}
            fits = msgspec.structs.replace(newer, version=record.version)
            await etcd.put(record_key(deployment.namespace, "g1"), encode(fits, None))

            async def known() -> bool:
                return bool((await deployment.status("g0"))["cluster"]["peers"])

            await eventually(known, "one that it reads is a peer")
