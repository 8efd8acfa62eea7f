# SPDX-License-Identifier: Apache-2.0
"""A pool as engines and peers see it: the directory mapped read-only, and no way to write to it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvcr.keys import KEY_BYTES
from kvcr.layout import Layout
from kvcr.pool import native
from kvcr.pool.meta import EPOCH_INDEX, INCARNATION_INDEX, META, Geometry, Meta
from kvcr.pool.state import GENERATION_MASK, I32, U64, Mask, SlotState, as_slots, as_u64, control_words


class Hits(NamedTuple):
    """Where blocks are, one entry per key asked for."""

    slots: I32
    """-1 for a miss"""
    generations: U64
    """0 for a miss"""


def look_up(backend: native.Backend, meta: Meta, keys: bytes) -> tuple[Hits, int]:
    """Where blocks are, of 16-byte keys one after the other, and how many are here."""
    count = len(keys) // KEY_BYTES
    found = Hits(np.empty(count, np.int32), np.empty(count, np.uint64))
    hits = backend.lookup(keys, meta.buckets, meta.control, meta.keys, found.slots, found.generations)
    return found, hits


class Found(NamedTuple):
    """Where blocks are and what is recorded of them, one entry per key asked for."""

    slots: I32
    """-1 for a miss"""
    generations: U64
    checksums: U64
    """[n, ranks]: xxh3-64 of each part; like the hashes read while the slot held that generation"""
    engine_hashes: U64
    hits: int


class PoolReader:
    """Finds blocks in another process's pool without a message, a lock or a wait. Any thread.

    A hit is good for the 2 s an evicted slot cools. Longer uses need a lease from the guard; every use
    ends with :meth:`still`, read after the bytes were copied.
    """

    def __init__(self, dir: Path, meta: Meta) -> None:
        self.dir = Path(dir)
        self._meta = meta
        self._backend = native.backend()

    @classmethod
    def open(cls, dir: Path) -> PoolReader:
        """Map the directory of the pool in ``dir``. Raises FileNotFoundError, PoolCorrupt."""
        return cls(Path(dir), Meta.open(Path(dir) / META, writable=False))

    @property
    def geometry(self) -> Geometry:
        """Where slots are in ``data``."""
        return self._meta.geometry

    @property
    def layout(self) -> Layout:
        """The layout the pool was made for."""
        return self._meta.geometry.body.layout

    @property
    def slots(self) -> int:
        """Slots of the pool, whatever their state."""
        return self._meta.geometry.slots

    @property
    def slot_part_bytes(self) -> int:
        """Bytes from one slot to the next in a rank's region."""
        return self._meta.geometry.part_stride

    @property
    def boot_id(self) -> str:
        """Boot the pool was made in."""
        return self._meta.geometry.body.boot_id

    @property
    def epoch(self) -> int:
        """The pool's epoch now."""
        return self._word(EPOCH_INDEX)

    @property
    def incarnation(self) -> int:
        """Incarnation of the guard that attached last."""
        return self._word(INCARNATION_INDEX)

    def lookup(self, keys: bytes) -> Hits:
        """Slot and generation of each 16-byte key. A miss is always possible, a wrong hit is not."""
        return look_up(self._backend, self._meta, keys)[0]

    def hits(self, keys: bytes) -> int:
        """How many of these blocks are here."""
        return look_up(self._backend, self._meta, keys)[1]

    def find(self, keys: bytes) -> Found:
        """:meth:`lookup`, with the checksums of what is found."""
        count, meta = len(keys) // KEY_BYTES, self._meta
        slots, generations = np.empty(count, np.int32), np.empty(count, np.uint64)
        checksums = np.empty((count, meta.geometry.ranks), np.uint64)
        hashes = np.empty(count, np.uint64)
        hits = self._backend.find(
            keys,
            meta.buckets,
            meta.control,
            meta.keys,
            meta.checksums,
            meta.engine_hashes,
            slots,
            generations,
            checksums,
            hashes,
        )
        return Found(slots, generations, checksums, hashes, hits)

    def still(self, slots: I32, generations: U64) -> Mask:
        """Whether each slot is READY in that generation, as of after everything read before this call."""
        mask = np.empty(len(slots), dtype=np.bool_)
        self._backend.still(self._meta.control, as_slots(slots), as_u64(generations), mask)
        return mask

    def still_granted(self, slots: I32, generations: U64) -> Mask:
        """Whether each slot is granted in that generation: neither published nor taken back since."""
        slots, generations = as_slots(slots), as_u64(generations)
        mask: Mask = (slots >= 0) & (slots < self.slots) & (generations <= np.uint64(GENERATION_MASK))
        words = np.empty(int(np.count_nonzero(mask)), dtype=np.uint64)
        self._backend.load_words(self._meta.control, slots[mask], words)
        mask[mask] = words == control_words(SlotState.GRANTED, generations[mask])
        return mask

    def checksums(self, slots: I32) -> U64:
        """uint64 [n, ranks]: xxh3-64 of each part. True of slots that are ``still`` the same afterwards."""
        return self._meta.checksums[as_slots(slots)]

    def close(self) -> None:
        """Unmap the directory."""
        self._meta.close()

    def _word(self, index: I32) -> int:
        out = np.empty(1, dtype=np.uint64)
        self._backend.load_words(self._meta.header, index, out)
        return int(out[0])
