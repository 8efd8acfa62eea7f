# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks, each a process, deposit and load as one, and die as one.

The scheduler is this process. What it does with two results is what vLLM does: a request is loaded when both
ranks said so, and a block that is bad on one of them is bad.
"""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_client import LAYOUT, GuardProcess, chain
from rank_process import Rank
from waiting import BUSY_S, PATIENCE_S, until

from kvcr.api import EngineConfig, LoadSpec, SaveSpec, SchedulerHandle, Source
from kvcr.keys import BlockKey, pack_keys
from kvcr.pool import Pool, checksum_parts
from kvcr.protocol.engine import BlockStatus

RANKS = 2
TWO = msgspec.structs.replace(LAYOUT, tp_size=RANKS)
BLOCKS = 32
OK = int(BlockStatus.OK)


class Engine:
    """Scheduler here, ranks elsewhere."""

    def __init__(self, guard: GuardProcess, ranks: list[Rank], engine_id: str) -> None:
        self.guard = guard
        self.ranks = ranks
        self._jobs = 0
        self.scheduler = SchedulerHandle(
            EngineConfig(socket=guard.ready["socket"], namespace="test"),
            TWO,
            engine_id=engine_id,
            standing_blocks=16,
        )
        assert self.scheduler.wait_connected(PATIENCE_S)
        assert all(rank.ask("connected") for rank in ranks)
        until(self.has_grants, "slots are granted")

    def has_grants(self) -> bool:
        self.scheduler.poll()
        return self.scheduler.grants_available >= 8

    def save_spec(self, keys: list[BlockKey], root: bytes) -> SaveSpec:
        until(self.has_grants, "slots are granted")
        grants = self.scheduler.take_grants(len(keys))
        assert len(grants) == len(keys)
        self._jobs += 1
        return SaveSpec(
            job_id=self._jobs,
            request_id=f"save-{self._jobs}",
            pool_token=grants.pool_token,
            epoch=grants.epoch,
            slots=grants.slots.astype("<i4").tobytes(),
            generations=grants.generations.astype("<u8").tobytes(),
            block_ids=np.arange(len(keys), dtype="<i4").tobytes(),
            keys=pack_keys(keys),
            parents=pack_keys([BlockKey(root), *keys[:-1]]),
            engine_hashes=np.arange(len(keys), dtype="<u8").tobytes(),
            positions=np.arange(len(keys), dtype="<u4").tobytes(),
        )

    def deposit(self, keys: list[BlockKey], root: bytes) -> None:
        spec = self.save_spec(keys, root)
        for rank in self.ranks:
            rank.save(spec, keys)
        until(lambda: self.visible(keys) == len(keys), "the blocks are published")

    def visible(self, keys: list[BlockKey]) -> int:
        return int(self.scheduler.lookup(pack_keys(keys)).sum())

    def load(
        self, keys: list[BlockKey], deadline_s: float = 5.0, **spec: object
    ) -> tuple[list[tuple[list[int], float, list[bool]]], list[bool]]:
        """What each rank says, and which blocks are good on all of them."""
        load = LoadSpec(
            request_id=f"load-{uuid.uuid4().hex}",
            first=0,
            keys=pack_keys(keys),
            block_ids=np.arange(len(keys), dtype="<i4").tobytes(),
            deadline_s=deadline_s,
            prefix_only=False,
        )
        load = msgspec.structs.replace(load, **spec)
        for rank in self.ranks:
            rank.load(load)
        results = [rank.loaded(keys) for rank in self.ranks]
        good = [all(result[0][row] == OK for result in results) for row in range(len(keys))]
        return results, good

    def granted(self) -> int:
        return int(self.guard.metrics()['kvcr_pool_slots{state="granted"}'])


@contextlib.contextmanager
def engine(guard: GuardProcess) -> Iterator[Engine]:
    engine_id = f"engine-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Rank(guard.ready["socket"], TWO, engine_id, rank, BLOCKS))
            for rank in range(RANKS)
        ]
        running = Engine(guard, ranks, engine_id)
        stack.callback(running.scheduler.close)
        yield running


@pytest.fixture
def guard(shm_dir: Path) -> Iterator[GuardProcess]:
    with GuardProcess(shm_dir, "g0", slots=96, layout=TWO) as running:
        yield running


def state(guard: GuardProcess) -> str:
    samples = guard.metrics().items()
    return next(n for n, v in samples if n.startswith("kvcr_guard_state{") and v).partition('"')[2][:-2]


def test_a_block_is_visible_when_both_ranks_wrote_it_and_each_loads_its_own_part(guard: GuardProcess) -> None:
    root, keys = chain(12, "both")
    with engine(guard) as two:
        spec = two.save_spec(keys, root)
        two.ranks[1].save(spec, keys)
        time.sleep(0.3)
        assert two.visible(keys) == 0
        two.ranks[0].save(spec, keys)
        until(lambda: two.visible(keys) == 12, "both ranks have filled them")
        results, good = two.load(keys)
        assert all(good)
        assert [right for _, _, right in results] == [[True] * 12] * 2


def test_a_rank_that_fails_to_store_fails_the_block_on_all_and_frees_its_slot_when_all_are_done(
    guard: GuardProcess,
) -> None:
    root, keys = chain(6, "broken store")
    with engine(guard) as two:
        until(lambda: two.granted() == 16, "the standing grants are there")
        two.ranks[1].ask("break_copies", "store")
        spec = two.save_spec(keys, root)
        two.ranks[1].save(spec, keys)
        time.sleep(0.3)
        # Rank 0 may be writing to these slots: nobody else may get them.
        assert guard.metrics().get("kvcr_returned_blocks_total", 0) == 0
        two.ranks[0].save(spec, keys)
        until(lambda: guard.metrics()["kvcr_returned_blocks_total"] == 6, "the slots are free again")
        assert two.visible(keys) == 0
        two.ranks[1].ask("break_copies", "")
        two.deposit(keys, root)
        results, good = two.load(keys)
        assert all(good)
        assert [right for _, _, right in results] == [[True] * 6] * 2
        until(lambda: two.has_grants() and two.granted() <= 16, "no slot is lost")


def test_a_part_that_rots_on_one_rank_is_a_failure_of_the_block_and_of_no_other(guard: GuardProcess) -> None:
    root, keys = chain(8, "rots")
    with engine(guard) as two:
        two.deposit(keys, root)
        _damage(guard, two, keys[3], rank=1)
        results, good = two.load(keys)
        assert good == [row != 3 for row in range(8)]
        assert results[0][0] == [OK] * 8
        assert results[1][0][3] == BlockStatus.FAILED
        # The guard takes it out of use for both.
        until(lambda: two.visible(keys) == 7, "the block is gone")
        results, good = two.load(keys)
        assert results[0][0][3] == results[1][0][3] == BlockStatus.MISS


def test_a_device_that_fails_to_load_on_one_rank_fails_the_load(guard: GuardProcess) -> None:
    root, keys = chain(8, "broken load")
    with engine(guard) as two:
        two.deposit(keys, root)
        two.ranks[0].ask("break_copies", "load")
        results, good = two.load(keys)
        assert not any(good)
        assert results[1][0] == [OK] * 8
        two.ranks[0].ask("break_copies", "")
        assert all(two.load(keys)[1])


def test_both_ranks_end_a_load_that_does_not_come_by_its_deadline(guard: GuardProcess, shm_dir: Path) -> None:
    root, keys = chain(8, "late")
    with GuardProcess(shm_dir, "g1", slots=96, layout=TWO) as other, engine(other) as source:
        source.deposit(keys, root)
        with engine(guard) as two:
            other.process.send_signal(signal.SIGSTOP)
            two.scheduler.fetch(
                "late",
                first=0,
                parent=root,
                keys=pack_keys(keys),
                engine_hashes=np.zeros(len(keys), np.uint64),
                sources=[Source(other.endpoint, 0, len(keys))],
                deadline_ms=60_000.0,
            )
            results, good = two.load(
                keys, deadline_s=1.0, request_id="late", fetching=True, fetch_count=len(keys)
            )
            assert not any(good)
            for statuses, seconds, right in results:
                assert set(statuses) <= {BlockStatus.TOO_SLOW, BlockStatus.MISS, BlockStatus.GONE}
                assert seconds < 1.0 + BUSY_S
                assert not any(right), "a byte was written to a block that was given up"
            other.process.send_signal(signal.SIGCONT)
            two.scheduler.finish("late")


def test_ranks_pull_a_peers_blocks_each_its_own_part(guard: GuardProcess, shm_dir: Path) -> None:
    root, keys = chain(8, "pulled")
    with GuardProcess(shm_dir, "g1", slots=96, layout=TWO) as other, engine(other) as source:
        source.deposit(keys, root)
        with engine(guard) as two:
            two.scheduler.fetch(
                "pull",
                first=0,
                parent=root,
                keys=pack_keys(keys),
                engine_hashes=np.zeros(len(keys), np.uint64),
                sources=[Source(other.endpoint, 0, len(keys))],
                deadline_ms=30_000.0,
            )
            results, good = two.load(
                keys, deadline_s=30.0, request_id="pull", fetching=True, fetch_count=len(keys)
            )
            assert all(good)
            assert [right for _, _, right in results] == [[True] * 8] * 2


def test_one_rank_killed_is_no_death_of_the_engine_until_the_other_is_gone_too(guard: GuardProcess) -> None:
    root, keys = chain(8, "kept")
    _, half = chain(6, "half")
    with engine(guard) as two:
        two.deposit(keys, root)
        spec = two.save_spec(half, root)
        two.ranks[0].save(spec, half)
        epoch = guard.metrics()["kvcr_pool_epoch"]
        two.ranks[1].kill()
        two.scheduler.close()
        # Rank 0 can still write to every slot it was granted.
        time.sleep(1.5)
        assert state(guard) in ("standby", "checking")
        assert (two.granted() > 0, guard.metrics()["kvcr_pool_epoch"]) == (True, epoch)
        two.ranks[0].kill()
        until(lambda: state(guard) == "active", "both are dead")
        assert two.granted() == 0
        assert guard.metrics()["kvcr_pool_epoch"] == epoch + 1
        assert not list((guard.pool_dir / "writers").iterdir())
    with engine(guard) as again:
        assert again.visible(half) == 0
        results, good = again.load(keys)
        assert all(good)
        assert [right for _, _, right in results] == [[True] * 8] * 2


def test_a_rank_that_restarts_the_guard_outlives_fills_are_joined_over_the_restart(
    guard: GuardProcess, shm_dir: Path
) -> None:
    root, keys = chain(6, "over a restart")
    with engine(guard) as two:
        spec = two.save_spec(keys, root)
        two.ranks[0].save(spec, keys)
        guard.process.kill()
        guard.process.wait()
        two.ranks[1].save(spec, keys)
        with GuardProcess(shm_dir, "g0", slots=96, layout=TWO):
            until(lambda: two.visible(keys) == 6, "the new guard heard of both parts")
            results, good = two.load(keys)
            assert all(good)
            assert [right for _, _, right in results] == [[True] * 6] * 2


def _damage(guard: GuardProcess, two: Engine, key: BlockKey, rank: int) -> None:
    """Change a byte of one rank's part in the file, as bad memory would."""
    mapping = two.scheduler._link.resources
    assert mapping is not None
    (slot,) = mapping.reader.lookup(pack_keys([key])).slots.tolist()
    geometry = mapping.reader.geometry
    with (guard.pool_dir / "data").open("r+b") as file:
        file.seek(rank * geometry.region_bytes + slot * geometry.part_stride + 1000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_the_directory_holds_a_checksum_of_each_rank(guard: GuardProcess) -> None:
    root, keys = chain(4, "sums")
    with engine(guard) as two:
        two.deposit(keys, root)
    guard.process.send_signal(signal.SIGTERM)
    guard.process.wait()
    pool = Pool.attach(guard.pool_dir, guard_incarnation=9)
    slots = pool.lookup(pack_keys(keys)).slots
    sums = pool.checksums(slots)
    assert sums.shape == (4, RANKS)
    for rank in range(RANKS):
        assert (checksum_parts(pool.data(rank).array, slots, pool.layout.part_bytes) == sums[:, rank]).all()
    assert (sums[:, 0] != sums[:, 1]).all()
    pool.close()
