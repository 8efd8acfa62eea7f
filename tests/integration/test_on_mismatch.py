# SPDX-License-Identifier: Apache-2.0
"""An engine meets a pool of another layout: both values are named, and what happens is a setting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_client import LAYOUT, GuardProcess, chain, content
from waiting import PATIENCE_S

from kvcr.api import BlockStatus, EngineConfig, HostBlockMemory, Kvcr, Layout
from kvcr.errors import MustFail

BLOCKS = 8
OTHERS = {
    "model": ("tiny@0123+0", "other@9876+0"),
    "dtype": ("float32", "bfloat16"),
    "block_size": (16, 32),
    "tp_size": (1, 2),
    "engine": ("test", "test-2"),
}
"""Field of a layout: what the pool has, what the engine has."""


@contextlib.contextmanager
def engine(
    guard: GuardProcess, layout: Layout = LAYOUT, wait_s: float = 15.0, **config: Any
) -> Iterator[tuple[Kvcr, np.ndarray]]:
    memory = np.zeros((BLOCKS, layout.part_bytes), np.uint8)
    settings = EngineConfig(socket=guard.ready["socket"], namespace="test", **config)
    kv = Kvcr.open(settings, layout, HostBlockMemory([memory]), standing_blocks=8, wait_s=wait_s)
    try:
        yield kv, memory
    finally:
        kv.close()


def store(kv: Kvcr, memory: np.ndarray, salt: str) -> list[int]:
    root, keys = chain(BLOCKS, salt)
    for row, key in enumerate(keys):
        memory[row] = content(key, LAYOUT.part_bytes)
    return kv.deposit(keys, range(BLOCKS), root=root, wait_s=15.0).tolist()


def found(kv: Kvcr, salt: str) -> int:
    _, keys = chain(BLOCKS, salt)
    return int((kv.query(keys) == BlockStatus.OK).sum())


def other_layout(**fields: Any) -> Layout:
    return msgspec.structs.replace(LAYOUT, **fields)


@contextlib.contextmanager
def guard_with_a_pool(directory: Path, *arguments: str) -> Iterator[GuardProcess]:
    with GuardProcess(directory, "g0", *arguments, slots=64) as guard:
        with engine(guard) as (kv, memory):
            assert store(kv, memory, "first") == [BlockStatus.OK] * BLOCKS
        yield guard


@pytest.mark.parametrize("field", OTHERS)
def test_cold_refuses_by_name_and_keeps_the_pool(shm_dir: Path, field: str) -> None:
    pool_has, engine_has = OTHERS[field]
    with guard_with_a_pool(shm_dir) as guard:
        if field == "tp_size":
            # An engine of two ranks has two processes; the guard's answer to one of them says it all.
            reason = _refusal(guard, other_layout(tp_size=2))
        else:
            with engine(guard, other_layout(**{field: engine_has})) as (kv, memory):
                refused = kv._scheduler.refused
                assert refused is not None
                assert refused.code == "layout"
                reason = refused.reason
                # It serves cold: every call has a result, and none is an error.
                assert store(kv, memory, "second") == [BlockStatus.GONE] * BLOCKS
        assert (
            f"{field}: the pool in {guard.pool_dir} has {pool_has!r}, the engine has {engine_has!r}" in reason
        )
        with engine(guard) as (kv, _):
            assert found(kv, "first") == BLOCKS


def _refusal(guard: GuardProcess, layout: Layout) -> str:
    from kvcr.api import WorkerHandle

    memory = HostBlockMemory([np.zeros((1, layout.part_bytes), np.uint8)])
    config = EngineConfig(socket=guard.ready["socket"], namespace="test")
    handle = WorkerHandle(config, layout, memory, engine_id="two-ranks", rank=1)
    try:
        assert not handle.wait_connected(15.0)
        assert handle.refused is not None
        return handle.refused.reason
    finally:
        handle.close()


def test_discard_makes_a_new_pool_in_a_later_epoch(shm_dir: Path) -> None:
    with guard_with_a_pool(shm_dir, "--on-mismatch", "discard") as guard:
        epoch = guard.metrics()["kvcr_pool_epoch"]
        with engine(guard, other_layout(dtype="bfloat16")) as (kv, memory):
            assert kv.connected
            assert found(kv, "first") == 0
            assert store(kv, memory, "second") == [BlockStatus.OK] * BLOCKS
            assert guard.metrics()["kvcr_pool_epoch"] > epoch


@pytest.mark.parametrize("whose", ["guard", "engine"])
def test_fail_keeps_the_engine_from_starting_with_both_values_named(shm_dir: Path, whose: str) -> None:
    arguments = ["--on-mismatch", "fail"] if whose == "guard" else []
    config = {"on_mismatch": "fail"} if whose == "engine" else {}
    with guard_with_a_pool(shm_dir, *arguments) as guard:
        with (
            pytest.raises(MustFail, match=r"dtype: .* has 'float32', the engine has 'bfloat16'"),
            engine(guard, other_layout(dtype="bfloat16"), **config),
        ):
            pass
        # The pool, and the guard, are as they were.
        with engine(guard, **config) as (kv, _):
            assert found(kv, "first") == BLOCKS


def test_an_engine_that_comes_before_the_old_one_is_gone_is_not_failed(shm_dir: Path) -> None:
    """``fail`` is about layouts: what an upgrade does for a while anyway must not end an engine."""
    with (
        guard_with_a_pool(shm_dir, "--on-mismatch", "fail") as guard,
        engine(guard) as (old, memory),
        engine(guard, on_mismatch="fail") as (new, fresh),
    ):
        refused = new._scheduler.refused
        assert refused is not None
        assert refused.code == "busy"
        assert store(new, fresh, "second") == [BlockStatus.GONE] * BLOCKS
        assert store(old, memory, "third") == [BlockStatus.OK] * BLOCKS
        old.close()
        # It asks again by itself, and goes on warm.
        deadline_s = time.monotonic() + PATIENCE_S
        while not new.connected and time.monotonic() < deadline_s:
            new.poll()
            time.sleep(0.05)
        assert found(new, "first") == BLOCKS


@pytest.mark.parametrize("setting", ["cold", "discard"])
def test_a_rolling_upgrade_ends_nobody(shm_dir: Path, setting: str) -> None:
    """Engines of two versions come and go in turn: no start raises, the guard lives through all of it."""
    versions = [LAYOUT, other_layout(engine="test-2")]
    with GuardProcess(shm_dir, "g0", "--on-mismatch", setting, slots=64) as guard:
        for turn in range(6):
            with engine(guard, versions[turn % 2], on_mismatch=setting) as (kv, memory):
                expected = BlockStatus.GONE if setting == "cold" and turn % 2 else BlockStatus.OK
                assert store(kv, memory, f"turn {turn}") == [expected] * BLOCKS
        assert guard.process.poll() is None
        with engine(guard, versions[0]) as (kv, _):
            # Of the version that has the pool nothing was lost; a discarded pool has nothing left of before.
            assert found(kv, "turn 0") == (BLOCKS if setting == "cold" else 0)
