# SPDX-License-Identifier: Apache-2.0
"""Quick pulls between two real pools: whole, verified and told, or left alone without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from kvcr.errors import ProtocolError
from kvcr.guard import quick
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.quick import TELL_S, QuickPulls
from kvcr.guard.serving import Caller, PeerServer
from kvcr.policy import DefaultPolicy, Offer
from kvcr.pool import SlotState
from kvcr.protocol.engine import BlockStatus, Fetch, FetchLease, FetchProgress, Source, ToEngine
from kvcr.protocol.peer import Release
from kvcr.transfer import base
from kvcr.transfer.base import LocalRegions
from kvcr.transfer.mover import MoverPool
from kvcr.transfer.shm import ShmTransport
from tests.unit.pools import ROOT, content, create, hashes_of, key, keys

PART_BYTES = 4096


class OddOnly(DefaultPolicy):
    """Admits the blocks at odd positions."""

    def admit(self, offer: Offer, now_s: float) -> npt.NDArray[np.bool_]:
        return offer.positions % 2 == 1


@dataclass(eq=False)
class Link:
    """Our side of a link to the source; remembers what it was told."""

    transport: ShmTransport
    label: str = "source"
    bytes_per_s: float | None = None
    released: list[Any] = field(default_factory=list)

    def measured(self, *arguments: Any) -> float:
        return 1e9

    def release(self, message: Any) -> None:
        self.released.append(message)


class Pair:
    """A pool with blocks 0 to 9, and one that pulls from it."""

    def __init__(self, directory: Path, ranks: int = 1, **options: Any) -> None:
        self.source = create(directory / "source", 32, ranks=ranks, part_bytes=PART_BYTES)
        self.target = create(directory / "target", 32, ranks=ranks, part_bytes=PART_BYTES, **options)
        granted = self.source.allocate(10, 0.0)
        for slot, number in zip(granted.slots.tolist(), range(10), strict=True):
            for rank in range(ranks):
                self.source.part(rank, slot)[:] = content(key(number), PART_BYTES)
        sums = hashes_of(self.source, granted.slots)
        blob, positions = keys(*range(10)), np.arange(10, dtype=np.uint32)
        hashes = np.arange(100, 110, dtype=np.uint64)
        assert self.source.commit(*granted, blob, blob, hashes, positions, sums, 0.0).committed.all()
        self.slots = granted.slots
        local = LocalRegions(
            self.target.layout,
            [self.target.data(rank).rows for rank in range(ranks)],
            [self.target.region(rank).address for rank in range(ranks)],
        )
        self.loop, self.meters = Loop(), Meters()
        self.movers = MoverPool(1, self.loop.post)
        transport = ShmTransport(directory / "source", self.source.incarnation, local, self.movers)
        self.link = Link(transport)
        self.context = SimpleNamespace(local=local)
        self.quick = QuickPulls(cast(Any, SimpleNamespace(pool_changed=lambda: None)), self.loop, self.meters)
        self.told: list[ToEngine] = []
        """What the scheduler was sent alone."""
        self.heard: list[ToEngine] = []
        """What every process of the engine was sent."""

    def pull(self, *numbers: int, first: int = 0, others: set[bytes] | None = None, **more: Any) -> Any:
        fetch = Fetch(
            epoch=1,
            request_id="r",
            first=first,
            parent=ROOT,
            keys=keys(*numbers),
            engine_hashes=bytes(8 * len(numbers)),
            sources=more.pop("sources", [Source("tcp://a", 0, 100)]),
            give_up_ms=more.pop("give_up_ms", 0.0),
            deadline_ms=more.pop("deadline_ms", 1000.0),
            **more,
        )
        hashes = np.zeros(len(numbers), np.uint64)
        return self.quick.pull(
            fetch,
            hashes,
            self.target,
            cast(Any, self.context),
            cast(Any, self.link),
            others or set(),
            self.told.append,
            self.heard.append,
        )

    def counts(self) -> dict[SlotState, int]:
        return self.target.counts()

    def close(self) -> None:
        self.movers.close(5.0)
        self.loop.close()
        self.target.close()
        self.source.close()


@pytest.fixture
def pair(tmp_path: Path, backend_name: str) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_blocks_arrive_with_bytes_record_and_one_message(pair: Pair) -> None:
    pulled = pair.pull(3, 4, 5, first=3)
    assert pulled.statuses.tolist() == [BlockStatus.OK] * 3
    found = pair.target.lookup(keys(3, 4, 5))
    for slot, number in zip(found.slots.tolist(), (3, 4, 5), strict=True):
        assert bytes(pair.target.part(0, slot)) == content(key(number), PART_BYTES)
    record = pair.target.record(found.slots)
    assert (record.keys, record.parents) == (keys(3, 4, 5), ROOT + keys(3, 4))
    assert record.positions.tolist() == [3, 4, 5]
    # The hint had no hashes of the engine: the source's are kept.
    assert record.engine_hashes.tolist() == [103, 104, 105]
    assert (pair.target.checksums(found.slots) == pair.source.checksums(pair.slots[3:6])).all()
    (told,) = pair.told
    assert isinstance(told, FetchProgress)
    assert (told.final, list(told.statuses), told.pulled_blocks) == (True, [BlockStatus.OK] * 3, 3)
    pair.target.check_invariants()


def test_the_source_and_the_meters_hear_of_several_pulls_at_once(pair: Pair) -> None:
    pair.pull(0, 1)
    pair.pull(2)
    assert not pair.link.released
    pair.loop.run_once(50 * TELL_S)
    (release,) = pair.link.released
    assert (release.lease_id, release.block_count, release.byte_count) == (0, 3, 3 * PART_BYTES)
    assert np.frombuffer(release.used_slots, "<i4").tolist() == pair.slots[:3].tolist()
    assert pair.source.still(pair.slots[:3], np.frombuffer(release.used_generations, "<u8")).all()
    assert pair.meters.pulled_blocks.value(transport="shm") == 3
    assert pair.meters.peer_pulled_bytes.value(peer="source") == 3 * PART_BYTES
    assert pair.meters.fetches.value(result="ok") == 2


def test_what_was_read_without_a_lease_is_a_use_at_the_source(pair: Pair) -> None:
    """Blocks 0 to 9 were stored together: the ones that are pulled are not those that go first."""
    nothing = cast(Any, None)
    host = SimpleNamespace(pool=pair.source, plugins={})
    server = PeerServer(cast(Any, host), pair.loop, nothing, pair.meters, nothing, 1000, nothing, nothing)
    pair.pull(7, 8, 9)
    pair.loop.run_once(50 * TELL_S)
    (release,) = pair.link.released
    server.handle(release, Caller(), nothing)
    used = ~pair.source.unused(pair.slots, np.ones(10, np.uint64) * pair.source.lookup(key(0)).generations)
    assert used.tolist() == [False] * 7 + [True] * 3
    with pytest.raises(ProtocolError, match="2 used slots, 0 generations"):
        server.handle(Release(0, used_slots=bytes(8)), Caller(), nothing)


@pytest.mark.parametrize(
    ("numbers", "more"),
    [
        pytest.param((1, 10), {}, id="a block the source has not"),
        pytest.param((1, 2, 1), {}, id="the same block twice"),
        pytest.param((1, 2), {"others": {key(2)}}, id="a block another pull is getting"),
        pytest.param((1, 2), {"sources": [Source("tcp://a", 0, 1)]}, id="a block it is not said to have"),
        pytest.param((1, 2), {"sources": []}, id="no source"),
        pytest.param((1, 2), {"no_retain": True}, id="not to be kept"),
        pytest.param((1, 2), {"move": True}, id="to be moved"),
        pytest.param((1, 2), {"deadline_ms": 0.0}, id="too late"),
        pytest.param((), {}, id="nothing"),
    ],
)  # fmt: skip
def test_what_is_out_of_the_ordinary_is_left_alone(
    pair: Pair, numbers: tuple[int, ...], more: dict[str, Any]
) -> None:
    before = pair.counts()
    assert pair.pull(*numbers, **more) is None
    assert (pair.counts(), pair.told) == (before, [])


def test_a_pull_of_several_steps_tells_of_each_and_of_the_whole_first(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "STEP_BYTES", 4 * PART_BYTES)
    pulled = pair.pull(*range(10))
    assert pulled.statuses.tolist() == [BlockStatus.OK] * 10
    (lease,) = pair.told
    assert isinstance(lease, FetchLease)
    assert lease.available == 10
    progress = [message for message in pair.heard if isinstance(message, FetchProgress)]
    assert [list(message.statuses) for message in progress] == [
        [BlockStatus.OK] * done + [BlockStatus.PENDING] * (10 - done) for done in (4, 8, 10)
    ]
    assert [message.final for message in progress] == [False, False, True]
    found = pair.target.lookup(keys(*range(10)))
    assert pair.target.record(found.slots).parents == ROOT + keys(*range(9))
    for slot, number in zip(found.slots.tolist(), range(10), strict=True):
        assert bytes(pair.target.part(0, slot)) == content(key(number), PART_BYTES)
    pair.target.check_invariants()


def test_what_was_published_before_a_step_went_wrong_stays(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "STEP_BYTES", 4 * PART_BYTES)
    pair.source.part(0, int(pair.slots[6]))[100] ^= 1
    assert pair.pull(*range(10)) is None
    assert (pair.target.lookup(keys(*range(10))).slots >= 0).tolist() == [True] * 4 + [False] * 6
    assert pair.counts()[SlotState.GRANTED] == 0
    assert not any(message.final for message in pair.heard if isinstance(message, FetchProgress))
    pair.target.check_invariants()


def test_large_pulls_leave_the_thread_half_of_its_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "INLINE_BYTES", 2 * PART_BYTES)

    def pull_at(times_s: list[float], *numbers: int) -> bool:
        """``times_s``: what the clock says, look by look."""
        monkeypatch.setattr(quick, "time", SimpleNamespace(monotonic=iter(times_s).__next__))
        return pair.pull(*numbers) is not None

    assert pull_at([1.0, 1.0, 5.0], 0, 1, 2)
    assert not pull_at([8.9], 3, 4, 5)
    assert pull_at([8.9, 8.9], 3, 4)
    assert pull_at([9.0, 9.0, 9.1], 5, 6, 7)


def test_a_pull_beyond_the_limit_is_left_to_the_movers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "QUICK_BYTES", 3 * PART_BYTES)
    assert pair.pull(1, 2, 3, 4) is None
    assert pair.pull(1, 2, 3) is not None


def test_a_block_that_is_here_already_is_left_to_the_long_way(pair: Pair) -> None:
    pair.pull(1)
    assert pair.pull(1, 2) is None


def test_a_pull_that_recomputing_would_beat_is_left_alone(pair: Pair) -> None:
    pair.link.bytes_per_s = PART_BYTES
    assert pair.pull(1, 2, give_up_ms=1999.0) is None
    assert pair.pull(1, 2, give_up_ms=2001.0) is not None


@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_that_do_not_verify_are_not_committed(tmp_path: Path, ranks: int) -> None:
    pair = Pair(tmp_path, ranks=ranks)
    pair.source.part(ranks - 1, int(pair.slots[2]))[100] ^= 1
    assert pair.pull(1, 2) is None
    assert pair.counts()[SlotState.GRANTED] == 0
    assert (pair.target.lookup(keys(1, 2)).slots < 0).all()
    assert not pair.told
    assert pair.pull(1) is not None
    pair.close()


def test_without_room_nothing_is_taken(pair: Pair) -> None:
    pair.target.allocate(31, 0.0)
    assert pair.pull(1, 2) is None
    assert pair.counts()[SlotState.GRANTED] == 31
    assert pair.pull(1) is not None


def test_what_the_policy_does_not_admit_is_said_to_have_failed(tmp_path: Path) -> None:
    pair = Pair(tmp_path, policy=OddOnly())
    pulled = pair.pull(0, 1, 2)
    assert pulled.statuses.tolist() == [BlockStatus.FAILED, BlockStatus.OK, BlockStatus.FAILED]
    assert (pair.target.lookup(keys(0, 1, 2)).slots >= 0).tolist() == [False, True, False]
    assert pair.counts()[SlotState.GRANTED] == 0
    pair.target.check_invariants()
    pair.close()
