# SPDX-License-Identifier: Apache-2.0
"""Policies: what goes first, what stays, and how another one is plugged in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.errors import ConfigError
from kvcr.policy import DefaultPolicy, Offer, OnMismatch, Policy, Resident, chain_recency, load_policy
from kvcr.pool import SlotState
from tests.unit.pools import commit, create, found, layout, store


def resident(
    last_used_s: list[float],
    parents: list[int],
    held: list[bool] | None = None,
    demoted: list[bool] | None = None,
) -> Resident:
    """Blocks 0..n-1; positions count from each chain's head."""
    positions: list[int] = []
    for parent in parents:
        positions.append(positions[parent] + 1 if parent >= 0 else 0)
    return Resident(
        slots=np.arange(len(parents), dtype=np.int32),
        last_used_s=np.array(last_used_s, dtype=np.float64),
        stored_s=np.zeros(len(parents)),
        positions=np.array(positions, dtype=np.uint32),
        parents=np.array(parents, dtype=np.int32),
        held=np.array(held or [False] * len(parents), dtype=np.bool_),
        demoted=np.array(demoted or [False] * len(parents), dtype=np.bool_),
    )


def victims(blocks: Resident, count: int) -> list[int]:
    return [int(slot) for slot in DefaultPolicy().victims(blocks, count, 0.0)]


def test_the_least_recently_used_block_goes_first() -> None:
    assert victims(resident([3.0, 1.0, 2.0], [-1, -1, -1]), 2) == [1, 2]


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    assert victims(resident([1.0] * 4, [-1, 0, 1, 2]), 3) == [3, 2, 1]
    # Committed one by one, so that the head looks oldest.
    assert victims(resident([1.0, 2.0, 3.0, 4.0], [-1, 0, 1, 2]), 3) == [3, 2, 1]


def test_a_head_shared_with_a_young_branch_outlives_an_old_branch() -> None:
    assert victims(resident([1.0, 1.0, 9.0, 5.0], [-1, 0, 0, -1]), 2) == [1, 3]


def test_the_policy_of_the_developer_guide_evicts_heads_last() -> None:
    guide = (Path(__file__).parents[2] / "docs/develop.md").read_text()
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "KeepHeads" in block
    ]
    names: dict[str, Any] = {}
    exec(compile(code, "develop.md", "exec"), names)
    keep_heads = names["KeepHeads"]()
    assert isinstance(keep_heads, Policy)
    chain = resident([1.0] * 66, list(range(-1, 65)))
    assert keep_heads.victims(chain, 2, 0.0).tolist() == [65, 64]
    assert keep_heads.victims(chain, 4, 0.0).tolist() == [65, 64, 63, 62]
    assert keep_heads.victims(resident([1.0], [-1], [True]), 1, 0.0).tolist() == []


def test_held_blocks_are_not_chosen() -> None:
    assert victims(resident([1.0, 2.0, 3.0], [-1, -1, -1], [True, False, False]), 3) == [1, 2]


def test_demoted_blocks_go_first_and_keep_their_order_among_each_other() -> None:
    assert victims(resident([1.0, 9.0, 8.0], [-1, -1, -1], demoted=[False, True, True]), 3) == [2, 1, 0]


def test_a_demoted_head_stays_while_something_in_use_comes_after_it() -> None:
    assert victims(resident([1.0, 2.0, 3.0], [-1, 0, -1], demoted=[True, False, False]), 2) == [1, 0]
    assert victims(resident([1.0, 4.0, 3.0], [-1, 0, -1], demoted=[True, False, False]), 1) == [2]


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    count = draw(st.integers(0, 40))
    times = draw(st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count))
    return times, [draw(st.integers(-1, index - 1)) for index in range(count)]


@given(forest=forests())
@settings(max_examples=50)
def test_recency_is_the_latest_use_of_a_block_or_anything_after_it(
    forest: tuple[list[float], list[int]],
) -> None:
    times, parents = forest
    expected = list(times)
    for index in reversed(range(len(parents))):
        if parents[index] >= 0:
            expected[parents[index]] = max(expected[parents[index]], expected[index])
    assert chain_recency(np.array(times), np.array(parents, np.int32)).tolist() == expected


@given(forest=forests(), count=st.integers(0, 40))
@settings(max_examples=50)
def test_no_block_is_evicted_before_its_successors(forest: tuple[list[float], list[int]], count: int) -> None:
    times, parents = forest
    chosen = victims(resident(times, parents), count)
    assert len(chosen) == len(set(chosen)) == min(count, len(parents))
    gone = set(chosen)
    assert all(child in gone for child, parent in enumerate(parents) if parent in gone)


def test_a_cycle_in_damaged_records_does_not_hold_the_guard() -> None:
    assert chain_recency(np.array([1.0, 2.0]), np.array([1, 0], np.int32)).tolist() == [2.0, 2.0]


def test_watermarks_are_fractions_of_the_pool() -> None:
    marks = DefaultPolicy(low=0.1, high=0.2).watermarks(100)
    assert (marks.low, marks.high) == (10, 20)
    assert DefaultPolicy().watermarks(8).high == 0
    with pytest.raises(ConfigError, match=r"low=0\.3, high=0\.2"):
        DefaultPolicy(low=0.3, high=0.2)


def test_a_pool_evicts_ahead_of_demand_in_batches(tmp_path: Path) -> None:
    pool = create(tmp_path, 100, policy=DefaultPolicy(low=0.1, high=0.2))
    store(pool, *range(90))
    granted = pool.allocate(5, 1.0)
    assert len(granted.slots) == 5
    assert pool.counts()[SlotState.COOLING] == 15
    pool.allocate(5, 1.0)
    assert pool.counts()[SlotState.COOLING] == 15
    assert len(pool.allocate(20, 3.0).slots) == 15
    pool.check_invariants()


def test_use_keeps_a_chain_and_its_tail_goes_first(tmp_path: Path) -> None:
    pool = create(tmp_path, 8)
    chain = store(pool, 0, 1, 2, 3)
    store(pool, 100, 101, 102, 103, now_s=1.0)
    pool.touch(chain.slots[:2], 2.0)
    pool.allocate(3, 3.0)
    assert found(pool, 0, 1, 2, 3, 100, 101, 102, 103) == [True, True, False, False, True, True, True, False]


@pytest.mark.parametrize("answer", [[0, 0, 1], [0, 1], [0, 1, 8], [-1, 0, 1], []])
def test_a_policy_cannot_have_slots_granted_twice_or_that_are_not_free(
    tmp_path: Path, answer: list[int]
) -> None:
    class Careless(DefaultPolicy):
        def place(self, free: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.intp]:
            return np.array(answer, np.intp)

    pool = create(tmp_path, 8, policy=Careless())
    granted = pool.allocate(3, 0.0).slots.tolist()
    assert len(set(granted)) == 3
    pool.check_invariants()


class Picky(DefaultPolicy):
    """Admits heads of chains only, grants the lowest slot, and tries to evict everything, twice."""

    def admit(self, offer: Offer, now_s: float) -> npt.NDArray[np.bool_]:
        heads: npt.NDArray[np.bool_] = offer.positions == 0
        return heads

    def place(self, free: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.intp]:
        return np.argsort(free)[:count]

    def victims(self, resident: Resident, count: int, now_s: float) -> npt.NDArray[np.int32]:
        return np.concatenate([resident.slots, resident.slots, np.array([-1, 99], np.int32)])


def test_another_policy_decides_and_cannot_break_the_pool(tmp_path: Path) -> None:
    policy = load_policy("tests.unit.test_policy:Picky", on_mismatch="discard")
    pool = create(tmp_path, 4, policy=policy)
    granted = pool.allocate(4, 0.0)
    result = commit(pool, granted, [0, 1, 2, 3])
    assert (result.committed.tolist(), result.refused.sum()) == ([True, False, False, False], 3)
    assert pool.allocate(2, 0.0).slots.tolist() == [1, 2]
    pool.lease(granted.slots[:1], granted.generations[:1])
    pool.allocate(4, 1.0)
    assert found(pool, 0) == [True]
    pool.check_invariants()
    assert policy.on_mismatch(layout(), layout(block_size=32)) is OnMismatch.DISCARD


def test_the_default_policy_is_loaded_by_the_empty_path_with_its_settings() -> None:
    policy = load_policy("", on_mismatch="fail")
    assert isinstance(policy, Policy)
    assert policy.on_mismatch(layout(), layout()) is OnMismatch.FAIL


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("nowhere", "must have the form package.module:Class"),
        ("no.such.module:Class", "cannot be loaded: No module named"),
        ("kvcr.policy:NoSuch", "cannot be loaded: module 'kvcr.policy' has no attribute"),
        ("collections:OrderedDict", "lacks one of admit, watermarks"),
    ],
)
def test_a_policy_that_cannot_be_used_is_named(path: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_policy(path)


def test_an_unknown_answer_to_a_mismatch_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_mismatch is 'ignore', must be cold, discard or fail"):
        DefaultPolicy(on_mismatch="ignore")
