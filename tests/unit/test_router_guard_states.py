# SPDX-License-Identifier: Apache-2.0
"""What the router believes of a guard's state, in whatever order it hears of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcr.errors import ProtocolError
from kvcr.protocol.events import Heartbeat, StateChange, event
from router_hints.cards import WorkerCard
from router_hints.failover import Failovers
from router_hints.guards import Guard, GuardDirectory
from router_hints.metrics import Metrics
from router_hints.topology import Topology
from router_hints.workers import DEAD_S, WorkerTable

ENDPOINT = "tcp://10.0.0.1:7100"
WORKER, SUCCESSOR = 17, 23
CHANGE = StateChange(
    guard="g0",
    incarnation=5,
    epoch=2,
    previous="CHECKING",
    state="ACTIVE",
    worker_id=WORKER,
    unix_s=100.0,
    seconds=0.01,
)


class Known:
    """A router that knows one guard with one worker beside it, and a worker elsewhere."""

    def __init__(self) -> None:
        self.workers = WorkerTable(16)
        self.guards = GuardDirectory()
        self.failovers = Failovers("dynamo", self.workers, self.guards, Metrics())
        self.workers.put_card(WorkerCard(WORKER, block_size=16, control_endpoints={0: ENDPOINT}))
        self.workers.put_card(WorkerCard(99, block_size=16, control_endpoints={0: "tcp://10.0.0.2:7100"}))
        self.record(state="STANDBY", epoch=1)

    def record(self, **fields: Any) -> None:
        guard = msgspec.structs.replace(Guard("g0", 5, ENDPOINT, "dynamo"), **fields)
        self.guards.put(guard)
        self.failovers.recorded(guard)

    def hear(self, **fields: Any) -> None:
        self.failovers.received(event.encode(msgspec.structs.replace(CHANGE, **fields)), {})

    def ready(self) -> list[int]:
        return [card.worker_id for card in self.workers.ready([WORKER, SUCCESSOR, 99], float("inf"))]


@pytest.fixture
def known() -> Known:
    return Known()


def test_a_worker_proven_dead_gets_nothing_even_when_all_others_are_down(known: Known) -> None:
    known.hear()
    assert known.failovers.state("g0") == "ACTIVE"
    assert known.ready() == [SUCCESSOR, 99]
    assert known.workers.is_dead(WORKER)


def test_what_a_guard_cannot_read_is_known_until_it_says_otherwise_or_is_gone(known: Known) -> None:
    sources, targets = ["g1", "g0"], ["g0", "g1"]
    known.guards.put(Guard("g1", 1, "tcp://10.0.0.2:7100", "dynamo"))
    known.guards.heard_unready("g0", ("g1",))
    known.guards.heard_unready("nobody", ("g1",))
    assert known.guards.topology.paths(sources, targets).open.tolist() == [[False, True], [True, True]]
    # It is part of what a plan is made from, and made again from.
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(known.guards.topology), type=Topology)
    assert again.paths(sources, targets).open.tolist() == [[False, True], [True, True]]
    known.guards.heard_unready("g0", ())
    assert known.guards.topology.paths(sources, targets).open.all()
    known.guards.heard_unready("g0", ("g1",))
    known.guards.drop("g0")
    known.record(state="STANDBY", epoch=1)
    assert known.guards.topology.paths(sources, targets).open.all()


def test_a_death_told_late_does_not_touch_the_successor(known: Known) -> None:
    known.record(state="STANDBY", epoch=3)
    known.workers.put_card(WorkerCard(SUCCESSOR, block_size=16, control_endpoints={0: ENDPOINT}))
    known.hear()
    assert known.failovers.state("g0") == "STANDBY"
    assert known.ready() == [SUCCESSOR, 99]


def test_a_guard_speaks_only_of_the_worker_beside_it(known: Known) -> None:
    known.hear(worker_id=99)
    assert known.ready() == [WORKER, SUCCESSOR, 99]


def test_a_guard_without_a_record_and_a_past_one_are_not_believed(known: Known) -> None:
    known.hear(guard="g7")
    known.hear(incarnation=4)
    assert known.ready() == [WORKER, SUCCESSOR, 99]
    assert known.failovers.state("g7") == ""


def test_an_older_change_does_not_undo_a_newer_one(known: Known) -> None:
    known.hear(state="STANDBY", epoch=3, unix_s=101.0, worker_id=0)
    known.hear(state="CHECKING", epoch=1, unix_s=99.0)
    assert known.failovers.state("g0") == "STANDBY"
    known.record(state="ACTIVE", epoch=2)
    assert known.failovers.state("g0") == "STANDBY"
    known.record(state="CHECKING", epoch=3)
    assert known.failovers.counts() == {"CHECKING": 1}


def test_a_new_incarnation_starts_over(known: Known) -> None:
    known.hear()
    known.record(incarnation=6, state="ACTIVE", epoch=1)
    assert known.failovers.state("g0") == "ACTIVE"
    known.failovers.gone("g0")
    assert known.failovers.state("g0") == ""


def test_a_mark_of_death_ends_with_the_lease(known: Known) -> None:
    known.workers.mark_dead(WORKER, 10.0)
    known.workers.expire(10.0 + DEAD_S - 1)
    assert known.workers.is_dead(WORKER)
    known.workers.expire(10.0 + DEAD_S + 1)
    assert known.ready() == [WORKER, SUCCESSOR, 99]


def test_what_is_no_change_of_state_is_refused(known: Known) -> None:
    with pytest.raises(ProtocolError):
        known.failovers.received(event.encode(Heartbeat("g0", 5, 1, 0, 0)), {})
    with pytest.raises(ProtocolError):
        known.failovers.received(b"junk", {})
