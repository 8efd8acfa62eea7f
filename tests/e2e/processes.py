# SPDX-License-Identifier: Apache-2.0
"""Real processes for end-to-end tests: started in a session of their own, ended by pid, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")

# One thread each, or two engines on two cores wait for each other's OpenMP threads.
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}

# For engines on a machine that does ten other things: a busy minute should cost time, not a reuse.
PATIENCE = {"lease_wait_ms": 2000, "load_deadline_ms": 20_000, "local_estimate": False}


class Child:
    """One process and everything it starts."""

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.PIPE if name.startswith("guard") else errors,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT / "components"), **(environment or {})},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def tail(self, line_count: int = 40) -> str:
        """The last lines of its log, for a failure message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-line_count:])

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll ``ready``; raises AssertionError with the log when the process ends or the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, (
                f"{self.name} ended with {self.process.returncode}:\n{self.tail()}"
            )
            assert time.monotonic() < deadline_s, f"{self.name} not ready after {timeout_s} s:\n{self.tail()}"
            time.sleep(0.2)

    def members(self) -> list[int]:
        """Pids of the live processes of its session."""
        return session_members(self.pid)

    def stop(self, timeout_s: float = 20.0) -> None:
        """SIGTERM to the process; SIGKILL, by pid, to what is left of its session after ``timeout_s``."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        end_session(self.pid)
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def session_members(leader: int) -> list[int]:
    """Pids of the live processes of the session that ``leader`` made."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, parent, group, session.
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def end_session(leader: int, patience_s: float = 5.0) -> None:
    """SIGKILL, by pid, to what is left of a session after ``patience_s``."""
    deadline_s = time.monotonic() + patience_s
    while (left := session_members(leader)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running(child: Child) -> Iterator[Child]:
    """``child``, stopped when the block is left."""
    try:
        yield child
    finally:
        child.stop()


def start_guard(
    name: str, pool: Path, pool_bytes: int, logs: Path, environment: Mapping[str, str] | None = None
) -> tuple[Child, dict[str, Any]]:
    """A guard of our own and the line of JSON it prints when it is ready."""
    settings = {
        "name": name,
        "pool-dir": str(pool),
        "pool-bytes": str(pool_bytes),
        "control": "tcp://127.0.0.1:0",
    }
    # Or the scrubber may find a block that a test damaged before the pull that should.
    arguments = ["-m", "kvcr.guard", "--remove-pool-on-exit", "--scrub-bytes-per-s", "0"]
    for flag, value in settings.items():
        arguments += [f"--{flag}", value]
    child = Child(f"guard {name}", arguments, logs / f"guard-{name}.log", environment)
    assert child.process.stdout is not None
    line = child.process.stdout.readline()
    if not line:
        child.stop()
        raise AssertionError(f"guard {name} said nothing:\n{child.tail()}")
    ready: dict[str, Any] = json.loads(line)
    return child, ready


def answers(url: str) -> bool:
    """Whether a GET of ``url`` gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def post(url: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
    """POST JSON, return JSON; the words of an error answer are in the exception."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url} answered {error.code}: {error.read()[:2000]!r}") from error


def shared_memory_names() -> set[str]:
    """Names in /dev/shm."""
    return {entry.name for entry in SHM.iterdir()}


def leaked_shared_memory(before: set[str]) -> set[str]:
    """Names in /dev/shm that were not there ``before`` and whose files no live process has mapped.

    By inode: a POSIX semaphore is mapped under a temporary name before it gets its own. Pools (``kvcr-*``)
    are left out: other tests may run beside this one. Who made a pool looks for its own.
    """
    fresh: dict[str, int] = {}
    for name in shared_memory_names() - before:
        with contextlib.suppress(FileNotFoundError):
            if not name.startswith("kvcr-"):
                fresh[name] = (SHM / name).stat().st_ino
    mapped: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                if f" {SHM}/" in line:
                    mapped.add(int(line.split()[4]))
    return {name for name, inode in fresh.items() if inode not in mapped and (SHM / name).exists()}


def eventually(check: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll ``check`` until it holds; raises AssertionError naming ``what``."""
    deadline_s = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
