# SPDX-License-Identifier: Apache-2.0
"""What the engine calls the blocks of G1 that somebody names by key. Scheduler's thread only.

vLLM knows blocks by its own hashes, which nobody can make from a key. So keys and hashes of what requests
left in G1 are kept, 32 bytes for each block of G1, in two tables: the newer one is filled while the older is
read, and takes its place when it is full. A chain whose blocks are hit again is written into the newer one
whole, so both together have whatever G1, which forgets the least recently used, can still have.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcr.keys import KEY_BYTES
from kvcr.vllm.chain import RequestChain
from kvcr.vllm.g1 import positions_of

Words = npt.NDArray[np.uint64]


class SeenBlocks:
    """``blocks``: how many G1 has."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._used = 0
        self._newer = np.zeros((2, blocks), np.uint64)
        """keys (their first 8 bytes; a mistake would cost a recompute) and the engine's hashes"""
        self._older = self._newer[:, :0]

    def note(self, chain: RequestChain, hits: int) -> None:
        """A request ends. Its first ``hits`` blocks were in G1 before it."""
        # Blocks may have been in G1 that have no key: of an image, of other weights.
        first = min(hits, len(chain))
        if first and not (self._newer[0, : self._used] == _words(chain.blob(first - 1, first))).any():
            first = 0
        if self._used + len(chain) - first > self._blocks:
            self._older, self._newer = self._newer[:, : self._used], np.zeros_like(self._newer)
            self._used = first = 0
        stop = min(len(chain), first + self._blocks)
        rows = slice(self._used, self._used + stop - first)
        self._newer[0, rows] = _words(chain.blob(first, stop))
        self._newer[1, rows] = chain.engine_hashes(first, stop)
        self._used = rows.stop

    def hashes(self, keys: bytes) -> Words:
        """The engine's hashes of those of these blocks that are known, in no order."""
        wanted, tables = _words(keys), (self._newer[:, : self._used], self._older)
        return np.concatenate([table[1, positions_of(wanted, table[0])] for table in tables])

    def clear(self) -> None:
        self._used, self._older = 0, self._newer[:, :0]


def hashes_of_running(chain: RequestChain, keys: bytes) -> Words:
    """The same for a request that has not ended."""
    positions = positions_of(_words(keys), _words(chain.blob(0, len(chain))))
    return chain.engine_hashes(0, len(chain) if len(positions) else 0)[positions]


def _words(keys: bytes) -> Words:
    """The first 8 bytes of each key."""
    return np.frombuffer(keys, "<u8")[:: KEY_BYTES // 8].astype(np.uint64)
