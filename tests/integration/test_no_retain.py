# SPDX-License-Identifier: Apache-2.0
"""Blocks fetched for one request alone: from one real guard, past another, into engine memory, and gone."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from engine_client import LAYOUT, EngineClient, GuardProcess, chain, content, guards
from waiting import PATIENCE_S, until

from kvcr.client import HostBlockMemory, LoadResult, LoadSpec, SchedulerHandle, WorkerHandle
from kvcr.config import EngineConfig
from kvcr.keys import BlockKey, pack_keys
from kvcr.protocol.engine import BlockStatus, Source
from kvcr.transfer import nixl

OK, FAILED = BlockStatus.OK, BlockStatus.FAILED
TRANSIT_USED = 'kvcr_transit_slots{kind="used"}'
READY = 'kvcr_pool_slots{state="ready"}'
needs_nixl = pytest.mark.skipif(bool(nixl.import_error()), reason=nixl.import_error())


@dataclass
class Engine:
    """The two halves of an engine whose memory is an array."""

    scheduler: SchedulerHandle
    worker: WorkerHandle
    memory: np.ndarray
    guard: GuardProcess

    def fetch(self, request_id: str, keys: Sequence[BlockKey], root: bytes, sources: list[Source]) -> None:
        self.scheduler.fetch(
            request_id,
            first=0,
            parent=root,
            keys=pack_keys(keys),
            engine_hashes=np.zeros(len(keys), np.uint64),
            sources=sources,
            deadline_ms=30_000,
            no_retain=True,
        )
        state = self.scheduler.fetch_state(request_id)
        assert state is not None
        until(lambda: self.scheduler.poll() or state.settled, "the fetch is settled", every_s=0.002)

    def load(self, request_id: str, keys: Sequence[BlockKey]) -> LoadResult:
        self.memory[:] = 0
        self.worker.submit_load(
            LoadSpec(
                request_id=request_id,
                first=0,
                keys=pack_keys(keys),
                block_ids=np.arange(len(keys), dtype="<i4").tobytes(),
                deadline_s=30.0,
                fetching=True,
                fetch_first=0,
                fetch_count=len(keys),
                prefix_only=False,
            )
        )
        results: list[LoadResult] = []
        until(lambda: results.extend(self.worker.take_loads()) or results, "the load is over", every_s=0.002)
        return results[0]

    def has(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [
            bool((self.memory[index] == content(key, LAYOUT.part_bytes)).all())
            for index, key in enumerate(keys)
        ]


@contextlib.contextmanager
def a_source_and_an_engine(
    directory: Path, count: int, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[tuple[EngineClient, Engine, bytes, list[BlockKey], list[Source]]]:
    with (
        guards(directory, "a", "b", arguments=arguments, env=env) as (a, b),
        EngineClient(a, "engine-a") as source,
        contextlib.ExitStack() as stack,
    ):
        root, keys = chain(count, "tenant")
        source.deposit(keys, root)
        config = EngineConfig(socket=b.ready["socket"])
        memory = np.zeros((count, LAYOUT.part_bytes), np.uint8)
        scheduler = SchedulerHandle(config, LAYOUT, engine_id="engine-b", standing_blocks=4)
        stack.callback(scheduler.close)
        worker = WorkerHandle(config, LAYOUT, HostBlockMemory([memory]), engine_id="engine-b")
        stack.callback(worker.close)
        assert scheduler.wait_connected(PATIENCE_S)
        assert worker.wait_connected(PATIENCE_S)
        yield source, Engine(scheduler, worker, memory, b), root, keys, [Source(a.endpoint, 0, count)]


def assert_nothing_is_left(engine: Engine, source: EngineClient, transport: str, blocks: int) -> None:
    """Nothing in the pool, nothing told to routers, and both sides count the same."""
    label = f'{{transport="{transport}"}}'
    assert engine.guard.wait_metric(f"kvcr_pulled_blocks_total{label}", blocks) == blocks
    assert source.guard.wait_metric(f"kvcr_served_blocks_total{label}", blocks) == blocks
    until(lambda: engine.guard.metrics()[TRANSIT_USED] == 0, "no transit slot is used")
    metrics = engine.guard.metrics()
    assert metrics[READY] == 0
    # The engine's standing grants are all that is granted.
    assert metrics['kvcr_pool_slots{state="granted"}'] <= 8
    assert metrics['kvcr_pool_slots{state="quarantined"}'] == 0
    assert metrics["kvcr_inventory_sequence"] == 0


def test_over_shm_blocks_go_straight_from_the_peers_pool_to_the_engine(directory: Path) -> None:
    with a_source_and_an_engine(directory, 60) as (source, engine, root, keys, sources):
        engine.fetch("once", keys, root, sources)
        result = engine.load("once", keys)
        assert set(result.statuses.tolist()) == {OK}
        assert all(engine.has(keys))
        assert engine.guard.wait_metric('kvcr_transit_blocks_total{how="in_place"}', 60) == 60
        assert 'kvcr_transit_blocks_total{how="slot"}' not in engine.guard.metrics()
        assert_nothing_is_left(engine, source, "shm", 60)
        engine.scheduler.finish("once")
        # And is not there the next time.
        engine.fetch("again", keys, root, sources)
        assert set(engine.load("again", keys).statuses.tolist()) == {OK}
        assert_nothing_is_left(engine, source, "shm", 120)


@needs_nixl
def test_over_nixl_a_long_prompt_passes_through_a_few_slots(directory: Path) -> None:
    arguments = ["--transport", "nixl", "--transit-slots", "8"]
    with a_source_and_an_engine(directory, 60, *arguments) as (source, engine, root, keys, sources):
        engine.fetch("once", keys, root, sources)
        # Nobody has taken any yet: as many wait as are allowed.
        assert engine.guard.wait_metric('kvcr_transit_slots{kind="used"}', 8) == 8
        assert engine.guard.metrics()[READY] == 0
        result = engine.load("once", keys)
        assert set(result.statuses.tolist()) == {OK}
        assert all(engine.has(keys))
        assert engine.guard.wait_metric('kvcr_transit_blocks_total{how="slot"}', 60) == 60
        # Freed as soon as the engine has the bytes, and not when the request is over.
        assert_nothing_is_left(engine, source, "nixl", 60)
        engine.scheduler.finish("once")


@pytest.mark.parametrize("transport", ["shm", pytest.param("nixl", marks=needs_nixl)])
def test_a_request_that_ends_before_its_load_leaves_nothing(directory: Path, transport: str) -> None:
    with a_source_and_an_engine(directory, 30, "--transport", transport) as (_, engine, root, keys, sources):
        for number in range(20):
            engine.fetch(f"r{number}", keys, root, sources)
            engine.scheduler.finish(f"r{number}")
        until(lambda: engine.guard.metrics()[TRANSIT_USED] == 0, "no transit slot is used")
        until(lambda: engine.guard.metrics()['kvcr_pool_slots{state="granted"}'] <= 8, "no slot is lost")
        assert engine.guard.metrics()[READY] == 0


def test_a_block_that_is_damaged_at_its_source_is_found_by_the_engine(directory: Path) -> None:
    with a_source_and_an_engine(directory, 20) as (source, engine, root, keys, sources):
        slot = int(source.reader.lookup(pack_keys(keys[5:6])).slots[0])
        source.region.array[slot, 100] ^= 0xFF
        engine.fetch("once", keys, root, sources)
        result = engine.load("once", keys)
        assert result.statuses.tolist() == [OK] * 5 + [FAILED] + [OK] * 14
        assert engine.has(keys) == [True] * 5 + [False] + [True] * 14
        engine.scheduler.finish("once")
        # Told with the release: the source checks, and takes it out of use.
        assert source.guard.wait_metric('kvcr_pool_slots{state="quarantined"}', 1) == 1
        assert_nothing_is_left(engine, source, "shm", 19)


def test_where_the_engine_cannot_read_the_peers_pool_blocks_take_the_way_through_slots(
    directory: Path,
) -> None:
    with a_source_and_an_engine(directory, 20) as (source, engine, root, keys, sources):
        engine.fetch("contact", keys[:1], root, sources)
        assert engine.load("contact", keys[:1]).statuses.tolist() == [OK]
        engine.scheduler.finish("contact")
        # The guards have it open; the engine, which has not, finds no pool there: the first bytes say so.
        engine.worker._loader._foreign._pools.clear()
        with (source.directory / "meta").open("r+b") as meta:
            meta.write(b"x")
        engine.fetch("once", keys, root, sources)
        assert set(engine.load("once", keys).statuses.tolist()) == {FAILED}
        engine.scheduler.finish("once")
        engine.fetch("again", keys, root, sources)
        assert set(engine.load("again", keys).statuses.tolist()) == {OK}
        assert all(engine.has(keys))
        engine.scheduler.finish("again")
        assert engine.guard.wait_metric('kvcr_transit_blocks_total{how="slot"}', 20) == 20


@needs_nixl
def test_blocks_reach_engine_memory_while_the_pull_goes_on(directory: Path) -> None:
    """Half of the blocks are at a guard whose NIXL process is stopped; the others are loaded before it is
    given up, which takes 5 s at least."""
    arguments, tcp = ["--transport", "nixl"], {"UCX_TLS": "tcp,self"}
    with (
        a_source_and_an_engine(directory, 40, *arguments, env=tcp) as (_, engine, root, keys, sources),
        guards(directory, "c", arguments=arguments, env=tcp) as (c,),
        EngineClient(c, "engine-c") as silent,
    ):
        more_root, more = chain(80, "tenant")
        assert (more_root, more[:40]) == (root, keys)
        silent.deposit(more[40:], more[39], first=40)
        # The way to the first is open and warm.
        engine.fetch("contact", keys[:1], root, sources)
        assert engine.load("contact", keys[:1]).statuses.tolist() == [OK]
        engine.scheduler.finish("contact")
        c_nixl = c.nixl_pid()
        os.kill(c_nixl, signal.SIGSTOP)
        state = engine.scheduler.fetch(
            "r",
            first=0,
            parent=root,
            keys=pack_keys(more),
            engine_hashes=np.zeros(80, np.uint64),
            sources=[*sources, Source(c.endpoint, 40, 40)],
            deadline_ms=30_000,
        )
        engine.worker.submit_load(
            LoadSpec(
                request_id="r",
                first=0,
                keys=pack_keys(keys),
                block_ids=np.arange(40, dtype="<i4").tobytes(),
                deadline_s=30.0,
                fetching=True,
                fetch_first=0,
                fetch_count=80,
            )
        )
        results: list[LoadResult] = []
        until(lambda: results.extend(engine.worker.take_loads()) or results, "the load is over")
        engine.scheduler.poll()
        ended_first = not state.final
        assert set(results[0].statuses.tolist()) == {OK}
        assert all(engine.has(keys))
        assert ended_first
        os.kill(c_nixl, signal.SIGCONT)
        until(lambda: engine.scheduler.poll() or state.final, "the fetch is over")
