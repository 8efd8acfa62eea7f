# SPDX-License-Identifier: Apache-2.0
"""Making a pool's files: space is reserved before anything relies on it, and files appear whole."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from kvcr.errors import PoolTooSmall
from kvcr.layout import Layout
from kvcr.pool import pages
from kvcr.pool.locks import FILE_MODE
from kvcr.pool.mapping import Mapping
from kvcr.pool.meta import DATA, MAX_SLOTS, META, Geometry, superblock_page

log = logging.getLogger(__name__)

_MORE_ROOM = "(docker --shm-size, or sizeLimit of a Kubernetes emptyDir with medium Memory)"


def plan_geometry(layout: Layout, pool_bytes: int) -> Geometry:
    """As many slots as fit ``pool_bytes`` of data; the directory, about 130 bytes a slot, comes on top.

    Raises PoolTooSmall when that is none.
    """
    slot_bytes = layout.ranks * layout.slot_part_bytes
    slots = min(pool_bytes // slot_bytes, MAX_SLOTS)
    if slots < 1:
        raise PoolTooSmall(
            f"a pool of {pool_bytes} bytes holds no block of this layout: one needs {slot_bytes} bytes "
            f"({layout.ranks} ranks of {layout.slot_part_bytes}); raise --pool-bytes"
        )
    return Geometry.plan(layout, slots)


def create_files(dir: Path, geometry: Geometry, *, epoch: int, incarnation: int, preallocate: bool) -> None:
    """Put a new, empty pool in ``dir``, replacing the files of an older one.

    The caller holds the guard's lock. Processes that still map the older files keep them, unchanged.
    ``meta`` is removed first and appears last: whoever finds it finds a whole pool.
    Raises PoolTooSmall, ConfigError.
    """
    data, meta = dir / DATA, dir / META
    page = superblock_page(geometry.body, epoch=epoch, incarnation=incarnation)
    needed = geometry.meta_bytes + (geometry.data_bytes if preallocate else 0)
    _check_space(dir, needed, reusable=_allocated(data) + _allocated(meta), geometry=geometry)
    meta.unlink(missing_ok=True)
    data.unlink(missing_ok=True)
    temporary = [dir / f"{DATA}.new", dir / f"{META}.new"]
    try:
        _write(temporary[0], geometry.data_bytes, b"", preallocate, dir, geometry)
        _write(temporary[1], geometry.meta_bytes, page, True, dir, geometry)
        temporary[0].rename(data)
        temporary[1].rename(meta)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def remove_files(dir: Path) -> None:
    """Remove a pool's files; ``meta`` first, so that nobody finds half a pool."""
    for name in (META, DATA):
        (dir / name).unlink(missing_ok=True)


def require_room(dir: Path, pool_bytes: int) -> None:
    """Raise PoolTooSmall if the mount of ``dir`` has no room for a new pool; for a guard that starts.

    The directory of the pool, about 130 bytes a slot, comes on top when it is made.
    """
    available = _available(dir) + _allocated(dir / DATA) + _allocated(dir / META)
    if available < pool_bytes:
        raise PoolTooSmall(
            f"{dir} needs {pool_bytes} bytes for the pool, {available} are available; give the mount more "
            f"room {_MORE_ROOM}, or lower --pool-bytes below {available}"
        )


def allocate(fd: int, nbytes: int) -> int:
    """Reserve all memory of a new file; returns how much of it is in huge pages. Raises OSError."""
    os.ftruncate(fd, nbytes)
    with (
        open(fd, "r+b", closefd=False) as file,
        contextlib.closing(Mapping.of(file, nbytes, writable=True)) as mapping,
    ):
        huge = pages.make_huge(fd, mapping.address, nbytes)
    os.posix_fallocate(fd, 0, nbytes)
    return huge


def _write(path: Path, nbytes: int, head: bytes, preallocate: bool, dir: Path, geometry: Geometry) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        os.fchmod(fd, FILE_MODE)
        if preallocate:
            huge = allocate(fd, nbytes)
            log.info("%s: %d of %d MiB of %s in huge pages", dir, huge >> 20, nbytes >> 20, path.stem)
        else:
            os.ftruncate(fd, nbytes)
        os.pwrite(fd, head, 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
            raise
        raise _too_small(dir, nbytes, _available(dir), geometry) from error
    finally:
        os.close(fd)


def _check_space(dir: Path, needed: int, *, reusable: int, geometry: Geometry) -> None:
    # Asked first, because a fallocate that fails half-way has taken the memory from others meanwhile.
    available = _available(dir) + reusable
    if available < needed:
        raise _too_small(dir, needed, available, geometry)


def _too_small(dir: Path, needed: int, available: int, geometry: Geometry) -> PoolTooSmall:
    return PoolTooSmall(
        f"{dir} needs {needed} bytes for {geometry.slots} slots of "
        f"{geometry.ranks * geometry.part_stride} bytes, {available} are available; give the mount more room "
        f"{_MORE_ROOM}, or lower --pool-bytes below {available}"
    )


def _available(dir: Path) -> int:
    mount = os.statvfs(dir)
    return mount.f_bavail * mount.f_frsize


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
