# SPDX-License-Identifier: Apache-2.0
"""What was handed to one request alone is freed once, when every rank has it or nobody will."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.guard.transit import Handover, TransitSlots


@pytest.mark.parametrize(
    ("most", "share", "slots", "limit"), [(1024, 0.125, 80, 10), (4, 0.125, 80, 4), (4, 0.01, 10, 1)]
)
def test_slots_in_transit_are_capped_in_number_and_share(
    most: int, share: float, slots: int, limit: int
) -> None:
    pool: Any = SimpleNamespace(slots=slots)
    transit = TransitSlots(most, share)
    assert transit.limit(pool) == limit
    transit.used = limit - 1
    assert transit.room(pool) == 1
    transit.used = limit + 1
    assert transit.room(pool) == 0


def test_a_slot_is_freed_when_the_last_rank_has_its_part() -> None:
    handover = Handover(4, ranks=2)
    handover.hand(np.array([1, 2]), np.array([7, 8], np.int32), np.array([5, 6], np.uint64), in_place=False)
    assert len(handover.taken(np.array([1, 2]), 0).slots) == 0
    freed = handover.taken(np.array([2, 3, -1, 99]), 1)
    assert (freed.slots.tolist(), freed.generations.tolist()) == ([8], [6])
    assert handover.left == 1
    assert handover.drop().slots.tolist() == [7]
    assert handover.left == 0


def test_what_is_read_in_place_frees_no_slot_of_ours() -> None:
    handover = Handover(2, ranks=1)
    handover.hand(np.array([0, 1]), np.array([7, 8], np.int32), np.array([5, 6], np.uint64), in_place=True)
    freed = handover.taken(np.array([0]), 0)
    assert (freed.slots.tolist(), freed.in_place.tolist()) == ([], [0])


@settings(deadline=None)
@given(
    ranks=st.integers(1, 3),
    takes=st.lists(st.tuples(st.lists(st.integers(-2, 12), max_size=6), st.integers(-1, 4)), max_size=30),
)
def test_every_slot_is_freed_exactly_once(ranks: int, takes: list[tuple[list[int], int]]) -> None:
    handover = Handover(10, ranks)
    slots = np.arange(100, 110, dtype=np.int32)
    handover.hand(np.arange(10), slots, np.ones(10, np.uint64), in_place=False)
    freed: list[int] = []
    for indices, rank in takes:
        freed += handover.taken(np.array(indices, np.int64), rank).slots.tolist()
    freed += handover.drop().slots.tolist()
    assert sorted(freed) == slots.tolist()
