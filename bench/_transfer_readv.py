# SPDX-License-Identifier: Apache-2.0
"""What CMA does on this machine: blocks read out of another process with process_vm_readv, and hashed.

Without guards, leases, messages or UCX, by as many threads and in chunks as large as pulls have: no pull over
CMA can be much faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench._blocks import layout
from bench._transfer_ours import directory, environment
from kvcr.pool import DataRegion, Pool, PoolReader, checksum_parts
from kvcr.transfer.nixl_reader import LARGE_CHUNK_BYTES, READERS

ROOT = Path(__file__).resolve().parents[1]

Times = dict[str, list[float]]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc.process_vm_readv.argtypes = [
    ctypes.c_int, ctypes.POINTER(_Part), ctypes.c_ulong, ctypes.POINTER(_Part), ctypes.c_ulong, ctypes.c_ulong
]  # fmt: skip
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def pulls(block_bytes: int, reps: Mapping[int, int]) -> dict[int, Times]:
    """``reps[n]`` times ``n`` blocks, each after a memcpy of the same blocks in this process."""
    slots = 2 * max(reps)
    shape = layout(block_bytes)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(directory())
        source, target = (
            stack.enter_context(
                contextlib.closing(
                    Pool.create(path / name, shape, slots * shape.slot_part_bytes, guard_incarnation=1)
                )
            ).data(0)
            for name in ("a", "b")
        )
        for region in (source, target):
            region.populate()
        holder = stack.enter_context(_holder(path / "a"))
        assert holder.stdout is not None
        remote = int(holder.stdout.readline())
        scratch = np.ones((slots, block_bytes), np.uint8)
        threads = stack.enter_context(ThreadPoolExecutor(READERS))
        random = np.random.default_rng(1)

        def read(chunk: tuple[np.ndarray, np.ndarray]) -> None:
            theirs, ours = chunk
            _read(holder.pid, remote, theirs, target, ours, block_bytes)
            checksum_parts(target.array, ours)

        result: dict[int, Times] = {}
        for blocks, times in reps.items():
            width = max(1, min(LARGE_CHUNK_BYTES // block_bytes, -(-blocks // READERS)))
            row: Times = {"memcpy": [], "pull": []}
            for number in range(times + 1):
                theirs, ours = (random.permutation(slots)[:blocks].astype(np.int32) for _ in range(2))
                chunks = [(theirs[at : at + width], ours[at : at + width]) for at in range(0, blocks, width)]
                started_s = time.perf_counter()
                for ours_slot, slot in zip(ours.tolist(), theirs.tolist(), strict=True):
                    _libc.memcpy(
                        scratch[ours_slot].ctypes.data,
                        source.address + slot * shape.slot_part_bytes,
                        block_bytes,
                    )
                copied_s = time.perf_counter()
                list(threads.map(read, chunks))
                ended_s = time.perf_counter()
                if number:
                    row["memcpy"].append(copied_s - started_s)
                    row["pull"].append(ended_s - copied_s)
            result[blocks] = row
        return result


def _read(
    pid: int, remote: int, theirs: np.ndarray, target: DataRegion, ours: np.ndarray, block_bytes: int
) -> None:
    stride, count = target.layout.slot_part_bytes, len(ours)
    to = (_Part * count)(*(_Part(target.address + slot * stride, block_bytes) for slot in ours.tolist()))
    of = (_Part * count)(*(_Part(remote + slot * stride, block_bytes) for slot in theirs.tolist()))
    if _libc.process_vm_readv(pid, to, count, of, count, 0) != count * block_bytes:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _holder(pool_dir: Path) -> subprocess.Popen[bytes]:
    """Another process with that pool mapped, until its stdin is closed."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench._transfer_readv", str(pool_dir)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def hold(pool_dir: Path) -> None:
    """The other process."""
    reader = PoolReader.open(pool_dir)
    region = DataRegion.open(pool_dir, reader, 0, writable=False)
    print(region.address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold(Path(sys.argv[1]))
