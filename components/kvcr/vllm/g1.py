# SPDX-License-Identifier: Apache-2.0
"""Forgetting blocks in G1, through the block pool that vLLM hands to its connector. Scheduler's thread only.

A block that loses its hash is never hit again. If requests still use it, it is freed when the last of them
ends, as any block is. vLLM tells Dynamo of it as of an eviction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import get_block_hash

_BITS = 16
_MASK = np.uint64((1 << _BITS) - 1)


def drop(block_pool: Any, drops: Sequence[npt.NDArray[np.uint64]]) -> list[int]:
    """Drop the cached blocks of these hashes (uint64, as KV events have them), one array a drop.

    Returns how many blocks each of them had. Looks once at every block of G1, as vLLM finds blocks by their
    full hash only: 0.2 us a block (``python -m bench.actions``).
    """
    hashes = [block.block_hash for block in block_pool.blocks]
    first = next((each for each in hashes if each is not None), None)
    if first is None or not any(len(each) for each in drops):
        return [0] * len(drops)
    # All of one width, so that rows are block ids; blocks without a hash are zeros.
    none, width = bytes(len(first)), len(get_block_hash(first))
    rows = np.frombuffer(b"".join([each or none for each in hashes]), np.uint8).reshape(-1, len(first))
    cached = np.flatnonzero(rows.any(axis=1))
    # Its last 8 bytes, big-endian: see RequestChain.engine_hashes. Behind them is the KV group.
    tails = np.ascontiguousarray(rows[cached, width - 8 : width]).view(">u8")[:, 0].astype(np.uint64)
    counts = []
    for wanted in drops:
        found = cached[positions_of(wanted, tails)]
        block_pool.evict_blocks(set(found.tolist()))
        counts.append(len(found))
    return counts


def positions_of(wanted: npt.NDArray[np.uint64], words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Where in ``words``, which are as good as random, any of the wanted ones are."""
    # A few bits sort out nearly all others: searching for each in full takes five times as long.
    marked = np.zeros(1 << _BITS, np.bool_)
    marked[wanted & _MASK] = True
    hits = np.flatnonzero(marked[words & _MASK])
    return hits[np.isin(words[hits], wanted)]


def drop_own(block_pool: Any, block_ids: Iterable[int]) -> None:
    """Drop those of a request's blocks that no other request uses. The request still holds them."""
    blocks = block_pool.blocks
    block_pool.evict_blocks({i for i in block_ids if blocks[i].ref_cnt == 1 and not blocks[i].is_null})


def first_among(block_hashes: Sequence[bytes], tails: frozenset[bytes]) -> int | None:
    """Position of the first block whose hash ends in one of ``tails`` (8 bytes each)."""
    if not tails:
        return None
    # A loop over blocks of live requests, at a drop only: 60 ns a block.
    return next((index for index, each in enumerate(block_hashes) if each[-8:] in tails), None)
