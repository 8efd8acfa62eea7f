# SPDX-License-Identifier: Apache-2.0
"""Proof of life and death: a lock lives exactly as long as its process."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvcr.errors import ConfigError, PoolBusy
from kvcr.pool import FileLock, WriterLock, engine_is_dead, is_dead, writer_path, writers_of

HOLD = """
import sys
from pathlib import Path
from kvcr.pool import WriterLock
lock = WriterLock(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
lock.acquire()
print("held", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""


class Writer:
    """A process that holds a writer lock."""

    def __init__(self, dir: Path, engine_id: str, rank: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(dir), engine_id, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def release(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "released\n"

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=10)


def test_a_killed_writer_is_dead_and_a_stopped_one_is_not(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "engine-1", 0)
    path = writer_path(tmp_path, "engine-1", 0)
    try:
        assert not is_dead(path)
        writer.process.send_signal(signal.SIGSTOP)
        assert not is_dead(path)
    finally:
        writer.end()
    assert is_dead(path)


def test_an_engine_is_dead_when_all_its_ranks_are(tmp_path: Path) -> None:
    ranks = [Writer(tmp_path, "engine-1", rank) for rank in range(2)]
    try:
        assert sorted(writers_of(tmp_path)) == ["engine-1"]
        ranks[0].end()
        assert not engine_is_dead(tmp_path, "engine-1")
        assert engine_is_dead(tmp_path, "engine-2")
    finally:
        for writer in ranks:
            writer.end()
    assert engine_is_dead(tmp_path, "engine-1")
    assert len(writers_of(tmp_path)["engine-1"]) == 2


def test_a_clean_release_removes_the_file(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "engine-1", 0)
    try:
        writer.release()
        assert writers_of(tmp_path) == {}
        assert is_dead(writer_path(tmp_path, "engine-1", 0))
    finally:
        writer.end()


def test_a_held_lock_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "engine-1", 0)
    try:
        with pytest.raises(PoolBusy, match=f"held by pid {writer.process.pid}"):
            WriterLock(tmp_path, "engine-1", 0).acquire()
    finally:
        writer.end()
    lock = WriterLock(tmp_path, "engine-1", 0)
    lock.acquire()
    lock.release()


def test_asking_about_a_lock_of_this_process_does_not_drop_it(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path, "engine-1", 0)
    lock.acquire()
    assert not is_dead(lock.path)
    with pytest.raises(PoolBusy, match="held by this process"):
        WriterLock(tmp_path, "engine-1", 0).acquire()
    code = "import sys; from kvcr.pool import is_dead; print(is_dead(sys.argv[1]))"
    asked = subprocess.run(
        [sys.executable, "-c", code, str(lock.path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert asked.stdout == "False\n"
    assert lock.held
    lock.release()
    lock.release()
    assert not lock.held


def test_lock_files_are_shared_with_the_group(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path, "engine-1", 3)
    lock.acquire()
    assert stat.S_IMODE(lock.path.stat().st_mode) == 0o660
    assert stat.S_IMODE(lock.path.parent.stat().st_mode) == 0o2770
    lock.release()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_on_the_new_file(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    first.acquire()
    first.path.unlink()
    second.acquire()
    assert first.held
    assert second.held
    first.release()
    second.release()


def test_an_engine_id_may_not_leave_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_id '\.\./x' must be 1 to 127 characters"):
        WriterLock(tmp_path, "../x", 0)
