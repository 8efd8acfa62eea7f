# SPDX-License-Identifier: Apache-2.0
"""A pool that is full: answers at once, never takes what is in use, and goes on when something is let go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcr.policy import DefaultPolicy, Resident, Watermarks
from kvcr.pool import COOLING_S, Granted, Pool, PoolReader, SlotState
from tests.unit.pools import commit, create, found, keys, store

SLOTS = 64


class Counting(DefaultPolicy):
    """The default policy, and how often it was asked for victims."""

    def __init__(self, low: float = 1 / 32, high: float = 1 / 8) -> None:
        super().__init__(low=low, high=high)
        self.asked: list[int] = []

    def victims(self, resident: Resident, count: int, now_s: float) -> npt.NDArray[np.int32]:
        self.asked.append(count)
        return super().victims(resident, count, now_s)


def full(tmp_path: Path, policy: DefaultPolicy) -> tuple[Pool, Granted]:
    """A pool in which every slot holds a block."""
    pool = create(tmp_path, SLOTS, policy=policy)
    granted = pool.allocate(SLOTS, 0.0)
    assert len(granted.slots) == SLOTS
    assert commit(pool, granted, list(range(SLOTS))).committed.all()
    return pool, granted


def test_a_pool_with_everything_in_use_answers_at_once_with_nothing(tmp_path: Path) -> None:
    policy = Counting()
    pool, granted = full(tmp_path, policy)
    assert pool.lease(*granted).all()
    asked = len(policy.asked)
    got = pool.allocate(SLOTS, 10.0)
    assert len(got.slots) == 0
    # One look for victims, not a loop until there is one.
    assert len(policy.asked) == asked + 1
    assert pool.counts()[SlotState.READY] == SLOTS
    assert not pool.evicted_blocks
    pool.check_invariants()


def test_it_goes_on_as_soon_as_one_lease_ends(tmp_path: Path) -> None:
    pool, granted = full(tmp_path, Counting(low=1 / 32, high=1 / 32))
    assert pool.lease(*granted).all()
    assert len(pool.allocate(1, 10.0).slots) == 0
    one = Granted(granted.slots[5:6], granted.generations[5:6])
    pool.unlease(*one)
    # The one that is free to go is evicted at the next question, and granted when it has cooled.
    assert len(pool.allocate(1, 11.0).slots) == 0
    assert not any(found(pool, 5))
    got = pool.allocate(1, 11.0 + COOLING_S)
    assert got.slots.tolist() == one.slots.tolist()
    assert sum(found(pool, *range(SLOTS))) == SLOTS - 1
    pool.check_invariants()


def test_granted_slots_are_never_victims(tmp_path: Path) -> None:
    pool = create(tmp_path, SLOTS, policy=Counting())
    held = pool.allocate(SLOTS, 0.0, engine_id="engine-1")
    assert len(held.slots) == SLOTS
    for second in range(1, 5):
        assert len(pool.allocate(8, 10.0 * second).slots) == 0
    assert pool.grants("engine-1").slots.tolist() == sorted(held.slots.tolist())


def test_a_probe_is_not_a_use(tmp_path: Path) -> None:
    pool, _ = full(tmp_path, Counting())
    reader = PoolReader.open(pool.dir)
    slots = pool.lookup(keys(*range(SLOTS))).slots
    # Every block is used at 20 s but the last one of the chain, which was never used since it was stored.
    pool.touch(slots[:-1], 20.0)
    for _ in range(50):
        for view in (pool, reader):
            hit = view.lookup(keys(SLOTS - 1))
            assert view.still(hit.slots, hit.generations).all()
        pool.record(slots)
        pool.checksums(slots)
        pool.snapshot(0, SLOTS)
    pool.allocate(1, 30.0)
    assert not any(found(pool, SLOTS - 1))
    assert all(found(pool, 0))
    reader.close()


def test_evictions_come_in_batches_tails_first(tmp_path: Path) -> None:
    policy = Counting(low=1 / 16, high=1 / 4)
    assert policy.watermarks(SLOTS) == Watermarks(4, 16)
    pool, _ = full(tmp_path, policy)
    policy.asked.clear()
    now_s = 10.0
    stored = 0
    while stored < 12:
        got = pool.allocate(1, now_s)
        stored += len(got.slots)
        now_s += 0.5
    # Sixteen at a time, not one for each grant; and of a chain of 64 its end.
    assert len(policy.asked) <= 2
    assert pool.evicted_blocks["space"] >= 16
    left = found(pool, *range(SLOTS))
    kept = sum(left)
    assert left == [True] * kept + [False] * (SLOTS - kept)


def test_storing_on_a_full_pool_never_stops(tmp_path: Path) -> None:
    pool, _ = full(tmp_path, Counting())
    number, now_s = SLOTS, 100.0
    for _ in range(200):
        got = pool.allocate(2, now_s)
        for slot, generation in zip(*got, strict=True):
            one = Granted(np.array([slot], np.int32), np.array([generation], np.uint64))
            assert commit(pool, one, [number], now_s).committed.all()
            number += 1
        now_s += 0.5
    assert number > SLOTS + 200
    pool.check_invariants()


def test_a_pool_of_one_slot_still_works(tmp_path: Path) -> None:
    pool = create(tmp_path, 1, policy=Counting())
    store(pool, 1)
    assert len(pool.allocate(1, 5.0).slots) == 0
    assert len(pool.allocate(1, 5.0 + COOLING_S).slots) == 1
