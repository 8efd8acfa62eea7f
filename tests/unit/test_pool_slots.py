# SPDX-License-Identifier: Apache-2.0
"""The life of a slot: granted, filled, found, evicted, cooled, and never two blocks in one generation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcr.errors import ConfigError, PoolError
from kvcr.pool import (
    DataRegion,
    Granted,
    Pool,
    PoolReader,
    SlotState,
    checksum_parts,
    pack_control,
    unpack_control,
)
from kvcr.pool.meta import WRITER_ENTRIES
from tests.unit.pools import ROOT, commit, content, create, found, key, keys, layout, numbers_of, store

pytestmark = pytest.mark.usefixtures("backend_name")


def count(pool: Pool, state: SlotState) -> int:
    return pool.counts()[state]


def test_a_control_word_is_state_and_generation() -> None:
    assert pack_control(SlotState.READY, 5) == 2 << 56 | 5
    assert unpack_control(2 << 56 | 5) == (SlotState.READY, 5)
    with pytest.raises(ValueError, match="outside of"):
        pack_control(SlotState.FREE, 1 << 56)
    with pytest.raises(ValueError, match="9 is not a valid SlotState"):
        unpack_control(9 << 56)


def test_a_committed_block_is_found_with_its_bytes_checksums_and_record(tmp_path: Path) -> None:
    pool = create(tmp_path, 8, ranks=2, part_bytes=5000)
    granted = store(pool, 0, 1, 2)

    reader = PoolReader.open(tmp_path)
    hits = reader.lookup(keys(2, 7, 0))
    assert hits.slots.tolist() == [granted.slots[2], -1, granted.slots[0]]
    assert reader.still(hits.slots, hits.generations).tolist() == [True, False, True]
    for rank in range(2):
        assert bytes(pool.part(rank, int(granted.slots[2]))) == content(key(2), 5000)
        sums = checksum_parts(pool.data(rank).array, granted.slots, 5000)
        assert (reader.checksums(granted.slots)[:, rank] == sums).all()
    record = pool.record(granted.slots[1:])
    assert (record.keys, record.parents) == (keys(1, 2), keys(0, 1))
    assert (record.engine_hashes.tolist(), numbers_of(record)) == ([1, 2], [1, 2])
    pool.check_invariants()


def test_a_new_pool_grants_slots_in_order_and_never_more_than_it_has(tmp_path: Path) -> None:
    pool = create(tmp_path, 8)
    assert pool.allocate(3, 0.0).slots.tolist() == [0, 1, 2]
    assert pool.allocate(100, 0.0).slots.tolist() == [3, 4, 5, 6, 7]
    assert len(pool.allocate(1, 0.0).slots) == 0
    assert len(pool.allocate(-5, 0.0).slots) == 0
    pool.check_invariants()


def test_bytes_in_a_granted_slot_are_not_found(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    pool.allocate(2, 0.0)
    assert found(pool, 0, 1) == [False, False]


def test_returned_slots_are_granted_again_in_a_new_generation(tmp_path: Path) -> None:
    pool = create(tmp_path, 1)
    first = pool.allocate(1, 0.0)
    assert pool.give_back(first.slots, first.generations) == 1
    assert pool.give_back(first.slots, first.generations) == 0
    second = pool.allocate(1, 0.0)
    assert second.generations[0] == first.generations[0] + 1
    assert commit(pool, first, [0]).stale.all()
    assert commit(pool, second, [1]).committed.all()
    pool.check_invariants()


def test_a_commit_is_idempotent(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    granted = store(pool, 0, 1)
    again = commit(pool, granted, [0, 1])
    assert again.committed.all()
    assert count(pool, SlotState.READY) == 2
    pool.check_invariants()


def test_the_second_of_two_equal_blocks_frees_its_slot(tmp_path: Path) -> None:
    pool = create(tmp_path, 8)
    first = store(pool, 0)
    result = commit(pool, pool.allocate(3, 0.0), [0, 1, 1])
    assert result.duplicate.tolist() == [True, False, True]
    assert result.committed.tolist() == [False, True, False]
    assert pool.lookup(keys(0)).slots.tolist() == first.slots.tolist()
    assert count(pool, SlotState.FREE) == 6
    pool.check_invariants()


def test_one_slot_named_twice_holds_the_first_block(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    granted = pool.allocate(1, 0.0)
    twice = Granted(np.repeat(granted.slots, 2), np.repeat(granted.generations, 2))
    result = commit(pool, twice, [0, 1])
    assert (result.committed.tolist(), result.stale.tolist()) == ([True, False], [False, True])
    assert found(pool, 0, 1) == [True, False]
    pool.check_invariants()


def test_slots_and_generations_from_nowhere_change_nothing(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    store(pool, 0)
    before = pool.counts()
    slots = np.array([-1, 4, 2**31 - 1, 0, 1], np.int32)
    generations = np.array([0, 0, 0, 7, 2**63], np.uint64)
    assert pool.give_back(slots, generations) == 0
    assert pool.quarantine(slots, generations) == 0
    assert pool.requalify(slots, generations) == 0
    assert not pool.lease(slots, generations).any()
    pool.unlease(slots, generations)
    pool.touch(slots, 1.0)
    assert pool.evict(np.array([-1, 9, 2], np.int32), 0.0, "test") == b""
    places, sums = np.arange(5, dtype=np.uint32), np.zeros((5, 1), np.uint64)
    result = pool.commit(
        slots, generations, keys(*range(1, 6)), keys(*range(5)), generations, places, sums, 0.0
    )
    assert result.stale.all()
    assert pool.counts() == before
    pool.check_invariants()


def test_arguments_of_different_lengths_are_refused(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    granted = pool.allocate(1, 0.0)
    one = np.zeros(1, np.uint64)
    with pytest.raises(ValueError, match="keys has 32 bytes, expected 1 of 16"):
        pool.commit(*granted, keys(0, 1), ROOT, one, np.zeros(1, np.uint32), one, 0.0)
    with pytest.raises(ValueError, match="positions has 2 entries, slots has 1"):
        pool.commit(*granted, keys(0), ROOT, one, np.zeros(2, np.uint32), one, 0.0)
    with pytest.raises(ValueError, match="generations has 0 entries, slots has 1"):
        pool.give_back(granted.slots, one[:0])


def test_an_evicted_block_leaves_at_once_and_its_slot_cools_for_two_seconds(tmp_path: Path) -> None:
    pool = create(tmp_path, 2)
    granted = store(pool, 0, 1)
    reader = PoolReader.open(tmp_path)
    assert pool.evict(granted.slots[:1], 10.0, "test") == keys(0)
    assert pool.evict(granted.slots[:1], 10.0, "test") == b""
    assert pool.evicted_blocks == {"test": 1}
    assert found(pool, 0, 1) == [False, True]
    assert reader.still(*granted).tolist() == [False, True]

    assert pool.tick(11.9) == 0
    pool.check_invariants()
    assert len(pool.allocate(1, 11.9).slots) == 0
    assert pool.tick(12.0) == 1
    again = pool.allocate(1, 12.0)
    assert again.slots.tolist() == granted.slots[:1].tolist()
    assert again.generations[0] == granted.generations[0] + 1
    pool.check_invariants()


def test_a_leased_slot_is_neither_chosen_for_eviction_nor_reused(tmp_path: Path) -> None:
    pool = create(tmp_path, 3)
    granted = store(pool, 0, 1, 2)
    assert pool.lease(granted.slots[:1], granted.generations[:1]).all()
    assert pool.lease(granted.slots[:1], granted.generations[:1]).all()
    pool.allocate(3, 1.0)
    assert found(pool, 0, 1, 2) == [True, False, False]

    pool.evict(granted.slots[:1], 1.0, "invalidate")
    assert not pool.lease(granted.slots[:1], granted.generations[:1]).any()
    assert pool.tick(9.0) == 2
    pool.unlease(granted.slots[:1], granted.generations[:1])
    assert pool.tick(9.0) == 0
    pool.unlease(granted.slots[:1], granted.generations[:1])
    assert pool.tick(9.0) == 1
    pool.unlease(granted.slots[:1], granted.generations[:1])
    pool.check_invariants()


def test_a_lease_is_for_one_generation(tmp_path: Path) -> None:
    pool = create(tmp_path, 1)
    granted = store(pool, 0)
    assert not pool.lease(granted.slots, granted.generations + np.uint64(1)).any()
    pool.lease(*granted)
    pool.unlease(granted.slots, granted.generations + np.uint64(1))
    pool.evict(granted.slots, 0.0, "test")
    assert pool.tick(5.0) == 0


def test_a_pinned_block_stays_until_its_time_or_its_unpin(tmp_path: Path) -> None:
    pool = create(tmp_path, 2)
    store(pool, 0, 1)
    assert pool.pin(keys(0, 9), until_s=10.0) == 1
    pool.allocate(2, 1.0)
    assert found(pool, 0, 1) == [True, False]
    assert pool.unpin(keys(0)) == 1
    pool.allocate(2, 1.5)
    assert found(pool, 0) == [False]


def test_a_use_ends_a_demotion_and_a_new_block_in_the_slot_has_none(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    stored = store(pool, 0, 10, 20, 30)
    assert pool.demote(stored.slots[2:]) == 2
    assert pool.demote(np.array([99, -1], np.int32)) == 0
    pool.touch(stored.slots[3:], 1.0)
    pool.allocate(1, 2.0)
    assert found(pool, 0, 10, 20, 30) == [True, True, False, True]
    store(pool, 40, now_s=5.0)
    pool.allocate(1, 6.0)
    assert found(pool, 0, 10, 40) == [True, False, True]


def test_a_quarantined_slot_is_out_of_use_until_requalified(tmp_path: Path) -> None:
    pool = create(tmp_path, 2)
    ready, granted = store(pool, 0), pool.allocate(1, 0.0)
    assert pool.quarantine(*ready) + pool.quarantine(*granted) == 2
    assert found(pool, 0) == [False]
    assert len(pool.allocate(2, 99.0).slots) == 0
    assert commit(pool, granted, [1]).stale.all()
    pool.check_invariants()
    assert pool.requalify(*ready) + pool.requalify(*granted) == 2
    assert len(pool.allocate(2, 99.0).slots) == 2
    pool.check_invariants()


def test_a_quarantined_slot_is_not_requalified_while_it_is_leased(tmp_path: Path) -> None:
    pool = create(tmp_path, 1)
    granted = store(pool, 0)
    pool.lease(*granted)
    pool.quarantine(*granted)
    assert pool.requalify(*granted) == 0
    pool.unlease(*granted)
    assert pool.requalify(*granted) == 1


def test_grants_are_known_by_owner_and_reclaimed_with_it(tmp_path: Path) -> None:
    pool = create(tmp_path, 8)
    own, engine = pool.allocate(2, 0.0), pool.allocate(3, 0.0, engine_id="engine-1")
    commit(pool, Granted(engine.slots[:1], engine.generations[:1]), [0])
    assert pool.grants().slots.tolist() == own.slots.tolist()
    assert pool.grants("engine-1").slots.tolist() == engine.slots[1:].tolist()
    assert pool.grants("engine-2").slots.tolist() == []
    assert pool.writers() == ["engine-1"]

    assert pool.reclaim_writer("engine-1") == 2
    assert pool.writers() == []
    assert found(pool, 0) == [True]
    assert commit(pool, Granted(engine.slots[1:], engine.generations[1:]), [1, 2]).stale.all()
    assert pool.reclaim_writer() == 2
    assert count(pool, SlotState.FREE) == 7
    pool.check_invariants()


def test_an_engine_id_must_name_a_file_and_find_room(tmp_path: Path) -> None:
    pool = create(tmp_path, 1)
    for bad in ("../evil", "a/b", "-x", "x" * 128, "a b"):
        with pytest.raises(ConfigError, match="engine_id"):
            pool.allocate(1, 0.0, engine_id=bad)
    for number in range(WRITER_ENTRIES):
        pool.allocate(0, 0.0, engine_id=f"engine-{number}")
    with pytest.raises(PoolError, match="reclaim the dead ones"):
        pool.allocate(0, 0.0, engine_id="one-more")
    pool.reclaim_writer("engine-7")
    pool.allocate(0, 0.0, engine_id="one-more")


def test_changes_are_a_net_effect_and_told_once(tmp_path: Path) -> None:
    pool = create(tmp_path, 8)
    granted = store(pool, 0, 1, 2)
    pool.evict(granted.slots[:1], 0.0, "test")
    pool.evict(granted.slots[1:2], 0.0, "test")
    store(pool, 1)
    changes = pool.drain_changes()
    assert changes.stored_keys == keys(2, 1)
    assert (changes.stored_hashes.tolist(), changes.stored_positions.tolist()) == ([2, 1], [2, 1])
    assert changes.removed_keys == keys(0, 1)
    assert pool.drain_changes().stored_keys == pool.drain_changes().removed_keys == b""


def test_a_snapshot_in_pages_is_the_whole_inventory(tmp_path: Path) -> None:
    pool = create(tmp_path, 16)
    granted = store(pool, *range(10))
    pool.evict(granted.slots[4:5], 0.0, "test")
    seen, cursor, digest = b"", 0, 0
    while cursor >= 0:
        page = pool.snapshot(cursor, 4)
        assert len(page.keys) == 16 * len(page.positions) <= 64
        seen, cursor = seen + page.keys, page.next_cursor
    for start in range(0, len(seen), 16):
        digest ^= int.from_bytes(seen[start : start + 8], "little")
    assert seen == keys(0, 1, 2, 3, 5, 6, 7, 8, 9)
    assert (digest, len(seen) // 16) == (pool.digest, pool.ready_count)


def test_a_region_is_a_strided_grid(tmp_path: Path) -> None:
    pool = create(tmp_path, 4, ranks=2, part_bytes=5000)
    address, nbytes, stride = pool.region(1)
    assert (nbytes, stride) == (4 * 8192, 8192)
    assert pool.data(1).array[2].__array_interface__["data"][0] == address + 2 * stride
    with pytest.raises(IndexError, match=r"slot 4 is outside of 0\.\.3"):
        pool.part(0, 4)
    with pytest.raises(ValueError, match=r"rank 2 is outside of 0\.\.1"):
        DataRegion.open(tmp_path, layout(ranks=2, part_bytes=5000), 2, writable=False)


def test_the_epoch_only_rises_and_readers_see_it(tmp_path: Path) -> None:
    pool, reader = create(tmp_path, 1, guard_incarnation=77), PoolReader.open(tmp_path)
    assert (pool.epoch, reader.epoch, reader.incarnation) == (1, 1, 77)
    assert pool.raise_epoch() == 2
    assert pool.raise_epoch(above=9) == 10
    assert pool.raise_epoch(above=3) == 11
    assert reader.epoch == 11


def test_blobs_are_published_when_all_are_new_and_nothing_changes_when_one_is_not(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    granted = pool.allocate(3, 0.0)

    def commit(first: int, stop: int, blob: bytes) -> int | None:
        count = stop - first
        slots, generations = granted.slots[first:stop].tobytes(), granted.generations[first:stop].tobytes()
        zeros = bytes(8 * count)
        return pool.commit_filled(slots, generations, blob, blob, zeros, bytes(4 * count), zeros, 1.0)

    assert commit(0, 2, keys(0, 1)) == 2
    assert [pool.hits(keys(number)) for number in range(3)] == [1, 1, 0]
    before = pool.counts()
    # A key that is there already, a slot that is published already, a key named twice.
    assert commit(2, 3, keys(1)) is commit(1, 2, keys(2)) is commit(1, 3, keys(2, 2)) is None
    assert pool.counts() == before
    assert commit(2, 3, keys(2)) == 1
    assert pool.drain_changes().stored_keys == keys(0, 1, 2)
    pool.check_invariants()
