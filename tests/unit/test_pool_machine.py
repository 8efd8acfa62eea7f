# SPDX-License-Identifier: Apache-2.0
"""Any sequence of operations: every slot is accounted for, and lookups say what a dict would.

Store (grant, commit, or abort by giving back), load (lease, check, end of the lease), evict, quarantine, and
the guard that restarts in good order or dies between any two of its stores. A pull is a grant to the guard
itself (the empty engine id); one that ends badly is given back or quarantined.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

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


class Killed(Exception):
    """The guard is gone, at this store."""


class DyingBackend:
    """Stores go through until the guard dies at one of them; of a batch to publish, a part may be done."""

    def __init__(self, backend: Any, after: int, part: float) -> None:
        self._backend = backend
        self._left = after
        self._part = part

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)
        return self._dying(name, method) if name in ("store_words", "remove", "publish") else method

    def _dying(self, name: str, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if self._left == 0:
                if name == "publish":
                    *tables, indexed, now_s = arguments
                    columns = tables[-7:]
                    some = int(len(indexed) * self._part)
                    method(*tables[:-7], *(column[:some] for column in columns), indexed[:some], now_s)
                raise Killed
            self._left -= 1
            return method(*arguments)

        return call


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

    @rule(data=st.data(), after=st.integers(0, 3), part=st.floats(0, 1))
    def die(self, data: st.DataObject, after: int, part: float) -> None:
        """kill -9 in the middle of an operation, and a successor: only an eviction loses committed blocks."""
        deeds = ["allocate", "tick"]
        deeds += ["commit", "give_back"] if self.granted else []
        deeds += ["evict"] if self.ready else []
        deed = data.draw(st.sampled_from(deeds))
        batch = dict(list(self.granted.items())[:3])
        blocks = data.draw(
            st.lists(st.integers(0, BLOCKS - 1), min_size=len(batch), max_size=len(batch), unique=True)
        )
        victims = list(self.ready)[:2]
        self.pool._backend = DyingBackend(self.pool._backend, after, part)
        with contextlib.suppress(Killed):
            if deed == "allocate":
                self.pool.allocate(2, self.now_s, engine_id="engine-1")
            elif deed == "commit":
                commit(self.pool, granted(batch), blocks, self.now_s)
            elif deed == "give_back":
                self.pool.give_back(*granted(batch))
            elif deed == "evict":
                slots = np.array([self.ready[block][0] for block in victims], np.int32)
                self.pool.evict(slots, self.now_s, "test")
            else:
                self.pool.tick(self.now_s)
        leased = set(self.leases)
        self.pool.close()
        self.pool = Pool.attach(self.pool.dir, guard_incarnation=3)
        self.leases.clear()
        assert self.pool.recovery.damaged == self.pool.recovery.duplicates == 0
        attempted = dict(zip(blocks, batch.items(), strict=True)) if deed == "commit" else {}
        self._learn(
            attempted, gone=victims if deed == "evict" else [], evicts=deed == "allocate", leased=leased
        )

    def _learn(
        self,
        attempted: dict[int, tuple[int, int]],
        *,
        gone: list[int],
        evicts: bool,
        leased: set[tuple[int, int]],
    ) -> None:
        """Bring the model to what a successor found, which must be before or after each single step."""
        for block in range(BLOCKS):
            hits = self.pool.lookup(keys(block))
            where = (int(hits.slots[0]), int(hits.generations[0]))
            had = self.ready.pop(block, None)
            if where[0] >= 0:
                assert where == (had or attempted.get(block))
                self.ready[block] = where
            elif had is not None:
                assert block in gone or (evicts and had not in leased), "a committed block was lost"
                self.stale[had[0]] = had[1]
        before = self.granted
        self.granted = {}
        for engine in ("", "engine-1"):
            slots, generations = self.pool.grants(engine)
            self.granted.update(zip(slots.tolist(), generations.tolist(), strict=True))
        committed = set(self.ready.values())
        self.stale.update(
            (slot, generation)
            for slot, generation in before.items()
            if self.granted.get(slot) != generation and (slot, generation) not in committed
        )
        self.known = {key(block) for block in self.ready}

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
