# SPDX-License-Identifier: Apache-2.0
"""What a death costs: of an engine, for the peers that read its pool; of a guard; and the way back.

Two guards on this host, an engine beside each. One engine is killed while the other pulls from its pool, a
chain every 10 ms and one right after the kill. All processes are real; the killed ones get SIGKILL. The same
is done to NVIDIA's kvcr in the same run (:mod:`bench._peer_failover`). Then an engine of a whole graph is
killed under load, once with KVCR and once without: ``report``.

Figures are medians; ``spread`` has the samples.
"""

from __future__ import annotations

import compileall
import contextlib
import dataclasses
import itertools
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from bench import _common, peer_venv
from bench._blocks import layout
from bench._common import ROOT, cpu_ns, environment
from demo.failover_report import figures as report_figures
from demo.failover_report import show
from demo.metrics import scrape
from demo.scenes.failover import QUICK, Scale, on_and_off
from demo.table import waiting
from kvcr.api import (
    BlockKey,
    BlockStatus,
    EngineConfig,
    HostBlockMemory,
    KeySpace,
    Kvcr,
    Source,
    extend_chain,
)
from kvcr.pool import Pool, writers_of
from kvcr.protocol.peer import Lease, Leased, to_client, to_server

CHAIN_BLOCKS = 8
PART_BYTES = 64 << 10
PULL_EVERY_S = 0.01
WARM_S = 0.25
AFTER_KILL_S = 0.5
"""Pulls are counted for this long after the kill."""
CHAINS_PER_KILL = 80
"""No chain is pulled twice, so that each is really copied."""
START_S = 60.0
PEER_S = 300.0

RESTART_BLOCKS = 100_000
BIG_PART_BYTES = 94 * 2 * 4 * 128 * 2 * 16
"""A block of 16 tokens of Qwen3-235B in bf16: 94 layers, 4 KV heads of 128."""


def chain(number: int) -> list[BlockKey]:
    root = KeySpace("bench", layout(PART_BYTES).model, salt=str(number)).root()
    return extend_chain(root, np.arange(CHAIN_BLOCKS * 16, dtype=np.uint32), 16)


def measure(quick: bool) -> dict[str, Any]:
    """The figures of this benchmark; times are of this machine under its load."""
    directory = Path(tempfile.mkdtemp(prefix="kvcr-bench-", dir="/dev/shm"))
    rounds, idle_s = (3, 5.0) if quick else (10, 20.0)
    try:
        samples = measure_engine_death(directory, rounds, idle_s)
        samples |= measure_guard_restart(directory, rounds=3 if quick else 5)
        samples["idle_cpu_percent"] |= measure_idle_without_engine(directory, idle_s)
    finally:
        shutil.rmtree(directory)
    return {
        "goals": {
            "failed_pulls": 0,
            "first_good_pull_ms": 50,
            "active_ms": 100,
            "guard_restart_100k_s": 1.0,
            "idle_cpu_percent": 1.0,
        },
        **figures(samples),
        "guard_restart_blocks": RESTART_BLOCKS,
        "kvcr": measure_peer(rounds, idle_s),
        "report": measure_graph(quick),
    }


def measure_graph(quick: bool) -> dict[str, Any]:
    """An engine of a whole graph killed in mid-stream, with KVCR and without: what users see of it."""
    scale = QUICK if quick else Scale()
    seen = on_and_off(scale, _common.say, waiting)
    reports = {switch: report_figures(one) for switch, one in seen.items()}
    show({f"KVCR {switch}": report for switch, report in reports.items()}, sys.stderr)
    return {"model": "smollm2-135m-instruct", **dataclasses.asdict(scale), **reports}


def figures(samples: dict[str, Any]) -> dict[str, Any]:
    """Medians of what has several samples, and those samples; everything else as it is."""
    lists = {key: value for key, value in samples.items() if isinstance(value, list)}
    return {
        **samples,
        **{key: round(statistics.median(values), 6) for key, values in lists.items()},
        "spread": {key: _common.summary(values) for key, values in lists.items()},
    }


# --- the same to NVIDIA's kvcr ---------------------------------------------------------------------

KEYS = (
    "failed_pulls",
    "first_good_pull_ms",
    "active_ms",
    "guard_restart_100k_s",
    "engine_restart_restored_s",
    "idle_cpu_percent",
)


def measure_peer(rounds: int, idle_s: float) -> dict[str, Any]:
    """The same keys for kvcr 0.1.1. What it cannot do is None, with ``<key>_reason`` beside it."""
    try:
        seen = _run_peer(
            [str(peer_venv.interpreter()), "-m", "bench._peer_failover", str(rounds), str(idle_s)]
        )
    except (peer_venv.PeerUnavailable, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"version": peer_venv.VERSION, **dict.fromkeys(KEYS), "reason": f"not measured: {error}"}
    good_ms = [kill["first_ms"] for kill in seen["kills"] if kill["first_ms"] is not None]
    samples = {
        "failed_pulls": sum(kill["failed"] for kill in seen["kills"]),
        "first_good_pull_ms": good_ms or None,
        "active_ms": [kill["active_ms"] for kill in seen["kills"]],
        "guard_restart_100k_s": None,
        "engine_restart_restored_s": seen["restored_s"],
        "idle_cpu_percent": {**seen["idle_cpu_percent"], "checking": None},
    }
    reasons = {
        "guard_restart_100k_s_reason": "a restarted service makes a new pool: of a pool with "
        f"{seen['blocks_deposited']} blocks, {seen['blocks_after_guard_restart']} were found after it",
        "idle_cpu_percent_checking_reason": "it has no such state: the end of the pidfd is its proof",
        "failed_pulls_note": "independent pulls every 10 ms from the kill on, until 0.5 s after it at least",
    }
    return {"version": peer_venv.VERSION, **figures(samples), **reasons}


def _run_peer(command: list[str]) -> dict[str, Any]:
    """What it printed. Raises SubprocessError when it failed twice: it may lose a race for a free port."""
    _common.say(f"NVIDIA kvcr {peer_venv.VERSION}: the same deaths")
    environment = peer_venv.environment()
    for attempt in (1, 2):
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=PEER_S, check=attempt == 2
        )
        if not done.returncode:
            break
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# --- the engine dies, and comes back ---------------------------------------------------------------


def measure_engine_death(directory: Path, rounds: int, idle_s: float) -> dict[str, Any]:
    """Kill the engine beside the pool that is read, ``rounds`` times; its successor restores a prefix."""
    chains = rounds * CHAINS_PER_KILL
    slots = chains * CHAIN_BLOCKS * 5 // 4 + 512
    failed: list[int] = []
    first_ms: list[float] = []
    exit_ms: list[float] = []
    active_ms: list[float] = []
    restored_s: list[float] = []
    longest_ms: list[float] = []
    with (
        guard(directory, "a", slots) as a,
        guard(directory, "b", slots) as b,
        engine(a) as first,
        puller(b) as pull,
    ):
        assert first.stdin is not None
        first.stdin.write(b"%d\n" % chains)
        first.stdin.flush()
        answer(first)
        source = Source(a.ready["control"], 0, CHAIN_BLOCKS)
        victim = first
        idle = {"standby": max(idle_cpu_percent([a, b], idle_s))}
        for number in range(rounds):
            result = kill_under_load(victim, a.directory, lambda: pull(source))
            failed.append(result["failed"])
            first_ms.append(result["first_ms"])
            longest_ms.append(result["longest_ms"])
            exit_ms.append(result["exit_ms"])
            active_ms.append(result["active_ms"])
            if not number:
                idle["active"] = idle_cpu_percent([a], idle_s)[0]
            started_s = time.monotonic()
            victim = start_engine(a)
            assert answer(victim) == {"restored": CHAIN_BLOCKS}
            restored_s.append(time.monotonic() - started_s)
            _common.say(f"kill {number + 1}/{rounds}: {result}, restored in {restored_s[-1]:.2f} s")
        victim.kill()
        victim.wait()
    return {
        "failed_pulls": sum(failed),
        "first_good_pull_ms": first_ms,
        "longest_pull_after_kill_ms": longest_ms,
        "engine_exit_ms": exit_ms,
        "active_ms": active_ms,
        "engine_restart_restored_s": restored_s,
        "idle_cpu_percent": idle,
    }


def kill_under_load(
    victim: subprocess.Popen[bytes], pool_dir: Path, pull: Callable[[], bool]
) -> dict[str, Any]:
    """Pull, kill in the middle, and go on pulling; times in ms since the kill."""
    gone_s: list[float] = []
    active_s: list[float] = []
    pidfd = os.pidfd_open(victim.pid)

    def watch() -> None:
        # How long the kernel takes to end the process, most of it for unmapping its pool: not the guard's.
        select.select([pidfd], [], [])
        gone_s.append(time.monotonic())
        os.close(pidfd)
        # The guard removes the lock files of a dead engine as its last act before it is ACTIVE.
        until_s = gone_s[0] + START_S
        while writers_of(pool_dir) and time.monotonic() < until_s:
            time.sleep(0.0005)
        active_s.append(time.monotonic())

    pulls: list[tuple[float, float, bool]] = []
    killed_s = 0.0
    watcher = threading.Thread(target=watch)
    begun_s = time.monotonic()
    while not killed_s or time.monotonic() - killed_s < AFTER_KILL_S:
        if not killed_s and time.monotonic() - begun_s >= WARM_S:
            watcher.start()
            killed_s = time.monotonic()
            victim.kill()
        started_s = time.monotonic()
        good = pull()
        pulls.append((started_s, time.monotonic(), good))
        time.sleep(max(0.0, started_s + PULL_EVERY_S - time.monotonic()))
    victim.wait()
    watcher.join()
    assert not writers_of(pool_dir), f"the guard was not ACTIVE within {START_S:g} s of its engine's end"
    assert all(good for _, ended_s, good in pulls if ended_s < killed_s), "pulls fail without a fault"
    after = [one for one in pulls if one[1] >= killed_s]
    good_s = [ended_s for started_s, ended_s, good in after if good and started_s >= killed_s]
    return {
        "failed": sum(not good for _, _, good in after),
        "pulls": len(after),
        "first_ms": round(1000 * (good_s[0] - killed_s), 3),
        "longest_ms": round(1000 * max(ended_s - started_s for started_s, ended_s, _ in after), 3),
        "exit_ms": round(1000 * (gone_s[0] - killed_s), 3),
        "active_ms": round(1000 * (active_s[0] - killed_s), 3),
    }


@contextlib.contextmanager
def puller(target: Guard) -> Iterator[Callable[[Source], bool]]:
    """This process as the engine beside ``target``: pulls the next chain each time it is called."""
    memory = HostBlockMemory([np.zeros((CHAIN_BLOCKS, PART_BYTES), np.uint8)])
    config = EngineConfig(socket=target.ready["socket"], namespace="bench")
    kv = Kvcr.open(config, layout(PART_BYTES), memory, standing_blocks=1)
    numbers = itertools.count()

    def pull(source: Source) -> bool:
        number = next(numbers)
        statuses = kv.fetch(f"r{number}", chain(number), sources=[source], deadline_s=2.0)
        kv.finish(f"r{number}")
        return bool((statuses == BlockStatus.OK).all())

    yield pull
    kv.close()


@contextlib.contextmanager
def engine(beside: Guard) -> Iterator[subprocess.Popen[bytes]]:
    process = start_engine(beside)
    assert answer(process) == {"restored": 0}
    yield process
    process.kill()
    process.wait()


def start_engine(beside: Guard) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.failover", "engine", beside.ready["socket"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )


def answer(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def engine_main(socket_path: str) -> None:
    """The engine process: says how much of the first chain it could restore, then stores what it is told."""
    blocks = np.zeros((CHAIN_BLOCKS, PART_BYTES), np.uint8)
    config = EngineConfig(socket=socket_path, namespace="bench")
    kv = Kvcr.open(config, layout(PART_BYTES), HostBlockMemory([blocks]))
    restored = kv.deliver("first", chain(0), range(CHAIN_BLOCKS))
    print(json.dumps({"restored": int((restored == BlockStatus.OK).sum())}), flush=True)
    for line in sys.stdin:
        for number in range(int(line)):
            blocks[:] = number % 256
            statuses = kv.deposit(chain(number), range(CHAIN_BLOCKS), wait_s=START_S)
            assert (statuses == BlockStatus.OK).all(), statuses
        print(json.dumps({"stored": int(line)}), flush=True)


# --- the guard dies --------------------------------------------------------------------------------


def measure_guard_restart(directory: Path, rounds: int) -> dict[str, Any]:
    """From starting a guard's process to its first answered lease, with a full pool and with none."""
    # As an installed package has it, wherever this environment keeps Python from writing bytecode.
    compileall.compile_dir(ROOT / "components", quiet=1)
    keys = fill_sparsely(directory / "big")
    full, empty = [], []
    for number in range(rounds):
        full.append(restart(directory, "big", keys))
        shutil.rmtree(directory / "empty", ignore_errors=True)
        empty.append(restart(directory, "empty", keys))
        _common.say(f"guard start {number + 1}/{rounds}: {full[-1]:.2f} s, without a pool {empty[-1]:.2f} s")
    return {
        "guard_restart_100k_s": full,
        "guard_start_empty_s": empty,
    }


def fill_sparsely(pool_dir: Path) -> bytes:
    """A pool whose records are real and whose payload is a hole. Returns some of its keys."""
    shape = layout(BIG_PART_BYTES)
    pool = Pool.create(
        pool_dir, shape, RESTART_BLOCKS * shape.slot_part_bytes, guard_incarnation=1, preallocate=False
    )
    granted = pool.allocate(RESTART_BLOCKS, 0.0)
    keys = np.random.default_rng(1).bytes(16 * RESTART_BLOCKS)
    zeros = np.zeros(RESTART_BLOCKS, np.uint64)
    positions = zeros.astype(np.uint32)
    committed = pool.commit(*granted, keys, keys, zeros, positions, zeros, 0.0).committed
    assert int(committed.sum()) >= RESTART_BLOCKS - 1000, "two full buckets drop a block now and then"
    pool.close()
    return keys[: 16 * 64]


def restart(directory: Path, name: str, keys: bytes) -> float:
    """Seconds from the start of the process to the reply to a lease; then the guard is killed."""
    started_s = time.monotonic()
    with guard(directory, name, 64, "--scrub-bytes-per-s", "0") as running, zmq.Context() as context:
        with context.socket(zmq.DEALER) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(running.ready["control"])
            sock.send(to_server.encode(Lease(1, "bench", 1, keys, 1000, "shm")))
            reply = to_client.decode(sock.recv())
            took_s = time.monotonic() - started_s
        assert name == "empty" or isinstance(reply, Leased), reply
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
    return took_s


# --- processes -------------------------------------------------------------------------------------


class Guard:
    """A running guard."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.process = process
        self.ready: dict[str, Any] = answer(process)


@contextlib.contextmanager
def guard(directory: Path, name: str, slots: int, *flags: str) -> Iterator[Guard]:
    """``python -m kvcr.guard`` with room for so many blocks, if it makes a new pool."""
    command = [
        sys.executable, "-m", "kvcr.guard", "--name", name, "--pool-dir", str(directory / name),
        "--pool-bytes", str(slots * layout(PART_BYTES).slot_part_bytes), "--transport", "shm", *flags,
    ]  # fmt: skip
    with open(directory / f"{name}.log", "ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment())
    try:
        yield Guard(directory / name, process)
    finally:
        process.terminate()
        process.wait()


def measure_idle_without_engine(directory: Path, period_s: float) -> dict[str, float]:
    """A guard that never had an engine, and one that cannot tell whether its engine is dead: it is stopped,
    and the guard before was killed."""
    with guard(directory, "c", 512) as first, engine(first) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        first.process.kill()
        first.process.wait()
        with guard(directory, "c", 512) as second, guard(directory, "d", 512) as never:
            for one, state in ((second, "checking"), (never, "empty")):
                page = scrape(one.ready["metrics"])
                assert page.total("kvcr_guard_state", state=state) == 1, f"not {state}"
            checking, empty = idle_cpu_percent([second, never], period_s)
    return {"empty": empty, "checking": checking}


def idle_cpu_percent(guards: list[Guard], period_s: float) -> list[float]:
    """Of one core, each of the guards, over a period in which nobody asks anything of them."""
    time.sleep(1.0)
    before = [cpu_ns(one.process.pid) for one in guards]
    time.sleep(period_s)
    after = [cpu_ns(one.process.pid) for one in guards]
    return [round(100 * (b - a) / (period_s * 1e9), 3) for a, b in zip(before, after, strict=True)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine_main(sys.argv[2])
    else:
        sys.exit(_common.run("failover", measure, __doc__ or ""))
