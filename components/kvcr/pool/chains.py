# SPDX-License-Identifier: Apache-2.0
"""Walking chains down from a block to what comes after it. The directory only has the way up: each parent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcr.pool.meta import Meta
from kvcr.pool.state import I32, U64

_BITS = 20
_MASK = np.uint64((1 << _BITS) - 1)

Rows = npt.NDArray[np.intp]


def after(meta: Meta, ready: I32, here: I32, named: U64) -> I32:
    """Slots among ``ready`` whose chain goes through one of the keys ``named`` (uint64 [n, 2]), or is one.

    ``here``: slots of those that are here themselves; the others too lead to the blocks right after them.
    Looks at all parents once and sorts those that can matter: 25 ms of CPU time for 200,000 blocks in chains
    of 1,000 (``python -m bench.actions``).
    """
    parents = meta.parents[ready, 0]
    found = np.isin(ready, here, kind="table")
    # A few bits of a key sort out nearly all that are not named; the rest is compared in full.
    marked = np.zeros(1 << _BITS, np.bool_)
    marked[named[:, 0] & _MASK] = True
    hits = np.flatnonzero(marked[parents & _MASK])
    known = {key.tobytes() for key in named}
    found[hits] |= np.array([row.tobytes() in known for row in meta.parents[ready[hits]]], np.bool_)
    frontier = np.flatnonzero(found)
    if not len(frontier):
        return ready[:0]
    # What comes after a block has a higher position, and was not found yet.
    positions = meta.positions[ready]
    later = np.flatnonzero((positions > positions[frontier].min()) & ~found)
    order = later[np.argsort(parents[later])]
    sorted_parents = parents[order]
    while len(frontier):
        frontier = _children(meta, ready, order, sorted_parents, frontier)
        # A cycle in damaged records ends here.
        frontier = np.unique(frontier[~found[frontier]])
        found[frontier] = True
    chosen: I32 = ready[found]
    return chosen


def _children(meta: Meta, ready: I32, order: Rows, sorted_parents: U64, frontier: Rows) -> Rows:
    """Rows whose parent is one of the ``frontier``'s blocks."""
    keys = meta.keys[ready[frontier]]
    low = np.searchsorted(sorted_parents, keys[:, 0], "left")
    counts = np.searchsorted(sorted_parents, keys[:, 0], "right") - low
    # Ranges of different lengths, one behind the other.
    starts = np.repeat(low - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    rows = order[starts + np.arange(len(starts))]
    same: Rows = rows[meta.parents[ready[rows], 1] == np.repeat(keys[:, 1], counts)]
    return same
