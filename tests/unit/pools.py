# SPDX-License-Identifier: Apache-2.0
"""Small pools and numbered blocks for the tests of ``kvcr.pool``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from kvcr.layout import Layout
from kvcr.pool import CommitResult, Granted, Pool, Record, checksum_parts

ROOT = b"\xff" * 16


def layout(*, ranks: int = 1, part_bytes: int = 4096, **others: Any) -> Layout:
    """A layout whose model does not matter."""
    fields: dict[str, Any] = {
        "model": "tiny@0+0",
        "dtype": "float32",
        "block_size": 16,
        "layers": 2,
        "kv_heads": 2,
        "head_size": 16,
        "part_bytes": part_bytes,
        "tp_size": ranks,
    }
    return Layout(**(fields | others))


def key(number: int) -> bytes:
    """The key of block ``number``."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def content(block: bytes, part_bytes: int) -> bytes:
    """The bytes block ``block`` must hold: nothing but a function of its key."""
    return (block * (-(-part_bytes // len(block))))[:part_bytes]


def create(dir: Path, slots: int, *, ranks: int = 1, part_bytes: int = 4096, **options: Any) -> Pool:
    """A new pool of exactly ``slots`` slots, on a sparse file."""
    shape = layout(ranks=ranks, part_bytes=part_bytes)
    options = {"guard_incarnation": 1, "preallocate": False} | options
    return Pool.create(dir, shape, slots * ranks * shape.slot_part_bytes, **options)


def commit(pool: Pool, granted: Granted, numbers: list[int], now_s: float = 0.0) -> CommitResult:
    """Fill granted slots with numbered blocks and publish them. Block 0 follows the root, n follows n - 1."""
    ranks = pool.layout.ranks
    for slot, number in zip(granted.slots, numbers, strict=True):
        for rank in range(ranks):
            pool.part(rank, int(slot))[:] = content(key(number), pool.layout.part_bytes)
    return pool.commit(
        granted.slots,
        granted.generations,
        keys(*numbers),
        b"".join(key(number - 1) if number else ROOT for number in numbers),
        np.array(numbers, dtype=np.uint64),
        np.array(numbers, dtype=np.uint32),
        hashes_of(pool, granted.slots),
        now_s,
    )


def hashes_of(pool: Pool, slots: np.ndarray) -> np.ndarray:
    """uint64 [slots, ranks]: what the directory has to say of these slots."""
    size = pool.layout.part_bytes
    arrays = [pool.data(rank).array for rank in range(pool.layout.ranks)]
    return np.stack([checksum_parts(array, slots, size) for array in arrays], axis=1)


def store(pool: Pool, *numbers: int, now_s: float = 0.0) -> Granted:
    """Allocate and publish numbered blocks, all of which must find room."""
    granted = pool.allocate(len(numbers), now_s)
    assert len(granted.slots) == len(numbers), f"{len(granted.slots)} slots for {len(numbers)} blocks"
    assert commit(pool, granted, list(numbers), now_s).committed.all()
    return granted


def found(pool: Pool, *numbers: int) -> list[bool]:
    """Which of these blocks a lookup finds."""
    return [bool(slot >= 0) for slot in pool.lookup(keys(*numbers)).slots]


def numbers_of(record: Record) -> list[int]:
    return [int(position) for position in record.positions]
