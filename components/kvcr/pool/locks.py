# SPDX-License-Identifier: Apache-2.0
"""Proof of life and of death: POSIX record locks the kernel drops when a process is gone.

The guard holds ``guard.lock`` for life. Every process that can write to ``data`` holds its own
``writers/<engine_id>.<rank>``, taken before it maps anything. These locks work across PID namespaces
and survive a restart of the guard.

POSIX drops all locks of a process on a file when it closes *any* descriptor of that file, and never
refuses a process its own lock. So this module remembers what this process holds, and never opens
such a file a second time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import threading
from pathlib import Path
from typing import Final

from kvcr.errors import ConfigError, PoolBusy

GUARD_LOCK = "guard.lock"
WRITERS = "writers"
FILE_MODE = 0o660
DIR_MODE = 0o2770
"""Group-shared and setgid: engine and guard may run under different users of one group."""

MAX_ENGINE_ID = 127
_ENGINE_ID = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:-]{{0,{MAX_ENGINE_ID - 1}}}")

# struct flock of 64-bit Linux: short type, short whence, off_t start, off_t len, pid_t pid.
_FLOCK = "hhqqi4x"

_held: Final[dict[tuple[int, int, int], Path]] = {}
_held_guard = threading.Lock()


def check_engine_id(engine_id: str) -> str:
    """``engine_id``, which names a file and an entry of a table. Raises ConfigError if it cannot."""
    if not _ENGINE_ID.fullmatch(engine_id):
        raise ConfigError(
            f"engine_id {engine_id!r} must be 1 to {MAX_ENGINE_ID} characters of A-Z a-z 0-9 _ . : - "
            "and not start with a punctuation mark"
        )
    return engine_id


def writer_path(pool_dir: Path, engine_id: str, rank: int) -> Path:
    """The lock file of one process of an engine."""
    return Path(pool_dir) / WRITERS / f"{check_engine_id(engine_id)}.{rank}"


class FileLock:
    """An exclusive POSIX record lock on a file, for as long as this process lives or until released."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._fd = -1
        self._identity: tuple[int, int, int] | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd >= 0

    def acquire(self) -> None:
        """Take the lock without waiting. Raises PoolBusy, naming the holder's pid where it is known."""
        with _held_guard:
            while not self._try_acquire():
                # The previous holder removed the file between our open and our lock: take the new file.
                continue

    def _try_acquire(self) -> bool:
        identity = _identity_of(self.path)
        if identity is not None and identity in _held:
            raise PoolBusy(f"{self.path} is held by this process (pid {os.getpid()}); close the first user")
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, FILE_MODE)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                pid = _holder_of(fd)
                raise PoolBusy(
                    f"{self.path} is held by {f'pid {pid}' if pid else 'a process of another PID namespace'}"
                    "; stop that process, or use another pool directory"
                ) from None
            identity = _identity_of(self.path)
            status = os.fstat(fd)
            if identity is None or identity[1:] != (status.st_dev, status.st_ino):
                os.close(fd)
                return False
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._identity = fd, identity
        _held[identity] = self.path
        return True

    def release(self, *, unlink: bool = False) -> None:
        """Give the lock back; ``unlink`` removes the file first. Does nothing when it is not held."""
        if self._fd < 0:
            return
        with _held_guard:
            if unlink:
                self.path.unlink(missing_ok=True)
            if self._identity is not None:
                _held.pop(self._identity, None)
            os.close(self._fd)
            self._fd, self._identity = -1, None


class WriterLock(FileLock):
    """Held by an engine process, from before it maps ``data`` writable until it has unmapped it."""

    def __init__(self, dir: Path, engine_id: str, rank: int) -> None:
        super().__init__(writer_path(dir, engine_id, rank))

    def acquire(self) -> None:
        """Take the lock, making ``writers/`` if need be. Raises PoolBusy when another process has it."""
        make_dir(self.path.parent)
        super().acquire()

    def release(self, *, unlink: bool = True) -> None:
        """Give the lock back and, as engine ids are not used twice, remove the file."""
        super().release(unlink=unlink)


def is_dead(path: Path) -> bool:
    """Whether nobody holds the lock on ``path``: its process is gone, or released it. Never waits.

    A file that does not exist counts as dead: a writer makes it before it can write.
    """
    with _held_guard:
        identity = _identity_of(Path(path))
        if identity is None:
            return True
        if identity in _held:
            return False
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            return _holder_of(fd) is None
        finally:
            os.close(fd)


def writers_of(pool_dir: Path) -> dict[str, list[Path]]:
    """Lock files by engine id, dead or alive."""
    found: dict[str, list[Path]] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted((Path(pool_dir) / WRITERS).iterdir()):
            found.setdefault(path.name.rpartition(".")[0], []).append(path)
    return found


def engine_is_dead(pool_dir: Path, engine_id: str) -> bool:
    """The proof of death of an engine: no process holds any of its writer locks."""
    return all(is_dead(path) for path in writers_of(pool_dir).get(engine_id, []))


def make_dir(path: Path) -> None:
    """A directory for the group, with its parents."""
    if path.is_dir():
        return
    path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):
        path.chmod(DIR_MODE)


def _identity_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return os.getpid(), status.st_dev, status.st_ino


def _holder_of(fd: int) -> int | None:
    """Pid of another process that holds the lock, 0 if it cannot be named here, None if nobody does."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(int(pid), 0)
