# SPDX-License-Identifier: Apache-2.0
"""The ``data`` file: one region per rank, slot *i* at ``i * slot_part_bytes`` in it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcr.errors import PoolCorrupt
from kvcr.layout import Layout
from kvcr.pool import native, pages
from kvcr.pool.mapping import Mapping
from kvcr.pool.meta import DATA, META, SPARE_ROWS, Geometry, Meta
from kvcr.pool.state import I32, U8, U64, as_slots

if TYPE_CHECKING:
    from kvcr.pool.reader import PoolReader

_POPULATE_BYTES = 16 << 20
"""Filled at once: a millisecond or a few."""


class RegionInfo(NamedTuple):
    """One rank's region as mapped in this process: what a NIXL registration and a strided grid need."""

    address: int
    nbytes: int
    stride: int
    """Bytes from one slot to the next."""


class DataRegion:
    """One rank's part of ``data``, mapped into this process and not into its forked children.

    ``array`` is uint8 [slots, slot_part_bytes]; bytes past ``layout.part_bytes`` of a row are padding,
    written by nobody. Any thread may read or write rows it has a grant or a lease for. ``rows`` is the same
    and the spare rows behind it, which the guard tries transports with.
    """

    def __init__(
        self, mapping: Mapping, slots: int, layout: Layout, rank: int, *, writable: bool, sparse: bool
    ) -> None:
        self.rank = rank
        self.layout = layout
        self._mapping = mapping
        self._writable = writable
        self._sparse = sparse
        count = slots + SPARE_ROWS
        stride = layout.slot_part_bytes
        self.rows: U8 = np.frombuffer(mapping, np.uint8, count * stride, mapping.start).reshape(count, stride)
        self.array = self.rows[:slots]
        self.address: int = self.array.__array_interface__["data"][0]

    @classmethod
    def open(
        cls, dir: Path, source: Layout | PoolReader, rank: int, *, writable: bool, populate: bool = True
    ) -> DataRegion:
        """Map rank ``rank``'s region of the pool in ``dir``.

        ``source`` is the open reader, or the layout the pool must have. ``populate`` fills the page table
        now, where the kernel can. Raises FileNotFoundError, PoolCorrupt, LayoutMismatch, and ValueError
        on a rank the layout does not have.
        """
        meta = Meta.open(Path(dir) / META, writable=False)
        try:
            geometry = meta.geometry
        finally:
            meta.close()
        geometry.body.layout.require_same(
            source if isinstance(source, Layout) else source.layout, ours="the pool", theirs="the caller"
        )
        return cls.map(Path(dir) / DATA, geometry, rank, writable=writable, populate=populate)

    @classmethod
    def map(cls, path: Path, geometry: Geometry, rank: int, *, writable: bool, populate: bool) -> DataRegion:
        """:meth:`open` for a caller who has read the superblock already."""
        layout = geometry.body.layout
        if not 0 <= rank < geometry.ranks:
            raise ValueError(f"rank {rank} is outside of 0..{geometry.ranks - 1}, the ranks of the layout")
        with open(path, "r+b" if writable else "rb") as file:
            status = os.fstat(file.fileno())
            # Checked, because a mapping past the end of its file has nothing to read or write.
            if status.st_size != geometry.data_bytes:
                raise PoolCorrupt(
                    f"{path} has {status.st_size} bytes, the superblock says {geometry.data_bytes}; "
                    "remove the pool's directory to start cold"
                )
            nbytes = geometry.region_bytes
            mapping = Mapping.of(file, nbytes, writable=writable, offset=rank * nbytes)
        sparse = status.st_blocks * 512 < status.st_size
        region = cls(mapping, geometry.slots, layout, rank, writable=writable, sparse=sparse)
        if populate:
            region.populate()
        return region

    def populate(self) -> None:
        """Fill the page table, where the kernel can, until done or closed. Any thread, without the GIL."""
        # Populating a hole of a sparse file would allocate it.
        if self._sparse:
            return
        # Held, so that the addresses stay ours.
        array = self.rows
        for start in range(0, array.nbytes, _POPULATE_BYTES):
            if not len(self.rows):
                return
            nbytes = min(_POPULATE_BYTES, array.nbytes - start)
            if not pages.populate(self.address + start, nbytes, writable=self._writable):
                return

    def populate_aside(self) -> None:
        """:meth:`populate` on a thread of its own, which does not keep the process."""
        threading.Thread(target=self.populate, name="kvcr-populate", daemon=True).start()

    @property
    def info(self) -> RegionInfo:
        """Address, bytes and stride of the slots."""
        return RegionInfo(self.address, self.array.nbytes, self.layout.slot_part_bytes)

    def part(self, slot: int) -> memoryview:
        """The ``layout.part_bytes`` bytes of one slot. Raises IndexError on a slot the pool has not."""
        if not 0 <= slot < len(self.array):
            raise IndexError(f"slot {slot} is outside of 0..{len(self.array) - 1}")
        start = self._mapping.start + slot * self.layout.slot_part_bytes
        return memoryview(self._mapping)[start : start + self.layout.part_bytes]

    def close(self) -> None:
        """Unmap. While a caller still holds a view, the memory stays mapped until that view is gone."""
        self.array = self.rows = np.empty((0, 0), dtype=np.uint8)
        try:
            self._mapping.close()
        except BufferError:
            return


def checksum_parts(array: U8, slots: I32, part_bytes: int | None = None) -> U64:
    """xxh3-64 of the first ``part_bytes`` bytes (default: all) of each named row of ``array``.

    ``array``: uint8 [slots, slot_part_bytes], contiguous. Any thread; runs at the speed of memory, without
    the GIL. Raises IndexError on a row the array does not have.
    """
    width = array.shape[1] if part_bytes is None else part_bytes
    sums = np.empty(len(slots), np.uint64)
    native.bulk(width).hash_rows(array, as_slots(slots), sums, width, native.WIDEST)
    return sums


def copy_parts(source: U8, source_slots: I32, target: U8, target_slots: I32, part_bytes: int) -> U64:
    """Copy the first ``part_bytes`` bytes of rows to rows; returns the xxh3-64 of what was written.

    Arrays as in :func:`checksum_parts`. One pass over memory, so that the sums are of the target's bytes even
    if the source changes meanwhile. Any thread; without the GIL. Raises IndexError, and copies nothing, on a
    row that an array does not have.
    """
    sums = np.empty(len(source_slots), np.uint64)
    native.bulk(part_bytes).copy_rows(
        source, as_slots(source_slots), target, as_slots(target_slots), sums, part_bytes, native.WIDEST
    )
    return sums


SEGMENT_BYTES = 64
"""What the pieces of a block must be multiples of to be hashed as they are stored: a stripe of XXH3."""


def gather_parts(segments: tuple[U8, ...], blocks: I32, target: U8, slots: I32) -> U64:
    """Copy blocks that lie in pieces, one in each segment, to rows; returns the xxh3-64 of what was written.

    ``segments``: uint8 [blocks, bytes], rows maybe apart, each of a multiple of :data:`SEGMENT_BYTES`. As
    :func:`copy_parts` for the rest.
    """
    width = sum(segment.shape[1] for segment in segments)
    sums = np.empty(len(slots), np.uint64)
    native.bulk(width).gather_rows(segments, as_slots(blocks), target, as_slots(slots), sums, native.WIDEST)
    return sums
