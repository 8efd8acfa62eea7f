# SPDX-License-Identifier: Apache-2.0
"""Leases a guard gives to peers that read over NIXL: when its own NIXL agent has to work for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvcr.guard import serving
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.serving import Caller, PeerServer
from kvcr.protocol.peer import Lease, Leased, Release
from tests.unit.pools import create, key, keys


class Source:
    """A guard with block 0 in its pool; ``log`` has its replies and what its NIXL process was told."""

    def __init__(self, directory: Path) -> None:
        self.pool = create(directory, 8)
        slots, generations = self.pool.allocate(1, 0.0)
        zeros = np.zeros(1, np.uint64)
        self.pool.commit(
            slots, generations, key(0), key(9), zeros, zeros.astype(np.uint32), zeros[:, None], 0.0
        )
        self.log: list[Any] = []
        self.loop = Loop()
        nixl = SimpleNamespace(
            hold=lambda lease_id, until_s, *, quick: self.log.append(("hold", lease_id, quick)),
            drop=lambda lease_id: self.log.append(("drop", lease_id)),
        )
        host = SimpleNamespace(pool=self.pool, plugins={}, incarnation=1, nixl=lambda: nixl)
        nothing = cast(Any, None)
        self._server = PeerServer(
            cast(Any, host), self.loop, nothing, Meters(), nothing, 1000, nothing, nothing
        )
        self._caller = Caller()

    def lease(self, *, by_itself: bool) -> int:
        request = Lease(
            op=1, name="b", incarnation=2, keys=keys(0), lease_ms=1000, transport="nixl", by_itself=by_itself
        )
        self._server.handle(request, self._caller, self.log.append)
        (leased,) = [one for one in self.log if isinstance(one, Leased)]
        return leased.lease_id

    def release(self, lease_id: int) -> None:
        self._server.handle(Release(lease_id), self._caller, self.log.append)

    def close(self) -> None:
        self.loop.close()
        self.pool.close()


@pytest.fixture
def source(tmp_path: Path, backend_name: str) -> Iterator[Source]:
    made = Source(tmp_path)
    yield made
    made.close()


def test_a_reader_that_needs_our_agent_has_its_answer_and_then_the_agent(source: Source) -> None:
    lease_id = source.lease(by_itself=False)
    assert isinstance(source.log[0], Leased)
    assert source.log[1:] == [("hold", lease_id, True)]
    source.release(lease_id)
    assert source.log[2:] == [("drop", lease_id)]


def test_a_reader_that_copies_by_itself_and_is_soon_through_costs_our_agent_nothing(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ALONE_S", 0.005)
    lease_id = source.lease(by_itself=True)
    source.release(lease_id)
    source.loop.run_once(0.05)
    assert len(source.log) == 1
    # Nothing is leased any more, and nothing is left of the timer.
    assert source.pool.leased(source.pool.lookup(key(0)).slots).tolist() == [False]


def test_one_that_takes_longer_is_helped_as_it_may_have_to_connect(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ALONE_S", 0.005)
    lease_id = source.lease(by_itself=True)
    source.loop.run_once(1.0)
    source.release(lease_id)
    assert source.log[1:] == [("hold", lease_id, False), ("drop", lease_id)]
