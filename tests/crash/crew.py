# SPDX-License-Identifier: Apache-2.0
"""Real guards and engine-like clients as processes that start in no time and can be killed at any moment.

They are forked from a process that has imported everything (:mod:`multiprocessing`'s fork server), as a test
that kills fifty of them cannot wait a second for each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcr.api import BlockStatus, EngineConfig, HostBlockMemory, Kvcr, Source
from kvcr.guard import authority
from kvcr.guard.__main__ import main as guard_main

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from engine_client import LAYOUT, chain, content
from waiting import PATIENCE_S

MEMORY_BLOCKS = 64
OK = BlockStatus.OK
PRELOADED = (authority,)
"""What a guard's main imports when it runs: here before the fork."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


class Hung(AssertionError):
    """A process that runs did not answer: a request hangs."""


class Crew:
    """Starts guards and engines, and ends what is left of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.members: list[Guard | Engine] = []

    def guard(self, name: str, *flags: str, slots: int = 512) -> Guard:
        guard = Guard(self.directory, name, flags, slots)
        self.members.append(guard)
        return guard

    def engine(self, guard: Guard, *, standing: int = 32) -> Engine:
        """An engine that connects to ``guard``, in a process of its own. Does not wait for it."""
        engine = Engine(str(guard.pool_dir / "guard.sock"), standing)
        self.members.append(engine)
        return engine

    def close(self) -> None:
        for member in self.members:
            member.kill()
        for member in self.members:
            member.process.join(PATIENCE_S)


class _Member:
    process: Any

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(PATIENCE_S)


class Guard(_Member):
    """``python -m kvcr.guard``, but for the start of the interpreter."""

    def __init__(self, directory: Path, name: str, flags: tuple[str, ...], slots: int) -> None:
        self.pool_dir = directory / name
        self._line = b""
        self._ready: dict[str, Any] = {}
        self._reader, writer = _processes.Pipe(duplex=False)
        arguments = [
            "--name", name, "--pool-dir", str(self.pool_dir), "--pool-bytes",
            str(slots * LAYOUT.slot_part_bytes), *flags,
        ]  # fmt: skip
        log = str(directory / f"{name}.log")
        self.process = _processes.Process(target=_run_guard, args=(arguments, log, writer), daemon=True)
        self.process.start()
        writer.close()

    @property
    def ready(self) -> dict[str, Any]:
        """What it printed when it was ready; waits for it."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._ready:
            if not self._reader.poll(max(0.0, deadline_s - time.monotonic())):
                raise Hung(f"guard {self.pool_dir} is not ready after {PATIENCE_S} s")
            chunk = os.read(self._reader.fileno(), 65536)
            if not chunk:
                log = self.pool_dir.with_suffix(".log").read_text()
                raise RuntimeError(f"guard {self.pool_dir} ended: {log[-2000:]}")
            self._line += chunk
            if self._line.endswith(b"\n"):
                self._ready = json.loads(self._line)
        return self._ready

    @property
    def endpoint(self) -> str:
        return str(self.ready["control"])

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.ready["metrics"], timeout=PATIENCE_S) as response:
            text = response.read().decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    @property
    def state(self) -> str:
        found = [
            name.partition('"')[2].rstrip('"}')
            for name, value in self.metrics().items()
            if name.startswith("kvcr_guard_state{") and value
        ]
        return found[0]

    def slots(self, state: str) -> int:
        return int(self.metrics()[f'kvcr_pool_slots{{state="{state}"}}'])

    def cpu_s(self) -> float:
        """User and system time used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self, what: str, true: Any, within_s: float = PATIENCE_S) -> float:
        """Until ``true(self)``; seconds it took. Raises AssertionError after ``within_s``."""
        started_s = time.monotonic()
        while not true(self):
            waited_s = time.monotonic() - started_s
            assert waited_s < within_s, f"guard {self.pool_dir.name}: not {what} after {within_s} s"
            time.sleep(0.005)
        return time.monotonic() - started_s


class Engine(_Member):
    """A toy engine of one rank on :mod:`kvcr.api`; blocks hold what their keys say."""

    def __init__(self, socket: str, standing: int) -> None:
        self._conn, theirs = _processes.Pipe()
        self.process = _processes.Process(target=_run_engine, args=(socket, standing, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, *operation: Any) -> None:
        """Start an operation of :func:`_operate`."""
        with contextlib.suppress(OSError):
            self._conn.send(operation)

    def result(self, within_s: float = PATIENCE_S) -> Any:
        """What the oldest operation gave, or None if the process died over it. Raises Hung."""
        try:
            if not self._conn.poll(within_s):
                # Where it hangs, on stderr.
                self.signal(signal.SIGUSR1)
                time.sleep(0.5)
                raise Hung(f"engine {self.pid} did not answer within {within_s} s")
            return self._conn.recv()
        except (EOFError, OSError):
            return None

    def ask(self, *operation: Any) -> Any:
        self.start(*operation)
        return self.result()


@pytest.fixture
def crew(shm_dir: Path) -> Iterator[Crew]:
    crew = Crew(shm_dir)
    yield crew
    crew.close()


@pytest.fixture(scope="session", autouse=True)
def no_fork_server_is_left(run_id: str) -> Iterator[None]:
    yield
    # There is no public way to end these two before this process ends, and they are looked for.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


# --- in the processes ------------------------------------------------------------------------------


def _run_guard(arguments: list[str], log: str, ready: Connection) -> None:
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(ready.fileno(), 1)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os._exit(guard_main(arguments))


def _run_engine(socket: str, standing: int, conn: Connection) -> None:
    faulthandler.register(signal.SIGUSR1)
    memory = np.zeros((MEMORY_BLOCKS, LAYOUT.part_bytes), np.uint8)
    config = EngineConfig(socket=socket, namespace="test")
    kv = Kvcr.open(config, LAYOUT, HostBlockMemory([memory]), standing_blocks=standing, wait_s=0.0)
    while True:
        kv.poll()
        if conn.poll(0.005):
            try:
                conn.send(_operate(kv, memory, *conn.recv()))
            except EOFError:
                os._exit(0)


def _operate(kv: Kvcr, memory: np.ndarray, operation: str, *arguments: Any) -> Any:
    if operation == "connected":
        return kv.connected
    if operation == "held":
        return kv._scheduler.grants_available
    if operation == "fork":
        # A child that outlives its parent and keeps its sockets open.
        if pid := os.fork():
            return pid
        time.sleep(arguments[0])
        os._exit(0)
    salt, count = arguments[:2]
    root, keys = chain(count, salt)
    if operation == "deposit":
        for row, key in enumerate(keys):
            memory[row] = content(key, LAYOUT.part_bytes)
        return kv.deposit(keys, range(count), root=root, wait_s=3.0).tolist()
    assert operation == "read"
    memory[:count] = 0xAA
    if arguments[2]:
        sources = [Source(endpoint, 0, count) for endpoint in arguments[2]]
        kv.fetch(salt, keys, parent=root, sources=sources, deadline_s=2.0, wait=False)
    statuses = kv.deliver(salt, keys, range(count), deadline_s=2.5)
    kv.finish(salt)
    wrong = [
        row
        for row, key in enumerate(keys)
        if statuses[row] == OK and not (memory[row] == content(key, LAYOUT.part_bytes)).all()
    ]
    return statuses.tolist(), wrong
