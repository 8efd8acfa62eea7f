# SPDX-License-Identifier: Apache-2.0
"""What dead guards and engines left behind: found when a guard starts, and taken only from the dead.

In a guard's own directory, with its lock held, everything but a whole pool is rubbish. Beside it may be
directories of guards that engines started for themselves: were such a guard killed, and nobody came for its
pool again, its memory would be lost until the next boot. A successor may come at any moment, so those are
only taken after they were seen dead for as long as a guard lingers.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvcr.errors import PoolBusy
from kvcr.pool import DATA, META, FileLock, is_dead, writers_of
from kvcr.pool.locks import GUARD_LOCK

log = logging.getLogger(__name__)

SPAWN_SUFFIX = ".spawn"
"""Beside the directory of a guard that an engine started: the lock under which it is started."""

Identity = tuple[int, int]


@dataclass(frozen=True)
class Abandoned:
    """A directory whose guard and engines are dead."""

    directory: Path
    identity: Identity | None
    """of its lock file: another one means that somebody came"""
    byte_count: int


def clean_own(directory: Path) -> int:
    """Remove half-made pools from our own directory; returns the bytes freed. The caller holds its lock."""
    rubbish = [directory / f"{DATA}.new", directory / f"{META}.new"]
    if not (directory / META).exists():
        # The guard before ended between making or removing the two.
        rubbish.append(directory / DATA)
    freed = 0
    for path in rubbish:
        with contextlib.suppress(FileNotFoundError):
            freed += path.stat().st_blocks * 512
            path.unlink()
    if freed:
        log.info("removed %d bytes of a pool in %s that was never whole", freed, directory)
    return freed


def abandoned(parent: Path, own: Path) -> list[Abandoned]:
    """Directories in ``parent``, but for ``own``, of guards that engines started and that are dead."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for spawned in sorted(parent.glob(f"*{SPAWN_SUFFIX}")):
            directory = spawned.with_name(spawned.name.removesuffix(SPAWN_SUFFIX))
            if directory != own and directory.is_dir() and _all_dead(directory):
                found.append(Abandoned(directory, _identity(directory), _allocated(directory)))
    return found


def reclaim(found: list[Abandoned]) -> None:
    """Remove those that nobody came for since they were found. Never waits."""
    for one in found:
        if _remove(one):
            log.warning(
                "removed %s, %d bytes: its guard and its engines are dead, and nobody came for its pool",
                one.directory,
                one.byte_count,
            )


def _remove(one: Abandoned) -> bool:
    spawned = one.directory.with_name(one.directory.name + SPAWN_SUFFIX)
    lock = FileLock(one.directory / GUARD_LOCK)
    with contextlib.ExitStack() as held:
        try:
            # An engine that starts a guard there holds this while it does.
            starting = held.enter_context(open(spawned))
            fcntl.flock(starting, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _identity(one.directory) != one.identity or not _all_dead(one.directory):
                return False
            # A guard that starts there takes this first of all.
            lock.acquire()
        except (OSError, PoolBusy):
            return False
        held.callback(lock.release)
        if not all(is_dead(path) for paths in writers_of(one.directory).values() for path in paths):
            return False
        shutil.rmtree(one.directory, ignore_errors=True)
    return True


def _all_dead(directory: Path) -> bool:
    # A file that a guard never made is of no dead one, either.
    if not (directory / GUARD_LOCK).exists() or not is_dead(directory / GUARD_LOCK):
        return False
    return all(is_dead(path) for paths in writers_of(directory).values() for path in paths)


def _identity(directory: Path) -> Identity | None:
    try:
        status = os.stat(directory / GUARD_LOCK)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _allocated(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total
