# SPDX-License-Identifier: Apache-2.0
"""Where a load's blocks are read from, when that is not a directory: what the guard handed to it alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcr.errors import PoolCorrupt
from kvcr.layout import Layout
from kvcr.pool import DataRegion, PoolReader
from kvcr.protocol.engine import Handed

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

MAX_FOREIGN_POOLS = 16
"""Pools of other guards kept mapped; the one used longest ago goes first."""


@dataclass(frozen=True, eq=False)
class Origin:
    """Slots to read blocks from."""

    slots: U8
    """uint8 [slots, slot_part_bytes], of this rank"""
    still: Callable[[I32, U64], npt.NDArray[np.bool_]]
    """Whether slots still hold what they did, asked after the copy."""
    foreign: bool = False
    """Another guard's pool: nobody has verified these bytes on their way here."""


class ForeignPools:
    """Pools of other guards on this host, mapped read-only. For the copy thread."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._pools: OrderedDict[tuple[str, int], Origin] = OrderedDict()

    def origin(self, message: Handed) -> Origin:
        """The slots of the pool that ``message`` names.

        Raises FileNotFoundError, PermissionError, PoolError or LayoutMismatch when they cannot be read here.
        """
        key = (message.pool_dir, message.incarnation)
        known = self._pools.get(key)
        if known is None:
            known = self._pools[key] = self._open(Path(message.pool_dir), message.incarnation)
            if len(self._pools) > MAX_FOREIGN_POOLS:
                # Unmapped with the last load that uses it.
                self._pools.popitem(last=False)
        self._pools.move_to_end(key)
        return known

    def _open(self, directory: Path, incarnation: int) -> Origin:
        reader = PoolReader.open(directory)
        if reader.incarnation != incarnation:
            raise PoolCorrupt(f"the pool in {directory}, as seen from here, is another guard's")
        reader.layout.require_same(self._layout, ours=f"the pool in {directory}", theirs="this engine")
        # Not populated: of a large pool a few blocks are read.
        region = DataRegion.open(directory, reader, self._rank, writable=False, populate=False)
        return Origin(region.array, reader.still, foreign=True)
