# SPDX-License-Identifier: Apache-2.0
"""Which fills stay dead after an invalidation, and which do not."""

from __future__ import annotations

import pytest

from kvcr.guard import tombstones
from kvcr.guard.tombstones import TTL_S, Tombstones
from tests.unit.pools import ROOT, key, keys

EPOCH = 3


def parents(*numbers: int) -> bytes:
    return b"".join(key(number - 1) if number else ROOT for number in numbers)


def dead(stones: Tombstones, *numbers: int, drops: int, epoch: int = EPOCH, now_s: float = 1.0) -> list[bool]:
    return stones.dead(keys(*numbers), parents(*numbers), epoch, drops, now_s).tolist()


def test_a_request_from_before_the_drop_fills_in_vain_and_one_from_after_it_does_not() -> None:
    stones = Tombstones()
    stones.bury(keys(4, 5), EPOCH, 7, 0.0)
    assert dead(stones, 3, 4, 5, drops=6) == [False, True, True]
    assert dead(stones, 3, 4, 5, drops=7) == [False, False, False]
    # One coming after it does not make the other's late fills welcome.
    assert dead(stones, 4, drops=6) == [True]


def test_what_comes_after_a_dead_block_is_dead_as_long_as_the_request_goes_on() -> None:
    stones = Tombstones()
    stones.bury(keys(4), EPOCH, 7, 0.0)
    for number in range(5, 30):
        # One block a minute, all of them decoded by a request that was running then.
        assert dead(stones, number, drops=6, now_s=60.0 * (number - 4)) == [True]
    assert dead(stones, 40, drops=6, now_s=60.0 * 25) == [False]


def test_a_later_invalidation_of_the_same_block_counts() -> None:
    stones = Tombstones()
    stones.bury(keys(4), EPOCH, 7, 0.0)
    stones.bury(keys(4), EPOCH, 9, 1.0)
    assert dead(stones, 4, drops=8) == [True]


def test_another_engine_has_nothing_under_way() -> None:
    stones = Tombstones()
    stones.bury(keys(4), EPOCH, 7, 0.0)
    assert dead(stones, 4, drops=0, epoch=EPOCH + 1) == [False]


def test_tombstones_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    stones = Tombstones()
    stones.bury(keys(1), EPOCH, 7, 0.0)
    assert dead(stones, 1, drops=0, now_s=TTL_S - 0.1) == [True]
    assert dead(stones, 1, drops=0, now_s=TTL_S + 0.1) == [False]
    assert len(stones) == 0
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 4)
    stones.bury(keys(*range(6)), EPOCH, 7, 200.0)
    assert dead(stones, 0, 10, 5, drops=0, now_s=201.0) == [False, False, True]
    assert len(stones) == 4
