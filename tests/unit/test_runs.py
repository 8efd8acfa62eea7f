# SPDX-License-Identifier: Apache-2.0
"""What ``kvcr serve`` cleans up after others: after launchers that are dead, and of this user alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcr.graph import runs, site
from kvcr.graph.site import RunPaths

GONE = {"pid": 2**22 + 1, "start_time": 1}
"""No kernel has such a pid."""


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(runs, "SHM", directory)
    monkeypatch.setattr(site, "SHM", directory)
    return directory


@pytest.fixture
def member(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run in ``tmp_path / "run"``."""
    environment = {**os.environ, runs.RUN_DIR_VARIABLE: str(tmp_path / "run")}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        yield process
        process.kill()


def test_a_run_whose_launcher_was_killed_is_cleaned_up(
    shm: Path, tmp_path: Path, member: subprocess.Popen[bytes]
) -> None:
    pools = shm / "kvcr-x"
    pools.mkdir()
    (pools / "owner.json").write_text(json.dumps({**GONE, "run_dir": str(tmp_path / "run")}))
    (line,) = runs.sweep_dead_runs()
    assert "1 processes" in line
    assert not pools.exists()
    assert member.wait(10) == -9


def test_a_live_run_of_another_pid_namespace_is_left_alone(
    shm: Path, tmp_path: Path, member: subprocess.Popen[bytes]
) -> None:
    paths = RunPaths("x", tmp_path / "run")
    with runs.opened(paths):
        owner = paths.pools / "owner.json"
        # As it looks from a container beside, which shares /dev/shm and no process ids.
        owner.write_text(json.dumps({**json.loads(owner.read_text()), **GONE}))
        assert runs.sweep_dead_runs() == []
        assert paths.pools.exists()
        assert member.poll() is None
    assert not paths.pools.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of somebody else")
def test_another_user_cannot_have_our_processes_ended(
    shm: Path, tmp_path: Path, member: subprocess.Popen[bytes]
) -> None:
    pools = shm / "kvcr-x"
    pools.mkdir()
    owner = pools / "owner.json"
    owner.write_text(json.dumps({**GONE, "run_dir": str(tmp_path / "run")}))
    os.chown(owner, 12345, 12345)
    assert runs.sweep_dead_runs() == []
    assert pools.exists()
    assert member.poll() is None
