# SPDX-License-Identifier: Apache-2.0
"""Pins: who holds what, for how long, and how much together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.guard import pins
from kvcr.guard.pins import Pins
from kvcr.pool import Pool
from tests.unit.pools import create, keys, store

BLOCKS = 16


def pinned(pool: Pool, now_s: float) -> list[int]:
    """Which of the numbered blocks a pin holds."""
    slots = pool.lookup(keys(*range(BLOCKS))).slots
    return [number for number in range(BLOCKS) if pool.pinned(slots[number : number + 1], now_s)[0]]


def test_the_second_pin_of_a_block_holds_it_after_the_first_ended(tmp_path: Path) -> None:
    pool, held = create(tmp_path, 64), Pins()
    store(pool, *range(BLOCKS))
    assert held.pin(pool, "a", keys(0, 1, 99), 10.0, 0.0) == (2, "")
    assert held.pin(pool, "b", keys(1, 2), 20.0, 0.0) == (2, "")
    assert held.unpin(pool, "a", 1.0) == 2
    assert pinned(pool, 1.0) == [1, 2]
    assert held.unpin(pool, "a", 1.0) is None
    assert pinned(pool, 20.0) == []
    assert held.unpin(pool, "b", 20.0) is None


def test_a_pin_that_is_made_again_is_longer_and_wider_never_shorter(tmp_path: Path) -> None:
    pool, held = create(tmp_path, 64), Pins()
    store(pool, *range(BLOCKS))
    held.pin(pool, "a", keys(0), 10.0, 0.0)
    held.pin(pool, "a", keys(1), 2.0, 0.0)
    assert pinned(pool, 9.0) == [0, 1]
    held.pin(pool, "a", keys(1), 10.0, 9.0)
    assert pinned(pool, 18.0) == [0, 1]


def test_pins_hold_a_quarter_of_the_pool_at_most(tmp_path: Path) -> None:
    pool, held = create(tmp_path, 64), Pins()
    store(pool, *range(20))
    assert held.pin(pool, "a", keys(*range(16)), 10.0, 0.0) == (16, "")
    count, refusal = held.pin(pool, "b", keys(16), 10.0, 0.0)
    assert (count, "the limit is 16" in refusal) == (0, True)
    assert held.pin(pool, "c", keys(3, 4), 10.0, 0.0) == (2, ""), "they are pinned already"
    assert held.pin(pool, "b", keys(16), 10.0, 11.0) == (1, "")


def test_the_number_of_pins_is_bounded_and_ended_ones_make_room(tmp_path: Path) -> None:
    pool, held = create(tmp_path, 64), Pins()
    store(pool, 0)
    for number in range(pins.MAX_PINS):
        assert held.pin(pool, str(number), keys(0), 10.0, 0.0) == (1, "")
    assert held.pin(pool, "one more", keys(0), 10.0, 0.0)[1]
    assert held.pin(pool, "one more", keys(0), 10.0, 10.0) == (1, "")
    refusal = "its id has 257 characters, at most 256 are kept"
    assert held.pin(pool, "x" * 257, keys(0), 10.0, 10.0) == (0, refusal)


def test_what_is_not_here_is_not_remembered(tmp_path: Path) -> None:
    pool, held = create(tmp_path, 64), Pins()
    store(pool, 0)
    assert held.pin(pool, "a", keys(*range(1000)), 10.0, 0.0) == (1, "")
    store(pool, *range(1, 17))
    assert held.pin(pool, "a", keys(0), 10.0, 1.0) == (1, ""), "what came since was not asked for again"
    assert pinned(pool, 1.0) == [0]


def test_the_blocks_that_all_pins_name_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 8)
    pool, held = create(tmp_path, 64), Pins()
    store(pool, *range(16))
    for pin_id in "abcd":
        assert held.pin(pool, pin_id, keys(*range(16)), 10.0, 0.0) == (16, "")
    refusal = "pins name 64 blocks and this one would name 1, the limit is 64"
    assert held.pin(pool, "e", keys(0), 10.0, 0.0) == (0, refusal)
    assert held.pin(pool, "d", keys(0), 20.0, 0.0) == (16, ""), "it names them already"
    held.unpin(pool, "c", 1.0)
    assert held.pin(pool, "e", keys(0), 10.0, 1.0) == (1, "")


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sets(st.integers(0, BLOCKS - 1), max_size=4),
            st.integers(0, 4),
        ),
        max_size=20,
    )
)
@settings(max_examples=40, deadline=None)
def test_a_block_is_pinned_exactly_while_a_pin_names_it(
    tmp_path_factory, steps: list[tuple[str, set[int], int]]
) -> None:
    """Against a model: pin id -> (blocks, end)."""
    pool, held = create(tmp_path_factory.mktemp("pool"), 64), Pins()
    store(pool, *range(BLOCKS))
    model: dict[str, tuple[set[int], float]] = {}
    for now, (pin_id, blocks, ttl_s) in enumerate(steps):
        now_s = float(now)
        model = {name: pin for name, pin in model.items() if pin[1] > now_s}
        if ttl_s == 0:
            assert (held.unpin(pool, pin_id, now_s) is None) == (pin_id not in model)
            model.pop(pin_id, None)
        else:
            before, until_s = model.get(pin_id, (set(), 0.0))
            model[pin_id] = (before | blocks, max(until_s, now_s + ttl_s))
            assert held.pin(pool, pin_id, keys(*blocks), float(ttl_s), now_s)[1] == ""
        assert pinned(pool, now_s) == sorted(set().union(*(pin[0] for pin in model.values())))
    pool.close()
