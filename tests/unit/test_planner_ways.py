# SPDX-License-Identifier: Apache-2.0
"""The native walk over runs gives what the one in Python gives; heat and queue averages do what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_hints.heat import Heat
from router_hints.ledger import Ledger, Load
from router_hints.ways import MAX_RUNS, _native, walk_in_python

NOT_BUILT = pytest.mark.skipif(_native is None, reason="router_hints._native is not built")


@NOT_BUILT
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5), st.integers(1, 120), st.floats(0, 1))
def test_native_and_python_walks_agree(
    seed: int, sources: int, targets: int, blocks: int, density: float
) -> None:
    rng = np.random.default_rng(seed)
    held = rng.random((sources, blocks)) < density
    usable = rng.random((targets, sources)) < 0.8
    own = rng.integers(-1, sources, targets).astype(np.int32)
    for target, row in enumerate(own):
        if row >= 0:
            usable[target, row] = False
    inputs = (
        held,
        usable,
        own,
        rng.integers(0, blocks + 1, targets).astype(np.int32),
        rng.integers(1, 5, sources).astype(np.float64) * 1000,
        rng.integers(0, 3, sources).astype(np.float64) * 50_000,
        rng.choice([1e6, 1e7, 1e8], (targets, sources)),
        rng.choice([1e-6, 1e-4], targets),
        0.003,
    )
    results = []
    for walk in (_native.walk, walk_in_python):
        shape = (targets, MAX_RUNS)
        out = (
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float64),
            np.zeros(targets, np.int32),
        )
        walk(*inputs, *out)
        results.append(out)
    native, python = results
    for ours, theirs in zip(native[:3] + native[4:], python[:3] + python[4:], strict=True):
        assert ours.tolist() == theirs.tolist()
    assert native[3] == pytest.approx(python[3])


@NOT_BUILT
def test_a_walk_whose_arrays_do_not_fit_is_refused() -> None:
    one = np.zeros((1, 1))
    small = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="do not fit"):
        _native.walk(
            np.zeros((2, 4), np.bool_),
            np.zeros((1, 2), np.bool_),
            small,
            small,
            np.zeros(2),
            np.zeros(2),
            one,  # one rate for two sources
            np.zeros(1),
            0.0,
            np.zeros((1, 4), np.int32),
            np.zeros((1, 4), np.int32),
            np.zeros((1, 4), np.int32),
            np.zeros((1, 4)),
            small,
        )


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


def test_heat_is_known_by_depth_and_fades() -> None:
    heat = Heat()
    for step in range(200):
        # Everybody begins with the same four blocks; the fifth to eighth differ.
        common, own = [1, 2, 3, 4], [1000 * step + n for n in range(5, 9)]
        rates = heat.seen(keys(*common, *own), step * 0.1)
    assert rates[0] == rates[2] == pytest.approx(10, rel=0.2)
    assert rates[3] == 0.0
    assert heat.seen(keys(1), 20 + 30.0)[0] == pytest.approx(0.5, rel=0.2)
    small = Heat(max_prefixes=10)
    for step in range(100):
        small.seen(keys(step), float(step))
    assert len(small) == 10


def test_the_hottest_prefixes_are_the_longest_that_many_share() -> None:
    heat = Heat()
    for step in range(40):
        # Eight blocks that all of these share, and then a question of each one's own; some ask for another.
        heat.seen(keys(*range(1, 9), *range(1000 * step, 1000 * step + 8)), step * 0.1)
        if step % 4 == 0:
            heat.seen(keys(*range(11, 15)), step * 0.1)
    first, second, *others = heat.hottest(20, 4.0)
    assert (first.blocks, first.key) == (8, keys(8))
    assert (second.blocks, second.key) == (4, keys(14))
    assert first.per_s == pytest.approx(4 * second.per_s, rel=0.1)
    assert all(other.blocks == 16 and other.per_s < second.per_s for other in others)
    assert heat.hottest(1, 4.0) == [first]
    assert heat.hottest(20, 4.0 + 200) == []


def test_a_spike_raises_the_fast_average_and_not_the_slow_one() -> None:
    ledger = Ledger()
    ledger.loads(0.0)
    ledger.book("r", (1, 0), prefill_tokens=10_000, blocks=0, copies={"g": 6_000_000})
    spike = ledger.loads(4.0)
    assert spike.of((1, 0)).fast_tokens > 7_000
    assert spike.of((1, 0)).slow_tokens < 1_000
    assert spike.copied_bytes_per_s == pytest.approx(100_000, rel=0.1)
    trend = ledger.loads(300.0).of((1, 0))
    assert trend.slow_tokens > 9_000
    ledger.release("r")
    gone = ledger.loads(310.0).of((1, 0))
    assert (gone.prefill_tokens, gone.requests) == (0, 0)
    assert gone.fast_tokens < 500 < 7_000 < gone.slow_tokens
    assert ledger.loads(5_000.0).of((1, 0)) == Load()


def test_announced_turns_come_are_withdrawn_or_are_forgotten() -> None:
    ledger = Ledger()
    ledger.announce("a", (1, 0), starts_at_s=10.0, prefill_tokens=100)
    ledger.announce("b", (1, 0), starts_at_s=12.0, prefill_tokens=100)
    ledger.announce("a", (2, 0), starts_at_s=11.0, prefill_tokens=200)
    assert {(each.rank, each.starts_in_s) for each in ledger.loads(9.0).announced} == {
        ((2, 0), 2.0),
        ((1, 0), 3.0),
    }
    ledger.withdraw("a")
    ledger.withdraw("a")
    assert [each.rank for each in ledger.loads(20.0).announced] == [(1, 0)]
    assert ledger.loads(60.0).announced == ()
    ledger.announce("c", (1, 0), starts_at_s=100.0, prefill_tokens=100)
    ledger.forget_worker(1)
    assert ledger.loads(90.0).announced == ()


def test_unseen_work_grows_with_routers_and_staleness() -> None:
    ledger = Ledger()
    ledger.loads(0.0)
    for at in range(120):
        ledger.book(f"r{at}", (1, 0), prefill_tokens=1000, blocks=0, copies={})
        ledger.first_output(f"r{at}")
        ledger.loads(float(at))
    assert ledger.loads(120.0).unseen_tokens == 0
    assert ledger.loads(120.0, routers=3, stale_s=2.0).unseen_tokens == pytest.approx(2 * 2 * 860, rel=0.2)
