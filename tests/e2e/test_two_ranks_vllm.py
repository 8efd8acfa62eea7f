# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine of two tensor-parallel ranks with our connector: stored, restored and lost as one.

On the CPU build, with a tiny model that has one KV head for each rank. Such an engine was seen to hang at its
end, with a rank spinning: everything here has a time-out, and ranks are ended by their pids.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcr.keys import KeySpace, extend_chain
from kvcr.pool import PoolReader, writers_of
from tests.e2e.offline_engine import OfflineEngine
from tests.e2e.processes import SHM, Child, eventually, session_members, start_guard
from tests.e2e.test_connector_vllm import PROMPT_BLOCKS, in_pool, prompt
from tests.e2e.tiny_model import BLOCK_SIZE, tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

POOL_BYTES = 16 << 20


@dataclass
class Two:
    engine: OfflineEngine
    guard: Child
    pool: Path
    metrics_url: str

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        found = (line.rpartition(" ")[2] for line in lines if line.startswith(name + " "))
        return float(next(found, "0"))

    def generate(self, tokens: list[int]) -> dict[str, Any]:
        (output,) = self.engine.generate([tokens])
        return output


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    model = tiny_model()
    pool = SHM / f"kvcr-tp-{os.getpid()}"
    guard, ready = start_guard("tp", pool, POOL_BYTES, tmp_path)
    extra = {"socket": ready["socket"], "load_deadline_ms": 20_000, "lease_wait_ms": 5000}
    engine = OfflineEngine(
        model,
        tmp_path / "engine.log",
        extra=extra,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
        num_gpu_blocks_override=256,
        max_num_seqs=8,
    )
    mapped: set[int] = set()
    try:
        engine.wait_ready()
        mapped = _mapped(engine)
        yield Two(engine, guard, pool, ready["metrics"])
    finally:
        engine.close()
        guard.stop()
        shutil.rmtree(pool, ignore_errors=True)
        # A rank that was killed leaves its semaphores and message queues behind.
        for file in SHM.iterdir():
            if file.is_file() and file.stat().st_ino in mapped:
                file.unlink(missing_ok=True)


def test_two_ranks_of_a_real_engine_store_restore_fail_and_die_as_one(two: Two) -> None:
    ranks = [path for paths in writers_of(two.pool).values() for path in paths]
    assert {path.name.rpartition(".")[2] for path in ranks} == {"0", "1"}

    # Stored by both, restored by both.
    text = prompt(1)
    cold = two.generate(text)
    assert cold["cached"] == 0
    eventually(lambda: in_pool(two.pool, text) == PROMPT_BLOCKS, "both ranks have stored it")
    two.engine.reset_g1()
    restored = two.generate(text)
    assert restored["cached"] == PROMPT_BLOCKS * BLOCK_SIZE
    assert restored["tokens"] == cold["tokens"]

    # A byte that rots in one rank's part fails the block on both: computed again, and the answer is the same.
    _damage(two.pool, text, position=9, rank=1)
    two.engine.reset_g1()
    assert two.generate(text)["tokens"] == cold["tokens"]
    eventually(lambda: two.metric('kvcr_corrupt_blocks_total{where="load"}') == 1, "the guard heard of it")

    # One rank is killed: vLLM ends the engine, and the guard takes over when the last of them is gone.
    victim = _holder(two.pool, rank=1)
    os.kill(victim, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while two.metric('kvcr_guard_state{state="active"}') != 1:
        if time.monotonic() > deadline_s - 30:
            # A rank that spins on after its engine ended is what an operator would end.
            for rank in (0, 1):
                if (holder := _holder(two.pool, rank)) > 0:
                    os.kill(holder, signal.SIGKILL)
        assert time.monotonic() < deadline_s, "the guard is not ACTIVE"
        time.sleep(0.2)
    assert two.metric('kvcr_pool_slots{state="granted"}') == 0
    assert two.metric("kvcr_failovers_total") == 1
    assert not writers_of(two.pool)


def _mapped(engine: OfflineEngine) -> set[int]:
    """Inodes of the files in shared memory that the engine's processes have mapped."""
    found: set[int] = set()
    for pid in session_members(engine.pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if f" {SHM}/" in line:
                    found.add(int(line.split()[4]))
    return found


def _holder(pool: Path, rank: int) -> int:
    """Pid of the process that holds the writer lock of a rank, 0 if nobody does."""
    for paths in writers_of(pool).values():
        for path in paths:
            if path.name.endswith(f".{rank}"):
                inode = path.stat().st_ino
                for line in Path("/proc/locks").read_text().splitlines():
                    # "1: POSIX  ADVISORY  WRITE 1234 00:19:5678 0 EOF"
                    _, kind, _, _, pid, file = line.split()[:6]
                    if kind == "POSIX" and file.endswith(f":{inode}"):
                        return int(pid)
    return 0


def _damage(pool: Path, tokens: list[int], position: int, rank: int) -> None:
    """Flip a byte of one rank's part of a block, as bad memory would."""
    reader = PoolReader.open(pool)
    try:
        keys = extend_chain(KeySpace("dynamo", reader.layout.model).root(), tokens, BLOCK_SIZE)
        slots, _ = reader.lookup(keys[position])
        assert slots[0] >= 0
        geometry = reader.geometry
        with (pool / "data").open("r+b") as data:
            data.seek(rank * geometry.region_bytes + int(slots[0]) * geometry.part_stride + 1000)
            byte = data.read(1)
            data.seek(-1, 1)
            data.write(bytes([byte[0] ^ 0xFF]))
    finally:
        reader.close()
