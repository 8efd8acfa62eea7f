# SPDX-License-Identifier: Apache-2.0
"""What a pool of 512 GB costs: memory for its directory, and the time to scan, attach, restart and evict.

200,000 records of blocks of Qwen3-235B on a sparse file: the records are real, the payload is a hole. The
same with four ranks, into which four processes then write.
"""

from __future__ import annotations

import compileall
import contextlib
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from bench import _common
from bench._common import ROOT, cpu_ns, environment
from bench.failover import BIG_PART_BYTES, guard
from kvcr.api import EngineConfig, HostBlockMemory, SaveSpec, SchedulerHandle, WorkerHandle
from kvcr.layout import Layout
from kvcr.pool import META, Pool
from kvcr.protocol.peer import Lease, Leased, to_client, to_server

RECORDS = 200_000
CHAIN_BLOCKS = 256
"""Records are of chains this long: 4,096 tokens."""
RANKS = 4
SMALL_PART_BYTES = 4096
"""Of the blocks that four processes write: what is measured is the work a block costs, not memory speed."""
STEP_BLOCKS = 256
LOOKUP_KEYS = 2048
WAIT_S = 60.0


def layout(part_bytes: int, ranks: int) -> Layout:
    return Layout(
        model="bench@0+0",
        dtype="bfloat16",
        block_size=16,
        layers=94,
        kv_heads=4,
        head_size=128,
        part_bytes=part_bytes,
        tp_size=ranks,
        engine="bench",
    )


def measure(quick: bool) -> dict[str, Any]:
    """The figures of this benchmark; times are of this machine under its load."""
    directory = Path(tempfile.mkdtemp(prefix="kvcr-bench-", dir="/dev/shm"))
    rounds = 3 if quick else 7
    # As an installed package has it, wherever this environment keeps Python from writing bytecode.
    compileall.compile_dir(ROOT / "components", quiet=1)
    try:
        one = measure_directory(directory, "one", layout(BIG_PART_BYTES, 1), rounds)
        four = measure_directory(directory, "four", layout(BIG_PART_BYTES // RANKS, RANKS), rounds)
        writing = measure_writers(directory, blocks=4096 if quick else 32_768)
    finally:
        shutil.rmtree(directory)
    figures = {**one, **{f"four_ranks_{name}": value for name, value in {**four, **writing}.items()}}
    for name, value in figures.items():
        _common.say(f"{name:40} {value}")
    return {"records": RECORDS, "pool_bytes": RECORDS * BIG_PART_BYTES, **figures}


# --- one guard, no engine --------------------------------------------------------------------------


def measure_directory(directory: Path, name: str, shape: Layout, rounds: int) -> dict[str, Any]:
    """Records only: nobody writes."""
    keys = fill(directory / name, shape)
    meta_bytes = (directory / name / META).stat().st_size
    attach_s, attach_cpu_s, times = [], [], []
    for number in range(rounds):
        started_s, used_s = time.perf_counter(), time.process_time()
        pool = Pool.attach(directory / name, guard_incarnation=number + 2)
        attach_s.append(time.perf_counter() - started_s)
        attach_cpu_s.append(time.process_time() - used_s)
        assert pool.recovery.ready == pool.ready_count >= RECORDS - 1000, pool.recovery
        times.append(scans(pool, keys))
        pool.close()
    started = [restart(directory, name, keys) for _ in range(rounds)]
    return {
        "metadata_bytes_per_block": round(meta_bytes / RECORDS, 1),
        "private_bytes_per_block": private_bytes(directory / name),
        "attach_200k_s": median(attach_s),
        "attach_200k_cpu_s": median(attach_cpu_s),
        **{what: median([one[what] for one in times]) for what in times[0]},
        "restart_200k_s": median([one.seconds for one in started]),
        "restart_200k_cpu_s": median([one.cpu_s for one in started]),
        "rss_bytes": int(median([one.rss for one in started])),
        "evict_batch_200k_ms": evict(directory / name),
    }


def fill(pool_dir: Path, shape: Layout) -> bytes:
    """A pool of :data:`RECORDS` records whose payload is a hole. Returns their keys."""
    pool = Pool.create(
        pool_dir,
        shape,
        RECORDS * shape.slot_part_bytes * shape.ranks,
        guard_incarnation=1,
        preallocate=False,
    )
    keys = np.random.default_rng(1).bytes(16 * RECORDS)
    parents = bytearray(bytes(16) + keys[:-16])
    for head in range(0, RECORDS, CHAIN_BLOCKS):
        parents[16 * head : 16 * (head + 1)] = bytes(16)
    positions = (np.arange(RECORDS) % CHAIN_BLOCKS).astype(np.uint32)
    slots, generations = pool.allocate(RECORDS, 0.0)
    done = pool.commit(
        slots,
        generations,
        keys,
        bytes(parents),
        np.arange(RECORDS, dtype=np.uint64),
        positions,
        np.zeros((RECORDS, shape.ranks), np.uint64),
        0.0,
    ).committed
    assert int(done.sum()) >= RECORDS - 1000, "two full buckets drop a block now and then"
    pool.close()
    return keys


def scans(pool: Pool, keys: bytes) -> dict[str, float]:
    """Milliseconds of what walks the whole directory, and of a lookup that does not."""
    some = keys[: 16 * LOOKUP_KEYS]
    return {
        "self_check_200k_ms": took_ms(pool.check_invariants),
        "snapshot_page_ms": took_ms(lambda: pool.snapshot(RECORDS // 2, 4096)),
        "counts_200k_ms": took_ms(pool.counts),
        f"lookup_{LOOKUP_KEYS}_keys_ms": took_ms(lambda: pool.lookup(some)),
    }


def evict(pool_dir: Path) -> float:
    """Milliseconds of evicting one batch out of the full pool, a sixteenth of it, tails of chains first."""
    pool = Pool.attach(pool_dir, guard_incarnation=99)
    before = pool.ready_count
    took = took_ms(lambda: pool.allocate(1, time.monotonic()))
    assert before - pool.ready_count >= RECORDS // 16
    pool.close()
    return round(took, 1)


def took_ms(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started_s)


def private_bytes(pool_dir: Path) -> float:
    """What a guard keeps for each block besides the directory, in memory of its own."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    pool = Pool.attach(pool_dir, guard_incarnation=98)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    pool.close()
    return round((after - before) / RECORDS, 1)


class Started(NamedTuple):
    """What a guard took from the start of its process to the answer that a block is leased."""

    seconds: float
    cpu_s: float
    """of all its threads: what is left of the seconds it waited, mostly for a core"""
    rss: int


def restart(directory: Path, name: str, keys: bytes) -> Started:
    started_s = time.monotonic()
    with (
        guard(directory, name, 64, "--scrub-bytes-per-s", "0") as running,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as sock,
    ):
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(running.ready["control"])
        sock.send(to_server.encode(Lease(1, "bench", 1, keys[-16 * 64 :], 1000, "shm")))
        reply = to_client.decode(sock.recv())
        took_s = time.monotonic() - started_s
        assert isinstance(reply, Leased), reply
        cpu_s = cpu_ns(running.process.pid) / 1e9
        rss = resident_bytes(running.process.pid)
        running.process.kill()
        running.process.wait()
    return Started(took_s, cpu_s, rss)


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


# --- four ranks write ------------------------------------------------------------------------------


def measure_writers(directory: Path, blocks: int) -> dict[str, Any]:
    """Four processes fill their parts of the same blocks, in a pool of 200,000 slots."""
    shape = layout(SMALL_PART_BYTES, RANKS)
    pool_bytes = RECORDS * shape.slot_part_bytes * RANKS
    Pool.create(directory / "writers", shape, pool_bytes, guard_incarnation=1, preallocate=False).close()
    with guard(directory, "writers", 64) as running, contextlib.ExitStack() as stack:
        socket_path = running.ready["socket"]
        ranks = [stack.enter_context(rank_process(socket_path, rank)) for rank in range(RANKS)]
        scheduler = SchedulerHandle(
            EngineConfig(socket=socket_path, namespace="bench"),
            shape,
            engine_id="bench",
            standing_blocks=2 * STEP_BLOCKS,
        )
        stack.callback(scheduler.close)
        assert scheduler.wait_connected(WAIT_S)
        for rank in ranks:
            assert tell(rank, "connect")
        keys = np.random.default_rng(2).bytes(16 * blocks)
        started_s = time.monotonic()
        for first in range(0, blocks, STEP_BLOCKS):
            spec = pickle.dumps(step(scheduler, keys, first, min(STEP_BLOCKS, blocks - first)))
            for rank in ranks:
                send(rank, ("save", spec))
            for rank in ranks:
                assert receive(rank) == [first]
        deadline_s = time.monotonic() + WAIT_S
        while not scheduler.lookup(keys).all():
            assert time.monotonic() < deadline_s, "blocks of four ranks are not published"
            time.sleep(0.001)
        took_s = time.monotonic() - started_s
        rss = resident_bytes(running.process.pid)
    return {
        "write_blocks": blocks,
        "write_blocks_per_s": int(blocks / took_s),
        "write_guard_rss_bytes": rss,
    }


def step(scheduler: SchedulerHandle, keys: bytes, first: int, count: int) -> SaveSpec:
    """The blocks of one engine step, in slots that are granted."""
    deadline_s = time.monotonic() + WAIT_S
    while scheduler.grants_available < count:
        assert time.monotonic() < deadline_s, "no slots are granted"
        scheduler.poll()
        time.sleep(0.0002)
    grants = scheduler.take_grants(count)
    part = keys[16 * first : 16 * (first + count)]
    return SaveSpec(
        job_id=first,
        request_id=f"step-{first}",
        pool_token=grants.pool_token,
        epoch=grants.epoch,
        slots=grants.slots.astype("<i4").tobytes(),
        generations=grants.generations.astype("<u8").tobytes(),
        block_ids=np.arange(count, dtype="<i4").tobytes(),
        keys=part,
        parents=bytes(16) + part[:-16],
        engine_hashes=np.arange(count, dtype="<u8").tobytes(),
        positions=np.arange(count, dtype="<u4").tobytes(),
    )


@contextlib.contextmanager
def rank_process(socket_path: str, rank: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.size", "rank", socket_path, str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def send(process: subprocess.Popen[bytes], call: tuple[Any, ...]) -> None:
    assert process.stdin is not None
    pickle.dump(call, process.stdin)
    process.stdin.flush()


def receive(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    return pickle.load(process.stdout)


def tell(process: subprocess.Popen[bytes], *call: Any) -> Any:
    send(process, call)
    return receive(process)


def rank_main(socket_path: str, rank: int) -> None:
    """One rank: copies what it is told to, and says when that is over."""
    memory = HostBlockMemory([np.full((STEP_BLOCKS, SMALL_PART_BYTES), rank, np.uint8)])
    config = EngineConfig(socket=socket_path, namespace="bench")
    handle = WorkerHandle(config, layout(SMALL_PART_BYTES, RANKS), memory, engine_id="bench", rank=rank)
    while True:
        try:
            verb, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if verb == "connect":
            answer: Any = handle.wait_connected(WAIT_S)
        else:
            handle.submit_save(pickle.loads(arguments[0]))
            handle.wait_saves()
            answer = handle.take_saved_jobs()
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(_common.run("size", measure, __doc__ or ""))
