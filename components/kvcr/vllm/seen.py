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
        first = hits if hits and (self._newer[0, : self._used] == _words(chain, hits - 1, hits)).any() else 0
        if self._used + len(chain) - first > self._blocks:
            self._older, self._newer = self._newer[:, : self._used], np.zeros_like(self._newer)
            self._used = first = 0
        stop = min(len(chain), first + self._blocks)
        rows = slice(self._used, self._used + stop - first)
        self._newer[0, rows] = _words(chain, first, stop)
        self._newer[1, rows] = chain.engine_hashes(first, stop)
        self._used = rows.stop

    def hashes(self, keys: bytes) -> Words:
        """The engine's hashes of those of these blocks that are known, in no order."""
        wanted = np.frombuffer(keys, "<u8")[::2]
        newer = self._newer[:, : self._used]
        found = [table[1, np.isin(table[0], wanted)] for table in (newer, self._older)]
        return np.concatenate(found)

    def clear(self) -> None:
        self._used, self._older = 0, self._newer[:, :0]


def hashes_of_running(chain: RequestChain, keys: bytes) -> Words:
    """The same for a request that has not ended."""
    positions = np.flatnonzero(np.isin(_words(chain, 0, len(chain)), np.frombuffer(keys, "<u8")[::2]))
    return chain.engine_hashes(0, len(chain) if len(positions) else 0)[positions]


def _words(chain: RequestChain, first: int, stop: int) -> Words:
    return np.frombuffer(chain.blob(first, stop), "<u8")[:: KEY_BYTES // 8].astype(np.uint64)
