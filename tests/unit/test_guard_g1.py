# SPDX-License-Identifier: Apache-2.0
"""Asking an engine for drops in G1: one that answers, one that sleeps, one that comes back, and none."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcr.guard.g1 import MAX_UNANSWERED, G1Drops
from kvcr.guard.meters import Meters
from kvcr.guard.view import GuardState
from kvcr.protocol.engine import DropG1, DroppedG1, Role


@dataclass
class Scheduler:
    role: Role = Role.SCHEDULER
    sent: list[DropG1] = field(default_factory=list)

    def send(self, message: DropG1) -> None:
        self.sent.append(message)


def make(*members: Any, state: GuardState = GuardState.STANDBY) -> tuple[G1Drops, SimpleNamespace]:
    seat = SimpleNamespace(state=state, members=list(members), engine_id="one")
    return G1Drops(seat, Meters(), incarnation=1000), seat


def hashes(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def named(message: DropG1) -> list[int]:
    return np.frombuffer(message.engine_hashes, "<u8").tolist()


def test_the_answer_ends_the_drop_with_its_count() -> None:
    scheduler, counts = Scheduler(), []
    drops, _ = make(scheduler)
    number = drops.drop(hashes(1, 2, 3), counts.append)
    (sent,) = scheduler.sent
    assert (sent.drop_id, named(sent)) == (number, [1, 2, 3])
    drops.dropped(DroppedG1(number, 2))
    assert counts == [2]
    drops.dropped(DroppedG1(number, 2))
    assert counts == [2]


def test_blocks_go_by_hash_and_by_key_and_what_waits_is_merged_within_a_message() -> None:
    scheduler, counts = Scheduler(), []
    drops, _ = make(scheduler)
    keys = [bytes([each]) * 16 for each in range(3)]
    number = drops.drop(hashes(1), counts.append, keys[0])
    assert (named(scheduler.sent[0]), scheduler.sent[0].keys) == ([1], keys[0])
    for _ in range(MAX_UNANSWERED - 1):
        drops.drop(hashes(9), lambda _: None)
    drops.drop(hashes(2), counts.append, keys[1])
    last = drops.drop(hashes(), counts.append, keys[2])
    drops.dropped(DroppedG1(number, 2))
    drops.dropped(DroppedG1(scheduler.sent[MAX_UNANSWERED - 1].drop_id, 1))
    merged = scheduler.sent[MAX_UNANSWERED]
    assert (merged.drop_id, named(merged), merged.keys) == (last, [2], keys[1] + keys[2])
    many = b"".join(each.to_bytes(16, "big") for each in range(5000))
    drops.drop(hashes(), lambda _: None, many)
    parts = scheduler.sent[MAX_UNANSWERED + 1 :]
    assert [len(part.keys) // 16 for part in parts] == [2048, 2048, 904]
    assert b"".join(part.keys for part in parts) == many


def test_numbers_grow_from_that_of_the_guard_on() -> None:
    drops, _ = make(Scheduler())
    assert [drops.drop(hashes(each), lambda _: None) for each in range(3)] == [1001, 1002, 1003]


def test_a_long_drop_goes_in_parts_and_ends_once() -> None:
    scheduler, counts = Scheduler(), []
    drops, _ = make(scheduler)
    number = drops.drop(np.arange(5000, dtype=np.uint64), counts.append)
    assert [len(named(each)) for each in scheduler.sent] == [2048, 2048, 904]
    assert scheduler.sent[-1].drop_id == number
    for each in scheduler.sent:
        assert counts == []
        drops.dropped(DroppedG1(each.drop_id, 10))
    assert counts == [30]


def test_an_engine_that_sleeps_has_little_to_read_and_nothing_is_lost() -> None:
    scheduler, counts = Scheduler(), []
    drops, _ = make(scheduler)
    for value in range(100):
        drops.drop(hashes(value), counts.append)
    assert len(scheduler.sent) == MAX_UNANSWERED
    answered = 0
    while answered < len(scheduler.sent):
        each = scheduler.sent[answered]
        answered += 1
        drops.dropped(DroppedG1(each.drop_id, len(named(each))))
    assert sorted(value for each in scheduler.sent for value in named(each)) == list(range(100))
    assert answered == MAX_UNANSWERED + 1
    assert (len(counts), sum(counts)) == (100, 100)


def test_a_scheduler_that_reconnects_hears_what_it_may_not_have_read() -> None:
    scheduler, again, counts = Scheduler(), Scheduler(), []
    drops, seat = make(scheduler)
    numbers = [drops.drop(hashes(each), counts.append) for each in (1, 2)]
    seat.members, seat.state = [], GuardState.CHECKING
    late = drops.drop(hashes(3), counts.append)
    seat.members, seat.state = [again], GuardState.STANDBY
    drops.attached()
    assert [each.drop_id for each in again.sent] == [*numbers, late]
    # Whoever answers the last has carried out those before it.
    drops.dropped(DroppedG1(late, 1))
    assert counts == [0, 0, 1]


def test_another_engine_is_not_asked_for_what_it_never_had() -> None:
    scheduler, another, counts = Scheduler(), Scheduler(), []
    drops, seat = make(scheduler)
    drops.drop(hashes(1), counts.append)
    seat.members, seat.engine_id = [another], "two"
    drops.attached()
    assert (another.sent, counts) == ([], [])


def test_without_an_engine_there_is_nothing_to_drop() -> None:
    counts: list[int] = []
    for state in (GuardState.ACTIVE, GuardState.EMPTY):
        drops, _ = make(state=state)
        drops.drop(hashes(1), counts.append)
    assert counts == [0, 0]
