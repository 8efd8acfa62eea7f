# SPDX-License-Identifier: Apache-2.0
"""The ``meta`` file: superblock, writer table, one aligned column per field, index.

::

    0        superblock   4 KiB: five u64 words (magic, version, body length, epoch, incarnation),
                          16 bytes digest of the body, the body as JSON from byte 64 on
    4 KiB    writers      8 KiB: 64 engine ids of at most 127 bytes, zero-padded; entry i is owner i + 1
    12 KiB   control      u64 each, see :mod:`kvcr.pool.state`
             keys         16 bytes each
             parents      16 bytes each
             engine_hash  u64 each
             stored_at    f64 each, seconds of the guard's clock
             seal         u64 each: hash over generation and record, for the check at attach
             checksums    u64 for each slot and rank, slot-major: xxh3-64 of that rank's part
             positions    u32 each
             owners       i32 each: who a GRANTED slot was granted to; 0 is the guard itself
             buckets      u64[power of two][8], each tag << 32 | slot + 1

Columns start on a cache line. Words of the superblock that change (epoch, incarnation) are single u64
stores; its body never changes.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvcr.errors import ConfigError, PoolCorrupt
from kvcr.keys import KEY_VERSION
from kvcr.layout import PAGE_BYTES, Layout
from kvcr.pool.fallback import BUCKET_ENTRIES
from kvcr.pool.mapping import Mapping
from kvcr.pool.state import F64, I32, U8, U32, U64

T = TypeVar("T", bound=np.generic)

META = "meta"
DATA = "data"
MAGIC = int.from_bytes(b"KVCRPOOL", "little")
VERSION = 2

SUPERBLOCK_BYTES = PAGE_BYTES
WRITER_ENTRIES = 64
WRITER_ENTRY_BYTES = 128
WRITERS_BYTES = WRITER_ENTRIES * WRITER_ENTRY_BYTES
_COLUMN_ALIGN = 64
_BODY_OFFSET = 64
_EPOCH_WORD = 3
_INCARNATION_WORD = 4
_DIGEST_SLICE = slice(40, 56)

REGION_ALIGN = 65536
"""A rank's region starts on a multiple of this, so that it can be mapped alone also with 64 KiB pages."""

SPARE_ROWS = 3
"""Rows of a region behind its slots, for the guard's use: the directory knows nothing of them."""

MAX_SLOTS = (1 << 31) - 1 - SPARE_ROWS


def boot_id() -> str:
    """The kernel's id of this boot. Two processes with the same one share a host's memory and clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def time_namespace() -> int:
    """Inode of this process's time namespace, each having its own CLOCK_MONOTONIC; 0 on old kernels."""
    try:
        return os.stat("/proc/self/ns/time").st_ino
    except FileNotFoundError:
        return 0


class SuperblockBody(msgspec.Struct, frozen=True):
    """What never changes in the life of a pool's files."""

    layout: Layout
    slots: int
    buckets: int
    region_bytes: int
    """From one rank's region to the next in ``data``."""
    key_version: int
    boot_id: str
    time_namespace: int
    pool_id: str = ""
    """Random, so that a pool made in place of a lost one is told from it."""


class Geometry:
    """Where everything is in both files, from the superblock's body."""

    def __init__(self, body: SuperblockBody) -> None:
        slots, ranks = body.slots, body.layout.ranks
        self.body = body
        self.slots = slots
        self.ranks = ranks
        self.part_stride = body.layout.slot_part_bytes
        self.region_bytes = body.region_bytes
        self.data_bytes = ranks * body.region_bytes
        self.offsets: dict[str, int] = {}
        at = SUPERBLOCK_BYTES + WRITERS_BYTES
        for name, nbytes in (
            ("control", 8 * slots),
            ("keys", 16 * slots),
            ("parents", 16 * slots),
            ("engine_hashes", 8 * slots),
            ("stored_at", 8 * slots),
            ("seals", 8 * slots),
            ("checksums", 8 * slots * ranks),
            ("positions", 4 * slots),
            ("owners", 4 * slots),
            ("buckets", 8 * BUCKET_ENTRIES * body.buckets),
        ):
            self.offsets[name] = at
            at = -(-(at + nbytes) // _COLUMN_ALIGN) * _COLUMN_ALIGN
        self.meta_bytes = -(-at // PAGE_BYTES) * PAGE_BYTES

    @classmethod
    def plan(cls, layout: Layout, slots: int) -> Geometry:
        """The geometry of a new pool. The index has at least twice as many entries as there are slots."""
        buckets = 2
        while buckets * BUCKET_ENTRIES < 2 * slots:
            buckets *= 2
        region = -(-(slots + SPARE_ROWS) * layout.slot_part_bytes // REGION_ALIGN) * REGION_ALIGN
        return cls(
            SuperblockBody(
                layout, slots, buckets, region, KEY_VERSION, boot_id(), time_namespace(), os.urandom(16).hex()
            )
        )


class Meta:
    """A mapped ``meta`` file: one numpy array per column, all views of the mapping.

    Read-only unless opened writable, which only the guard does. Arrays must not outlive :meth:`close`.
    """

    def __init__(self, mapping: Mapping, geometry: Geometry, inode: int) -> None:
        self.geometry = geometry
        self.inode = inode
        self._mapping = mapping
        slots, ranks = geometry.slots, geometry.ranks
        self.header: U64 = np.frombuffer(
            mapping, dtype=np.uint64, count=_BODY_OFFSET // 8, offset=mapping.start
        )
        self.writers: U8 = np.frombuffer(
            mapping, dtype=np.uint8, count=WRITERS_BYTES, offset=mapping.start + SUPERBLOCK_BYTES
        ).reshape(WRITER_ENTRIES, WRITER_ENTRY_BYTES)
        self.control: U64 = self._column("control", np.uint64, slots)
        self.keys: U64 = self._column("keys", np.uint64, 2 * slots).reshape(slots, 2)
        self.parents: U64 = self._column("parents", np.uint64, 2 * slots).reshape(slots, 2)
        self.engine_hashes: U64 = self._column("engine_hashes", np.uint64, slots)
        self.stored_at: F64 = self._column("stored_at", np.float64, slots)
        self.seals: U64 = self._column("seals", np.uint64, slots)
        self.checksums: U64 = self._column("checksums", np.uint64, slots * ranks).reshape(slots, ranks)
        self.positions: U32 = self._column("positions", np.uint32, slots)
        self.owners: I32 = self._column("owners", np.int32, slots)
        self.buckets: U64 = self._column("buckets", np.uint64, BUCKET_ENTRIES * geometry.body.buckets)

    def _column(self, name: str, dtype: type[T], count: int) -> npt.NDArray[T]:
        offset = self._mapping.start + self.geometry.offsets[name]
        return np.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset)

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> Meta:
        """Map an existing file. Raises FileNotFoundError, PoolCorrupt when it is no pool of this version."""
        with open(path, "r+b" if writable else "rb") as file:
            status = os.fstat(file.fileno())
            geometry = Geometry(_read_body(path, file.read(SUPERBLOCK_BYTES)))
            if status.st_size != geometry.meta_bytes:
                raise PoolCorrupt(
                    f"{path} has {status.st_size} bytes, its superblock says {geometry.meta_bytes}; "
                    "remove the pool's directory to start cold"
                )
            mapping = Mapping.of(file, geometry.meta_bytes, writable=writable)
        return cls(mapping, geometry, status.st_ino)

    def close(self) -> None:
        """Unmap. While a caller still holds a view, the memory stays mapped until that view is gone."""
        for name in list(vars(self)):
            if isinstance(getattr(self, name), np.ndarray):
                setattr(self, name, np.empty(0, dtype=getattr(self, name).dtype))
        try:
            self._mapping.close()
        except BufferError:
            # A view is still out; the mapping goes with the last one.
            return


def superblock_page(body: SuperblockBody, *, epoch: int, incarnation: int) -> bytes:
    """The first 4 KiB of a new ``meta`` file. Raises ConfigError when the layout does not fit there."""
    raw = msgspec.json.encode(body)
    limit = SUPERBLOCK_BYTES - _BODY_OFFSET
    if len(raw) > limit:
        raise ConfigError(
            f"the layout takes {len(raw)} bytes in the superblock, the limit is {limit}; "
            f"shorten the model identity, which has {len(body.layout.model)} characters"
        )
    words = np.array([MAGIC, VERSION, len(raw), epoch, incarnation], dtype=np.uint64)
    return (words.tobytes() + _digest(raw)).ljust(_BODY_OFFSET, b"\0") + raw.ljust(
        SUPERBLOCK_BYTES - _BODY_OFFSET, b"\0"
    )


EPOCH_INDEX: I32 = np.array([_EPOCH_WORD], dtype=np.int32)
"""Index of the epoch in :attr:`Meta.header`, in the form the backend's loads and stores take."""

_MAX_INCARNATION = 1 << 53
"""Nobody's clock gets there; a damaged superblock may say so."""

INCARNATION_INDEX: I32 = np.array([_INCARNATION_WORD], dtype=np.int32)
"""Index of the guard's incarnation in :attr:`Meta.header`."""


def next_incarnation(directory: Path, now_us: int) -> int:
    """Number of a guard that starts at ``now_us`` (Unix time): above that of the one before it on this pool.

    Also when the clock was set back since, or nobody would listen to it until the clock has caught up.
    """
    try:
        with open(directory / META, "rb") as file:
            page = file.read(_BODY_OFFSET)
    except OSError:
        return now_us
    words = np.frombuffer(page[: len(page) // 8 * 8], dtype=np.uint64).tolist()
    if len(words) <= _INCARNATION_WORD or words[:2] != [MAGIC, VERSION]:
        return now_us
    last = words[_INCARNATION_WORD]
    # Above what else it numbered from there, too: drops in G1, of which there is no million.
    return max(now_us, last + 1_000_000) if last < _MAX_INCARNATION else now_us


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16, person=b"kvcr-superblock").digest()


def _read_body(path: Path, page: bytes) -> SuperblockBody:
    fix = "remove the pool's directory to start cold"
    if len(page) < SUPERBLOCK_BYTES:
        raise PoolCorrupt(f"{path} has {len(page)} bytes, a superblock has {SUPERBLOCK_BYTES}; {fix}")
    magic, version, length = (int(word) for word in np.frombuffer(page, dtype=np.uint64, count=3))
    if magic != MAGIC:
        raise PoolCorrupt(f"{path} is not a pool: magic is {magic:#018x}, expected {MAGIC:#018x}; {fix}")
    if version != VERSION:
        raise PoolCorrupt(
            f"{path} is a pool of version {version}, this program knows version {VERSION}; {fix}"
        )
    if length > SUPERBLOCK_BYTES - _BODY_OFFSET:
        raise PoolCorrupt(f"{path}: superblock body of {length} bytes does not fit {SUPERBLOCK_BYTES}; {fix}")
    raw = page[_BODY_OFFSET : _BODY_OFFSET + length]
    if _digest(raw) != page[_DIGEST_SLICE]:
        raise PoolCorrupt(f"{path}: the superblock does not match its digest; {fix}")
    try:
        body = msgspec.json.decode(raw, type=SuperblockBody)
    except msgspec.MsgspecError as error:
        raise PoolCorrupt(f"{path}: the superblock does not decode: {error}; {fix}") from error
    if body.key_version != KEY_VERSION:
        raise PoolCorrupt(
            f"{path} has block keys of version {body.key_version}, expected {KEY_VERSION}; {fix}"
        )
    return body
