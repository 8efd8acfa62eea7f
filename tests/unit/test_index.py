# SPDX-License-Identifier: Apache-2.0
"""The location index agrees with the guards, whatever the network does to their events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.protocol.events import Heartbeat, Inventory
from kvcr.protocol.peer import SnapshotChunk
from router_hints.index import MAX_PENDING_BATCHES, LocationIndex, Outcome, RepairKind
from router_hints.table import BlockTable, as_words, fold


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def keys(*numbers: int) -> bytes:
    return b"".join(key(n) for n in numbers)


def batch(
    guard: str, sequence: int, stored: bytes = b"", removed: bytes = b"", incarnation: int = 1, tier: int = 2
) -> Inventory:
    count = len(stored) // 16
    return Inventory(guard, incarnation, sequence, tier, stored, bytes(8 * count), bytes(4 * count), removed)


@dataclass
class Guard:
    """A guard that remembers what it said, and can be asked again."""

    name: str
    incarnation: int = 1
    slots: list[bytes] = field(default_factory=list)
    """As in a pool: a block stays in its slot, an empty slot is reused; snapshots go by slot."""
    said: list[Inventory] = field(default_factory=list)

    @property
    def held(self) -> set[bytes]:
        return {each for each in self.slots if each}

    def change(self, store: list[int], remove: list[int]) -> Inventory:
        removed = [key(n) for n in set(remove) if key(n) in self.held]
        self.slots = [b"" if each in removed else each for each in self.slots]
        stored = [key(n) for n in store]
        for each in stored:
            self.put(each)
        said = batch(self.name, len(self.said) + 1, b"".join(stored), b"".join(removed), self.incarnation)
        self.said.append(said)
        return said

    def put(self, each: bytes) -> None:
        if each in self.held:
            return
        if b"" in self.slots:
            self.slots[self.slots.index(b"")] = each
        else:
            self.slots.append(each)

    def restart(self) -> None:
        self.incarnation += 1
        self.said.clear()

    def heartbeat(self) -> Heartbeat:
        digest = fold(as_words(b"".join(self.held)))
        return Heartbeat(self.name, self.incarnation, len(self.said), len(self.held), digest)

    def chunk(self, cursor: int, size: int) -> SnapshotChunk:
        part = self.slots[cursor : cursor + size]
        following = cursor + size if cursor + size < len(self.slots) else -1
        return SnapshotChunk(
            0, self.name, self.incarnation, len(self.said), b"".join(part), b"", b"", following
        )


def repair(index: LocationIndex, guards: dict[str, Guard]) -> None:
    """What the inventory client does, without a network."""
    for _ in range(4):
        for guard in guards.values():
            index.beat(guard.heartbeat())
        for wanted in index.repairs():
            guard = guards[wanted.guard]
            if wanted.kind is RepairKind.REPLAY:
                for said in guard.said[wanted.first - 1 : wanted.last]:
                    index.apply(said)
                continue
            index.begin_snapshot(guard.name)
            cursor = 0
            while cursor >= 0:
                chunk = guard.chunk(cursor, 3)
                assert index.add_chunk(chunk)
                cursor = chunk.next_cursor


def holders(index: LocationIndex, number: int) -> set[str]:
    return set(index.lookup(key(number)).guards)


# --- the table ------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 3), st.lists(st.integers(0, 40), max_size=8)), max_size=60
    )
)
def test_table_agrees_with_a_dict_of_sets(steps: list[tuple[bool, int, list[int]]]) -> None:
    table, model = BlockTable(10_000), dict[bytes, set[int]]()
    for add, bit, numbers in steps:
        before = {key(n) for n in numbers if bit in model.get(key(n), set())}
        if add:
            changed, dropped = table.add(as_words(keys(*numbers)), bit)
            assert dropped == 0
            assert {row.tobytes() for row in changed} == {key(n) for n in numbers} - before
            for n in numbers:
                model.setdefault(key(n), set()).add(bit)
        else:
            changed = table.remove(as_words(keys(*numbers)), bit)
            assert {row.tobytes() for row in changed} == before
            for n in numbers:
                model.get(key(n), set()).discard(bit)
        assert len(table) == sum(1 for bits in model.values() if bits)
    masks = table.masks(as_words(keys(*range(41))))
    for n in range(41):
        assert int(masks[n, 0]) == sum(1 << bit for bit in model.get(key(n), set()))


def test_table_grows_to_its_bound_and_then_drops_and_counts() -> None:
    table = BlockTable(50_000)
    words = np.frombuffer(random.Random(1).randbytes(16 * 60_000), dtype="<u8").reshape(-1, 2)
    dropped = sum(table.add(words[i : i + 2000], 0)[1] for i in range(0, 60_000, 2000))
    assert len(table) == 50_000
    assert dropped == 10_000
    assert np.count_nonzero(table.masks(words)) == 50_000
    assert table.nbytes / 50_000 < 150
    table.clear(0)
    assert len(table) == 0
    assert table.add(words[:50_000], 1)[1] == 0


def test_more_than_sixty_four_guards() -> None:
    index = LocationIndex()
    for number in range(130):
        index.admit(f"g{number}", 1)
        index.apply(batch(f"g{number}", 1, keys(7, number + 1000)))
    assert len(index.lookup(key(7)).guards) == 130
    assert holders(index, 1129) == {"g129"}
    index.retire("g64")
    assert len(index.lookup(key(7)).guards) == 129


# --- order, gaps, restarts --------------------------------------------------------------------------


def test_a_duplicate_changes_nothing_and_a_late_batch_is_waited_for() -> None:
    index = LocationIndex()
    index.admit("a", 1)
    assert index.apply(batch("a", 2, removed=keys(1))) is Outcome.WAITING
    assert index.apply(batch("a", 1, keys(1, 2))) is Outcome.APPLIED
    assert index.apply(batch("a", 1, keys(1, 2))) is Outcome.DUPLICATE
    assert holders(index, 1) == set()
    assert holders(index, 2) == {"a"}


def test_one_lost_batch_costs_one_replay_and_no_hit() -> None:
    index, guard = LocationIndex(), Guard("a")
    index.admit("a", 1)
    for number in range(1000):
        said = guard.change([number], [])
        if number != 500:
            index.apply(said)
        assert number < 500 or holders(index, 3) == {"a"}
    wanted = [r for r in index.repairs() if r.kind is RepairKind.REPLAY]
    assert not wanted or (wanted[0].first, wanted[0].last) == (501, 501)
    repair(index, {"a": guard})
    assert index.blocks("a") == 1000


def test_a_gap_asks_for_exactly_what_is_missing_once_the_guard_is_known() -> None:
    index, guard = LocationIndex(), Guard("a")
    index.admit("a", 1)
    repair(index, {"a": guard})
    for number in range(10):
        said = guard.change([number], [])
        if number not in (3, 4):
            index.apply(said)
    (wanted,) = index.repairs()
    assert (wanted.kind, wanted.first, wanted.last) == (RepairKind.REPLAY, 4, 5)


def test_a_heartbeat_finds_the_loss_of_the_last_batch_and_a_wrong_set() -> None:
    index, guard = LocationIndex(), Guard("a")
    index.admit("a", 1)
    repair(index, {"a": guard})
    guard.change([1], [])
    assert index.beat(guard.heartbeat()) is Outcome.BEHIND
    repair(index, {"a": guard})
    guard.put(key(99))  # changed without an event
    assert index.beat(guard.heartbeat()) is Outcome.DIFFERS
    assert [r.kind for r in index.repairs()] == [RepairKind.SNAPSHOT]
    repair(index, {"a": guard})
    assert holders(index, 99) == {"a"}


def test_a_new_incarnation_replaces_the_old_one_at_once() -> None:
    index, guard = LocationIndex(), Guard("a")
    index.admit("a", 1)
    old = guard.change([1], [])
    index.apply(old)
    guard.restart()
    guard.slots.clear()
    index.apply(guard.change([2], []))
    assert holders(index, 1) == set()
    assert holders(index, 2) == {"a"}
    assert index.apply(old) is Outcome.STALE


def test_a_retired_guard_does_not_come_back_with_its_queued_events() -> None:
    index, guard = LocationIndex(), Guard("a", incarnation=5)
    index.admit("a", 5)
    index.apply(guard.change([1], []))
    index.retire("a")
    for number in range(1000):
        assert index.apply(guard.change([number], [])) is Outcome.UNKNOWN
    assert len(index) == 0
    index.admit("a", 4)
    assert index.guards() == []
    index.admit("a", 5)
    repair(index, {"a": guard})
    assert index.blocks("a") == 1000


def test_batches_that_pile_up_behind_a_gap_are_bounded() -> None:
    index, guard = LocationIndex(), Guard("a")
    index.admit("a", 1)
    repair(index, {"a": guard})
    guard.change([0], [])
    for number in range(1, MAX_PENDING_BATCHES + 10):
        index.apply(guard.change([number], []))
    assert [r.kind for r in index.repairs()] == [RepairKind.SNAPSHOT]
    repair(index, {"a": guard})
    assert index.blocks("a") == MAX_PENDING_BATCHES + 10


def test_other_tiers_keep_the_sequence_going() -> None:
    index = LocationIndex()
    index.admit("a", 1)
    index.apply(batch("a", 1, keys(1), tier=3))
    assert index.apply(batch("a", 2, keys(2))) is Outcome.APPLIED
    assert holders(index, 1) == set()


def test_blocks_beyond_the_bound_are_dropped_counted_and_do_not_cause_resyncs() -> None:
    index, guard = LocationIndex(max_blocks=100), Guard("a")
    index.admit("a", 1)
    repair(index, {"a": guard})
    index.apply(guard.change(list(range(300)), []))
    assert len(index) == 100
    assert index.dropped_blocks == 200
    assert index.beat(guard.heartbeat()) is Outcome.APPLIED
    assert index.repairs() == []


def test_lookup_gives_a_row_for_each_holder_in_chain_order() -> None:
    index = LocationIndex()
    for name in ("a", "b", "c"):
        index.admit(name, 1)
    index.apply(batch("a", 1, keys(0, 1, 2)))
    index.apply(batch("b", 1, keys(2, 3)))
    view = index.lookup(keys(0, 1, 2, 3, 4))
    assert view.guards == ("a", "b")
    assert view.held.tolist() == [[True, True, True, False, False], [False, False, True, True, False]]


# --- the whole, against a dict ----------------------------------------------------------------------

changes = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from(["deliver", "lose", "twice", "delay", "restart", "retire", "snapshot"]),
    st.lists(st.integers(0, 30), max_size=5),
    st.lists(st.integers(0, 30), max_size=5),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(changes, max_size=60), st.randoms(use_true_random=False))
def test_after_any_loss_duplication_and_reordering_the_index_equals_the_guards(
    steps: list[tuple[str, str, list[int], list[int]]], shuffle: random.Random
) -> None:
    index = LocationIndex()
    guards = {name: Guard(name) for name in ("a", "b")}
    cursors: dict[str, int] = {}
    for name in guards:
        index.admit(name, 1)
    delayed: list[Inventory] = []
    for name, fate, store, remove in steps:
        guard = guards[name]
        if fate == "restart":
            guard.restart()
            index.admit(name, guard.incarnation)
            cursors.pop(name, None)
        elif fate == "retire":
            index.retire(name)
            index.admit(name, guard.incarnation)
            cursors.pop(name, None)
        elif fate == "snapshot":
            # One chunk of a snapshot that goes on while events go on.
            if name not in cursors:
                index.begin_snapshot(name)
                cursors[name] = 0
            chunk = guard.chunk(cursors[name], 4)
            index.add_chunk(chunk)
            cursors[name] = chunk.next_cursor
            if chunk.next_cursor < 0:
                del cursors[name]
        said = guard.change(store, remove)
        if fate == "delay":
            delayed.append(said)
        elif fate != "lose":
            index.apply(said)
            if fate == "twice":
                index.apply(said)
        if delayed and shuffle.random() < 0.3:
            index.apply(delayed.pop(shuffle.randrange(len(delayed))))
    for said in delayed:
        index.apply(said)
    for name in cursors:
        index.abort_snapshot(name)
    repair(index, guards)
    assert index.repairs() == []
    for name, guard in guards.items():
        assert {row.tobytes() for row in as_words(index.held_by(name))} == guard.held
        assert index.blocks(name) == len(guard.held)
    assert len(index) == len({k for guard in guards.values() for k in guard.held})
