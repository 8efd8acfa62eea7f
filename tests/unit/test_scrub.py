# SPDX-License-Identifier: Apache-2.0
"""Blocks that do not verify: out of use, and their slots in use again once nobody reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcr.guard import scrub
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.scrub import Scrubber
from kvcr.pool import SlotState
from kvcr.transfer.base import LocalRegions
from kvcr.transfer.mover import MoverPool
from tests.unit.pools import create, found, store


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def run(loop: Loop, until: Callable[[], bool], most_s: float = 10.0) -> None:
    end_s = time.monotonic() + most_s
    while not until():
        assert time.monotonic() < end_s
        loop.run_once(0.01)


def test_a_slot_that_is_read_for_long_is_in_use_again_when_that_is_over(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "QUARANTINE_S", 0.05)
    pool = create(tmp_path, 4)
    local = LocalRegions(pool.layout, [pool.data(0).rows], [pool.region(0).address])
    meters, movers = Meters(), MoverPool(1, loop.post)
    scrubber = Scrubber(loop, movers, meters, lambda: (pool, local), lambda: None)
    granted = store(pool, 0)
    # By a load of the engine, which has no bound but its own deadline.
    assert pool.lease(*granted).all()
    pool.part(0, int(granted.slots[0]))[0] ^= 1
    scrubber.distrust(*granted, "load")
    assert found(pool, 0) == [False]
    run(loop, lambda: meters.corrupt_blocks.value(where="load") == 1)
    over_s = time.monotonic() + 0.2
    run(loop, lambda: time.monotonic() > over_s)
    assert pool.counts()[SlotState.QUARANTINED] == 1
    pool.unlease(*granted)
    run(loop, lambda: pool.counts()[SlotState.FREE] == 4)
    pool.check_invariants()
    assert movers.close(5.0)
