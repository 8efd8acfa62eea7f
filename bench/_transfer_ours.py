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

from kvcr.api import BlockKey, BlockStatus, EngineConfig, HostBlockMemory, Kvcr, Source
from kvcr.keys import pack_keys
from kvcr.layout import Layout
from kvcr.pool import DataRegion, PoolReader

ROOT = Path(__file__).resolve().parents[1]

TRANSPORTS: dict[str, tuple[str, dict[str, str]]] = {
    "shm": ("shm", {}),
    "cma": ("nixl", {}),
    "tcp": ("nixl", {"UCX_TLS": "tcp,self"}),
}
"""name -> (--transport of the reader, environment of both guards). With everything allowed UCX takes CMA on
one host."""

ENGINE_BLOCKS = 64
START_S = 60.0
PULL_S = 20.0
SCRATCH_BYTES = 256 << 20

Times = dict[str, list[float]]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p


def layout(part_bytes: int) -> Layout:
    return Layout(
        model="bench@0+0",
        dtype="bfloat16",
        block_size=16,
        layers=2,
        kv_heads=2,
        head_size=16,
        part_bytes=part_bytes,
        engine="bench",
    )


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
        paths = [str(ROOT / "components"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(directory / f"{name}.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
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
    """The engine beside a guard: this process, with memory for :data:`ENGINE_BLOCKS` blocks."""

    def __init__(self, guard: Guard, block_bytes: int, standing_blocks: int = 1) -> None:
        self.blocks = np.zeros((ENGINE_BLOCKS, block_bytes), np.uint8)
        self.guard = guard
        config = EngineConfig(socket=str(guard.ready["socket"]), namespace="bench")
        self.kv = Kvcr.open(
            config, layout(block_bytes), HostBlockMemory([self.blocks]), standing_blocks=standing_blocks
        )

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
    seed = int.from_bytes(name.encode(), "little") % (1 << 63)
    raw = np.random.default_rng(seed).bytes(16 * count)
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
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(directory())
        source = stack.enter_context(contextlib.closing(Guard(path, "a", block_bytes, slots, transport)))
        target = stack.enter_context(contextlib.closing(Guard(path, "b", block_bytes, slots, transport)))
        holder, puller = Engine(source, block_bytes, ENGINE_BLOCKS), Engine(target, block_bytes)
        stack.enter_context(contextlib.closing(holder.kv))
        stack.enter_context(contextlib.closing(puller.kv))
        holder.deposit(keys)
        copy = stack.enter_context(contextlib.closing(Memcpy(source.pool_dir, block_bytes)))
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
                pulled_s = _pull(puller.kv, f"r{next(numbers)}", mine, source.control)
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


def require_same_bytes(engine: Engine, keys: Sequence[BlockKey]) -> None:
    """Load what was pulled and compare it with what was deposited."""
    engine.blocks[: len(keys)] = 0xEE
    require_ok(engine.kv.deliver("check", keys, range(len(keys)), deadline_s=PULL_S))
    for row, key in enumerate(keys):
        if engine.blocks[row, :16].tobytes() != key or engine.blocks[row, 16:].any():
            raise RuntimeError(f"block {row} has not the bytes that were deposited")
