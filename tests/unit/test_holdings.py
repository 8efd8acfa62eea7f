# SPDX-License-Identifier: Apache-2.0
"""Which grants a guard frees when the processes of an engine have said what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pools
import pytest

from kvcr.errors import ProtocolError
from kvcr.guard.holdings import Holdings
from kvcr.pool import Granted, Pool
from kvcr.protocol.engine import Holding, Role

SCHEDULER, FIRST, SECOND = (Role.SCHEDULER, 0), (Role.WORKER, 0), (Role.WORKER, 1)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = pools.create(tmp_path, 32, ranks=2)
    yield pool
    pool.close()


def holding(pool: Pool, granted: Granted, part: slice = slice(0, 0), *, final: bool = True) -> Holding:
    return Holding(pool.epoch, granted.slots[part].tobytes(), granted.generations[part].tobytes(), final)


def test_nothing_is_freed_before_the_scheduler_and_every_rank_have_spoken(pool: Pool) -> None:
    granted = pool.allocate(10, 0.0, engine_id="e")
    heard = Holdings()
    assert heard.heard(pool, "e", holding(pool, granted, slice(0, 3)), SCHEDULER) == 0
    assert heard.heard(pool, "e", holding(pool, granted, slice(3, 5)), FIRST) == 0
    assert heard.heard(pool, "e", holding(pool, granted), SECOND) == 5
    assert sorted(pool.grants("e").slots) == sorted(granted.slots[:5])


def test_grants_that_were_given_after_the_list_are_kept(pool: Pool) -> None:
    granted = pool.allocate(4, 0.0, engine_id="e")
    heard = Holdings()
    heard.heard(pool, "e", holding(pool, granted), SCHEDULER)
    later = pool.allocate(4, 0.0, engine_id="e")
    heard.heard(pool, "e", holding(pool, granted), FIRST)
    assert heard.heard(pool, "e", holding(pool, granted), SECOND) == 4
    assert sorted(pool.grants("e").slots) == sorted(later.slots)


def test_a_list_in_parts_counts_when_it_is_whole_and_a_broken_off_one_is_void(pool: Pool) -> None:
    granted = pool.allocate(6, 0.0, engine_id="e")
    heard = Holdings()
    heard.heard(pool, "e", holding(pool, granted), FIRST)
    heard.heard(pool, "e", holding(pool, granted), SECOND)
    heard.heard(pool, "e", holding(pool, granted, slice(0, 3), final=False), SCHEDULER)
    heard.restarted(SCHEDULER)
    heard.heard(pool, "e", holding(pool, granted, slice(3, 5), final=False), SCHEDULER)
    assert heard.heard(pool, "e", holding(pool, granted, slice(5, 6)), SCHEDULER) == 3
    assert sorted(pool.grants("e").slots) == sorted(granted.slots[3:])


def test_what_was_said_in_another_epoch_counts_for_nothing(pool: Pool) -> None:
    granted = pool.allocate(4, 0.0, engine_id="e")
    heard = Holdings()
    old = holding(pool, granted)
    heard.heard(pool, "e", old, FIRST)
    heard.heard(pool, "e", old, SECOND)
    pool.raise_epoch()
    assert heard.heard(pool, "e", old, SCHEDULER) == 0
    # In the new one, a rank that has not come yet may still be copying for the old.
    assert heard.heard(pool, "e", holding(pool, granted), SCHEDULER) == 0
    assert heard.heard(pool, "e", holding(pool, granted), FIRST) == 0
    assert heard.heard(pool, "e", holding(pool, granted), SECOND) == 4


def test_a_later_list_of_the_same_connections_frees_what_got_lost_since(pool: Pool) -> None:
    granted = pool.allocate(4, 0.0, engine_id="e")
    heard = Holdings()
    for process in (FIRST, SECOND, SCHEDULER):
        heard.heard(pool, "e", holding(pool, granted, slice(None)), process)
    assert len(pool.grants("e").slots) == 4
    lost = pool.allocate(2, 0.0, engine_id="e")
    assert heard.heard(pool, "e", holding(pool, granted, slice(None)), SCHEDULER) == 2
    assert not set(lost.slots) & set(pool.grants("e").slots)


def test_slots_that_do_not_exist_and_ragged_arrays_are_harmless(pool: Pool) -> None:
    heard = Holdings()
    strange = Holding(pool.epoch, b"\xff" * 8, bytes(16))
    assert heard.heard(pool, "e", strange, SCHEDULER) == 0
    with pytest.raises(ProtocolError):
        heard.heard(pool, "e", Holding(pool.epoch, bytes(8), bytes(8)), SCHEDULER)
