# SPDX-License-Identifier: Apache-2.0
"""What a scheduler tells its workers to copy. Batches are blobs: they are pickled once per step."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvcr.protocol.engine import BlockStatus


class LoadSpec(msgspec.Struct, frozen=True):
    """Copy these blocks from the pool into engine memory, for one request."""

    request_id: str
    first: int
    """Position in the request's chain of the first key."""
    keys: bytes
    """16 bytes each"""
    block_ids: bytes
    """int32 each: where in engine memory"""
    deadline_s: float
    """Seconds from receipt, on the worker's own clock."""
    fetching: bool = False
    """A pull is running: keys that are not in the directory yet may still appear."""
    fetch_first: int = 0
    """Position of the first key of that pull."""
    fetch_count: int = 0
    """Number of keys of that pull."""
    prefix_only: bool = True
    """Blocks after the first failed one are of no use and are not waited for."""


class SaveSpec(msgspec.Struct, frozen=True):
    """Copy these blocks from engine memory into granted slots. All blobs have one entry a block."""

    job_id: int
    request_id: str
    pool_token: int
    """Identity of the pool the grants are for: a worker that maps another one drops the job."""
    epoch: int
    slots: bytes
    generations: bytes
    block_ids: bytes
    keys: bytes
    parents: bytes
    engine_hashes: bytes
    positions: bytes
    drops: int = 0
    """The last drop in G1 that was carried out before the request began."""


@dataclass(frozen=True)
class LoadResult:
    """How a load ended. ``statuses`` is uint8 :class:`BlockStatus`, one a block, none of them PENDING."""

    request_id: str
    statuses: npt.NDArray[np.uint8]
    block_ids: npt.NDArray[np.int32]
    corrupt_keys: frozenset[bytes] = frozenset()
    """Blocks that the directory lists and that did not verify: their next save is no duplicate."""

    @property
    def failed_block_ids(self) -> list[int]:
        """Blocks of engine memory from the first that did not arrive on."""
        bad = np.flatnonzero(self.statuses != BlockStatus.OK)
        return self.block_ids[bad[0] :].tolist() if len(bad) else []


class Grants(msgspec.Struct, frozen=True):
    """Slots this engine may fill: int32 and uint64, same length."""

    slots: npt.NDArray[np.int32]
    generations: npt.NDArray[np.uint64]
    pool_token: int
    epoch: int

    def __len__(self) -> int:
        return len(self.slots)
