# SPDX-License-Identifier: Apache-2.0
"""An engine that ends in good order, and one whose scheduler is killed while its ranks end in good order."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_client import COMPONENTS, GuardProcess
from waiting import until

HERE = Path(__file__).parent

PROCESS = """
import sys
import numpy as np
from engine_client import LAYOUT
from kvcr.api import EngineConfig, HostBlockMemory, SchedulerHandle, WorkerHandle
socket, role = sys.argv[1:]
config = EngineConfig(socket=socket, namespace="test")
if role == "scheduler":
    handle = SchedulerHandle(config, LAYOUT, engine_id="engine", standing_blocks=4)
else:
    memory = HostBlockMemory([np.zeros((4, LAYOUT.part_bytes), np.uint8)])
    handle = WorkerHandle(config, LAYOUT, memory, engine_id="engine", rank=0)
assert handle.wait_connected(30.0)
print("up", flush=True)
sys.stdin.read()
handle.close()
"""


@contextlib.contextmanager
def part(guard: GuardProcess, role: str) -> Iterator[subprocess.Popen[str]]:
    """A scheduler or worker that is attached; it ends in good order when its input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, guard.ready["socket"], role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPONENTS), str(HERE)])},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def leave(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0


def is_active(guard: GuardProcess) -> bool:
    return guard.metrics().get('kvcr_guard_state{state="active"}') == 1


@pytest.fixture
def guard(shm_dir: Path) -> Iterator[GuardProcess]:
    with GuardProcess(shm_dir, "g0", slots=64) as running:
        yield running


def test_an_engine_that_ends_in_good_order_did_not_fail(guard: GuardProcess) -> None:
    with part(guard, "scheduler") as scheduler, part(guard, "worker") as worker:
        leave(worker)
        leave(scheduler)
        until(lambda: is_active(guard), "the pool is the guard's")
    assert guard.metrics()["kvcr_failovers_total"] == 0


def test_a_scheduler_that_is_killed_is_a_failure_also_when_its_ranks_end_in_good_order(
    guard: GuardProcess,
) -> None:
    with part(guard, "scheduler") as scheduler, part(guard, "worker") as worker:
        scheduler.kill()
        scheduler.wait()
        leave(worker)
        assert not list((guard.pool_dir / "writers").iterdir())
        until(lambda: is_active(guard), "the engine is taken over")
    assert guard.metrics()["kvcr_failovers_total"] == 1
