# SPDX-License-Identifier: Apache-2.0
"""The pool as an engine process maps it: directory read-only, and for workers its own data region."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from kvcr.errors import PoolError
from kvcr.layout import Layout
from kvcr.pool import DataRegion, PoolReader, WriterLock
from kvcr.protocol.engine import Welcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolMapping:
    """What one process of an engine maps of one pool. Reading it needs no live guard.

    ``token`` is the identity of the pool's files: grants and fills of one pool mean nothing in another,
    and a guard that starts afresh replaces the files.
    """

    token: int
    reader: PoolReader
    region: DataRegion | None
    lock: WriterLock | None


@dataclass(slots=True)
class Attachment:
    """What a worker's copy thread reads and writes: it changes on that thread only, when a guard comes."""

    mapping: PoolMapping | None = None
    epoch: int = 0


def pool_token(pool_dir: Path) -> int:
    """Identity of the pool's files, the same in every process of the host. Raises FileNotFoundError."""
    return os.stat(pool_dir / "meta").st_ino


def map_directory(welcome: Welcome, layout: Layout, previous: PoolMapping | None) -> PoolMapping:
    """The scheduler's mapping: the directory only. Keeps ``previous`` if the files are still the same."""
    pool_dir = Path(welcome.pool_dir)
    token = pool_token(pool_dir)
    if previous is not None and previous.token == token:
        return previous
    reader = PoolReader.open(pool_dir)
    reader.layout.require_same(layout, ours="the pool", theirs="this engine")
    return PoolMapping(token, reader, None, None)


def map_region(
    welcome: Welcome, layout: Layout, engine_id: str, rank: int, previous: PoolMapping | None
) -> PoolMapping:
    """A worker's mapping: takes the writer lock, then maps directory and its own region, writable.

    Keeps ``previous`` if the files are still the same. Raises PoolError when another process holds the
    lock, and LayoutMismatch.
    """
    pool_dir = Path(welcome.pool_dir)
    token = pool_token(pool_dir)
    if previous is not None and previous.token == token:
        return previous
    if previous is not None and previous.lock is not None:
        # What we may still write to the old files, nobody reads: their guard is gone with them.
        previous.lock.release(unlink=False)
    lock = WriterLock(pool_dir, engine_id, rank)
    lock.acquire()
    try:
        reader = PoolReader.open(pool_dir)
        reader.layout.require_same(layout, ours="the pool", theirs="this engine")
        # From here on our death can be disproved. If the epoch was raised before, we were taken for dead
        # and our grants are somebody else's.
        if reader.epoch != welcome.epoch:
            raise PoolError(
                f"the pool in {pool_dir} is in epoch {reader.epoch}, the guard said {welcome.epoch}; "
                "asking again"
            )
        region = DataRegion.open(pool_dir, reader, rank, writable=True)
    except BaseException:
        lock.release()
        raise
    if pool_token(pool_dir) != token:
        lock.release()
        raise PoolError(f"the pool in {pool_dir} was replaced while it was being mapped; trying again")
    return PoolMapping(token, reader, region, lock)
