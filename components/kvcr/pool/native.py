# SPDX-License-Identifier: Apache-2.0
"""Chooses who touches control words, index and bulk: the C extension, or numpy where that is safe.

``KVCR_NO_NATIVE=1`` forces numpy. Without the extension, numpy is used on x86-64 only: there an
aligned 8-byte load or store of a numpy array is one instruction and the processor keeps loads and
stores in order, which is what acquire and release ask for. Elsewhere that is not so, and wrong bytes
could be served.
"""

from __future__ import annotations

import functools
import os
import platform
from types import ModuleType
from typing import NamedTuple, Protocol, cast

from kvcr.errors import ConfigError
from kvcr.pool import fallback
from kvcr.pool.state import F64, I32, U8, U32, U64, Mask

_native: ModuleType | None
try:
    from kvcr import _native
except ImportError:
    _native = None

NO_NATIVE = "KVCR_NO_NATIVE"

SHORTEST_ROW = 241
"""Bytes from which on the extension hashes rows: shorter ones follow other rules of XXH3."""

WIDEST = 512
"""Bits of the widest vectors to hash with; the extension takes what the processor has of them."""


class Directory(NamedTuple):
    """Every column that changes when a block is published, one entry a slot but for the buckets: those of the
    file, and behind them what the guard keeps of its slots for itself."""

    control: U64
    buckets: U64
    keys: U64
    parents: U64
    engine_hashes: U64
    positions: U32
    stored_at: F64
    seals: U64
    checksums: U64
    last_used_s: F64
    pinned_until_s: F64
    demoted: Mask


class Backend(Protocol):
    """What the pool needs done with order or in a tight loop. Arrays are C-contiguous."""

    def load_words(self, words: U64, indices: I32, out: U64) -> None:
        """Acquire loads of ``words[indices]`` into ``out``. Raises IndexError outside of ``words``."""

    def store_words(self, words: U64, indices: I32, values: U64) -> None:
        """Release stores, in order. Raises IndexError, and stores nothing, outside of ``words``."""

    def grant(self, control: U64, owners: I32, slots: I32, out_generations: U64, owner: int) -> None:
        """Write the owner of slots taken from the free list, then their control words: GRANTED, generation
        unchanged. Raises IndexError, and stores nothing, outside of ``control``."""

    def lookup(
        self,
        keys: bytes | U64,
        buckets: U64,
        control: U64,
        key_column: U64,
        out_slots: I32,
        out_generations: U64,
    ) -> int:
        """Slot (-1: miss) and generation of each 16-byte key, each hit confirmed by the full key
        between two equal READY loads of its control word. Returns the number of hits."""

    def find(
        self,
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
        """:meth:`lookup`, with checksums and engine hash of each hit (0 of a miss), read while its slot still
        held that generation. Returns the number of hits."""

    def still(self, control: U64, slots: I32, generations: U64, out: Mask) -> None:
        """Whether each slot is READY in that generation, loaded after everything read before."""

    def insert(self, buckets: U64, keys: bytes | U64, slots: I32, out: Mask) -> None:
        """Adds absent keys to the index; ``out`` is False where both buckets of a key are full."""

    def remove(self, buckets: U64, keys: bytes | U64, slots: I32) -> int:
        """Clears the entries key -> slot; returns how many there were."""

    def all_new(
        self,
        control: U64,
        buckets: U64,
        key_column: U64,
        slots: bytes | I32,
        generations: bytes | U64,
        keys: bytes | U64,
    ) -> bool:
        """Whether every slot is GRANTED in its generation, every key a miss, and all of them distinct."""

    def seals(
        self,
        generations: U64,
        keys: U64,
        parents: U64,
        engine_hashes: U64,
        positions: U32,
        checksums: U64,
        out: U64,
    ) -> None:
        """A hash over each record and the generation it belongs to: 7 words, or more with more ranks."""

    def publish(
        self,
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
        """Write records (columns first) of slots the caller owns, then their control words, READY, then the
        index; ``out`` is False where that has no room. Returns the number of the others, and the XOR of the
        first words of their keys. The keys are distinct and not there."""

    def hash_rows(self, array: U8, rows: I32, out: U64, width: int, widest: int) -> None:
        """xxh3-64 of the first ``width`` bytes of rows of ``array``. Raises IndexError outside of it."""

    def copy_rows(
        self,
        source: U8,
        source_rows: I32,
        target: U8,
        target_rows: I32,
        out: U64,
        width: int,
        widest: int,
    ) -> None:
        """Copy the first ``width`` bytes of rows to rows; ``out`` is the xxh3-64 of what was written, even
        if the source changes meanwhile. Raises IndexError, and copies nothing, outside of an array."""

    def gather_rows(
        self, segments: tuple[U8, ...], blocks: I32, target: U8, rows: I32, out: U64, widest: int
    ) -> None:
        """Copy the pieces a block has in each segment, one after the other, to the start of a row; ``out``
        is the xxh3-64 of what was written. Segments are [blocks, width] with rows that may lie apart,
        multiples of 64 bytes wide. Raises IndexError, and copies nothing, outside of an array."""


def bulk(width: int) -> Backend:
    """:func:`backend`, for rows of ``width`` bytes."""
    return backend() if width >= SHORTEST_ROW else cast(Backend, fallback)


@functools.cache
def backend() -> Backend:
    """The implementation to use in this process, chosen at the first call. Raises ConfigError where none is
    safe."""
    if _native is not None and os.environ.get(NO_NATIVE, "") in ("", "0"):
        return cast(Backend, _native)
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        raise ConfigError(
            f"the numpy fallback is not safe on {machine}: build the extension kvcr._native "
            f"(pip install with a C compiler) and unset {NO_NATIVE}"
        )
    return cast(Backend, fallback)
