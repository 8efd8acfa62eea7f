# SPDX-License-Identifier: Apache-2.0
"""Engine memory (G1) as the worker handle sees it: numbered blocks that it copies to and from slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcr.pool.region import SEGMENT_BYTES, gather_parts

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]


class BlockMemory(Protocol):
    """Blocks of one rank. ``load`` and ``store`` are called on the worker handle's copy thread only."""

    @property
    def part_bytes(self) -> int:
        """Bytes of one block on this rank, all layers."""
        ...

    @property
    def blocks(self) -> int: ...

    def attach(self, slots: U8) -> None:
        """A pool was mapped: ``slots`` is uint8 [slots, slot_part_bytes]. May pin it, if it can."""
        ...

    def detach(self, slots: U8) -> None:
        """Undo :meth:`attach`; the array goes away after this."""
        ...

    def fence(self) -> Any:
        """A point in the engine's work after which its writes are complete; called on the engine's thread."""
        ...

    def store(self, slots: U8, slot_ids: I32, block_ids: I32, fence: Any) -> U64 | None:
        """Copy blocks into slots; returns when the bytes are in the slots: the xxh3-64 of what was written to
        each, or None where the copy does not bring it and the guard has to hash."""
        ...

    def load(self, slots: U8, slot_ids: I32, block_ids: I32, fence: Any) -> None:
        """Copy slots into blocks; returns when the bytes are in the blocks.

        ``fence`` is of when the load was asked for: a step that was under way then may still use what the
        blocks held before. ``slots`` need not be the attached array, and may be read-only.
        """
        ...


class HostBlockMemory:
    """Blocks in host memory.

    ``segments`` are uint8 arrays [blocks, bytes] (rows may be strided apart, bytes are dense): the pieces a
    block is made of, in the order they have in a slot, e.g. one per layer. Writable views of the engine's
    memory; they are kept.
    """

    def __init__(self, segments: Sequence[U8]) -> None:
        if not segments:
            raise ValueError("a block memory needs at least one segment, got none")
        for index, segment in enumerate(segments):
            if segment.ndim != 2 or segment.dtype != np.uint8 or segment.strides[1] != 1:
                raise ValueError(
                    f"segment {index} must be uint8 [blocks, bytes] with dense bytes, got {segment.dtype} "
                    f"{segment.shape} strides {segment.strides}"
                )
            if segment.shape[0] != segments[0].shape[0]:
                raise ValueError(
                    f"segment {index} has {segment.shape[0]} blocks, segment 0 has {segments[0].shape[0]}"
                )
        self._blocks = int(segments[0].shape[0])
        self._part_bytes = sum(int(segment.shape[1]) for segment in segments)
        self._segments = tuple(segments)
        self._striped = all(segment.shape[1] % SEGMENT_BYTES == 0 for segment in segments)
        self._grid = _as_grid(segments)

    @property
    def part_bytes(self) -> int:
        return self._part_bytes

    @property
    def blocks(self) -> int:
        return self._blocks

    def attach(self, slots: U8) -> None:
        if slots.shape[1] < self._part_bytes:
            raise ValueError(f"a slot part has {slots.shape[1]} bytes, a block needs {self._part_bytes}")

    def detach(self, slots: U8) -> None:
        return None

    def fence(self) -> None:
        return None

    def store(self, slots: U8, slot_ids: I32, block_ids: I32, fence: Any = None) -> U64 | None:
        if self._striped:
            return gather_parts(self._segments, block_ids, slots, slot_ids)
        self._copy(slots, slot_ids, block_ids, to_slots=True)
        return None

    def load(self, slots: U8, slot_ids: I32, block_ids: I32, fence: Any = None) -> None:
        self._copy(slots, slot_ids, block_ids, to_slots=False)

    def _copy(self, slots: U8, slot_ids: I32, block_ids: I32, *, to_slots: bool) -> None:
        # A loop over blocks: each iteration moves hundreds of kilobytes with the GIL released, and a fancy-
        # indexed copy of the whole batch would go through a temporary of the same size.
        for slot, block in zip(slot_ids.tolist(), block_ids.tolist(), strict=True):
            part = slots[slot, : self._part_bytes]
            if self._grid is not None:
                rows = self._grid[block]
                if to_slots:
                    np.copyto(part.reshape(rows.shape), rows)
                else:
                    np.copyto(rows, part.reshape(rows.shape))
                continue
            offset = 0
            for segment in self._segments:
                end = offset + segment.shape[1]
                if to_slots:
                    part[offset:end] = segment[block]
                else:
                    segment[block] = part[offset:end]
                offset = end


def _as_grid(segments: Sequence[U8]) -> U8 | None:
    """All segments as one array [blocks, segments, bytes], when they are equal and evenly spaced.

    Engines allocate layers that way; one copy call then moves a whole block.
    """
    first = segments[0]
    if any(s.shape != first.shape or s.strides != first.strides for s in segments):
        return None
    addresses = [s.ctypes.data for s in segments]
    gaps = set(np.diff(addresses).tolist())
    if len(gaps) > 1 or any(gap < 0 for gap in gaps):
        return None
    gap = gaps.pop() if gaps else 0
    return np.lib.stride_tricks.as_strided(
        first, shape=(first.shape[0], len(segments), first.shape[1]), strides=(first.strides[0], gap, 1)
    )
