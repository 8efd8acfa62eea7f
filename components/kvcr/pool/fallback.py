# SPDX-License-Identifier: Apache-2.0
"""numpy twin of ``kvcr/_native.c``, for x86-64 only; :mod:`kvcr.pool.native` says why, and the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvcr.keys import KEY_BYTES
from kvcr.pool.state import GENERATION_MASK, I32, STATE_SHIFT, U8, U32, U64, Mask, SlotState

if TYPE_CHECKING:
    from kvcr.pool.native import Directory

BUCKET_ENTRIES = 8
_GRANTED = np.uint64(SlotState.GRANTED)
_READY = np.uint64(SlotState.READY)
_SHIFT = np.uint64(STATE_SHIFT)
_GENERATION = np.uint64(GENERATION_MASK)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Odd constants with well-spread bits (from splitmix64); a seal guards against damage, not malice.
_SEAL_START = np.uint64(0x9E3779B97F4A7C15)
_SEAL_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SEAL_SHIFT = np.uint64(29)


def _pairs(keys: bytes | U64) -> U64:
    if isinstance(keys, np.ndarray):
        return keys.reshape(-1, 2)
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys: {len(keys)} bytes are not items of {KEY_BYTES} bytes")
    return np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)


def _column(values: bytes | npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return values if isinstance(values, np.ndarray) else np.frombuffer(values, dtype)


def _mask(buckets: U64) -> np.uint64:
    count = buckets.size // BUCKET_ENTRIES
    if count < 1 or count & (count - 1) or buckets.size % BUCKET_ENTRIES:
        raise ValueError(f"buckets: {buckets.nbytes} bytes are not a power of two of buckets")
    return np.uint64(count - 1)


def _probe(pairs: U64, mask: np.uint64) -> tuple[U64, U64, U64]:
    """First and second bucket, and the tag in the upper half of a word. Same arithmetic as in C."""
    x = pairs[:, 0] + pairs[:, 1] * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    tag = (x * np.uint64(0xD6E8FEB86659FD93)) & ~_LOW_HALF
    return x & mask, (x >> _HALF) & mask, tag


def _check_indices(words: U64, indices: I32) -> None:
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= words.size):
        raise IndexError(f"an index is outside of {words.size} words")


def load_words(words: U64, indices: I32, out: U64) -> None:
    _check_indices(words, indices)
    out[:] = words[indices]


def store_words(words: U64, indices: I32, values: U64) -> None:
    _check_indices(words, indices)
    words[indices] = values


def grant(control: U64, owners: I32, slots: I32, out_generations: U64, owner: int) -> None:
    _check_indices(control, slots)
    out_generations[:] = control[slots] & _GENERATION
    owners[slots] = owner
    store_words(control, slots, out_generations | (_GRANTED << _SHIFT))


def lookup(
    keys: bytes | U64, buckets: U64, control: U64, key_column: U64, out_slots: I32, out_generations: U64
) -> int:
    pairs = _pairs(keys)
    table = buckets.reshape(-1, BUCKET_ENTRIES)
    column = key_column.reshape(-1, 2)
    first, second, tag = _probe(pairs, _mask(buckets))
    out_slots[:] = -1
    out_generations[:] = 0
    for bucket in (first, second):
        entries = table[bucket]
        which, where = np.nonzero(((entries & ~_LOW_HALF) == tag[:, None]) & (entries != 0))
        slot = (entries[which, where] & _LOW_HALF).astype(np.int64) - 1
        inside = (slot >= 0) & (slot < control.size)
        which, slot = which[inside], slot[inside]
        # The control word before, the key, the control word again: three separate passes over memory.
        before = control[slot]
        found = column[slot]
        after = control[slot]
        hit = (before == after) & (before >> _SHIFT == _READY) & (found == pairs[which]).all(axis=1)
        out_slots[which[hit]] = slot[hit]
        out_generations[which[hit]] = before[hit] & _GENERATION
    return int(np.count_nonzero(out_slots >= 0))


def find(
    keys: bytes | U64,
    buckets: U64,
    control: U64,
    key_column: U64,
    checksum_column: U64,
    hash_column: U64,
    out_slots: I32,
    out_generations: U64,
    out_checksums: U64,
    out_hashes: U64,
) -> int:
    lookup(keys, buckets, control, key_column, out_slots, out_generations)
    found = np.flatnonzero(out_slots >= 0)
    slots, generations = out_slots[found], out_generations[found]
    out_checksums[:] = 0
    out_checksums[found] = checksum_column[slots]
    out_hashes[:] = 0
    out_hashes[found] = hash_column[slots]
    same = np.empty(len(found), np.bool_)
    still(control, slots, generations, same)
    out_slots[found[~same]] = -1
    out_generations[found[~same]] = 0
    out_checksums[found[~same]] = 0
    out_hashes[found[~same]] = 0
    return int(np.count_nonzero(same))


def still(control: U64, slots: I32, generations: U64, out: Mask) -> None:
    inside = (slots >= 0) & (slots < control.size)
    words = control[np.where(inside, slots, 0)]
    out[:] = inside & (words == generations | (_READY << _SHIFT)) & (generations <= _GENERATION)


def insert(buckets: U64, keys: bytes | U64, slots: I32, out: Mask) -> None:
    table = buckets.reshape(-1, BUCKET_ENTRIES)
    first, second, tag = _probe(_pairs(keys), _mask(buckets))
    entry = tag | (slots.astype(np.int64) + 1).astype(np.uint64)
    out[:] = False
    waiting = np.flatnonzero(slots >= 0)
    # Each round places at most one key per bucket, so that no two keys take the same place: about as many
    # rounds as the fullest bucket has entries.
    while waiting.size:
        a, b = first[waiting].astype(np.int64), second[waiting].astype(np.int64)
        used_a, used_b = np.count_nonzero(table[a], axis=1), np.count_nonzero(table[b], axis=1)
        bucket = np.where(used_b < used_a, b, a)
        room = np.minimum(used_a, used_b) < BUCKET_ENTRIES
        waiting, bucket = waiting[room], bucket[room]
        bucket, turn = np.unique(bucket, return_index=True)
        placed = waiting[turn]
        place = np.argmax(table[bucket] == 0, axis=1)
        table[bucket, place] = entry[placed]
        out[placed] = True
        waiting = np.delete(waiting, turn)


def remove(buckets: U64, keys: bytes | U64, slots: I32) -> int:
    table = buckets.reshape(-1, BUCKET_ENTRIES)
    first, second, tag = _probe(_pairs(keys), _mask(buckets))
    entry = tag | (slots.astype(np.int64) + 1).astype(np.uint64)
    removed = 0
    cleared = np.zeros(len(entry), dtype=np.bool_)
    for bucket in (first, second):
        which, where = np.nonzero(table[bucket] == entry[:, None])
        fresh = ~cleared[which]
        which, where = which[fresh], where[fresh]
        table[bucket[which], where] = 0
        cleared[which] = True
        removed += int(which.size)
    return removed


def seals(
    generations: U64, keys: U64, parents: U64, engine_hashes: U64, positions: U32, checksums: U64, out: U64
) -> None:
    words = [keys[:, 0], keys[:, 1], parents[:, 0], parents[:, 1], engine_hashes, positions.astype(np.uint64)]
    words += [checksums[:, rank] for rank in range(checksums.shape[1])]
    state = generations * _SEAL_START + _SEAL_START
    for word in words:
        state = (state ^ word) * _SEAL_FACTOR
        state ^= state >> _SEAL_SHIFT
    out[:] = state


def all_new(
    control: U64,
    buckets: U64,
    key_column: U64,
    slots: bytes | I32,
    generations: bytes | U64,
    keys: bytes | U64,
) -> bool:
    slots, generations = _column(slots, np.int32), _column(generations, np.uint64)
    inside = (slots >= 0) & (slots < len(control)) & (generations <= _GENERATION)
    if not inside.all() or (control[slots] != generations | (_GRANTED << _SHIFT)).any():
        return False
    found, found_generations = np.empty(len(slots), np.int32), np.empty(len(slots), np.uint64)
    lookup(keys, buckets, control, key_column, found, found_generations)
    pairs = _pairs(keys)
    distinct = len(np.unique(slots)) == len(np.unique(pairs, axis=0)) == len(slots)
    return distinct and not bool((found >= 0).any())


def publish(
    columns: Directory,
    slots: bytes | I32,
    generations: bytes | U64,
    new_keys: bytes | U64,
    new_parents: bytes | U64,
    new_hashes: bytes | U64,
    new_positions: bytes | U32,
    new_checksums: bytes | U64,
    out: Mask,
    now_s: float,
) -> tuple[int, int]:
    slots, generations = _column(slots, np.int32), _column(generations, np.uint64)
    new_keys, new_parents = _pairs(new_keys), _pairs(new_parents)
    new_hashes, new_positions = _column(new_hashes, np.uint64), _column(new_positions, np.uint32)
    new_checksums = _column(new_checksums, np.uint64).reshape(len(slots), columns.checksums.shape[1])
    _check_indices(columns.control, slots)
    columns.checksums[slots] = new_checksums
    columns.keys[slots] = new_keys
    columns.parents[slots] = new_parents
    columns.engine_hashes[slots] = new_hashes
    columns.positions[slots] = new_positions
    columns.stored_at[slots] = now_s
    sealed = np.empty(len(slots), np.uint64)
    seals(generations, new_keys, new_parents, new_hashes, new_positions, new_checksums, sealed)
    columns.seals[slots] = sealed
    store_words(columns.control, slots, generations | (_READY << _SHIFT))
    insert(columns.buckets, new_keys, slots, out)
    columns.last_used_s[slots[out]] = now_s
    columns.pinned_until_s[slots[out]] = -np.inf
    columns.demoted[slots[out]] = False
    digest = np.bitwise_xor.reduce(new_keys[out, 0], initial=np.uint64(0))
    return int(np.count_nonzero(out)), int(digest)


def hash_rows(array: U8, rows: I32, out: U64, width: int, widest: int) -> None:
    _check_rows(array, rows)
    for index, row in enumerate(rows.tolist()):
        out[index] = xxhash.xxh3_64_intdigest(array[row, :width].data)


def copy_rows(
    source: U8, source_rows: I32, target: U8, target_rows: I32, out: U64, width: int, widest: int
) -> None:
    _check_rows(source, source_rows)
    _check_rows(target, target_rows)
    # Row by row: a fancy-indexed copy would go through a temporary, and this one is hashed in the cache.
    for index, (row, into) in enumerate(zip(source_rows.tolist(), target_rows.tolist(), strict=True)):
        target[into, :width] = source[row, :width]
        out[index] = xxhash.xxh3_64_intdigest(target[into, :width].data)


def _check_rows(array: U8, rows: I32) -> None:
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= len(array)):
        raise IndexError(f"a row is outside of the {len(array)} of an array")


def gather_rows(segments: tuple[U8, ...], blocks: I32, target: U8, rows: I32, out: U64, widest: int) -> None:
    for segment in segments:
        _check_rows(segment, blocks)
    _check_rows(target, rows)
    for index, (block, row) in enumerate(zip(blocks.tolist(), rows.tolist(), strict=True)):
        offset = 0
        for segment in segments:
            target[row, offset : offset + segment.shape[1]] = segment[block]
            offset += segment.shape[1]
        out[index] = xxhash.xxh3_64_intdigest(target[row, :offset].data)
