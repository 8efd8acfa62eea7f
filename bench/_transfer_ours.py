# SPDX-License-Identifier: Apache-2.0
"""Transfers between two real guards, and between a guard and its engine, for :mod:`bench.transfer`.

This process is the engine beside each guard. Every time is from the call at the engine until its result: a
pull until its blocks are committed in the local pool and said to be, a deposit until it is confirmed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench._blocks import layout
from bench._common import ROOT, cpu_ns, environment
from kvcr.api import (
    BlockKey,
    BlockStatus,
    EngineConfig,
    HostBlockMemory,
    Kvcr,
    SchedulerHandle,
    Source,
    WorkerHandle,
)
from kvcr.keys import pack_keys
from kvcr.pool import DataRegion, PoolReader

TRANSPORTS: dict[str, tuple[str, dict[str, str]]] = {
    "shm": ("shm", {}),
    "cma": ("nixl", {}),
    "tcp": ("nixl", {"UCX_TLS": "tcp,self"}),
}
"""name -> (--transport of the reader, environment of both guards). With everything allowed UCX takes CMA on
one host."""

ENGINE_BLOCKS = 64
START_S = 60.0
SETTLE_S = 1.0
"""For links, agents and page tables, which are made ahead: until memory has not grown for this long."""
MOST_SETTLE_S = 30.0
PULL_S = 20.0
SCRATCH_BYTES = 256 << 20

Times = dict[str, list[float]]

_numbers = itertools.count()

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p


class Guard:
    """``python -m kvcr.guard`` with a pool of ``slots`` blocks."""

    def __init__(self, directory: Path, name: str, block_bytes: int, slots: int, transport: str) -> None:
        choice, env = TRANSPORTS[transport]
        self.pool_dir = directory / name
        pool_bytes = slots * layout(block_bytes).slot_part_bytes
        command = [
            sys.executable, "-m", "kvcr.guard", "--name", name, "--pool-dir", str(self.pool_dir),
            "--pool-bytes", str(pool_bytes), "--transport", choice, "--scrub-bytes-per-s", "0",
            "--remove-pool-on-exit", "--metrics-port", "-1",
        ]  # fmt: skip
        with open(directory / f"{name}.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment(), **env},
            )
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        if not self.ready:
            raise RuntimeError(
                f"guard {name} did not start: {(directory / f'{name}.log').read_text()[-2000:]}"
            )

    @property
    def control(self) -> str:
        return str(self.ready["control"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(START_S)


class Engine:
    """The engine beside a guard: this process, with memory for some blocks."""

    def __init__(
        self, guard: Guard, block_bytes: int, standing_blocks: int = 1, blocks: int = ENGINE_BLOCKS
    ) -> None:
        self.blocks = np.zeros((blocks, block_bytes), np.uint8)
        self.guard = guard
        config = EngineConfig(socket=str(guard.ready["socket"]), namespace="bench")
        shape, engine_id = layout(block_bytes), f"bench-{os.getpid()}-{next(_numbers)}"
        worker = WorkerHandle(config, shape, HostBlockMemory([self.blocks]), engine_id=engine_id)
        self.scheduler = SchedulerHandle(config, shape, engine_id=engine_id, standing_blocks=standing_blocks)
        self.kv = Kvcr(self.scheduler, worker)
        if not (worker.wait_connected(START_S) and self.scheduler.wait_connected(START_S)):
            raise RuntimeError(f"no connection to {guard.ready['socket']}")

    def deposit(self, keys: Sequence[BlockKey]) -> None:
        """Store blocks; the engine's memory is stamped so that each has content of its own."""
        for start in range(0, len(keys), ENGINE_BLOCKS):
            part = keys[start : start + ENGINE_BLOCKS]
            for row, key in enumerate(part):
                self.blocks[row, :16] = np.frombuffer(key, np.uint8)
            statuses = self.kv.deposit(part, range(len(part)), wait_s=START_S)
            require_ok(statuses)


def require_ok(statuses: npt.NDArray[np.uint8]) -> None:
    if (statuses != BlockStatus.OK).any():
        raise RuntimeError(f"not all blocks are OK: {statuses}")


def chain(name: str, count: int) -> list[BlockKey]:
    """Keys that nothing else has."""
    raw = np.random.default_rng(list(name.encode())).bytes(16 * count)
    return [BlockKey(raw[16 * i : 16 * i + 16]) for i in range(count)]


class Memcpy:
    """The C library's memcpy of blocks of a pool, into memory that is as little in the cache as they are."""

    def __init__(self, pool_dir: Path, block_bytes: int) -> None:
        self._reader = PoolReader.open(pool_dir)
        self._region = DataRegion.open(pool_dir, self._reader, 0, writable=False)
        self._blocks = max(ENGINE_BLOCKS, SCRATCH_BYTES // block_bytes)
        self._scratch = np.ones((self._blocks, block_bytes), np.uint8)
        self._next = 0
        self._block_bytes = block_bytes

    def time(self, keys: Sequence[BlockKey]) -> float:
        slots = self._reader.lookup(pack_keys(keys)).slots.tolist()
        source, stride = self._region.address, self._region.layout.slot_part_bytes
        if self._next + len(slots) > self._blocks:
            self._next = 0
        target = self._scratch.ctypes.data + self._next * self._block_bytes
        self._next += len(slots)
        started_s = time.perf_counter()
        for index, slot in enumerate(slots):
            _memcpy(target + index * self._block_bytes, source + slot * stride, self._block_bytes)
        return time.perf_counter() - started_s

    def close(self) -> None:
        self._region.close()
        self._reader.close()


@contextlib.contextmanager
def pair(block_bytes: int, slots: int, transport: str) -> Iterator[tuple[Engine, Engine]]:
    """Two guards with an engine each: one to hold blocks, one to pull them."""
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(directory())
        guards = [
            stack.enter_context(contextlib.closing(Guard(path, name, block_bytes, slots, transport)))
            for name in ("a", "b")
        ]
        engines = Engine(guards[0], block_bytes, ENGINE_BLOCKS), Engine(guards[1], block_bytes)
        for engine in engines:
            stack.enter_context(contextlib.closing(engine.kv))
        settle([guard.process.pid for guard in guards])
        yield engines


def settle(pids: Sequence[int]) -> None:
    """Wait until these processes and their children have mapped what they map ahead."""
    until_s = time.monotonic() + MOST_SETTLE_S
    before, since_s = -1, time.monotonic()
    while time.monotonic() < min(until_s, since_s + SETTLE_S):
        now = sum(_resident_pages(pid) for pid in pids)
        if now > before:
            before, since_s = now, time.monotonic()
        time.sleep(0.05)


def _resident_pages(pid: int) -> int:
    """Of a process and its children; 0 when it is gone."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return own + sum(_resident_pages(int(child)) for child in children)


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvcr-bench-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def pulls(block_bytes: int, transport: str, reps: dict[int, int]) -> dict[int, Times]:
    """``reps[n]`` pulls of ``n`` blocks that the puller never had, each after a memcpy of the same blocks."""
    total = sum(count * (times + 1) for count, times in reps.items())
    keys = chain(f"pull-{block_bytes}-{transport}", total)
    slots = total * 9 // 8 + 64
    with pair(block_bytes, slots, transport) as (holder, puller), contextlib.ExitStack() as stack:
        holder.deposit(keys)
        copy = stack.enter_context(contextlib.closing(Memcpy(holder.guard.pool_dir, block_bytes)))
        numbers = itertools.count()
        taken = 0
        result: dict[int, Times] = {}
        for count, times in reps.items():
            row: Times = {"memcpy": [], "pull": []}
            # The first opens the link and makes the agents; it is not counted.
            for number in range(times + 1):
                mine = keys[taken : taken + count]
                taken += count
                copied_s = copy.time(mine)
                pulled_s = _pull(puller.kv, f"r{next(numbers)}", mine, holder.guard.control)
                if number:
                    row["memcpy"].append(copied_s)
                    row["pull"].append(pulled_s)
            require_same_bytes(puller, mine)
            result[count] = row
    return result


def _pull(kv: Kvcr, request_id: str, keys: Sequence[BlockKey], control: str) -> float:
    sources = [Source(control, 0, len(keys))]
    started_s = time.perf_counter()
    statuses = kv.fetch(request_id, keys, sources=sources, deadline_s=PULL_S)
    took_s = time.perf_counter() - started_s
    kv.finish(request_id)
    require_ok(statuses)
    return took_s


def concurrent(block_bytes: int, requests: int, blocks: int, rounds: int) -> Times:
    """``requests`` pulls of ``blocks`` blocks at a time: seconds until all have ended."""
    keys = chain("concurrent", requests * blocks * (rounds + 1))
    slots = len(keys) * 9 // 8 + 64
    with pair(block_bytes, slots, "shm") as (holder, puller):
        holder.deposit(keys)
        took_s: list[float] = []
        kv, sources = puller.kv, [Source(holder.guard.control, 0, blocks)]
        for number in range(rounds + 1):
            started_s = time.perf_counter()
            names = [f"c{number}-{request}" for request in range(requests)]
            for request, name in enumerate(names):
                start = (number * requests + request) * blocks
                kv.fetch(name, keys[start : start + blocks], sources=sources, deadline_s=PULL_S, wait=False)
            for name in names:
                state = kv.fetch_state(name)
                assert state is not None
                puller.scheduler.wait_for(state, time.monotonic() + PULL_S)
                require_ok(state.statuses)
            if number:
                took_s.append(time.perf_counter() - started_s)
            for name in names:
                kv.finish(name)
    return {"seconds": took_s}


def local(block_bytes: int, reps: dict[int, int]) -> dict[int, Times]:
    """Deposits of new blocks and loads of the same, each after a memcpy of as many."""
    total = sum(count * (times + 1) for count, times in reps.items())
    keys = chain(f"local-{block_bytes}", total)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(directory())
        guard = stack.enter_context(
            contextlib.closing(Guard(path, "a", block_bytes, total * 9 // 8 + 256, "shm"))
        )
        engine = Engine(guard, block_bytes, ENGINE_BLOCKS)
        stack.enter_context(contextlib.closing(engine.kv))
        copy = stack.enter_context(contextlib.closing(Memcpy(guard.pool_dir, block_bytes)))
        settle([guard.process.pid])
        taken, result = 0, {}
        for count, times in reps.items():
            row: Times = {"memcpy": [], "deposit": [], "load": []}
            for number in range(times + 1):
                mine = keys[taken : taken + count]
                taken += count
                started_s = time.perf_counter()
                statuses = engine.kv.deposit(mine, range(count), wait_s=PULL_S)
                stored_s = time.perf_counter()
                require_ok(statuses)
                copied_s = copy.time(mine)
                loading_s = time.perf_counter()
                loaded = engine.kv.deliver(f"l{number}", mine, range(count), deadline_s=PULL_S)
                loaded_s = time.perf_counter()
                require_ok(loaded)
                if number:
                    row["memcpy"].append(copied_s)
                    row["deposit"].append(stored_s - started_s)
                    row["load"].append(loaded_s - loading_s)
            result[count] = row
    return result


def lookups(counts: Sequence[int], times: int) -> dict[int, Times]:
    """The scheduler's lookup of blocks that are here: keys in, a mask out."""
    most = max(counts)
    keys = chain("lookups", most)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(directory())
        guard = stack.enter_context(contextlib.closing(Guard(path, "a", 4096, 2 * most + 512, "shm")))
        engine = Engine(guard, 4096, ENGINE_BLOCKS)
        stack.enter_context(contextlib.closing(engine.kv))
        engine.deposit(keys)
        result = {}
        for count in counts:
            blob = pack_keys(keys[:count])
            samples = []
            for _ in range(times):
                started_s = time.perf_counter()
                found = engine.scheduler.lookup(blob)
                samples.append(time.perf_counter() - started_s)
                if not found.all():
                    raise RuntimeError("a block that was stored is not found")
            result[count] = {"lookup": samples}
    return result


def full_pool(block_bytes: int, slots: int, batch: int, batches: int) -> Times:
    """Deposits of ``batch`` blocks into a pool without a free slot: seconds of each.

    Between them it waits, uncounted, until evicted slots have cooled: an engine does not wait for slots, it
    goes on without storing.
    """
    keys = chain("full", slots + batch * batches)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(directory())
        guard = stack.enter_context(contextlib.closing(Guard(path, "a", block_bytes, slots, "shm")))
        # Topped up when half is used: a whole batch is always granted, sooner or later.
        engine = Engine(guard, block_bytes, standing_blocks=2 * batch, blocks=batch)
        kv = stack.enter_context(contextlib.closing(engine.kv))
        took_s = []
        for start in range(0, len(keys) - batch + 1, batch):
            until_s = time.monotonic() + START_S
            while engine.scheduler.grants_available < batch and time.monotonic() < until_s:
                time.sleep(0.02)
                kv.poll()
            started_s = time.perf_counter()
            statuses = kv.deposit(keys[start : start + batch], range(batch), wait_s=START_S)
            ended_s = time.perf_counter()
            require_ok(statuses)
            if start >= slots:
                took_s.append(ended_s - started_s)
    return {"seconds": took_s[-batches:]}


def idle_cpu_percent(period_s: float) -> dict[str, float]:
    """Of one core: the busier of two linked guards with an engine each, and a process with a connector."""
    block_bytes = 256 << 10
    with pair(block_bytes, 512, "shm") as (holder, puller):
        holder.deposit(chain("idle", 8))
        _pull(puller.kv, "idle", chain("idle", 8), holder.guard.control)
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(directory())
            guard = stack.enter_context(contextlib.closing(Guard(path, "c", block_bytes, 512, "shm")))
            command = [
                sys.executable,
                "-m",
                "bench._transfer_ours",
                str(guard.ready["socket"]),
                str(block_bytes),
            ]
            connector = subprocess.Popen(
                command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT, env=environment()
            )
            try:
                assert connector.stdout is not None
                if connector.stdout.readline().strip() != b"connected":
                    raise RuntimeError("the connector did not connect")
                time.sleep(2 * SETTLE_S)
                pids = [holder.guard.process.pid, puller.guard.process.pid, connector.pid]
                before = [cpu_ns(pid) for pid in pids]
                time.sleep(period_s)
                used = [cpu_ns(pid) - was for pid, was in zip(pids, before, strict=True)]
            finally:
                connector.kill()
                connector.wait()
    shares = [round(100 * ns / (1e9 * period_s), 3) for ns in used]
    return {"guard": max(shares[:2]), "connector": shares[2]}


def connector_main(socket: str, block_bytes: int) -> None:
    """A process with scheduler and worker handle, and nothing to do."""
    memory = HostBlockMemory([np.zeros((ENGINE_BLOCKS, block_bytes), np.uint8)])
    kv = Kvcr.open(EngineConfig(socket=socket, namespace="bench"), layout(block_bytes), memory)
    kv.deposit(chain("connector", 8), range(8), wait_s=START_S)
    print("connected", flush=True)
    sys.stdin.read()


def require_same_bytes(engine: Engine, keys: Sequence[BlockKey]) -> None:
    """Load what was pulled and compare it with what was deposited."""
    engine.blocks[: len(keys)] = 0xEE
    require_ok(engine.kv.deliver("check", keys, range(len(keys)), deadline_s=PULL_S))
    for row, key in enumerate(keys):
        if engine.blocks[row, :16].tobytes() != key or engine.blocks[row, 16:].any():
            raise RuntimeError(f"block {row} has not the bytes that were deposited")


if __name__ == "__main__":
    connector_main(sys.argv[1], int(sys.argv[2]))
