# SPDX-License-Identifier: Apache-2.0
"""The location index agrees with the guards, whatever the network does to their events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.protocol.events import Heartbeat, Inventory
from kvcr.protocol.peer import SnapshotChunk
from router_hints.index import MAX_PENDING_BATCHES, LocationIndex, Outcome, RepairKind
from router_hints.table import BlockTable, DictTable, fold


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
        digest = fold(b"".join(self.held))
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

NAMES = [f"g{bit}" for bit in range(131)]
NOT_BUILT = pytest.mark.skipif(BlockTable is DictTable, reason="router_hints._native is not built")
TABLES = [pytest.param(BlockTable, marks=NOT_BUILT, id="native"), pytest.param(DictTable, id="dict")]


@pytest.mark.parametrize("table_type", TABLES)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "remove", "clear"]),
            st.sampled_from([0, 1, 63, 64, 130]),
            st.lists(st.integers(0, 40), max_size=8),
        ),
        max_size=60,
    ),
    crowded=st.booleans(),
)
def test_table_agrees_with_a_dict_of_sets(
    table_type: type[DictTable], steps: list[tuple[str, int, list[int]]], crowded: bool
) -> None:
    # Crowded: all keys want the same few slots, so that probes, removals and wrap-around meet each other.
    name = (lambda n: (2**64 - 1 - n % 3).to_bytes(8, "little") + key(n)[8:]) if crowded else key
    table, model = table_type(10_000), dict[bytes, set[int]]()
    for verb, bit, numbers in steps:
        blob = b"".join(name(n) for n in numbers)
        before = {name(n) for n in numbers if bit in model.get(name(n), set())}
        if verb == "add":
            assert table.add(blob, bit) == len({name(n) for n in numbers} - before)
            for n in numbers:
                model.setdefault(name(n), set()).add(bit)
        elif verb == "remove":
            assert table.remove(blob, bit) == len(before)
            for n in numbers:
                model.get(name(n), set()).discard(bit)
        else:
            table.clear(bit)
            for bits in model.values():
                bits.discard(bit)
        assert len(table) == sum(1 for bits in model.values() if bits)
    everything = [name(n) for n in range(41)]
    bits = sorted({bit for bits in model.values() for bit in bits})
    shuffled = random.Random(len(steps)).sample(everything, 41)
    # In the order in which entries may lie, against it, in none, and some twice.
    for asked in (everything, everything[::-1], shuffled, everything[:5] + shuffled + everything[20:25]):
        names, rows = table.lookup(b"".join(asked), NAMES)
        assert names == tuple(f"g{bit}" for bit in bits)
        for row, bit in enumerate(bits):
            found = list(rows[len(asked) * row : len(asked) * (row + 1)])
            assert found == [bit in model.get(k, set()) for k in asked]
    for bit in bits:
        mine = [k for k in everything if bit in model.get(k, set())]
        held = table.held_by(bit)
        assert {held[at : at + 16] for at in range(0, len(held), 16)} == set(mine)
        assert (table.count(bit), table.digest(bit)) == (len(mine), fold(b"".join(mine)))


@pytest.mark.parametrize("table_type", TABLES)
def test_table_grows_to_its_bound_evicts_and_counts_and_gives_memory_back(
    table_type: type[DictTable],
) -> None:
    table = table_type(50_000)
    blob = random.Random(1).randbytes(16 * 60_000)
    small = table.nbytes
    for at in range(0, len(blob), 32_000):
        table.add(blob[at : at + 32_000], 0)
    assert len(table) == table.count(0) == 50_000
    assert table.evicted(0) == 10_000
    held = table.held_by(0)
    assert table.digest(0) == fold(held)
    table.remove(blob, 0)
    assert (len(table), table.count(0), table.digest(0)) == (0, 0, 0)
    assert table.nbytes <= small + 1
    table.clear(0)
    assert table.evicted(0) == 0
    assert table.add(blob[: 16 * 50_000], 1) == 50_000


@pytest.mark.parametrize("table_type", TABLES)
def test_what_is_looked_up_is_evicted_last(table_type: type[DictTable]) -> None:
    table = table_type(1000)
    blob = random.Random(2).randbytes(16 * 1500)
    table.add(blob[:16_000], 0)
    used = blob[: 16 * 300]
    table.lookup(used, NAMES)
    table.add(blob[16_000:], 0)
    assert sum(table.lookup(used, NAMES)[1]) == 300
    assert len(table) == 1000


@pytest.mark.parametrize("table_type", TABLES)
def test_a_ragged_blob_is_refused(table_type: type[DictTable]) -> None:
    table = table_type(10)
    for call in (
        lambda: table.add(b"x" * 17, 0),
        lambda: table.remove(b"x", 0),
        lambda: table.lookup(b"xy", NAMES),
    ):
        with pytest.raises(ValueError, match="16 bytes a key"):
            call()
    table.add(b"x" * 16, 3)
    with pytest.raises(ValueError, match="bit 3 has no name"):
        table.lookup(b"x" * 16, NAMES[:3])
    for size in (0, 2**31 + 1):
        with pytest.raises(ValueError, match="at least 1 and at most 2\\^31"):
            table_type(size)


@pytest.mark.parametrize("table_type", TABLES)
def test_a_full_table_that_turned_over_many_times_finds_what_it_has_and_nothing_else(
    table_type: type[DictTable],
) -> None:
    """Chains come and go in either order, so that entries lie forwards, backwards, and in pieces."""
    table, draw = table_type(600), random.Random(4)
    chains, kept = [], dict[bytes, int]()
    for number in range(300):
        chain = [draw.randbytes(16) for _ in range(draw.randrange(1, 40))]
        chains.append(chain)
        table.add(b"".join(chain), number % 3)
        kept |= dict.fromkeys(chain, number % 3)
        if len(chains) > 20:
            old = chains.pop(draw.randrange(len(chains)))
            gone = old[draw.randrange(len(old)) :][:: draw.choice([1, -1])]
            table.remove(b"".join(gone), kept[gone[0]])
            for one in gone:
                del kept[one]
    found = {
        bit: {h[i : i + 16] for h in [table.held_by(bit)] for i in range(0, len(h), 16)} for bit in range(3)
    }
    assert len(table) == sum(map(len, found.values())) > 500
    for chain in chains:
        names, rows = table.lookup(b"".join(chain), NAMES)
        for row, name in enumerate(names):
            mine = found[int(name[1:])]
            assert list(rows[len(chain) * row : len(chain) * (row + 1)]) == [one in mine for one in chain]
        assert set(names) == {f"g{bit}" for bit in found if found[bit] & set(chain)}
    for bit in range(3):
        assert found[bit] <= {one for one, holder in kept.items() if holder == bit}
        assert (table.count(bit), table.digest(bit)) == (len(found[bit]), fold(b"".join(found[bit])))


@NOT_BUILT
def test_a_million_blocks_take_less_than_150_bytes_each() -> None:
    table = BlockTable(1_000_000)
    blob = random.Random(3).randbytes(16 * 1_000_000)
    for at in range(0, len(blob), 16_000):
        table.add(blob[at : at + 16_000], at // 16_000 % 8)
        assert table.nbytes < max(150 * len(table), 200_000)


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
    assert index.lag("a") == 7, "up to 10 was published, up to 3 is known"
    repair(index, {"a": guard})
    assert index.lag("a") == index.lag("nobody") == 0


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


def test_blocks_beyond_the_bound_are_evicted_counted_and_do_not_cause_resyncs() -> None:
    index, guard = LocationIndex(max_blocks=100), Guard("a")
    index.admit("a", 1)
    repair(index, {"a": guard})
    index.apply(guard.change(list(range(300)), []))
    assert len(index) == index.blocks("a") == 100
    assert index.evicted_blocks == 200
    assert index.beat(guard.heartbeat()) is Outcome.APPLIED
    assert index.repairs() == []
    index.retire("a")
    assert index.evicted_blocks == 200


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
    st.sampled_from(["deliver", "lose", "twice", "delay", "restart", "retire", "snapshot", "router"]),
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
        elif fate == "router":
            # The router starts over, with events of before still under way.
            index = LocationIndex()
            for each in guards.values():
                index.admit(each.name, each.incarnation)
            cursors.clear()
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
        held = index.held_by(name)
        assert {held[at : at + 16] for at in range(0, len(held), 16)} == guard.held
        assert index.blocks(name) == len(guard.held)
    assert len(index) == len({k for guard in guards.values() for k in guard.held})
