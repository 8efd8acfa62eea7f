# SPDX-License-Identifier: Apache-2.0
"""The transfers of :mod:`bench.transfer` with NVIDIA's kvcr: ``python -m bench._peer_transfer WHAT JSON``.

Under the interpreter of :mod:`bench.peer_venv`. Prints samples in seconds, one line of JSON. Its NIXL threads
spin for as long as its processes live, so nothing of ours runs beside them.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bench._peer_kvcr import POLL_S, Node, hint, key, succeeded

ENGINE_BLOCKS = 64
START_S = 120.0
TIMEOUTS = {"operation_timeout_ms": 20_000, "abandon_timeout_ms": 60_000}
"""On a busy machine its defaults are reached, after which a source serves nothing until it is restarted."""

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def timed(work: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def hold(block_bytes: int, count: int, pipe: Connection) -> None:
    """The source: ``count`` blocks in its pool, until told to end."""
    node = Node("src", block_bytes=block_bytes, blocks=ENGINE_BLOCKS, pool_blocks=count, **TIMEOUTS)
    for start in range(0, count, ENGINE_BLOCKS):
        numbers = range(start, min(count, start + ENGINE_BLOCKS))
        require(node.deposit(numbers) == len(numbers), "deposit at the source")
    pipe.send(node.endpoint)
    while not pipe.poll(POLL_S):
        for _ in node.kvcr.poll_completed():
            continue
    os._exit(0)


class Source:
    """The process that holds blocks."""

    def __init__(self, block_bytes: int, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=hold, args=(block_bytes, count, theirs), daemon=True)
        self._process.start()
        require(self._pipe.poll(START_S), "the source did not start")
        self.endpoint: str = self._pipe.recv()

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join(5.0)
        self._process.kill()


def pulls(block_bytes: int, reps: dict[str, int]) -> dict[str, dict[str, list[float]]]:
    """Blocks of a peer into the engine's memory, its shortest way; each after a memcpy of as many."""
    counts = {int(count): times for count, times in reps.items()}
    most = max(counts)
    source = Source(block_bytes, 4 * most)
    node = Node("dst", block_bytes=block_bytes, blocks=most, pool_blocks=2 * most, **TIMEOUTS)
    scratch = ctypes.create_string_buffer(most * block_bytes)
    ctypes.memset(scratch, 1, most * block_bytes)
    taken = 0

    def copied(count: int) -> None:
        for index in range(count):
            at = index * block_bytes
            _memcpy(node.memory.ctypes.data + at, ctypes.addressof(scratch) + at, block_bytes)

    def numbers(count: int) -> range:
        nonlocal taken
        start = taken % (4 * most - count + 1)
        taken += count
        return range(start, start + count)

    serial = 0

    def deliver(count: int) -> float:
        nonlocal serial
        serial += 1
        wanted, request = numbers(count), f"d{serial}"
        started_s = time.perf_counter()
        node.kvcr.submit_hint(hint(source.endpoint, wanted), request)
        result = node.wait(node.start_deliver(wanted, request=request))
        took_s = time.perf_counter() - started_s
        node.kvcr.discard_hint(request)
        require(succeeded(result) == count, "deliver")
        return took_s

    rows: dict[str, dict[str, list[float]]] = {}
    deliver(1)
    # Its own pool stays empty, so that every deliver is remote.
    for count, times in counts.items():
        row: dict[str, list[float]] = {"memcpy": [], "pull": []}
        deliver(count)
        for _ in range(times):
            row["memcpy"].append(timed(lambda count=count: copied(count)))  # type: ignore[misc]
            row["pull"].append(deliver(count))
        rows[str(count)] = row
    source.close()
    return rows


def concurrent(block_bytes: int, requests: int, blocks: int, rounds: int) -> dict[str, list[float]]:
    """``requests`` pulls of ``blocks`` blocks at a time: seconds until all have ended."""
    total = requests * blocks
    source = Source(block_bytes, total)
    node = Node("dst", block_bytes=block_bytes, blocks=total, **TIMEOUTS)
    took_s: list[float] = []
    for number in range(rounds + 1):
        started_s = time.perf_counter()
        waiting = set()
        for request in range(requests):
            wanted, name = range(request * blocks, (request + 1) * blocks), f"c{number}-{request}"
            node.kvcr.submit_hint(hint(source.endpoint, wanted), name)
            waiting.add(node.start_deliver(wanted, request * blocks, name))
        while waiting and time.perf_counter() - started_s < START_S:
            for handle, result in node.kvcr.poll_completed():
                if handle in waiting:
                    waiting.discard(handle)
                    require(succeeded(result) == blocks, "one of many delivers")
            time.sleep(POLL_S)
        require(not waiting, "many delivers")
        if number:
            took_s.append(time.perf_counter() - started_s)
        for request in range(requests):
            node.kvcr.discard_hint(f"c{number}-{request}")
    source.close()
    return {"seconds": took_s}


def local(block_bytes: int, reps: dict[str, int]) -> dict[str, dict[str, list[float]]]:
    """Deposits of new blocks, and delivers of the same from the own pool."""
    counts = {int(count): times for count, times in reps.items()}
    total = sum(count * (times + 1) for count, times in counts.items())
    node = Node("solo", block_bytes=block_bytes, blocks=ENGINE_BLOCKS, pool_blocks=total, **TIMEOUTS)
    rows: dict[str, dict[str, list[float]]] = {}
    start = 0
    for count, times in counts.items():
        row: dict[str, list[float]] = {"deposit": [], "load": []}
        for number in range(times + 1):
            wanted = range(start, start + count)
            start += count
            started_s = time.perf_counter()
            require(node.deposit(wanted) == count, "deposit")
            stored_s = time.perf_counter()
            require(succeeded(node.wait(node.start_deliver(wanted))) == count, "local deliver")
            if number:
                row["deposit"].append(stored_s - started_s)
                row["load"].append(time.perf_counter() - stored_s)
        rows[str(count)] = row
    return rows


def lookups(counts: list[int], times: int) -> dict[str, dict[str, list[float]]]:
    """``query`` of blocks that are here."""
    most = max(counts)
    node = Node("query", block_bytes=4096, blocks=ENGINE_BLOCKS, pool_blocks=2 * most, **TIMEOUTS)
    for start in range(0, most, ENGINE_BLOCKS):
        node.deposit(range(start, start + ENGINE_BLOCKS))
    rows = {}
    for count in counts:
        keys = [key(number) for number in range(count)]
        rows[str(count)] = {"lookup": [timed(lambda keys=keys: node.kvcr.query(keys)) for _ in range(times)]}
    return rows


def full_pool(block_bytes: int, slots: int, batch: int, batches: int) -> dict[str, list[float]]:
    """Deposits of ``batch`` blocks into a pool without a free slot: seconds of each."""
    node = Node("full", block_bytes=block_bytes, blocks=batch, pool_blocks=slots, **TIMEOUTS)
    for start in range(0, slots, batch):
        node.deposit(range(start, min(slots, start + batch)))
    took_s = []
    for number in range(batches):
        start = slots + number * batch
        took_s.append(timed(lambda start=start: node.deposit(range(start, start + batch))))  # type: ignore[misc]
    return {"seconds": took_s}


def require(good: bool, what: str) -> None:
    if not good:
        raise RuntimeError(f"{what}: not every block arrived")


if __name__ == "__main__":
    measured = {
        "pulls": pulls,
        "concurrent": concurrent,
        "local": local,
        "lookups": lookups,
        "full_pool": full_pool,
    }[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(measured), flush=True)
    # Its threads do not end by themselves.
    os._exit(0)
