# SPDX-License-Identifier: Apache-2.0
"""Two real guards driven through :mod:`kvcr.api` alone, in a process without torch, vLLM and Dynamo."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import BUSY_S, PATIENCE_S

from kvcr import api
from kvcr.api import (
    BlockStatus,
    EngineConfig,
    HostBlockMemory,
    KeySpace,
    Kvcr,
    Layout,
    LoadResult,
    Source,
    extend_chain,
    model_identity,
)
from kvcr.keys import pack_keys
from kvcr.protocol.events import (
    ACTION_VERSION,
    INVALIDATE,
    FetchPayload,
    FetchSource,
    InvalidatePayload,
    action,
    envelope,
    fetch_action,
)

COMPONENTS = Path(__file__).parents[2] / "components"
LAYERS, LAYER_BYTES, BLOCKS = 4, 6000, 64
LAYOUT = Layout(
    model=model_identity("toy", "f00d"),
    dtype="float32",
    block_size=16,
    layers=LAYERS,
    kv_heads=2,
    head_size=8,
    part_bytes=LAYERS * LAYER_BYTES,
    attention_layout="test",
    engine="test-1",
)


def chain(count: int, salt: str = "") -> list[bytes]:
    root = KeySpace("dynamo", LAYOUT.model, salt=salt).root()
    return extend_chain(root, np.arange(count * LAYOUT.block_size, dtype=np.uint32), LAYOUT.block_size)


@dataclass
class RunningGuard:
    process: subprocess.Popen[bytes]
    socket: str
    control: str
    directory: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start_guard(directory: Path, *flags: str) -> RunningGuard:
    environment = {**os.environ, "PYTHONPATH": str(COMPONENTS)}
    log = (directory.parent / f"{directory.name}.log").open("ab")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "kvcr.guard", "--scrub-bytes-per-s", "0",
            "--name", directory.name, "--pool-dir", str(directory),
            "--pool-bytes", "8MiB", "--metrics-port", "-1", *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
    )  # fmt: skip
    log.close()
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    return RunningGuard(process, ready["socket"], ready["control"], directory)


@dataclass
class Engine:
    """A toy engine: random blocks in numpy memory, and its connection."""

    kv: Kvcr
    layers: np.ndarray

    def block(self, block_id: int) -> np.ndarray:
        return self.layers[:, block_id].copy()


def open_engine(guard: RunningGuard, seed: int) -> Engine:
    layers = np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, LAYER_BYTES), dtype=np.uint8)
    memory = HostBlockMemory(list(layers))
    return Engine(Kvcr.open(EngineConfig(socket=guard.socket), LAYOUT, memory), layers)


@pytest.fixture
def guards(tmp_path: Path) -> Iterator[list[RunningGuard]]:
    running = [start_guard(tmp_path / name) for name in ("a", "b")]
    yield running
    for guard in running:
        if guard.process.poll() is None:
            guard.process.send_signal(signal.SIGTERM)
            guard.process.wait(PATIENCE_S)


@pytest.fixture
def engines(guards: list[RunningGuard]) -> Iterator[list[Engine]]:
    opened = [open_engine(guard, seed) for seed, guard in enumerate(guards)]
    yield opened
    for engine in opened:
        engine.kv.close()


def is_all(statuses: np.ndarray, status: BlockStatus) -> bool:
    return bool((statuses == status).all())


def test_blocks_deposited_at_one_engine_arrive_at_another_byte_for_byte(
    engines: list[Engine], guards: list[RunningGuard]
) -> None:
    a, b = engines
    keys = chain(24)
    assert is_all(a.kv.query(keys), BlockStatus.MISS)
    assert is_all(a.kv.deposit(keys, range(24)), BlockStatus.OK)
    assert is_all(a.kv.query(keys), BlockStatus.OK)
    assert is_all(b.kv.query(keys), BlockStatus.MISS)

    fetched = b.kv.fetch("r1", keys, sources=[Source(guards[0].control, 0, 24)], deadline_s=10.0)
    assert is_all(fetched, BlockStatus.OK)
    assert is_all(b.kv.query(keys), BlockStatus.OK)
    where = list(range(30, 54))
    assert is_all(b.kv.deliver("r1", keys, where), BlockStatus.OK)
    b.kv.finish("r1")
    for position, block_id in enumerate(where):
        assert (b.block(block_id) == a.block(position)).all()


def test_a_delivery_joins_the_fetch_that_is_still_running(
    engines: list[Engine], guards: list[RunningGuard]
) -> None:
    a, b = engines
    keys = chain(40)
    a.kv.deposit(keys, range(40))
    b.kv.fetch("r1", keys, sources=[Source(guards[0].control, 0, 40)], deadline_s=10.0, wait=False)
    assert is_all(b.kv.deliver("r1", keys, range(40), deadline_s=10.0), BlockStatus.OK)
    assert (b.layers[:, :40] == a.layers[:, :40]).all()
    state = b.kv.fetch_state("r1")
    assert state is not None
    # The last block is delivered before the guard's last word on the fetch is heard.
    deadline_s = time.monotonic() + PATIENCE_S
    while not state.final and time.monotonic() < deadline_s:
        b.kv.poll()
        time.sleep(0.01)
    assert state.transport == "shm"


def test_what_nobody_has_is_a_miss_and_blocks_around_it_arrive(
    engines: list[Engine], guards: list[RunningGuard]
) -> None:
    a, b = engines
    keys = chain(12)
    a.kv.deposit(keys[:5], range(5))
    statuses = b.kv.fetch("r1", keys, sources=[Source(guards[0].control, 0, 12)], deadline_s=10.0)
    assert is_all(statuses[:5], BlockStatus.OK)
    assert is_all(statuses[5:], BlockStatus.MISS)
    delivered = b.kv.deliver("r1", keys, range(12))
    assert is_all(delivered[:5], BlockStatus.OK)
    assert is_all(delivered[5:], BlockStatus.MISS)


def test_blocks_of_another_tenant_are_misses(engines: list[Engine]) -> None:
    a, _ = engines
    a.kv.deposit(chain(4), range(4))
    assert is_all(a.kv.query(chain(4, salt="tenant")), BlockStatus.MISS)


def test_depositing_again_is_free_and_ok(engines: list[Engine]) -> None:
    a, _ = engines
    keys = chain(6)
    assert is_all(a.kv.deposit(keys[:4], range(4)), BlockStatus.OK)
    assert is_all(a.kv.deposit(keys, range(6)), BlockStatus.OK)


def test_a_pinned_block_survives_a_flood_that_evicts_the_others(engines: list[Engine]) -> None:
    a, _ = engines
    pinned = chain(4)
    a.kv.deposit(pinned, range(4))
    pin = a.kv.pin(pinned, ttl_s=60.0)
    assert pin
    for round_ in range(20):
        a.kv.deposit(chain(30, salt=f"flood-{round_}"), range(30), wait_s=3.0)
    assert is_all(a.kv.query(pinned), BlockStatus.OK)
    assert not is_all(a.kv.query(chain(30, salt="flood-0")), BlockStatus.OK)
    a.kv.release(pin)


def test_a_hint_is_acted_on(engines: list[Engine], guards: list[RunningGuard]) -> None:
    a, b = engines
    keys = chain(10)
    a.kv.deposit(keys, range(10))
    payload = FetchPayload(
        plan_id="p", sources=[FetchSource(guards[0].control, 0, 10)], last_key=keys[9].hex()
    )
    state = b.kv.submit_hint("r1", envelope("m", [fetch_action("a", payload)]), keys)
    assert state is not None
    assert is_all(b.kv.deliver("r1", keys, range(10), deadline_s=10.0), BlockStatus.OK)
    assert b.kv.submit_hint("r2", envelope("m", [fetch_action("a", payload)]), keys) is None


def test_actions_beside_a_fetch_reach_the_guard_and_what_they_dropped_can_be_stored_again(
    engines: list[Engine],
) -> None:
    a, _ = engines
    keys = chain(6)
    a.kv.deposit(keys, range(6))
    payload = InvalidatePayload(plan_id="p", keys=pack_keys(keys[2:4]))
    hint = envelope("p", [action("0", INVALIDATE, ACTION_VERSION, payload)])
    assert a.kv.submit_hint("r", hint, keys) is None
    assert not a.kv.skipped_hints
    expected = [BlockStatus.OK] * 2 + [BlockStatus.MISS] * 4
    deadline_s = time.monotonic() + PATIENCE_S
    while a.kv.query(keys).tolist() != expected and time.monotonic() < deadline_s:
        a.kv.poll()
        time.sleep(0.01)
    assert a.kv.query(keys).tolist() == expected
    # The guard's word about engine memory comes right behind; what is deposited after it is new.
    while (
        not is_all(stored := a.kv.deposit(keys, range(6)), BlockStatus.OK) and time.monotonic() < deadline_s
    ):
        pass
    assert is_all(stored, BlockStatus.OK)


def test_a_block_that_rotted_in_the_pool_is_not_delivered(
    engines: list[Engine], guards: list[RunningGuard]
) -> None:
    a, _ = engines
    keys = chain(8)
    a.kv.deposit(keys, range(8))
    data = guards[0].directory / "data"
    raw = data.read_bytes()
    needle = a.layers[0, 3].tobytes()
    with data.open("r+b") as file:
        file.seek(raw.index(needle) + 100)
        file.write(b"\xff\x00\xff\x00")
    before = a.block(50)
    statuses = a.kv.deliver("r1", keys, range(47, 55))
    assert statuses.tolist() == [BlockStatus.OK] * 3 + [BlockStatus.FAILED] + [BlockStatus.OK] * 4
    assert (a.block(50) == before).all()
    # Computed again, it takes the damaged one's place, whether or not the guard has looked at that by now.
    assert is_all(a.kv.deposit(keys, range(8)), BlockStatus.OK)
    assert is_all(a.kv.deliver("r2", keys, range(47, 55)), BlockStatus.OK)
    assert (a.block(50) == a.block(3)).all()


def test_a_source_that_was_killed_is_gone_within_the_deadline(
    engines: list[Engine], guards: list[RunningGuard]
) -> None:
    a, b = engines
    keys = chain(20)
    a.kv.deposit(keys, range(20))
    guards[0].kill()
    started_s = time.monotonic()
    statuses = b.kv.fetch("r1", keys, sources=[Source(guards[0].control, 0, 20)], deadline_s=3.0)
    assert time.monotonic() - started_s < 3.0 + BUSY_S
    assert not (statuses == BlockStatus.OK).any()
    assert not (statuses == BlockStatus.PENDING).any()


def test_without_its_guard_an_engine_goes_on_and_gets_it_back(
    engines: list[Engine], guards: list[RunningGuard]
) -> None:
    a, _ = engines
    keys = chain(8)
    a.kv.deposit(keys, range(8))
    guards[0].kill()
    fresh = chain(8, salt="x")
    assert is_all(a.kv.fetch("r1", fresh, sources=[Source(guards[1].control, 0, 8)]), BlockStatus.GONE)
    assert is_all(a.kv.deliver("r1", fresh, range(8)), BlockStatus.MISS)
    assert is_all(a.kv.query(fresh), BlockStatus.MISS)
    assert a.kv.pin(keys, 1.0) == ""
    assert not a.kv.connected
    # The pool outlives the guard: what is in it is still read, verified, from shared memory.
    assert is_all(a.kv.deliver("r2", keys, range(40, 48)), BlockStatus.OK)
    assert (a.layers[:, 40:48] == a.layers[:, :8]).all()

    guards[0] = start_guard(guards[0].directory)
    deadline_s = time.monotonic() + PATIENCE_S
    while not a.kv.connected and time.monotonic() < deadline_s:
        a.kv.poll()
        time.sleep(0.02)
    assert a.kv.connected
    assert is_all(a.kv.query(keys), BlockStatus.OK)
    assert is_all(a.kv.deposit(fresh, range(8)), BlockStatus.OK)


def test_a_source_that_never_answers_costs_no_more_than_the_deadline(engines: list[Engine]) -> None:
    _, b = engines
    keys = chain(8)
    before = b.layers.copy()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 0, 8)
        b.kv.fetch("r1", keys, sources=[source], deadline_s=60.0, wait=False)
        started_s = time.monotonic()
        statuses = b.kv.deliver("r1", keys, range(8), deadline_s=0.3)
        assert time.monotonic() - started_s < 0.3 + BUSY_S
        assert np.isin(statuses, [BlockStatus.TOO_SLOW, BlockStatus.GONE]).all()
        assert b.kv.delivered("r1") is None
        b.kv.finish("r1")
    assert (b.layers == before).all()


def test_a_guard_that_stopped_answering_costs_no_more_than_the_deadline(
    engines: list[Engine], guards: list[RunningGuard]
) -> None:
    a, b = engines
    keys = chain(8)
    a.kv.deposit(keys, range(8))
    guards[1].process.send_signal(signal.SIGSTOP)
    try:
        b.kv.fetch("r1", keys, sources=[Source(guards[0].control, 0, 8)], deadline_s=60.0, wait=False)
        started_s = time.monotonic()
        assert is_all(b.kv.deliver("r1", keys, range(8), deadline_s=0.3), BlockStatus.TOO_SLOW)
        assert time.monotonic() - started_s < 0.3 + BUSY_S
        # Its socket fills up at some point; sending to it never waits.
        started_s = time.monotonic()
        for number in range(300):
            b.kv.fetch(f"s{number}", keys, sources=[Source(guards[0].control, 0, 8)], wait=False)
        assert time.monotonic() - started_s < BUSY_S
        assert not b.kv.connected
    finally:
        guards[1].process.send_signal(signal.SIGCONT)


def test_a_delivery_whose_thread_is_paused_over_its_deadline_is_too_slow(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, keys = engines[0].kv, chain(4, "paused")
    take_loads, asked = kv._worker.take_loads, 0

    def paused() -> list[LoadResult]:
        nonlocal asked
        results = take_loads()
        # The first time is that of the poll before, the second the first look at the load.
        asked += 1
        if asked == 2:
            time.sleep(1.5)
        return results

    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 0, 4)
        kv.fetch("r1", keys, sources=[source], deadline_s=10.0, wait=False)
        monkeypatch.setattr(kv._worker, "take_loads", paused)
        assert is_all(kv.deliver("r1", keys, range(4), deadline_s=0.3), BlockStatus.TOO_SLOW)


def test_an_engine_that_cannot_be_opened_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("no descriptors left")

    monkeypatch.setattr(api, "SchedulerHandle", fails)
    memory = HostBlockMemory([np.zeros((BLOCKS, LAYER_BYTES), np.uint8) for _ in range(LAYERS)])
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no descriptors left"):
        Kvcr.open(EngineConfig(socket=str(tmp_path / "none.sock")), LAYOUT, memory, wait_s=0.0)
    assert set(threading.enumerate()) <= before


def test_a_delivery_that_is_cancelled_ends_once(engines: list[Engine]) -> None:
    _, b = engines
    keys = chain(4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 0, 4)
        b.kv.fetch("r1", keys, sources=[source], deadline_s=60.0, wait=False)
        b.kv.deliver("r1", keys, range(4), deadline_s=5.0, wait=False)
        b.kv.cancel("r1")
        result = b.kv.delivered("r1")
        assert result is not None
        assert result.failed_block_ids == [0, 1, 2, 3]
        assert b.kv.delivered("r1") is None


def test_an_engine_without_any_guard_is_all_misses(tmp_path: Path) -> None:
    memory = HostBlockMemory([np.zeros((4, LAYOUT.part_bytes), np.uint8)])
    config = EngineConfig(socket=str(tmp_path / "nobody.sock"))
    kv = Kvcr.open(config, LAYOUT, memory, wait_s=0.1)
    keys = chain(3)
    assert is_all(kv.query(keys), BlockStatus.MISS)
    assert is_all(kv.deposit(keys, range(3)), BlockStatus.GONE)
    assert is_all(kv.deliver("r", keys, range(3), deadline_s=0.2), BlockStatus.GONE)
    kv.close()


def test_the_whole_of_it_runs_without_torch_vllm_and_dynamo(
    guards: list[RunningGuard],
) -> None:
    script = f"""
import sys
import numpy as np
from kvcr.api import *
layout = Layout(model="m@1+0", dtype="u8", block_size=16, layers=1, kv_heads=1, head_size=8, part_bytes=4096)
memory = HostBlockMemory([np.arange(8 * 4096, dtype=np.uint32).astype(np.uint8).reshape(8, 4096)])
kv = Kvcr.open(EngineConfig(socket={guards[0].socket!r}), layout, memory)
keys = extend_chain(KeySpace("dynamo", layout.model).root(), list(range(64)), 16)
assert kv.deposit(keys, range(4)).tolist() == [BlockStatus.OK] * 4
assert kv.deliver("r", keys, range(4, 8)).tolist() == [BlockStatus.OK] * 4
kv.close()
heavy = {{"torch", "vllm", "dynamo", "transformers"}} & set(sys.modules)
assert not heavy, heavy
print("light")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(COMPONENTS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "light", done.stderr
