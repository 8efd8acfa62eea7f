# SPDX-License-Identifier: Apache-2.0
"""Any sequence of operations: every slot is accounted for, and lookups say what a dict would."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcr.keys import BlockKey, unpack_keys
from kvcr.pool import Granted, Pool, PoolReader, SlotState
from tests.unit.pools import commit, content, create, key, keys

SLOTS = 5
BLOCKS = 7
PART_BYTES = 64

Held = dict[int, int]
"""slot -> generation"""


def granted(slots: Held) -> Granted:
    return Granted(np.array(list(slots), np.int32), np.array(list(slots.values()), np.uint64))


class PoolMachine(RuleBasedStateMachine):
    """A pool of a few slots beside a model of it in dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.now_s = 0.0
        self.granted: Held = {}
        self.quarantined: Held = {}
        self.ready: dict[int, tuple[int, int]] = {}
        """block -> (slot, generation)"""
        self.leases: list[tuple[int, int]] = []
        self.stale: Held = {}
        """pairs that named something once, and must never name anything again"""
        self.known: set[BlockKey] = set()
        """keys as the change list tells them"""

    @initialize(ranks=st.integers(1, 2))
    def start(self, ranks: int) -> None:
        self.pool = create(Path(self.directory.name), SLOTS, ranks=ranks, part_bytes=PART_BYTES)
        self.reader = PoolReader.open(self.pool.dir)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.reader.close()
            self.pool.close()
        self.directory.cleanup()

    def _forget_evicted(self) -> None:
        """Allocation may have evicted: whatever is gone must be explained by the count of evictions."""
        blocks = list(self.ready)
        for block, slot in zip(blocks, self.pool.lookup(keys(*blocks)).slots, strict=True):
            if slot < 0:
                where = self.ready.pop(block)
                assert where not in self.leases, "a leased block was evicted"
                self.stale[where[0]] = where[1]

    @rule(count=st.integers(0, SLOTS + 2), engine=st.sampled_from(["", "engine-1"]))
    def allocate(self, count: int, engine: str) -> None:
        got = self.pool.allocate(count, self.now_s, engine_id=engine)
        assert len(got.slots) <= count
        for slot, generation in zip(got.slots.tolist(), got.generations.tolist(), strict=True):
            assert slot not in self.granted
            assert slot not in self.quarantined
            assert self.stale.get(slot) != generation, "a generation was used twice"
            assert slot not in {leased for leased, _ in self.leases}, "a leased slot was reused"
            self.granted[slot] = generation
        self._forget_evicted()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.granted)), unique=True, min_size=1))
        blocks = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=len(chosen), max_size=len(chosen)))
        batch = {slot: self.granted.pop(slot) for slot in chosen}
        result = commit(self.pool, granted(batch), blocks, self.now_s)
        for index, ((slot, generation), block) in enumerate(zip(batch.items(), blocks, strict=True)):
            if block in self.ready:
                assert result.duplicate[index]
                self.stale[slot] = generation
            else:
                assert result.committed[index]
                self.ready[block] = (slot, generation)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.granted)), unique=True, min_size=1))
        batch = {slot: self.granted.pop(slot) for slot in chosen}
        assert self.pool.give_back(*granted(batch)) == len(batch)
        self.stale.update(batch)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def use_what_is_no_more(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.stale)))
        pair = granted({slot: self.stale[slot]})
        assert self.pool.give_back(*pair) == 0
        assert self.pool.quarantine(*pair) == 0
        assert self.pool.requalify(*pair) == 0
        assert not self.pool.lease(*pair).any()
        assert not self.reader.still(*pair).any()

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.ready)), unique=True, min_size=1))
        where = [self.ready.pop(block) for block in blocks]
        removed = self.pool.evict(np.array([slot for slot, _ in where], np.int32), self.now_s, "test")
        assert set(unpack_keys(removed)) == {key(block) for block in blocks}
        self.stale.update(where)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        where = self.ready[data.draw(st.sampled_from(sorted(self.ready)))]
        assert self.pool.lease(*granted(dict([where]))).all()
        self.leases.append(where)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        where = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.pool.unlease(*granted(dict([where])))

    @precondition(lambda self: self.ready or self.granted)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        block_of = {slot: block for block, (slot, _) in self.ready.items()}
        slot = data.draw(st.sampled_from(sorted([*block_of, *self.granted])))
        generation = self.ready.pop(block_of[slot])[1] if slot in block_of else self.granted.pop(slot)
        assert self.pool.quarantine(*granted({slot: generation})) == 1
        self.quarantined[slot] = generation

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def requalify(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.quarantined)))
        leased = any(slot == other for other, _ in self.leases)
        assert self.pool.requalify(*granted({slot: self.quarantined[slot]})) == (0 if leased else 1)
        if not leased:
            self.stale[slot] = self.quarantined.pop(slot)

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.pool.tick(self.now_s)

    @rule()
    def drain(self) -> None:
        changes = self.pool.drain_changes()
        self.known -= set(unpack_keys(changes.removed_keys))
        self.known |= set(unpack_keys(changes.stored_keys))
        assert self.known == {key(block) for block in self.ready}

    @rule()
    def restart_the_guard(self) -> None:
        self.drain()
        counts, digest = self.pool.counts(), self.pool.digest
        self.pool.close()
        self.pool = Pool.attach(self.pool.dir, guard_incarnation=2)
        self.leases.clear()
        assert (self.pool.counts(), self.pool.digest) == (counts, digest)
        assert self.pool.recovery.damaged == self.pool.recovery.duplicates == 0

    @rule()
    def reclaim_the_engine(self) -> None:
        slots = self.pool.grants("engine-1").slots.tolist()
        assert self.pool.reclaim_writer("engine-1") == len(slots)
        for slot in slots:
            self.stale[slot] = self.granted.pop(slot)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        counts = self.pool.counts()
        assert sum(counts.values()) == self.pool.slots
        assert counts[SlotState.GRANTED] == len(self.granted)
        assert counts[SlotState.QUARANTINED] == len(self.quarantined)
        assert counts[SlotState.READY] == self.pool.ready_count == len(self.ready)

    @invariant()
    def lookups_say_what_a_dict_would(self) -> None:
        if not hasattr(self, "pool"):
            return
        expected = [self.ready.get(block, (-1, 0)) for block in range(BLOCKS)]
        for view in (self.pool, self.reader):
            hits = view.lookup(keys(*range(BLOCKS)))
            assert list(zip(hits.slots.tolist(), hits.generations.tolist(), strict=True)) == expected
        for block, (slot, _) in self.ready.items():
            assert bytes(self.pool.part(0, slot)) == content(key(block), self.pool.layout.part_bytes)


@pytest.mark.usefixtures("backend_name")
def test_any_sequence_of_operations_keeps_the_books() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
