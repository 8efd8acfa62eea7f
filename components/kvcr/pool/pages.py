# SPDX-License-Identifier: Apache-2.0
"""Pages below a pool's files: huge ones where the kernel has them, and page tables filled ahead.

With 4 KiB pages, each process that maps a pool has 2 MiB of page table for each GiB of it, which the kernel
takes apart before it closes the sockets of one that was killed; with 2 MiB pages it has none of that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MOST = 32 << 20
"""Larger ones (512 MiB on some ARM kernels) would be found for nobody."""

# linux/mman.h, as of x86-64 and AArch64; Python 3.11 does not name them. Populating fills the page table many
# pages at a time: a first copy that faults page by page takes twice as long.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_AT_ONCE = 64 << 20
"""Bytes of one call, each of which waits for all processors once; a multiple of the largest huge page."""

_PASSING = (0, errno.ENOMEM, errno.EAGAIN, errno.EBUSY)
"""What says nothing about the next call."""

_MISSES = 8
"""Calls that found too few huge pages, after which none is looked for: each takes some milliseconds."""

# mmap.madvise keeps the GIL, for minutes where a region has hundreds of gigabytes.
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mmap = _libc.mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_mmap.restype = ctypes.c_void_p


def huge_page_bytes() -> int:
    """Of the kernel's transparent huge pages; 0 where it has none."""
    try:
        size = int(_SIZE.read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _MOST else 0


def map_over(address: int, nbytes: int, prot: int, fd: int, offset: int) -> None:
    """Map a part of a file, shared, in place of what is mapped at ``address``. Raises OSError."""
    if _mmap(address, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def make_huge(fd: int, address: int, nbytes: int) -> int:
    """Give a new file, which is mapped whole at ``address``, huge pages, as many as there are.

    Returns how many bytes have them. Works on any tmpfs, whatever its ``huge`` option, from Linux 6.1 on.
    Raises OSError when the mount is full.
    """
    huge = huge_page_bytes()
    if not 0 < huge <= nbytes:
        return 0
    got = misses = 0
    for begin in range(0, nbytes // huge * huge, _AT_ONCE):
        step = min(_AT_ONCE, nbytes // huge * huge - begin)
        for offset in range(begin, begin + step, huge):
            # Of nothing but a hole the kernel makes no huge page.
            os.pwrite(fd, b"\0", offset)
        error = _collapse(address + begin, step)
        if error:
            misses += 1
        else:
            got += step
        if error not in _PASSING or misses == _MISSES:
            break
    return got


def populate(address: int, nbytes: int, *, writable: bool) -> bool:
    """Fill the page table of a mapping that starts at ``address``; False where the kernel cannot."""
    return not _advise(address, nbytes, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)


def huge_mapped_bytes(address: int) -> int:
    """How much of the mapping that starts at ``address`` is in huge pages. Walks all of its pages."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.partition(" ")[0]
            if not first.endswith(":"):
                inside = int(first.partition("-")[0], 16) == address
            elif inside and first == "ShmemPmdMapped:":
                return int(line.split()[1]) << 10
    return 0


def _collapse(address: int, nbytes: int) -> int:
    """0 or an errno. Tried twice: the first try wakes the kernel's compaction where memory is in pieces."""
    return _advise(address, nbytes, _MADV_COLLAPSE) and _advise(address, nbytes, _MADV_COLLAPSE)


def _advise(address: int, nbytes: int, advice: int) -> int:
    return ctypes.get_errno() if _madvise(address, nbytes, advice) else 0
