# SPDX-License-Identifier: Apache-2.0
"""The directory of one run of a graph, and what earlier runs that were killed left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvcr.errors import ConfigError
from kvcr.graph.config import Kind
from kvcr.graph.models import cache_dir
from kvcr.graph.processes import kill_gently, processes_with_env, start_time
from kvcr.graph.site import SHM, RunPaths

STATE_FILE = "graph.json"
TARGETS_FILE = "targets.json"
"""For ``file_sd_configs`` of a Prometheus that is there already."""
RUN_DIR_VARIABLE = "KVCR_RUN_DIR"
"""In the environment of every process of a run: how its processes are recognised once it is dead."""

_OWNER = "owner.json"
_LATEST = "latest"
_SECRET_BYTES = 32


def new_run(graph_name: str, run_dir: Path | None = None) -> RunPaths:
    """Name a run; ``run_dir`` is ``<cache>/run/<graph>-<random>`` unless given. Creates nothing."""
    run_id = f"{graph_name}-{secrets.token_hex(3)}"
    return RunPaths(run_id, (run_dir or cache_dir() / "run" / run_id).absolute())


@contextmanager
def opened(paths: RunPaths) -> Iterator[None]:
    """Create the directories, the secret and the claim on the pools; remove all but the logs at the end.

    Raises ConfigError when the directory is used by a live run.
    """
    paths.logs.mkdir(parents=True, exist_ok=True)
    with (paths.run_dir / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run directory {paths.run_dir} is used by another kvcr serve") from None
        _write_secret(paths.secret)
        paths.pools.mkdir(mode=0o770)
        with _claimed(paths):
            _point_latest(paths)
            yield


@contextmanager
def _claimed(paths: RunPaths) -> Iterator[None]:
    """Say whose the pools are, by a lock that a launcher in another PID namespace sees too."""
    try:
        with (paths.pools / _OWNER).open("w") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX)
            pid = os.getpid()
            json.dump({"pid": pid, "start_time": start_time(pid), "run_dir": str(paths.run_dir)}, claim)
            claim.flush()
            yield
    finally:
        shutil.rmtree(paths.pools, ignore_errors=True)
        for name in ("etcd", "nats"):
            shutil.rmtree(paths.run_dir / name, ignore_errors=True)
        paths.secret.unlink(missing_ok=True)
        (paths.run_dir / TARGETS_FILE).unlink(missing_ok=True)


def write_state(paths: RunPaths, state: Mapping[str, Any]) -> None:
    """Replace ``graph.json`` and ``targets.json``, each in one step: readers see the old or the new one.

    Raises OSError, as on a full disk.
    """
    _replace(paths.run_dir / STATE_FILE, state)
    pages = [(Kind(found["component"]).role, found["metrics"]) for found in state["components"]]
    targets = [
        {"targets": [urlsplit(page).netloc], "labels": {"job": role}}
        for role, page in pages
        if page is not None
    ]
    _replace(paths.run_dir / TARGETS_FILE, targets)


def _replace(path: Path, content: Any) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as stream:
            json.dump(content, stream, indent=2)
            stream.write("\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sweep_dead_runs() -> list[str]:
    """End the processes and remove the pools of runs whose launcher was killed; says what it did."""
    swept: list[str] = []
    for owner_file in SHM.glob(f"kvcr-*/{_OWNER}"):
        # A claim that is held is an OSError too.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), owner_file.open() as claim:
            # Anybody may write there, and name the processes of others.
            if os.fstat(claim.fileno()).st_uid != os.getuid():
                continue
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = json.load(claim)
            if start_time(owner["pid"]) == owner["start_time"]:
                continue
            pids = processes_with_env(RUN_DIR_VARIABLE, owner["run_dir"])
            kill_gently(pids)
            shutil.rmtree(owner_file.parent)
            swept.append(
                f"cleaned up after a killed run: {len(pids)} processes, pools in {owner_file.parent}"
            )
    return swept


def _write_secret(path: Path) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_hex(_SECRET_BYTES) + "\n")


def _point_latest(paths: RunPaths) -> None:
    """``<cache>/run/latest`` is the newest run, wherever its directory, for people and scripts."""
    link = cache_dir() / "run" / _LATEST
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{_LATEST}-{os.getpid()}")
    fresh.symlink_to(paths.run_dir)
    fresh.replace(link)
