# SPDX-License-Identifier: Apache-2.0
"""A guard for an engine that has none configured: found running, or started.

It survives the engine (own session, no inherited descriptors, a child of init) but not the container, and
leaves after :data:`LINGER_S` without an engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvcr.config import EngineConfig
from kvcr.errors import ConfigError, GuardUnavailable
from kvcr.guard.connection import connect_unix
from kvcr.guard.leftovers import SPAWN_SUFFIX

LINGER_S = 60.0
START_TIMEOUT_S = 30.0
LOG_NAME = "guard.log"

_DETACH = (
    "import os, sys; os.fork() and os._exit(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""A vLLM server that ends in a hurry kills all its descendants, so the guard must not be one."""


def pool_dir_of(config: EngineConfig) -> Path:
    """Directory of the pool of an engine's own guard; the same at every start of the engine."""
    if config.pool_dir:
        return Path(config.pool_dir).absolute()
    return Path(f"/dev/shm/kvcr-{os.getuid()}") / _guard_name(config)


def ensure_guard(config: EngineConfig) -> str:
    """Path of the Unix socket of a guard that answers; started first, if need be.

    Called by every process of the engine at once: a file lock lets one of them start it. Blocks for as long
    as the guard takes to start, at most :data:`START_TIMEOUT_S`. Raises GuardUnavailable, with the end of its
    log, and ConfigError on a name that cannot be one.
    """
    if config.socket:
        if not _answers(config.socket):
            raise GuardUnavailable(
                f"no guard answers on {config.socket!r}; start one, or leave 'socket' empty"
            )
        return config.socket
    directory = pool_dir_of(config)
    directory.mkdir(parents=True, exist_ok=True)
    socket_path = str(directory / "guard.sock")
    # Beside the directory, not in it: the guard removes that when it leaves.
    with open(directory.with_name(directory.name + SPAWN_SUFFIX), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _answers(socket_path):
            directory.mkdir(parents=True, exist_ok=True)
            _start(config, directory, socket_path)
    return socket_path


def _start(config: EngineConfig, directory: Path, socket_path: str) -> None:
    log_path = directory / LOG_NAME
    command = [
        sys.executable, "-ISc", _DETACH, "-m", "kvcr.guard",
        "--name", _guard_name(config),
        "--pool-dir", str(directory),
        "--pool-bytes", str(config.pool_bytes),
        "--socket", socket_path,
        "--namespace", config.namespace,
        "--transport", config.transport,
        "--on-mismatch", config.on_mismatch,
        "--linger-s", str(LINGER_S),
    ]  # fmt: skip
    with open(log_path, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            cwd="/",
            env=_environment(),
        )
    ready = announced(process, START_TIMEOUT_S)
    if not ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if not ready:
        tail = log_path.read_text(errors="replace")[-2000:] if log_path.exists() else ""
        raise GuardUnavailable(f"the guard of {directory} did not start; its log ends:\n{tail}")


def announced(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    """The line of JSON by which a guard says that it is ready; empty when it ends or is late.

    On its stdout, a pipe that is closed afterwards.
    """
    assert process.stdout is not None
    with process.stdout, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        deadline_s = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline_s - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                break
            line += chunk
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and said.get("ready") is True else {}


def _environment() -> dict[str, str]:
    """Ours, such that the guard imports the same kvcr from whatever directory it runs in."""
    import kvcr.errors

    root = str(Path(kvcr.errors.__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCR_GUARD_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _guard_name(config: EngineConfig) -> str:
    name = config.name
    if not name:
        name = Path(config.pool_dir).name if config.pool_dir else "default"
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("_.-") or "default"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", name):
        raise ConfigError(f"name is {name!r}; it must be 1 to 128 letters, digits, '_', '-' or '.'")
    return name


def _answers(path: str) -> bool:
    try:
        connect_unix(path).close()
    except OSError:
        return False
    return True
