# SPDX-License-Identifier: Apache-2.0
"""The view of engine memory agrees with the engines, whatever the network does to their events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from dynamo.llm import compute_block_hash_for_seq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.errors import ProtocolError
from router_hints import g1_repair
from router_hints.g1 import MAX_PARKED, MAX_RECENT, MAX_WAITING, EngineMemory
from router_hints.g1_repair import keep_repaired
from router_hints.kv_events import G1Batch, G1Change, decode_dump
from router_hints.metrics import Metrics
from router_hints.names import extend_names, follow, unpack

BLOCK = 4
RANK = (1, 0)


# --- names -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.sampled_from([4, 16]), st.text(max_size=8))
@settings(max_examples=100, deadline=None)
def test_names_are_the_ones_dynamo_computes(tokens: list[int], block_size: int, salt: str) -> None:
    local = compute_block_hash_for_seq(tokens, block_size, cache_namespace=salt or None)
    expected: list[int] = []
    for each in local:
        expected.append(follow(expected[-1] if expected else None, each))
    assert unpack(extend_names(None, np.array(tokens, np.uint32), block_size, salt)) == expected


def test_names_go_on_where_they_ended_and_tenants_have_their_own() -> None:
    tokens = np.arange(40, dtype=np.uint32)
    whole = extend_names(None, tokens, BLOCK, "")
    head = extend_names(None, tokens[:12], BLOCK, "")
    assert head + extend_names(unpack(head)[-1], tokens[12:], BLOCK, "") == whole
    assert not set(unpack(whole)) & set(unpack(extend_names(None, tokens, BLOCK, "tenant")))


# --- an engine -------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """An engine that remembers what it has, and says each change in a numbered message."""

    worker_id: int
    publisher: int
    held: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    """hash: (hash of the block before, hash of its tokens)"""
    said: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        return self.worker_id, 0

    def hash_of(self, path: tuple[int, ...]) -> int:
        """Only the engine knows how: every engine has its own."""
        return random.Random(repr((self.worker_id, path))).getrandbits(63)

    def store(self, path: tuple[int, ...]) -> G1Batch:
        """A request with these blocks ran: what was not there is cached."""
        known = 0
        while known < len(path) and self.hash_of(path[: known + 1]) in self.held:
            known += 1
        parent = self.hash_of(path[:known]) if known else None
        blocks = []
        for at in range(known, len(path)):
            each = self.hash_of(path[: at + 1])
            self.held[each] = (self.hash_of(path[:at]) if at else None, path[at])
            blocks.append((each, path[at]))
        return self._say(G1Change(self.rank, tuple(blocks), parent)) if blocks else self._say()

    def evict(self, count: int) -> G1Batch:
        """The last blocks of chains go first."""
        gone = []
        for _ in range(count):
            parents = {parent for parent, _ in self.held.values()}
            leaf = next((each for each in self.held if each not in parents), None)
            if leaf is None:
                break
            del self.held[leaf]
            gone.append(leaf)
        return self._say(G1Change(self.rank, removed=tuple(gone)))

    def clear(self) -> G1Batch:
        self.held.clear()
        return self._say(G1Change(self.rank, cleared=True))

    def names(self) -> dict[int, int]:
        """Hash by name, of everything it has."""

        def name(each: int) -> int:
            parent, tokens = self.held[each]
            return follow(name(parent) if parent is not None else None, tokens)

        return {name(each): each for each in self.held}

    def dump(self) -> list[G1Change]:
        """As KvRouter tells it: parents first."""
        return [
            G1Change(self.rank, ((each, tokens),), parent) for each, (parent, tokens) in self.held.items()
        ]

    def _say(self, *changes: G1Change) -> G1Batch:
        self.said += 1
        return G1Batch(self.publisher, self.said - 1, changes)


def started() -> EngineMemory:
    memory = EngineMemory()
    memory.begin_repair()
    memory.repair([])
    return memory


def blob(names: list[int]) -> bytes:
    return np.array(names, "<u8").tobytes()


def agrees(memory: EngineMemory, engine: Engine) -> bool:
    expected = engine.names()
    hashes = memory.engine_hashes(engine.rank, blob(list(expected)))
    return memory.blocks(engine.rank) == len(expected) and hashes.tolist() == list(expected.values())


STEP = st.one_of(
    st.tuples(st.just("store"), st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)),
    st.tuples(st.just("evict"), st.integers(1, 4)),
    st.tuples(st.just("clear"), st.just(0)),
)


@given(st.lists(st.tuples(st.integers(0, 1), STEP, st.integers(0, 9)), max_size=60), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_after_any_loss_duplication_and_reordering_a_repair_makes_it_right(
    steps: list[tuple[int, tuple[str, object], int]], seed: int
) -> None:
    rng, memory = random.Random(seed), started()
    engines = [Engine(1, 11), Engine(2, 22)]
    late: list[G1Batch] = []
    for which, (kind, argument), luck in steps:
        said = getattr(engines[which], kind)(*([] if kind == "clear" else [argument]))
        if luck == 0:
            continue
        if luck <= 2:
            late.append(said)
            continue
        memory.take(said)
        if luck == 3:
            memory.take(said)
        if late and luck <= 5:
            memory.take(late.pop(rng.randrange(len(late))))
    lost = [each for each in late if rng.random() < 0.5]
    memory.begin_repair()
    for each in late:
        if each not in lost:
            memory.take(each)
    dump = [change for engine in engines for change in engine.dump()]
    for each in (engines[0].store((0, 1, 2)), engines[1].evict(1)):
        memory.take(each)
    memory.repair(dump)
    for _ in range(3):
        if memory.wants_repair or memory.missing():
            # A message from before the dump came after it, and the one that follows it was lost.
            memory.begin_repair()
            memory.repair([change for engine in engines for change in engine.dump()])
    assert not memory.wants_repair
    assert all(agrees(memory, engine) for engine in engines)
    assert not memory.missing()
    assert len(memory) == sum(len(engine.held) for engine in engines)
    for each in late:
        memory.take(each)
    assert all(agrees(memory, engine) for engine in engines), "what comes later still is too late"


@given(st.lists(STEP, max_size=40), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_reordering_and_duplication_alone_need_no_repair(steps: list[tuple[str, object]], seed: int) -> None:
    rng, memory, engine = random.Random(seed), started(), Engine(1, 11)
    said = [getattr(engine, kind)(*([] if kind == "clear" else [argument])) for kind, argument in steps]
    network = said[1:] + rng.sample(said, len(said) // 3)
    rng.shuffle(network)
    # By the first message its publisher becomes known.
    for each in said[:1] + network:
        memory.take(each)
    assert agrees(memory, engine) or not said
    assert not memory.missing()
    assert not memory.wants_repair


# --- cases -----------------------------------------------------------------------------------------------


def test_who_has_what_from_the_first_block_on_and_by_which_hash() -> None:
    memory, one, two = started(), Engine(1, 11), Engine(2, 22)
    memory.take(one.store((5, 6, 7)))
    memory.take(two.store((5, 6, 8)))
    memory.take(one.evict(1))
    names = blob([follow(None, 5), follow(follow(None, 5), 6), 99])
    assert memory.held(names) == {(1, 0): [True, True, False], (2, 0): [True, True, False]}
    assert memory.leading(names) == {(1, 0): 2, (2, 0): 2}
    assert memory.engine_hashes((2, 0), names).tolist() == [two.hash_of((5,)), two.hash_of((5, 6)), 0]
    assert memory.engine_hashes((3, 0), names).tolist() == [0, 0, 0]
    assert memory.engine_hashes(None, b"").tolist() == []
    assert memory.held(blob([99])) == {}


def test_cleared_leaves_nothing_of_that_engine() -> None:
    memory, one, two = started(), Engine(1, 11), Engine(2, 22)
    memory.take(one.store((5, 6)))
    memory.take(two.store((5, 6)))
    memory.take(one.clear())
    assert (memory.blocks(one.rank), memory.blocks(two.rank)) == (0, 2)


def test_a_block_waits_for_its_parent_and_a_removed_one_no_longer() -> None:
    memory, engine = started(), Engine(1, 11)
    first, second, third = engine.hash_of((5,)), engine.hash_of((5, 6)), engine.hash_of((5, 6, 7))
    memory.take(G1Batch(11, 0, (G1Change(RANK, ((second, 6), (third, 7)), first),)))
    assert (memory.blocks(RANK), memory.parked_blocks) == (0, 2)
    assert memory.wants_repair
    memory.take(G1Batch(11, 1, (G1Change(RANK, removed=(third,)),)))
    assert memory.parked_blocks == 1
    memory.take(G1Batch(11, 2, (G1Change(RANK, ((first, 5),)),)))
    assert (memory.blocks(RANK), memory.parked_blocks) == (2, 0)
    names = blob([follow(None, 5), follow(follow(None, 5), 6)])
    assert memory.engine_hashes(RANK, names).tolist() == [first, second]
    # Told of after another parent, it waits for that one only.
    for number, parent in enumerate((901, 902)):
        memory.take(G1Batch(11, 3 + number, (G1Change(RANK, ((900, 9),), parent),)))
    assert memory.parked_blocks == 1
    memory.take(G1Batch(11, 5, (G1Change(RANK, ((901, 8),)),)))
    assert (memory.blocks(RANK), memory.parked_blocks) == (3, 1)
    memory.take(G1Batch(11, 6, (G1Change(RANK, ((902, 7),)),)))
    assert (memory.blocks(RANK), memory.parked_blocks) == (5, 0)


def test_parked_blocks_are_bounded_and_the_oldest_go() -> None:
    memory = started()
    for number in range(MAX_PARKED + 100):
        memory.take(G1Batch(11, number, (G1Change(RANK, ((2 * number + 1, 1),), 2 * number),)))
    assert memory.parked_blocks == MAX_PARKED
    memory.take(G1Batch(11, MAX_PARKED + 100, (G1Change(RANK, ((0, 7), (2 * MAX_PARKED, 8))),)))
    assert memory.blocks(RANK) == 3, "the first parked one was forgotten, the last one was not"


def test_blocks_are_bounded_and_a_full_view_asks_for_no_repair() -> None:
    memory = EngineMemory(max_blocks=10)
    memory.begin_repair()
    memory.repair([])
    engine = Engine(1, 11)
    memory.take(engine.store(tuple(range(25))))
    assert (len(memory), memory.refused_blocks) == (10, 1)
    memory.take(engine.store(tuple(range(27))))
    assert (len(memory), memory.wants_repair) == (10, "")


def test_late_events_of_a_removed_worker_do_not_bring_it_back() -> None:
    memory, engine = started(), Engine(1, 11)
    memory.take(engine.store((5, 6)))
    late = engine.store((5, 6, 7))
    memory.retire(1)
    memory.take(late)
    assert (memory.ranks(), len(memory)) == ([], 0)
    memory.begin_repair()
    memory.repair(engine.dump())
    assert len(memory) == 0, "nor does a dump that does not know it yet"


def test_a_worker_that_discovery_had_lost_is_read_again() -> None:
    memory, engine = started(), Engine(1, 11)
    memory.take(engine.store((5, 6)))
    memory.retire(1)
    memory.admit(2)
    assert not memory.wants_repair
    memory.admit(1)
    assert memory.wants_repair
    memory.begin_repair()
    memory.repair(engine.dump())
    memory.take(engine.store((5, 6, 7)))
    assert agrees(memory, engine)


def test_an_engine_that_was_there_before_the_router_is_read() -> None:
    memory, engine = started(), Engine(1, 11)
    engine.store((1, 2))
    memory.take(engine.store((1, 2, 3)))
    assert memory.wants_repair
    memory.begin_repair()
    memory.repair(engine.dump())
    assert agrees(memory, engine)


def test_too_many_messages_behind_a_lost_one_are_not_kept() -> None:
    memory, engine = started(), Engine(1, 11)
    engine.store((1,))
    for number in range(MAX_WAITING + 1):
        memory.take(engine.store((number + 2,)))
    assert memory.wants_repair
    assert not memory.missing()
    memory.begin_repair()
    memory.repair(engine.dump())
    assert agrees(memory, engine)


def test_a_dump_that_is_older_than_what_is_known_takes_nothing_back() -> None:
    memory, engine = started(), Engine(1, 11)
    memory.take(engine.store((1, 2)))
    old = engine.dump()
    memory.take(engine.store((1, 2, 3)))
    memory.take(engine.store((4, 5)))
    memory.take(engine.evict(1))
    memory.begin_repair()
    memory.repair(old)
    assert agrees(memory, engine)
    assert not memory.wants_repair


def test_what_is_kept_for_that_is_bounded() -> None:
    memory, engine = started(), Engine(1, 11)
    for each in range(3000):
        memory.take(engine.store((each, 1)))
    (publisher,) = memory._publishers.values()
    assert len(publisher.recent) == MAX_RECENT
    for each in range(3):
        memory.take(engine.store((5000 + each, *range(2000))))
    assert len(publisher.recent) == 2
    assert publisher.recent_blocks == 4002


@given(st.lists(STEP, min_size=1, max_size=30), st.data())
@settings(deadline=None)
def test_whatever_the_age_of_the_dump_what_was_heard_is_known(
    steps: list[tuple[str, object]], data: st.DataObject
) -> None:
    memory, engine, dumps = started(), Engine(1, 11), [[]]
    said = []
    for kind, argument in steps:
        said.append(getattr(engine, kind)(*([] if kind == "clear" else [argument])))
        dumps.append(engine.dump())
    until = data.draw(st.integers(0, len(said)))
    for batch in said[:until]:
        memory.take(batch)
    memory.begin_repair()
    for batch in said[until:]:
        memory.take(batch)
    memory.repair(data.draw(st.sampled_from(dumps)))
    assert agrees(memory, engine)


# --- repair ----------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "BEFORE_DUMP_S"):
        monkeypatch.setattr(g1_repair, name, 0.001)


async def _repaired_until(memory: EngineMemory, dump, done) -> Metrics:  # type: ignore[no-untyped-def]
    metrics = Metrics()
    task = asyncio.get_running_loop().create_task(keep_repaired(memory, dump, metrics))
    try:
        async with asyncio.timeout(20):
            while not done():
                await asyncio.sleep(0.001)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return metrics


async def test_a_router_that_starts_reads_everything_and_again_what_was_lost(at_once: None) -> None:
    memory, engine = EngineMemory(), Engine(1, 11)
    engine.store((1, 2, 3))
    fails = [ProtocolError("not yet")]

    async def dump() -> list[G1Change]:
        if fails:
            raise fails.pop()
        return engine.dump()

    await _repaired_until(memory, dump, lambda: agrees(memory, engine))
    memory.take(engine.store((4, 5)))
    engine.store((6, 7))
    memory.take(engine.store((8, 9)))
    assert memory.missing()
    metrics = await _repaired_until(memory, dump, lambda: agrees(memory, engine))
    assert "kvcr_router_g1_repairs_total 1.0" in metrics.render()


async def test_what_the_first_dump_did_not_have_is_in_the_second(at_once: None) -> None:
    memory, engine = EngineMemory(), Engine(1, 11)
    late = [engine.dump()]
    memory.take(engine.store((1, 2)))
    engine.store((3, 4))
    memory.take(engine.store((5, 6)))

    async def dump() -> list[G1Change]:
        return late.pop() if late else engine.dump()

    await _repaired_until(memory, dump, lambda: agrees(memory, engine))
    assert not late


def test_a_dump_of_kv_router_is_read_and_other_tiers_are_left_out() -> None:
    def row(tier: str, worker_id: int, dp_rank: int) -> dict[str, object]:
        stored = {"parent_hash": 7, "start_position": None, "blocks": [{"block_hash": 8, "tokens_hash": 9}]}
        event = {"event_id": 0, "data": {"stored": stored}, "dp_rank": dp_rank}
        return {"worker_id": worker_id, "storage_tier": tier, "event": event}

    text = json.dumps([row("device", 1, 3), row("disk", 2, 0)])
    assert decode_dump(text) == (G1Change((1, 3), ((8, 9),), 7),)
    with pytest.raises(ProtocolError, match="does not decode"):
        decode_dump("{}")
