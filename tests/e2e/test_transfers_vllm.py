# SPDX-License-Identifier: Apache-2.0
"""Transfers and a real vLLM engine: what should leave no trace does not, and nobody else waits for them."""

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

from tests.e2e.offline_engine import OfflineEngine
from tests.e2e.processes import SHM, Child, start_guard
from tests.e2e.test_connector_vllm import G1_BLOCKS, POOL_BYTES, PROMPT_BLOCKS, prompt
from tests.e2e.tiny_model import BLOCK_SIZE, tiny_model
from tests.integration.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

READY = 'kvcr_pool_slots{state="ready"}'


@dataclass
class Side:
    engine: OfflineEngine
    guard: Child
    control: str
    metrics_url: str

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def compute(self, text: list[int]) -> dict[str, Any]:
        """The answer to a prompt, once the prompt is in the pool."""
        before = self.metrics()[READY]
        (cold,) = self.engine.generate([text])
        assert self.wait_metric(READY, before + PROMPT_BLOCKS) == before + PROMPT_BLOCKS
        return cold

    def wait_metric(self, name: str, value: float) -> float:
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := self.metrics().get(name, 0.0)) != value and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    logs = tmp_path_factory.mktemp("transfers")
    model = tiny_model()
    made: list[Side] = []
    pools: list[Path] = []
    try:
        for name in ("a", "b"):
            pool = SHM / f"kvcr-transfers-{logs.name}-{name}"
            pools.append(pool)
            guard, ready = start_guard(f"transfers-{name}", pool, POOL_BYTES, logs)
            extra = {
                "socket": ready["socket"],
                "load_deadline_ms": 10_000,
                "lease_wait_ms": 5000,
                "local_estimate": False,
            }
            engine = OfflineEngine(
                model, logs / f"{name}.log", extra=extra, num_gpu_blocks_override=G1_BLOCKS, max_num_seqs=16
            )
            made.append(Side(engine, guard, ready["control"], ready["metrics"]))
        for side in made:
            side.engine.wait_ready()
        yield made[0], made[1]
    finally:
        for side in made:
            side.engine.close()
            side.guard.stop()
        for pool in pools:
            shutil.rmtree(pool, ignore_errors=True)


def sources(*sides: tuple[Side, int, int], **more: Any) -> dict[str, Any]:
    named = [{"endpoint": side.control, "first": first, "count": count} for side, first, count in sides]
    return {"kvcr": {"sources": named, **more}}


def test_a_one_off_turn_is_pulled_answered_and_leaves_nothing(sides: tuple[Side, Side]) -> None:
    a, b = sides
    text = prompt(201)
    cold = a.compute(text)
    before = b.metrics()
    once = sources((a, 0, PROMPT_BLOCKS), no_retain=True)
    (pulled,) = b.engine.generate([text], params=once)
    assert (pulled["cached"], pulled["tokens"]) == (PROMPT_BLOCKS * BLOCK_SIZE, cold["tokens"])
    for counter in ('kvcr_transit_blocks_total{how="in_place"}', 'kvcr_pulled_blocks_total{transport="shm"}'):
        expected = before.get(counter, 0.0) + PROMPT_BLOCKS
        assert b.wait_metric(counter, expected) == expected
    assert b.wait_metric('kvcr_transit_slots{kind="used"}', 0) == 0
    after = b.metrics()
    # Neither the prompt nor the answer is in the pool, and no router was told of anything.
    assert after[READY] == before[READY]
    assert after["kvcr_deposited_blocks_total"] == before["kvcr_deposited_blocks_total"]
    assert after["kvcr_inventory_sequence"] == before["kvcr_inventory_sequence"]


def test_a_one_off_turn_without_a_source_stores_nothing_either(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    before = a.metrics()
    a.engine.generate([prompt(202)], params={"kvcr": {"no_retain": True}})
    time.sleep(0.5)
    after = a.metrics()
    assert after["kvcr_deposited_blocks_total"] == before["kvcr_deposited_blocks_total"]
    assert after[READY] == before[READY]


def test_other_requests_go_on_while_one_waits_for_its_blocks(sides: tuple[Side, Side]) -> None:
    """Half of the blocks are said to be at a guard that is stopped: the load waits for it for a second."""
    a, b = sides
    text = prompt(203)
    a.compute(text)
    warm = prompt(204, blocks=1)
    b.engine.generate([warm], max_tokens=4)
    stopped, ready = start_guard(
        "transfers-c", SHM / f"kvcr-transfers-c-{os.getpid()}", 8 << 20, a.guard.log.parent
    )
    try:
        # The link to it has to wait for an answer to its hello.
        os.kill(stopped.pid, signal.SIGSTOP)
        half = PROMPT_BLOCKS // 2
        params = {
            "kvcr": {
                "sources": [
                    {"endpoint": a.control, "first": 0, "count": half},
                    {"endpoint": ready["control"], "first": half, "count": PROMPT_BLOCKS - half},
                ],
                "deadline_ms": 3000,
            }
        }
        slow, other = b.engine.timeline(
            [
                {"prompt": text, "max_tokens": 2, "params": params},
                {"prompt": prompt(205, blocks=1), "max_tokens": 40},
            ]
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped.pid, signal.SIGCONT)
        stopped.stop()
        shutil.rmtree(SHM / f"kvcr-transfers-c-{os.getpid()}", ignore_errors=True)
    print(
        f"the one that waited: first token at {slow[0]:.2f} s; the other: {other[0]:.2f} to {other[-1]:.2f} s"
    )
    assert len(other) == 40
    # The one that needed nothing had tokens long before the first one of the one that waited.
    assert sum(at < slow[0] for at in other) >= 10


def test_an_idle_engine_does_not_step(sides: tuple[Side, Side]) -> None:
    _, b = sides
    b.engine.generate([prompt(206)])
    # vLLM's workers poll for a second or two after their last message; where others compute, for longer.
    for _ in range(5):
        time.sleep(4.0)
        before = cpu_s(b.engine.pid)
        time.sleep(4.0)
        used = cpu_s(b.engine.pid) - before
        print(f"idle engine, all processes: {100 * used / 4.0:.1f} % of a core")
        if used < 0.4:
            break
    # Stepping when idle, as other connectors make it, takes 50 to 70 % of a core.
    assert used < 0.4


def cpu_s(pid: int) -> float:
    """User and system time of a process and all below it."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            child = int(path.parent.name)
            children.setdefault(int(fields[1]), []).append(child)
            ticks[child] = int(fields[11]) + int(fields[12])
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        total += ticks.get(one, 0)
        todo += children.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")
