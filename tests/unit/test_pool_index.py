# SPDX-License-Identifier: Apache-2.0
"""The extension and its numpy twin: one behaviour, one table."""

from __future__ import annotations

import platform
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.errors import ConfigError
from kvcr.pool import fallback, native
from kvcr.pool.native import Backend
from kvcr.pool.state import I32, U64, Mask, SlotState, control_words
from tests.unit.pools import keys

_native: ModuleType = pytest.importorskip("kvcr._native")
BACKENDS = [pytest.param(_native, id="native"), pytest.param(fallback, id="fallback")]


class Table(NamedTuple):
    buckets: U64
    control: U64
    key_column: U64

    @classmethod
    def of(cls, blob: bytes, buckets: int) -> Table:
        """An empty index over READY slots that hold the keys in ``blob``, in generation 7."""
        rows = np.frombuffer(blob, dtype=np.uint64).reshape(-1, 2).copy()
        generations = np.full(len(rows), 7, dtype=np.uint64)
        return cls(np.zeros(8 * buckets, np.uint64), control_words(SlotState.READY, generations), rows)


def directory(slots: int, buckets: int, ranks: int) -> native.Directory:
    """Empty columns."""
    return native.Directory(
        np.zeros(slots, np.uint64),
        np.zeros(8 * buckets, np.uint64),
        np.zeros((slots, 2), np.uint64),
        np.zeros((slots, 2), np.uint64),
        np.zeros(slots, np.uint64),
        np.zeros(slots, np.uint32),
        np.zeros(slots),
        np.zeros(slots, np.uint64),
        np.zeros((slots, ranks), np.uint64),
        np.zeros(slots),
        np.zeros(slots),
        np.ones(slots, np.bool_),
    )


def lookup(backend: Backend, table: Table, blob: bytes) -> tuple[list[int], list[int]]:
    slots, generations = np.empty(len(blob) // 16, np.int32), np.empty(len(blob) // 16, np.uint64)
    backend.lookup(blob, *table, slots, generations)
    return slots.tolist(), generations.tolist()


def insert(backend: Backend, table: Table, blob: bytes, slots: I32) -> Mask:
    done = np.empty(len(slots), dtype=np.bool_)
    backend.insert(table.buckets, blob, slots, done)
    return done


@settings(max_examples=50, deadline=None)
@given(data=st.data(), count=st.integers(0, 200), size=st.sampled_from([1, 2, 8, 32]))
def test_each_finds_and_removes_what_the_other_inserted(data: st.DataObject, count: int, size: int) -> None:
    blob = keys(*range(count))
    slots = np.arange(count, dtype=np.int32)
    for writer, other in ((_native, fallback), (fallback, _native)):
        table = Table.of(blob, size)
        done = insert(writer, table, blob, slots)
        assert np.count_nonzero(table.buckets) == np.count_nonzero(done)
        for reader in (writer, other):
            found, generations = lookup(reader, table, blob + keys(10_000))
            assert found == [slot if ok else -1 for slot, ok in enumerate(done)] + [-1]
            assert generations == [7 if ok else 0 for ok in done] + [0]
        numbers = st.sampled_from(range(count)) if count else st.nothing()
        gone = np.array(data.draw(st.lists(numbers, unique=True)), dtype=np.intp)
        leaving = np.frombuffer(blob, np.uint64).reshape(-1, 2)[gone]
        assert other.remove(table.buckets, leaving, gone.astype(np.int32)) == np.count_nonzero(done[gone])
        done[gone] = False
        assert lookup(writer, table, blob)[0] == [slot if ok else -1 for slot, ok in enumerate(done)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_are_not_random_spread_all_the_same(backend: Backend) -> None:
    for byteorder in ("little", "big"):
        blob = b"".join(number.to_bytes(16, byteorder) for number in range(1, 4097))
        table = Table.of(blob, 1024)
        assert insert(backend, table, blob, np.arange(4096, dtype=np.int32)).all()
        assert lookup(backend, table, blob)[0] == list(range(4096))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_pair_of_buckets_refuses_and_room_is_used_again(backend: Backend) -> None:
    blob = keys(*range(20))
    table = Table.of(blob, 1)
    done = insert(backend, table, blob, np.arange(20, dtype=np.int32))
    assert np.count_nonzero(done) == 8
    first = int(np.flatnonzero(done)[0])
    assert backend.remove(table.buckets, keys(first), np.array([first], np.int32)) == 1
    assert backend.remove(table.buckets, keys(first), np.array([first], np.int32)) == 0
    assert insert(backend, table, keys(19), np.array([19], np.int32)).all()
    assert lookup(backend, table, keys(19, first))[0] == [19, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_needs_a_ready_slot_that_holds_the_whole_key(backend: Backend) -> None:
    blob = keys(0, 1, 2, 3)
    table = Table.of(blob, 2)
    insert(backend, table, blob, np.arange(4, dtype=np.int32))
    table.control[1] = control_words(SlotState.COOLING, np.array([8], np.uint64))[0]
    table.key_column[2, 1] ^= np.uint64(1)
    assert lookup(backend, table, blob)[0] == [0, -1, -1, 3]
    table.buckets[table.buckets != 0] |= np.uint64(0xFFFF_FFFF)
    assert lookup(backend, table, blob)[0] == [-1] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_still_compares_state_and_generation_and_ignores_slots_that_are_not(backend: Backend) -> None:
    table = Table.of(keys(0, 1), 1)
    table.control[1] = control_words(SlotState.QUARANTINED, np.array([7], np.uint64))[0]
    slots = np.array([0, 0, 1, -1, 2, 0], np.int32)
    generations = np.array([7, 8, 7, 7, 7, 7 | 2 << 56], np.uint64)
    mask = np.ones(6, dtype=np.bool_)
    backend.still(table.control, slots, generations, mask)
    assert mask.tolist() == [True, False, False, False, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_words_are_loaded_and_stored_by_index_or_not_at_all(backend: Backend) -> None:
    words, out = np.arange(4, dtype=np.uint64), np.empty(2, dtype=np.uint64)
    backend.store_words(words, np.array([3, 0], np.int32), np.array([30, 10], np.uint64))
    backend.load_words(words, np.array([0, 3], np.int32), out)
    assert (words.tolist(), out.tolist()) == ([10, 1, 2, 30], [10, 30])
    for outside in (-1, 4):
        with pytest.raises(IndexError, match="outside of 4 words"):
            backend.store_words(words, np.array([0, outside], np.int32), out)
        with pytest.raises(IndexError, match="outside of 4 words"):
            backend.load_words(words, np.array([0, outside], np.int32), out)
    assert words[0] == 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_call_is_an_error_and_touches_nothing(backend: Backend) -> None:
    table = Table.of(keys(0), 1)
    slots, generations, done = np.empty(1, np.int32), np.empty(1, np.uint64), np.empty(1, np.bool_)
    with pytest.raises(ValueError, match="17 bytes are not"):
        backend.lookup(bytes(17), *table, slots, generations)
    with pytest.raises(ValueError, match="power of two of buckets"):
        backend.insert(np.zeros(24, np.uint64), keys(0), slots, done)


def test_the_extension_checks_lengths_alignment_and_writability() -> None:
    words, slots, out = np.zeros(4, np.uint64), np.zeros(2, np.int32), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="out has 1 items, expected 2"):
        _native.load_words(words, slots, out[:1])
    with pytest.raises(ValueError, match="not aligned items of 8 bytes"):
        _native.load_words(np.zeros(33, np.uint8)[1:], slots, out)
    with pytest.raises(TypeError, match="expected 3 arguments, got 1"):
        _native.load_words(words)
    out.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        _native.load_words(words, slots, out)


def test_the_backend_follows_the_environment_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = native.backend.__wrapped__
    monkeypatch.setenv(native.NO_NATIVE, "0")
    assert choose() is _native
    monkeypatch.setenv(native.NO_NATIVE, "1")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert choose() is fallback
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="not safe on aarch64: build the extension"):
        choose()


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(1, 60),
    ranks=st.integers(1, 3),
    gone=st.sets(st.integers(0, 59)),
    seed=st.integers(0, 99),
)
def test_find_is_lookup_with_the_checksums_of_what_is_there(
    count: int, ranks: int, gone: set[int], seed: int
) -> None:
    blob = keys(*range(count))
    table = Table.of(blob, 32)
    done = insert(_native, table, blob, np.arange(count, dtype=np.int32))
    table.control[[slot for slot in gone if slot < count]] += np.uint64(1 << 56)
    sums = np.random.default_rng(seed).integers(0, 1 << 63, (count, ranks)).astype(np.uint64)
    asked = blob + keys(10_000)
    expected = [slot if done[slot] and slot not in gone else -1 for slot in range(count)] + [-1]
    for backend in (_native, fallback):
        slots, generations = np.empty(count + 1, np.int32), np.empty(count + 1, np.uint64)
        found = np.empty((count + 1, ranks), np.uint64)
        hashes = np.empty(count + 1, np.uint64)
        hits = backend.find(asked, *table, sums, sums[:, 0].copy(), slots, generations, found, hashes)
        assert hashes.tolist() == [int(sums[slot, 0]) if slot >= 0 else 0 for slot in expected]
        assert (hits, slots.tolist()) == (sum(slot >= 0 for slot in expected), expected)
        assert generations.tolist() == [7 if slot >= 0 else 0 for slot in expected]
        for index, slot in enumerate(expected):
            assert found[index].tolist() == (sums[slot].tolist() if slot >= 0 else [0] * ranks)


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(0, 60), ranks=st.integers(1, 3), size=st.sampled_from([1, 8]), seed=st.integers(0, 99)
)
def test_both_publish_the_same_records(count: int, ranks: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.permutation(64).astype(np.int32)[:count]
    generations = rng.integers(0, 1 << 40, count).astype(np.uint64)
    rows = np.frombuffer(keys(*range(count)), np.uint64).reshape(-1, 2)
    hashes, positions = rng.integers(0, 1 << 62, count).astype(np.uint64), np.arange(count, dtype=np.uint32)
    sums = rng.integers(0, 1 << 62, (count, ranks)).astype(np.uint64)
    written = []
    for backend in (_native, fallback):
        columns = directory(64, size, ranks)
        out = np.empty(count, np.bool_)
        published, digest = backend.publish(
            columns, slots, generations, rows, rows, hashes, positions, sums, out, 1.5
        )
        assert published == np.count_nonzero(out)
        assert digest == np.bitwise_xor.reduce(rows[out, 0], initial=np.uint64(0))
        control, buckets = columns.control, columns.buckets
        assert control[slots].tolist() == control_words(SlotState.READY, generations).tolist()
        assert np.count_nonzero(control) == count
        assert np.count_nonzero(buckets) == np.count_nonzero(out)
        assert (columns.last_used_s[slots] == np.where(out, 1.5, 0.0)).all()
        assert (columns.pinned_until_s[slots] == np.where(out, -np.inf, 0.0)).all()
        assert (columns.demoted[slots] == ~out).all()
        # Each has an order of its own in the buckets, and in what finds no room there.
        written.append([column.tobytes() for column in (columns.control, *columns[2:9])])
    assert written[0] == written[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_published_when_a_slot_is_outside(backend: Backend) -> None:
    columns = directory(4, 1, 1)
    before = [column.tobytes() for column in columns]
    new = np.frombuffer(keys(1, 2), np.uint64).reshape(2, 2)
    two, positions = np.ones(2, np.uint64), np.ones(2, np.uint32)
    with pytest.raises(IndexError):
        backend.publish(
            columns, np.array([0, 4], np.int32), two, new, new, two, positions, two[:, None],
            np.empty(2, np.bool_), 0.0,
        )  # fmt: skip
    assert [column.tobytes() for column in columns] == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_granting_writes_owner_and_word_and_gives_the_generation(backend: Backend) -> None:
    control, owners = np.array([5, 6, 7, 8], np.uint64), np.zeros(4, np.int32)
    out = np.empty(2, np.uint64)
    backend.grant(control, owners, np.array([2, 0], np.int32), out, 9)
    assert out.tolist() == [7, 5]
    assert owners.tolist() == [9, 0, 9, 0]
    granted = control_words(SlotState.GRANTED, out).tolist()
    assert control.tolist() == [granted[1], 6, granted[0], 8]
    for outside in (-1, 4):
        with pytest.raises(IndexError):
            backend.grant(control, owners, np.array([1, outside], np.int32), out, 9)
    assert owners.tolist() == [9, 0, 9, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_new_sees_whatever_is_not_granted_not_missing_or_not_distinct(backend: Backend) -> None:
    blob = keys(*range(60))
    rows = np.frombuffer(blob, np.uint64).reshape(-1, 2)
    table = Table.of(blob + bytes(16 * 4), 8)
    generations = np.arange(64, dtype=np.uint64)
    table.control[:] = control_words(SlotState.GRANTED, generations)
    slots = np.arange(60, dtype=np.int32)

    def new(slots: Any, generations: Any, rows: Any) -> bool:
        return backend.all_new(
            table.control,
            table.buckets,
            table.key_column,
            np.array(slots, np.int32),
            np.array(generations, np.uint64),
            np.array(rows, np.uint64),
        )

    assert new(slots, generations[:60], rows)
    assert new([], [], rows[:0])
    assert not new([1, 2, 1], [1, 2, 1], rows[:3]), "a slot twice"
    assert not new([1, 2, 3], [1, 2, 3], rows[[0, 1, 0]]), "a key twice"
    assert not new([1, 2], [1, 3], rows[:2]), "another generation"
    assert not new([1, 64], [1, 64], rows[:2]), "a slot the pool has not"
    assert not new([1, -1], [1, 63], rows[:2])
    table.control[:] = control_words(SlotState.READY, generations)
    insert(_native, table, keys(5), np.array([5], np.int32))
    assert not new([1], [1], rows[:1]), "not granted"
    table.control[1] = control_words(SlotState.GRANTED, generations[1:2])[0]
    assert new([1], [1], rows[:1])
    assert not new([1], [1], rows[5:6]), "a key that is there"
