# SPDX-License-Identifier: Apache-2.0
"""Mapping a pool's files: shared, not into forked children, and readable whatever becomes of the file."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import IO

import numpy as np

from kvcr.pool import pages

try:
    from kvcr import _shield
except ImportError:
    _shield = None  # type: ignore[assignment]


_MAP_NORESERVE = 0x4000
"""asm-generic/mman.h; Python 3.11 does not name it."""


class Mapping(mmap.mmap):
    """A part of an open file.

    What is lost under it later (the file is truncated, its memory fails) reads as zeros, which are no block.
    Without the extension, touching that ends the process with SIGBUS. Huge pages are mapped as such.
    """

    start: int
    """Where the part begins in this buffer, which is larger than the part where that helps huge pages."""

    @classmethod
    def of(cls, file: IO[bytes], nbytes: int, *, writable: bool, offset: int = 0) -> Mapping:
        """Map ``nbytes`` from ``offset`` on, which the file must have. Raises OSError."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        huge = pages.huge_page_bytes()
        mapping = None
        if nbytes >= huge > 0:
            # Address and offset must be alike modulo the page, and the kernel chooses an address as it likes.
            # So the part is put over a mapping of nothing, for which vm.overcommit_memory=2 may have no room.
            nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            with contextlib.suppress(OSError):
                mapping = cls(-1, nbytes + huge, flags=nothing, prot=access)
        if mapping is None:
            mapping = cls(file.fileno(), nbytes, flags=mmap.MAP_SHARED, prot=access, offset=offset)
            mapping.start = 0
        else:
            address = mapping._address()
            mapping.start = (offset - address) % huge
            pages.map_over(address + mapping.start, nbytes, access, file.fileno(), offset)
        mapping.madvise(mmap.MADV_DONTFORK)
        mapping._watch()
        return mapping

    @property
    def address(self) -> int:
        """Of the part."""
        return self._address() + self.start

    def close(self) -> None:
        """Unmap. Raises BufferError while there is a view of it."""
        # First, as the address may be somebody else's a moment later.
        self._ended()
        try:
            super().close()
        except BufferError:
            self._watch()
            raise

    def _address(self) -> int:
        return int(np.frombuffer(self, np.uint8).__array_interface__["data"][0])

    def _watch(self) -> None:
        address = self._address()
        if _shield is not None:
            _shield.shield(address, len(self))
        self._ended = weakref.finalize(self, _unwatch, address)
        self._ended.atexit = False


def _unwatch(address: int) -> None:
    if _shield is not None:
        _shield.unshield(address)
