# SPDX-License-Identifier: Apache-2.0
"""What a pool holds, as chains: one for each block that no other resident block follows. Pure.

Chains that begin alike share blocks. Each block is counted once, for the chain that has it and goes furthest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.pool import Listing

I64 = npt.NDArray[np.int64]

MAX_LISTED = 10_000
"""Chains that a guard tells at once."""


def chains(listing: Listing, block_bytes: int, limit: int) -> dict[str, Any]:
    """JSON-ready: totals, and the ``limit`` chains that were used last.

    Of each: ``tail`` (key of its last block), ``tenant`` (the root its keys come from, hex; empty when its
    beginning is not here), ``first`` and ``last`` position, ``blocks`` and ``bytes`` that are counted for it,
    ``leased`` and ``pinned`` ones among them, ``age_s`` since its last block was stored and ``idle_s`` since
    any of it was used. ``block_bytes``: of all ranks.
    """
    count = len(listing.keys)
    parents = _parents(listing)
    is_parent = np.zeros(count, bool)
    is_parent[parents[parents >= 0]] = True
    tails = np.flatnonzero(~is_parent)
    levels = _levels(listing.positions)
    owner = np.full(count, -1, np.int64)
    owner[tails] = tails
    for level in reversed(levels):
        below = level[parents[level] >= 0]
        # Of those that write to one parent the last wins: the one whose chain goes furthest.
        below = below[np.argsort(listing.positions[owner[below]], kind="stable")]
        owner[parents[below]] = owner[below]
    top = np.arange(count)
    for level in levels:
        below = level[parents[level] >= 0]
        top[below] = top[parents[below]]
    idle_s = np.full(count, np.inf)
    np.minimum.at(idle_s, owner, listing.idle_s)
    blocks = np.bincount(owner, minlength=count)
    leased = np.bincount(owner, weights=listing.leased, minlength=count)
    pinned = np.bincount(owner, weights=listing.pinned, minlength=count)
    shown = tails[np.lexsort((tails, idle_s[tails]))][:limit]
    rows = [
        {
            "tail": listing.keys[tail].tobytes().hex(),
            "tenant": listing.parents[top[tail]].tobytes().hex() if not listing.positions[top[tail]] else "",
            "first": int(listing.positions[top[tail]]),
            "last": int(listing.positions[tail]),
            "blocks": int(blocks[tail]),
            "bytes": int(blocks[tail]) * block_bytes,
            "leased": int(leased[tail]),
            "pinned": int(pinned[tail]),
            "age_s": round(float(listing.age_s[tail]), 1),
            "idle_s": round(float(idle_s[tail]), 1),
        }
        for tail in shown.tolist()
    ]
    return {"blocks": count, "bytes": count * block_bytes, "chains": len(tails), "rows": rows}


def _parents(listing: Listing) -> I64:
    """Of each block the index of the one before it, -1 when that is not here. By the first half of the keys,
    which are hashes."""
    count = len(listing.keys)
    if not count:
        return np.zeros(0, np.int64)
    order = np.argsort(listing.keys[:, 0], kind="stable")
    places = np.searchsorted(listing.keys[order, 0], listing.parents[:, 0])
    found = order[np.minimum(places, count - 1)]
    same = (listing.keys[found] == listing.parents).all(axis=1) & (listing.positions > 0)
    return np.where(same, found, -1)


def _levels(positions: npt.NDArray[np.uint32]) -> list[I64]:
    """Indices of the blocks of each position, ascending. As many as the longest chain has blocks."""
    order = np.argsort(positions, kind="stable")
    edges = np.flatnonzero(np.diff(positions[order])) + 1
    return [level for level in np.split(order, edges) if len(level)]
