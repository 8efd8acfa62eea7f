# SPDX-License-Identifier: Apache-2.0
"""Which worker a guard speaks of, and whose lease it ends, in whatever order things happen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcr.dynamo import beside
from kvcr.dynamo.beside import WorkerBeside
from kvcr.dynamo.etcd import EtcdUnavailable, KeyValue, Listing
from kvcr.protocol.events import StateChange

ENDPOINT = "tcp://10.0.0.1:7100"
OLD, NEW = 17, 23


class Etcd:
    """The cards of workers, and the leases that were ended; away when told."""

    def __init__(self) -> None:
        self.cards: dict[int, str] = {}
        self.revoked: list[int] = []
        self.away = False

    async def get_prefix(self, prefix: str) -> Listing:
        self._answer()
        values = [
            KeyValue(f"{prefix}backend/generate/{worker:x}", _card(endpoint), worker, revision)
            for revision, (worker, endpoint) in enumerate(self.cards.items())
        ]
        return Listing(values, len(values))

    async def revoke(self, lease: int) -> bool:
        self._answer()
        self.revoked.append(lease)
        return self.cards.pop(lease, None) is not None

    def _answer(self) -> None:
        if self.away:
            raise EtcdUnavailable("told to be away")


def _card(endpoint: str) -> bytes:
    data = {"router_hint_source_control_endpoints": json.dumps({"0": endpoint})}
    return json.dumps({"card_json": {"runtime_config": {"runtime_data": data}}}).encode()


def change(state: str, previous: str = "CHECKING", epoch: int = 1) -> StateChange:
    return StateChange("g0", 1, epoch, previous, state, worker_id=0, unix_s=1.0, seconds=0.1)


@pytest.fixture
def etcd() -> Any:
    return Etcd()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(beside, "LONGEST_LOOK_S", 0.0)


async def test_a_death_names_the_worker_and_the_return_names_none(etcd: Any) -> None:
    worker = WorkerBeside()
    etcd.cards = {99: "tcp://10.0.0.2:7100", OLD: ENDPOINT}
    assert worker.changed(change("STANDBY")).worker_id == 0
    await worker.find(etcd, "ns", ENDPOINT)
    assert worker.changed(change("CHECKING")).worker_id == OLD
    assert worker.changed(change("ACTIVE")).worker_id == OLD
    assert worker.changed(change("STANDBY")).worker_id == 0


async def test_a_dead_workers_lease_is_ended_also_when_etcd_comes_back_after_the_hand_off(etcd: Any) -> None:
    worker = WorkerBeside()
    etcd.cards = {OLD: ENDPOINT}
    worker.changed(change("STANDBY"))
    await worker.find(etcd, "ns", ENDPOINT)
    worker.changed(change("ACTIVE"))
    worker.changed(change("STANDBY"))
    etcd.away = True
    with pytest.raises(EtcdUnavailable):
        await worker.revoke_dead(etcd, "ns", ENDPOINT, lambda: False)
    etcd.away = False
    etcd.cards[NEW] = ENDPOINT
    # Its successor is registered by now, beside the same guard, and must not be touched.
    await worker.revoke_dead(etcd, "ns", ENDPOINT, lambda: False)
    assert etcd.revoked == [OLD]
    await worker.find(etcd, "ns", ENDPOINT)
    assert worker.worker_id == NEW


async def test_an_unknown_dead_worker_is_found_by_its_card_while_nobody_is_attached(etcd: Any) -> None:
    worker = WorkerBeside()
    etcd.cards = {OLD: ENDPOINT, 99: "tcp://10.0.0.2:7100"}
    assert worker.changed(change("ACTIVE")).worker_id == 0
    await worker.revoke_dead(etcd, "ns", ENDPOINT, lambda: True)
    await worker.revoke_dead(etcd, "ns", ENDPOINT, lambda: True)
    assert etcd.revoked == [OLD]


async def test_a_successor_of_the_guard_knows_the_worker_of_the_epoch_that_is_over(etcd: Any) -> None:
    worker = WorkerBeside()
    worker.inherit(OLD, dead=True)
    await worker.revoke_dead(etcd, "ns", ENDPOINT, lambda: False)
    assert etcd.revoked == [OLD]
    alive = WorkerBeside()
    alive.inherit(OLD, dead=False)
    await alive.revoke_dead(etcd, "ns", ENDPOINT, lambda: False)
    assert (alive.worker_id, etcd.revoked) == (OLD, [OLD])


async def test_a_card_that_a_dead_worker_left_gives_way_to_the_one_that_comes(etcd: Any) -> None:
    worker = WorkerBeside()
    etcd.cards = {OLD: ENDPOINT}
    worker.changed(change("STANDBY"))
    await worker.find(etcd, "ns", ENDPOINT)
    assert worker.worker_id == OLD
    etcd.cards[NEW] = ENDPOINT
    await worker.find(etcd, "ns", ENDPOINT)
    assert worker.worker_id == NEW
