# SPDX-License-Identifier: Apache-2.0
"""Mapping a pool's files: shared, not into forked children, and readable whatever becomes of the file."""

from __future__ import annotations

import mmap
import weakref
from typing import IO

import numpy as np

try:
    from kvcr import _shield
except ImportError:
    _shield = None  # type: ignore[assignment]


class Mapping(mmap.mmap):
    """A part of an open file.

    What is lost under it later (the file is truncated, its memory fails) reads as zeros, which are no block.
    Without the extension, touching that ends the process with SIGBUS.
    """

    @classmethod
    def of(cls, file: IO[bytes], nbytes: int, *, writable: bool, offset: int = 0) -> Mapping:
        """Map ``nbytes`` from ``offset`` on, which the file must have. Raises OSError."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = cls(file.fileno(), nbytes, flags=mmap.MAP_SHARED, prot=access, offset=offset)
        mapping.madvise(mmap.MADV_DONTFORK)
        mapping._watch()
        return mapping

    def close(self) -> None:
        """Unmap. Raises BufferError while there is a view of it."""
        # First, as the address may be somebody else's a moment later.
        self._ended()
        try:
            super().close()
        except BufferError:
            self._watch()
            raise

    def _watch(self) -> None:
        address = int(np.frombuffer(self, np.uint8).__array_interface__["data"][0])
        if _shield is not None:
            _shield.shield(address, len(self))
        self._ended = weakref.finalize(self, _unwatch, address)
        self._ended.atexit = False


def _unwatch(address: int) -> None:
    if _shield is not None:
        _shield.unshield(address)
