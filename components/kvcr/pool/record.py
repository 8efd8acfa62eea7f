# SPDX-License-Identifier: Apache-2.0
"""Batches as the pool takes and gives them: one array per field, one entry per block."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcr.keys import KEY_BYTES
from kvcr.pool import native
from kvcr.pool.meta import Meta
from kvcr.pool.state import F64, I32, U32, U64, Mask, generations_of

_WORD = np.dtype(np.uint64)


class Granted(NamedTuple):
    """Slots that their owner, and nobody else, may fill."""

    slots: I32
    generations: U64


class Columns(NamedTuple):
    """What is published of blocks."""

    slots: I32
    generations: U64
    keys: U64
    """[n, 2]"""
    parents: U64
    """[n, 2]"""
    engine_hashes: U64
    positions: U32
    checksums: U64
    """[n, ranks]"""

    def at(self, index: npt.NDArray[np.intp] | Mask) -> Columns:
        """Some of the entries, as copies."""
        return Columns(
            self.slots[index],
            self.generations[index],
            self.keys[index],
            self.parents[index],
            self.engine_hashes[index],
            self.positions[index],
            self.checksums[index],
        )


class CommitResult(NamedTuple):
    """What became of each block of a commit; exactly one of the masks is set for each."""

    committed: Mask
    """It is READY in the slot given; also when an earlier, identical commit put it there."""
    duplicate: Mask
    """Its key is READY in another slot: this one is free again."""
    refused: Mask
    """The policy did not admit it, or both its index buckets are full: its slot is free again."""
    stale: Mask
    """The slot was not granted in that generation, or appeared twice: nothing was changed."""


class Record(NamedTuple):
    """What the directory says about slots, besides their state."""

    keys: bytes
    """16 bytes each"""
    parents: bytes
    """16 bytes each"""
    engine_hashes: U64
    positions: U32


class Changes(NamedTuple):
    """What came and went since the last call, as a net effect: removed first, then stored."""

    stored_keys: bytes
    stored_hashes: U64
    stored_positions: U32
    removed_keys: bytes


class SnapshotPage(NamedTuple):
    """A run of the inventory. ``next_cursor`` is -1 after the last one."""

    keys: bytes
    engine_hashes: U64
    positions: U32
    next_cursor: int


class Listing(NamedTuple):
    """Every READY block, for whoever lists them."""

    keys: U64
    """[n, 2]"""
    parents: U64
    """[n, 2]"""
    positions: U32
    idle_s: F64
    """since the last use"""
    age_s: F64
    """since it was stored"""
    leased: Mask
    pinned: Mask


def key_rows(blob: bytes, count: int, name: str) -> U64:
    """A blob of keys as uint64 [count, 2]. Raises ValueError when it has another length."""
    if len(blob) != count * KEY_BYTES:
        raise ValueError(f"{name} has {len(blob)} bytes, expected {count} of {KEY_BYTES} bytes")
    return np.frombuffer(blob, dtype=_WORD).reshape(count, 2)


def first_of_each(rows: U64) -> Mask:
    """Marks the first occurrence of each distinct row of ``rows`` [n, 2]."""
    if len(rows) < 2:
        return np.ones(len(rows), dtype=np.bool_)
    order = np.lexsort((rows[:, 0], rows[:, 1]))
    ordered = rows[order]
    mask = np.ones(len(rows), dtype=np.bool_)
    # lexsort is stable: among equal rows, the earliest comes first.
    mask[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return mask


def seals_of(meta: Meta, slots: npt.NDArray[np.integer[Any]]) -> U64:
    """The seals the directory's records of READY slots should have."""
    out = np.empty(len(slots), dtype=np.uint64)
    native.backend().seals(
        generations_of(meta.control[slots]),
        meta.keys[slots],
        meta.parents[slots],
        meta.engine_hashes[slots],
        meta.positions[slots],
        meta.checksums[slots],
        out,
    )
    return out
