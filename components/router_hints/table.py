# SPDX-License-Identifier: Apache-2.0
"""Block key to set of holders, one bit a holder: the store of the location index.

:class:`BlockTable` is the native table, or without a compiler the same on a dict. Keys come and go as blobs
of 16 bytes each. Bounded by ``max_blocks``: beyond it an entry that nobody looked up lately is evicted for
each new one, and counted for each of its holders; a missing entry costs a recompute, not a wrong answer. What
becomes empty is given back to the system. Not thread-safe.

25 bytes a block for up to 64 holders, 8 more for each further 64, and 16 to 32 for its place in the index.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvcr.keys import KEY_BYTES

MOST_BLOCKS = 2**31

__all__ = ["BlockTable", "DictTable", "fold"]


def fold(keys: bytes) -> int:
    """XOR of the first word of every key: the order-free digest a guard sends with its heartbeat."""
    words = np.frombuffer(_checked(keys), dtype="<u8").reshape(-1, 2)
    return int(np.bitwise_xor.reduce(words[:, 0], initial=np.uint64(0)))


def _checked(keys: bytes) -> bytes:
    if len(keys) % KEY_BYTES:
        raise ValueError(f"a blob of keys has {KEY_BYTES} bytes a key, got {len(keys)} bytes")
    return keys


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(_checked(keys)), KEY_BYTES)]


class DictTable:
    """The table in Python: about a tenth as fast, and four times the memory."""

    def __init__(self, max_blocks: int) -> None:
        if not 1 <= max_blocks <= MOST_BLOCKS:
            raise ValueError(f"max_blocks must be at least 1 and at most 2^31, got {max_blocks}")
        self._max = max_blocks
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        """bit mask by key, least recently used first"""
        self._counts: dict[int, int] = {}
        self._digests: dict[int, int] = {}
        self._evicted: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks with at least one holder."""
        return len(self._holders)

    @property
    def nbytes(self) -> int:
        """Memory in use, estimated."""
        return 210 * len(self._holders)

    def reserve_bit(self, bit: int) -> None:
        """Make room for holder ``bit``."""

    def add(self, keys: bytes, bit: int) -> int:
        """Give ``bit`` these blocks; returns how many it did not have before."""
        added = 0
        for key in _split(keys):
            mask = self._holders.get(key, 0)
            if mask >> bit & 1:
                continue
            if not mask and len(self._holders) >= self._max:
                self._evict()
            self._holders[key] = mask | 1 << bit
            self._count(bit, key, 1)
            added += 1
        return added

    def remove(self, keys: bytes, bit: int) -> int:
        """Take these blocks from ``bit``; returns how many it had."""
        removed = 0
        for key in _split(keys):
            mask = self._holders.get(key, 0)
            if not mask >> bit & 1:
                continue
            if mask == 1 << bit:
                del self._holders[key]
            else:
                self._holders[key] = mask & ~(1 << bit)
            self._count(bit, key, -1)
            removed += 1
        return removed

    def clear(self, bit: int) -> None:
        """Take every block from ``bit``."""
        self.remove(self.held_by(bit), bit)
        self._evicted.pop(bit, None)

    def held_by(self, bit: int) -> bytes:
        """Every key of ``bit``, in no order."""
        return b"".join(key for key, mask in self._holders.items() if mask >> bit & 1)

    def lookup(self, keys: bytes, names: list[str]) -> tuple[tuple[str, ...], bytearray]:
        """Names of holders that have any of the keys, and for each a row: 1 where it has the key, else 0.

        ``names`` are those of all holders, by bit. Raises ValueError when it is too short.
        """
        split = _split(keys)
        masks = [self._holders.get(key, 0) for key in split]
        if len(self._holders) * 8 > self._max * 7:
            for key, mask in zip(split, masks, strict=True):
                if mask:
                    self._holders.move_to_end(key)
        present = 0
        for mask in masks:
            present |= mask
        bits = [bit for bit in range(present.bit_length()) if present >> bit & 1]
        if bits and bits[-1] >= len(names):
            raise ValueError(f"holder bit {bits[-1]} has no name")
        rows = bytearray(mask >> bit & 1 for bit in bits for mask in masks)
        return tuple(names[bit] for bit in bits), rows

    def count(self, bit: int) -> int:
        """Blocks of ``bit``."""
        return self._counts.get(bit, 0)

    def digest(self, bit: int) -> int:
        """:func:`fold` of the keys of ``bit``."""
        return self._digests.get(bit, 0)

    def evicted(self, bit: int) -> int:
        """Blocks of ``bit`` that were evicted since it was cleared."""
        return self._evicted.get(bit, 0)

    def _evict(self) -> None:
        key, mask = self._holders.popitem(last=False)
        for bit in range(mask.bit_length()):
            if mask >> bit & 1:
                self._count(bit, key, -1)
                self._evicted[bit] = self._evicted.get(bit, 0) + 1

    def _count(self, bit: int, key: bytes, change: int) -> None:
        self._counts[bit] = self._counts.get(bit, 0) + change
        self._digests[bit] = self._digests.get(bit, 0) ^ int.from_bytes(key[:8], "little")


try:
    from router_hints._native import Table as BlockTable
except ImportError:  # built without a compiler
    BlockTable = DictTable  # type: ignore[misc, assignment]
