# SPDX-License-Identifier: Apache-2.0
"""A guard in a process of its own, and a minimal engine that talks to it over its Unix socket."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from waiting import PATIENCE_S

from kvcr.keys import BlockKey, KeySpace, extend_chain, pack_keys
from kvcr.layout import Layout
from kvcr.pool import DataRegion, PoolReader, WriterLock
from kvcr.protocol.engine import (
    VERSION,
    Act,
    BlockStatus,
    Committed,
    DropG1,
    DroppedG1,
    Fetch,
    FetchLease,
    FetchProgress,
    Filled,
    Finish,
    Granted,
    Hello,
    Reserve,
    Return,
    Role,
    Source,
    ToEngine,
    ToGuard,
    Welcome,
    to_engine,
    to_guard,
)

COMPONENTS = Path(__file__).resolve().parents[2] / "components"

M = TypeVar("M")
N = TypeVar("N")

LAYOUT = Layout(
    model="tiny@0123+0",
    dtype="float32",
    block_size=16,
    layers=2,
    kv_heads=2,
    head_size=16,
    part_bytes=64 * 1024 - 512,
    engine="test",
)


class GuardProcess:
    """``python -m kvcr.guard``, ended with the context."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *arguments: str,
        slots: int = 768,
        layout: Layout = LAYOUT,
        env: dict[str, str] | None = None,
        wait: bool = True,
    ) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self.pool_dir = directory / name
        self.log_path = directory / f"{name}.log"
        command = [
            sys.executable, "-m", "kvcr.guard",
            "--name", name,
            "--pool-dir", str(self.pool_dir),
            "--pool-bytes", str(slots * layout.slot_part_bytes * layout.ranks),
            # Or the scrubber may find a block that a test damaged before the pull that should.
            "--scrub-bytes-per-s", "0",
            *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(COMPONENTS), **(env or {})}
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> GuardProcess:
        """Raises RuntimeError, with the log, when it ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise RuntimeError(f"guard {self.name} ended with status {status}: {self.log_path.read_text()}")
        self.ready = json.loads(line)
        return self

    @property
    def endpoint(self) -> str:
        return str(self.ready["control"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def metrics(self) -> dict[str, float]:
        """Samples by name with labels, e.g. ``kvcr_pulled_blocks_total{transport="shm"}``."""
        with urllib.request.urlopen(self.ready["metrics"], timeout=PATIENCE_S) as response:
            text = response.read().decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def wait_metric(self, name: str, value: float) -> float:
        """The sample, once it has ``value`` or :data:`waiting.PATIENCE_S` passed."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := self.metrics().get(name, 0.0)) != value and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return found

    def cpu_s(self) -> float:
        """User and system time used so far, by it and its NIXL process."""
        ticks = 0
        for pid in (self.pid, *self.children()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def children(self) -> list[int]:
        """Pids of its child processes that are no zombies: its NIXL process, if it has one."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.pid and fields[0] != "Z":
                    found.append(int(path.parent.name))
        return found

    def nixl_pid(self) -> int:
        """Pid of its NIXL process, which must be running."""
        (pid,) = self.children()
        return pid

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> GuardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineClient:
    """Scheduler and worker (one rank) of an engine, in this process, blocking."""

    def __init__(self, guard: GuardProcess, engine_id: str, layout: Layout = LAYOUT) -> None:
        self.guard = guard
        self.engine_id = engine_id
        self.layout = layout
        self.scheduler = self.connect(Role.SCHEDULER)
        self.welcome = self.receive(self.scheduler, Welcome)
        self.worker = self.connect(Role.WORKER)
        self.receive(self.worker, Welcome)
        self.directory = Path(self.welcome.pool_dir)
        self.lock = WriterLock(self.directory, engine_id, 0)
        self.lock.acquire()
        self.reader = PoolReader.open(self.directory)
        self.region = DataRegion.open(self.directory, self.reader, 0, writable=True)

    def connect(self, role: Role) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(PATIENCE_S)
        sock.connect(self.guard.ready["socket"])
        self.send(sock, Hello(VERSION, role, self.engine_id, 0, os.getpid(), self.layout, namespace="test"))
        return sock

    @staticmethod
    def send(sock: socket.socket, message: ToGuard) -> None:
        sock.send(to_guard.encode(message))

    @staticmethod
    def receive_any(sock: socket.socket) -> ToEngine:
        return to_engine.decode(sock.recv(1 << 20))

    def receive(self, sock: socket.socket, kind: type[M]) -> M:
        """The next message of this kind; others are dropped. Raises TimeoutError."""
        while True:
            message = self.receive_any(sock)
            if isinstance(message, kind):
                return message

    def receive_one_of(self, sock: socket.socket, kind: type[M], other: type[N]) -> M | N:
        """The next message of either kind; others are dropped. Raises TimeoutError."""
        while True:
            message = self.receive_any(sock)
            if isinstance(message, kind | other):
                return message

    def reserve(self, count: int) -> Granted:
        """Slots for the next :meth:`deposit`."""
        self.send(self.scheduler, Reserve(self.welcome.epoch, count))
        return self.receive(self.scheduler, Granted)

    def give_back(self, granted: Granted) -> None:
        """Slots that are not to be filled."""
        self.send(self.scheduler, Return(self.welcome.epoch, granted.slots, granted.generations))

    def deposit(
        self,
        keys: Sequence[BlockKey],
        root: bytes,
        first: int = 0,
        *,
        drops: int = 0,
        granted: Granted | None = None,
    ) -> None:
        """Fill slots with what :func:`content` says, and wait until the guard is done with them.

        ``drops``: the last drop in G1 that was carried out before the request that fills began.
        """
        granted = granted or self.reserve(len(keys))
        slots = np.frombuffer(granted.slots, "<i4")
        assert len(slots) == len(keys), f"{len(slots)} slots granted for {len(keys)} blocks"
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self.region.array[slot, : self.layout.part_bytes] = content(key, self.layout.part_bytes)
        self.send(
            self.worker,
            Filled(
                epoch=self.welcome.epoch,
                rank=0,
                slots=granted.slots,
                generations=granted.generations,
                keys=pack_keys(keys),
                parents=pack_keys([BlockKey(root), *keys[:-1]]),
                engine_hashes=engine_hashes(keys),
                positions=np.arange(first, first + len(keys), dtype="<u4").tobytes(),
                drops=drops,
            ),
        )
        self.receive(self.worker, Committed)

    def carry_out_drop(self, count: int | None = None) -> tuple[int, list[int]]:
        """Wait for the guard to ask for a drop in G1, and answer that ``count`` (or all) blocks were there.

        Returns the drop's number and the engine hashes it names.
        """
        drop = self.receive(self.scheduler, DropG1)
        hashes = np.frombuffer(drop.engine_hashes, "<u8").tolist()
        self.send(self.scheduler, DroppedG1(drop.drop_id, len(hashes) if count is None else count))
        return drop.drop_id, hashes

    def act(self, request_id: str, envelope: dict[str, Any]) -> None:
        """Pass on what rode on a request beside a fetch."""
        self.send(self.scheduler, Act(self.welcome.epoch, request_id, msgspec.json.encode(envelope)))

    def fetch(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        root: bytes,
        sources: Sequence[Source],
        *,
        deadline_ms: float = 30_000.0,
        give_up_ms: float = 0.0,
        no_retain: bool = False,
        **more: Any,
    ) -> tuple[FetchLease, FetchProgress]:
        """Fetch and wait for the end."""
        self.start_fetch(
            request_id,
            keys,
            root,
            sources,
            deadline_ms=deadline_ms,
            give_up_ms=give_up_ms,
            no_retain=no_retain,
            **more,
        )
        lease: FetchLease | None = None
        while True:
            # Blocks of one source may be here before another has answered.
            message = self.receive_one_of(self.scheduler, FetchLease, FetchProgress)
            if message.request_id != request_id:
                continue
            if isinstance(message, FetchLease):
                lease = lease or message
            elif message.final:
                # Over at once, it is without a lease.
                kept = message.statuses.count(BlockStatus.OK)
                return lease or FetchLease(request_id, message.first, kept), message

    def end_of_fetch(self) -> FetchProgress:
        """How the fetch under way ends."""
        while not (progress := self.receive(self.scheduler, FetchProgress)).final:
            pass
        return progress

    def start_fetch(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        root: bytes,
        sources: Sequence[Source],
        *,
        deadline_ms: float = 30_000.0,
        give_up_ms: float = 0.0,
        no_retain: bool = False,
        **more: Any,
    ) -> None:
        """Send a Fetch; ``more`` are fields of it."""
        self.send(
            self.scheduler,
            Fetch(
                epoch=self.welcome.epoch,
                request_id=request_id,
                first=0,
                parent=root,
                keys=pack_keys(keys),
                engine_hashes=engine_hashes(keys),
                sources=list(sources),
                give_up_ms=give_up_ms,
                deadline_ms=deadline_ms,
                no_retain=no_retain,
                **more,
            ),
        )

    def finish(self, request_id: str) -> None:
        self.send(self.scheduler, Finish(request_id))

    def right(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is in the pool with the bytes of :func:`content`."""
        slots = self.reader.lookup(pack_keys(keys)).slots
        return [
            slot >= 0
            and bool(
                (
                    self.region.array[slot, : self.layout.part_bytes] == content(key, self.layout.part_bytes)
                ).all()
            )
            for slot, key in zip(slots.tolist(), keys, strict=True)
        ]

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()
        self.region.close()
        self.reader.close()
        self.lock.release()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def content(key: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that tell blocks, and places in a block, apart."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.view(np.uint8)[:nbytes]


def engine_hashes(keys: Sequence[BlockKey]) -> bytes:
    """What stands for the engine's own hashes of these blocks, uint64 each."""
    return np.frombuffer(pack_keys(keys), "<u8")[::2].tobytes()


def chain(count: int, salt: str) -> tuple[bytes, list[BlockKey]]:
    """Root and keys of ``count`` blocks of a chain of its own."""
    root = KeySpace("test", LAYOUT.model, salt=salt).root()
    return root, extend_chain(root, np.arange(count * LAYOUT.block_size, dtype=np.uint32), LAYOUT.block_size)


def assert_available(lease: FetchLease, blocks: int) -> None:
    """The lease covers ``blocks``, or a busy machine did not let the source answer within 40 ms."""
    assert lease.available == blocks or "has not answered yet" in lease.reason, lease


def statuses(progress: FetchProgress) -> list[BlockStatus]:
    return [BlockStatus(value) for value in progress.statuses]


@contextlib.contextmanager
def guards(
    directory: Path, *names: str, arguments: Sequence[str] = (), **options: Any
) -> Iterator[list[GuardProcess]]:
    """Guards that start at the same time."""
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(GuardProcess(directory, name, *arguments, wait=False, **options))
            for name in names
        ]
        yield [guard.wait_ready() for guard in started]


@contextlib.contextmanager
def a_pair(
    directory: Path,
    count: int,
    arguments: Sequence[str] = (),
    env: dict[str, str] | None = None,
    *,
    contact: bool = False,
) -> Iterator[tuple[EngineClient, EngineClient, bytes, list[BlockKey], list[Source]]]:
    """Two guards with an engine each, and ``count`` blocks stored at the first. ``contact``: one of them is
    pulled already."""
    with (
        guards(directory, "a", "b", arguments=arguments, env=env) as (a, b),
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        root, keys = chain(count, "tenant")
        source.deposit(keys, root)
        sources = [Source(a.endpoint, 0, count)]
        if contact:
            pulled = target.fetch("contact", keys[:1], root, sources, deadline_ms=20_000)[1]
            assert statuses(pulled) == [BlockStatus.OK]
        yield source, target, root, keys, sources
