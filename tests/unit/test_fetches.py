# SPDX-License-Identifier: Apache-2.0
"""Fetches on a real pool and a real loop, with a source whose every answer the test hands out itself.

What is checked above all: whatever happens at whichever moment, every slot is back in the end.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.guard.fetches import Fetches
from kvcr.guard.grants import Grant
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.tracing import RequestTraces
from kvcr.guard.transit import TransitSlots
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool, checksum_parts
from kvcr.protocol.engine import BlockStatus, Fetch, FetchProgress, Handed, Source, Taken, ToEngine
from kvcr.protocol.peer import Release
from kvcr.tracing import NOT_TRACING
from kvcr.transfer.base import LocalRegions, Step, failed, verified
from kvcr.transfer.nixl import NixlTransport

OK, GONE, TOO_SLOW, FAILED = BlockStatus.OK, BlockStatus.GONE, BlockStatus.TOO_SLOW, BlockStatus.FAILED
SLOTS = 64


class FakeLink:
    """A peer that has every block. What it answers waits in ``world.todo`` until the test runs it."""

    name = label = "peer"
    in_place = True
    bytes_per_s: float | None = None
    ready = True
    reason = ""
    endpoint = "tcp://peer"

    def __init__(self, world: World) -> None:
        self.world = world
        self.transport = self
        self.released: list[int] = []
        self.granted = 0

    def when_ready(self, now_s: float, done: Callable[[str], None]) -> None:
        done("")

    def keys_per_lease(self) -> int:
        return 4

    def lease(
        self, keys: bytes, lease_ms: int, timeout_s: float, done: Any, renew: int, traceparent: str
    ) -> None:
        count = len(keys) // KEY_BYTES
        self.granted += 1
        slots = self.world.slots_of(keys)
        grant = Grant(
            self.granted,
            slots,
            np.ones(count, np.uint64),
            self.world.sums[slots][:, None],
            np.zeros(count, np.uint64),
            np.zeros(count, bool),
            float("inf"),
        )
        self.world.todo.append(lambda failing: done(*((None, "died") if failing else (grant, ""))))

    def read(self, step: Step, done: Any, quiet: Any) -> None:
        def end(failing: bool) -> None:
            local = self.world.local
            if failing and self.world.lands_late:
                done(failed(step, TOO_SLOW, "late", 0.1, in_flight=True))
                self.world.todo.append(lambda _: quiet(step))
                return
            if failing:
                done(failed(step, GONE, "died", 0.1))
                return
            for ours, theirs in zip(step.local_slots.tolist(), step.remote_slots.tolist(), strict=True):
                local.arrays[0][ours, : local.layout.part_bytes] = self.world.content[theirs]
            done(verified(step, local.checksums(step.local_slots), 0.0, 0.1))

        self.world.todo.append(end)

    def release(self, message: Release) -> None:
        self.released.append(message.lease_id)

    def measured(self, transport: str, nbytes: int, seconds: float) -> float:
        return 1.0

    def suspect(self, reason: str) -> None: ...


class World:
    """Two pools' worth of blocks, of which ours has none."""

    def __init__(self, directory: Path, slots: int = SLOTS, transit: int = 8) -> None:
        self.pool: Pool | None = pools.create(directory, slots)
        self.loop = Loop()
        self.meters = Meters()
        self.link = FakeLink(self)
        self.peers: Any = SimpleNamespace(link=lambda context, endpoint: self.link)
        pool = self.pool
        self.local = LocalRegions(pool.layout, [pool.data(0).array], [pool.region(0).address])
        self.peer_context: Any = SimpleNamespace(local=self.local)
        self.todo: list[Callable[[bool], None]] = []
        self.lands_late = False
        self.sent: list[ToEngine] = []
        part = pool.layout.part_bytes
        self.content = np.stack(
            [np.frombuffer(pools.content(pools.key(n), part), np.uint8) for n in range(256)]
        )
        self.sums = checksum_parts(self.content, np.arange(256, dtype=np.int32), part)
        self.fetches = Fetches(
            self,
            self.loop,
            self.meters,
            5000,
            TransitSlots(transit, 1.0),
            lambda _: None,
            RequestTraces(NOT_TRACING),
        )
        self.number_of = {pools.key(n): n for n in range(256)}

    def slots_of(self, keys: bytes) -> np.ndarray:
        return np.array(
            [self.number_of[keys[at : at + KEY_BYTES]] for at in range(0, len(keys), KEY_BYTES)], np.int32
        )

    def use_steps_of(self, blocks: int) -> None:
        """Instead of 8 MiB, which is all a test has."""
        small = type("Small", (LocalRegions,), {"blocks_per_step": property(lambda self: blocks)})
        self.local.__class__ = small

    def pool_changed(self) -> None: ...

    def broadcast(self, message: ToEngine) -> None:
        self.sent.append(message)

    def start(self, request_id: str, first: int, count: int, **more: Any) -> None:
        fetch = Fetch(
            epoch=1,
            request_id=request_id,
            first=0,
            parent=pools.ROOT,
            keys=pools.keys(*range(first, first + count)),
            engine_hashes=np.arange(count, dtype="<u8").tobytes(),
            sources=[Source("tcp://peer", 0, count)],
            give_up_ms=0.0,
            deadline_ms=60_000.0,
            **more,
        )
        self.fetches.start(fetch, self, self.sent.append, "scheduler")
        self.loop.run_once(0.0)

    def next(self, failing: bool = False) -> bool:
        """Let the oldest thing that is under way end; False when nothing is."""
        if not self.todo:
            return False
        self.todo.pop(0)(failing)
        self.loop.run_once(0.0)
        return True

    def drain(self) -> None:
        while self.next():
            pass

    def wait_until_idle(self) -> None:
        """Timers included; a cooling slot takes 2 s."""
        deadline_s = time.monotonic() + 10
        while self.fetches.active and time.monotonic() < deadline_s:
            self.drain()
            self.loop.run_once(0.1)

    def final(self, request_id: str) -> list[BlockStatus]:
        (message,) = [
            one
            for one in self.sent
            if isinstance(one, FetchProgress) and one.final and one.request_id == request_id
        ]
        return [BlockStatus(status) for status in message.statuses]

    def counts(self) -> dict[str, int]:
        assert self.pool is not None
        return {state.name: count for state, count in self.pool.counts().items() if count}

    def assert_every_slot_is_accounted_for(self, resident: int) -> None:
        """No slot is granted or in quarantine, and as many are READY as blocks arrived."""
        assert self.pool is not None
        counts = self.counts()
        assert counts.get("READY", 0) == resident
        assert counts.get("FREE", 0) == self.pool.slots - resident
        assert self.fetches.active == 0
        assert self.fetches.transit.used == 0
        self.pool.check_invariants()
        # And every lease was given back, once.
        assert sorted(one for one in self.link.released if one) == list(range(1, self.link.granted + 1))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "pool")
    yield made
    assert made.pool is not None
    made.pool.close(unlink=True)


def test_a_fetch_cancelled_at_each_of_its_moments_gives_every_slot_back(world: World) -> None:
    """Moments: each lease reply and each end of a step. The blocks differ, so that nothing is resident."""
    for moment in range(12):
        world.start(f"r{moment}", 20 * (moment % 3), 20)
        for _ in range(moment):
            world.next()
        world.fetches.finish(f"r{moment}")
        world.drain()
        assert world.fetches.active == 0
        assert world.counts().keys() <= {"FREE", "READY"}
    assert world.pool is not None
    world.assert_every_slot_is_accounted_for(world.pool.ready_count)


def test_a_thousand_fetches_and_cancels_lose_no_slot(world: World) -> None:
    for number in range(1000):
        world.start(f"r{number}", number % 180, 12, no_retain=number % 5 == 0)
        for _ in range(number % 4):
            world.next()
        world.fetches.finish(f"r{number}")
    world.drain()
    assert world.fetches.active == 0
    assert world.fetches.transit.used == 0
    assert world.counts().keys() <= {"FREE", "READY", "COOLING"}
    assert sum(world.counts().values()) == SLOTS
    assert world.pool is not None
    world.pool.check_invariants()


actions = st.lists(
    st.tuples(
        st.sampled_from(["start", "start_once", "next", "fail", "finish", "late", "take"]), st.integers(0, 5)
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(actions=actions)
def test_whatever_happens_in_whatever_order_every_slot_comes_back(actions: list[tuple[str, int]]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="kvcr-fetches-"))
    world = World(directory / "pool", slots=24)
    try:
        for action, number in actions:
            world.lands_late = action == "late"
            match action:
                case "start" | "start_once":
                    world.start(f"r{number}", 7 * number, 10, no_retain=action == "start_once")
                case "next":
                    world.next()
                case "fail" | "late":
                    world.next(failing=True)
                case "finish":
                    world.fetches.finish(f"r{number}")
                case "take":
                    take_all(world)
            world.loop.run_once(0.0)
        for number in range(6):
            world.fetches.finish(f"r{number}")
        world.drain()
        assert world.fetches.active == 0
        assert world.fetches.transit.used == 0
        assert world.counts().keys() <= {"FREE", "READY", "COOLING"}
        assert world.pool is not None
        world.pool.check_invariants()
    finally:
        assert world.pool is not None
        world.pool.close(unlink=True)
        shutil.rmtree(directory)


def take_all(world: World) -> None:
    for message in [one for one in world.sent if isinstance(one, Handed)]:
        world.fetches.taken(Taken(message.request_id, message.first, message.indices), rank=0)


# --- slots ------------------------------------------------------------------------------------------


def test_of_two_fetches_that_need_most_of_a_small_pool_the_first_gets_all_its_blocks(tmp_path: Path) -> None:
    world = World(tmp_path / "pool", slots=8)
    # In steps of one block, so that they take turns.
    world.use_steps_of(1)
    world.start("a", 0, 6)
    world.start("b", 100, 6)
    world.drain()
    assert world.final("a") == [OK] * 6
    world.wait_until_idle()
    assert world.final("b") == [OK] * 2 + [FAILED] * 4
    # What "a" was promised is held for it: "b" did not evict it.
    assert pools.found(world.pool, *range(6)) == [True] * 6
    world.fetches.finish("a")
    world.fetches.finish("b")
    world.assert_every_slot_is_accounted_for(8)
    world.pool.close(unlink=True)


def test_a_pull_waits_for_slots_that_cool_instead_of_giving_up(tmp_path: Path) -> None:
    world = World(tmp_path / "pool", slots=8)
    assert world.pool is not None
    pools.store(world.pool, *range(200, 208))
    world.start("a", 0, 6)
    world.wait_until_idle()
    assert world.final("a") == [OK] * 6
    world.pool.close(unlink=True)


def test_pulls_take_turns_step_by_step(world: World) -> None:
    world.use_steps_of(2)
    world.start("big", 0, 40)
    world.start("small", 100, 4)
    steps = 0
    while not any(
        isinstance(one, FetchProgress) and one.final and one.request_id == "small" for one in world.sent
    ):
        assert world.next()
        steps += 1
    # 10 + 1 leases, and then turns: the small one's two steps end with the big one's first few.
    assert steps < 18
    world.drain()
    assert world.final("big") == [OK] * 40


def test_reads_that_may_still_land_keep_their_slots_in_quarantine_until_they_cannot(world: World) -> None:
    world.lands_late = True
    world.start("a", 0, 3)
    world.next()
    world.next(failing=True)
    assert world.counts()["QUARANTINED"] == 3
    assert world.meters.quarantined_slots.value() == 3
    assert world.final("a") == [TOO_SLOW] * 3
    world.drain()
    world.assert_every_slot_is_accounted_for(0)
    assert world.meters.requalified_slots.value() == 3


# --- no retain --------------------------------------------------------------------------------------


def test_while_too_much_is_in_quarantine_tcp_peers_are_refused_in_words_and_used_again_after(
    world: World,
) -> None:
    process = SimpleNamespace(overloaded=True)
    tcp = NixlTransport.__new__(NixlTransport)
    tcp.own_agent, tcp._process, tcp.read = True, process, world.link.read  # type: ignore[assignment, method-assign]
    tcp.synchronous = False
    world.link.transport = tcp  # type: ignore[assignment]
    world.start("refused", 0, 4)
    assert world.final("refused") == [GONE] * 4
    (final,) = [one for one in world.sent if isinstance(one, FetchProgress) and one.final]
    assert "too many slots wait in quarantine" in final.reason
    world.assert_every_slot_is_accounted_for(0)
    # Between the lease and the step, too.
    process.overloaded = False
    world.start("leased", 0, 4)
    process.overloaded = True
    world.drain()
    assert world.final("leased") == [GONE] * 4
    process.overloaded = False
    world.start("again", 0, 4)
    world.drain()
    assert world.final("again") == [OK] * 4
    world.assert_every_slot_is_accounted_for(4)


def test_what_comes_for_one_request_alone_is_never_published_and_its_slots_are_few(world: World) -> None:
    assert world.pool is not None
    world.start("once", 0, 20, no_retain=True)
    world.drain()
    # Eight slots in transit, as many as are allowed: the rest waits for the engine.
    assert world.fetches.transit.used == 8
    assert world.counts() == {"FREE": SLOTS - 8, "GRANTED": 8}
    most = 0
    for _ in range(20):
        if world.fetches.active == 0:
            break
        take_all(world)
        world.loop.run_once(0.0)
        world.drain()
        most = max(most, world.fetches.transit.used)
        assert world.pool.ready_count == 0
        assert world.pool.drain_changes().stored_keys == b""
    assert most == 8
    assert world.final("once") == [OK] * 20
    world.assert_every_slot_is_accounted_for(0)
    assert world.meters.transit_blocks.value(how="slot") == 20


def test_a_fetch_that_retains_does_not_wait_for_one_that_does_not(world: World) -> None:
    world.start("once", 0, 4, no_retain=True)
    world.start("kept", 0, 4)
    world.drain()
    assert world.final("kept") == [OK] * 4
    assert pools.found(world.pool, *range(4)) == [True] * 4
    world.fetches.finish("once")
    world.assert_every_slot_is_accounted_for(4)


def test_what_is_handed_over_is_what_the_source_has(world: World) -> None:
    assert world.pool is not None
    world.start("once", 30, 5, no_retain=True)
    world.drain()
    handed = [one for one in world.sent if isinstance(one, Handed)]
    slots = np.frombuffer(b"".join(one.slots for one in handed), "<i4")
    assert np.frombuffer(b"".join(one.indices for one in handed), "<i4").tolist() == [0, 1, 2, 3, 4]
    part = world.pool.layout.part_bytes
    assert (world.local.arrays[0][slots, :part] == world.content[30:35]).all()
    sums = np.frombuffer(b"".join(one.checksums for one in handed), "<u8")
    assert sums.tolist() == world.sums[30:35].tolist()
    assert world.counts()["GRANTED"] == 5
