# SPDX-License-Identifier: Apache-2.0
"""The measurements of :mod:`bench.failover` on NVIDIA's kvcr; prints one JSON object.

``python -m bench._peer_failover ROUNDS IDLE_S`` under the interpreter of :mod:`bench.peer_venv`. One guard
service, the engine whose pool it keeps, and this process as the peer that pulls from it. Failed pulls are
probed for independently every 10 ms: a caller that waits for each pull would see the first one fail after
``operation_timeout_ms`` (1 s), and later recovery for it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench._peer_kvcr import Node, free_port, hint, succeeded
from kvcr.config import KVCRGuardConfig

CHAIN_BLOCKS = 8
BLOCK_BYTES = 64 << 10
CHAINS = 80
IN_FLIGHT = 40
PULL_EVERY_S = 0.01
WARM_S = 0.25
AFTER_KILL_S = 0.5
"""Pulls are counted for at least this long after the kill."""
PATIENCE_S = 30.0
POOL_GB = 1
DIGEST = "bench"


class Service:
    """``kvcr_service`` with one guard."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "service.sock"
        self.log = directory / "service.log"
        (directory / "pool").mkdir(exist_ok=True)
        command = [
            sys.executable, "-m", "kvcr.kvcr_service", "--socket-path", str(self.socket),
            "--guard-count", "1", "--pool-dir", str(directory / "pool"), "--pool-sizes-gb", str(POOL_GB),
            "--compatibility-digest", DIGEST,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.socket.exists():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"kvcr_service did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)

    def promotions(self) -> int:
        return self.log.read_text(errors="replace").count("KVCR_EVENT guard_promoted")

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Engine:
    """An engine process, and what it said: how much it found in its pool, after how long."""

    def __init__(self, service: Service, port: int) -> None:
        self.started_s = time.monotonic()
        command = [sys.executable, "-m", "bench._peer_failover", "engine", str(service.socket), str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        # NIXL says things on stdout, too.
        line = next((line for line in self.process.stdout if line.startswith(b'{"restored"')), None)
        self.ready_s = time.monotonic() - self.started_s
        if line is None:
            raise RuntimeError(f"the engine ended with {self.process.wait()}")
        self.said = json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def engine_main(socket_path: str, port: int) -> None:
    """Attach; restore the first chain if it is there, else deposit all of them; then serve until killed."""
    numbers = range(CHAINS * CHAIN_BLOCKS)
    node = Node(
        "engine",
        block_bytes=BLOCK_BYTES,
        blocks=len(numbers),
        port=port,
        guard=KVCRGuardConfig(socket_path, 0, DIGEST),
    )
    first = range(CHAIN_BLOCKS)
    restored = 0
    if node.hits(first) == CHAIN_BLOCKS:
        node.memory[:] = 0
        restored = succeeded(node.wait(node.start_deliver(first)))
        assert all((node.memory[i] == content(i)).all() for i in first), "restored other bytes"
    else:
        for number in numbers:
            node.memory[number] = content(number)
        for lo in range(0, len(numbers), 64):
            batch = range(lo, min(lo + 64, len(numbers)))
            assert node.deposit(batch, lo) == len(batch)
    print(json.dumps({"restored": restored}), flush=True)
    # When the benchmark is gone, so are we.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        list(node.kvcr.poll_completed())
        time.sleep(0.001)


def content(number: int) -> int:
    return number % 251


class Puller:
    """This process as the peer: pulls of one chain each, several under way at a time."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._node = Node("peer", block_bytes=BLOCK_BYTES, blocks=IN_FLIGHT * CHAIN_BLOCKS)
        self._under_way: dict[Any, tuple[float, int, range]] = {}
        self._free = list(range(IN_FLIGHT))
        self._count = 0

    def start(self) -> None:
        """Begin one more pull, unless too many are under way."""
        if not self._free:
            return
        place = self._free.pop()
        self._count += 1
        lo = self._count % CHAINS * CHAIN_BLOCKS
        numbers = range(lo, lo + CHAIN_BLOCKS)
        first_slot = place * CHAIN_BLOCKS
        self._node.memory[first_slot : first_slot + CHAIN_BLOCKS] = 255
        self._node.kvcr.submit_hint(hint(self._endpoint, numbers), f"r{self._count}")
        handle = self._node.start_deliver(numbers, first_slot, f"r{self._count}")
        self._under_way[handle] = (time.monotonic(), place, numbers)

    def ended(self) -> Iterator[tuple[float, float, bool]]:
        """Start, end and success of the pulls that ended since the last call."""
        for handle, result in self._node.kvcr.poll_completed():
            if handle not in self._under_way:
                continue
            started_s, place, numbers = self._under_way.pop(handle)
            good = succeeded(result) == CHAIN_BLOCKS
            if good:
                memory = self._node.memory[place * CHAIN_BLOCKS :]
                assert all((memory[i] == content(n)).all() for i, n in enumerate(numbers)), "other bytes"
            self._free.append(place)
            yield started_s, time.monotonic(), good

    def until_good(self) -> tuple[float, int]:
        """Pull until it works; seconds it took, and pulls that failed before."""
        begun_s, failed = time.monotonic(), 0
        while time.monotonic() - begun_s < PATIENCE_S:
            self.start()
            pause_s = time.monotonic() + PULL_EVERY_S
            while time.monotonic() < pause_s:
                for _, ended_s, good in self.ended():
                    if good:
                        return ended_s - begun_s, failed
                    failed += 1
                time.sleep(0.0005)
        raise TimeoutError(f"no good pull within {PATIENCE_S:g} s")


def kill_under_load(engine: Engine, service: Service, puller: Puller) -> dict[str, Any]:
    """Pull, kill in the middle, go on pulling; times in ms since the kill."""
    promoted_before = service.promotions()
    active_s: list[float] = []

    def watch() -> None:
        while service.promotions() == promoted_before and time.monotonic() < begun_s + PATIENCE_S:
            time.sleep(0.001)
        active_s.append(time.monotonic())

    watcher = threading.Thread(target=watch)
    pulls: list[tuple[float, float, bool]] = []
    begun_s = time.monotonic()
    killed_s = next_s = 0.0
    good_after_s: float | None = None
    while not killed_s or time.monotonic() - killed_s < AFTER_KILL_S or good_after_s is None:
        now_s = time.monotonic()
        if now_s > begun_s + PATIENCE_S:
            break
        if not killed_s and now_s - begun_s >= WARM_S:
            watcher.start()
            killed_s = time.monotonic()
            os.kill(engine.process.pid, signal.SIGKILL)
        if now_s >= next_s:
            puller.start()
            next_s = now_s + PULL_EVERY_S
        for pull in puller.ended():
            pulls.append(pull)
            if pull[2] and killed_s and pull[0] >= killed_s:
                good_after_s = good_after_s or pull[1]
        time.sleep(0.0005)
    engine.process.wait()
    watcher.join()
    return {
        "failed": sum(not good for _, ended_s, good in pulls if ended_s >= killed_s),
        "pulls": sum(ended_s >= killed_s for _, ended_s, _ in pulls),
        "first_ms": round(1000 * (good_after_s - killed_s), 3) if good_after_s else None,
        "active_ms": round(1000 * (active_s[0] - killed_s), 3),
    }


def idle_cpu_percent(service: Service, period_s: float) -> float:
    """Of one core, all processes of the service together."""
    time.sleep(1.0)
    before = _cpu_ns(service.process.pid)
    time.sleep(period_s)
    return round(100 * (_cpu_ns(service.process.pid) - before) / (period_s * 1e9), 3)


def _cpu_ns(pid: int) -> int:
    own = sum(int((t / "schedstat").read_text().split()[0]) for t in Path(f"/proc/{pid}/task").iterdir())
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(_cpu_ns(int(child)) for child in children)


def measure(rounds: int, idle_s: float) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="kvcr-bench-peer-", dir="/dev/shm"))
    service, engine = Service(directory), None
    try:
        idle = {"unclaimed": idle_cpu_percent(service, idle_s)}
        port = free_port()
        engine = Engine(service, port)
        puller = Puller(f"tcp://127.0.0.1:{port}")
        kills: list[dict[str, Any]] = []
        restored_s: list[float] = []
        again: list[tuple[float, int]] = []
        for number in range(rounds):
            again.append(puller.until_good())
            if not number:
                idle["standby"] = idle_cpu_percent(service, idle_s)
            kills.append(kill_under_load(engine, service, puller))
            if not number:
                idle["active"] = idle_cpu_percent(service, idle_s)
            engine = Engine(service, port)
            assert engine.said["restored"] == CHAIN_BLOCKS, engine.said
            restored_s.append(engine.ready_s)
            say(f"NVIDIA kvcr, kill {number + 1}/{rounds}: {kills[-1]}, restored in {restored_s[-1]:.2f} s")
        again.append(puller.until_good())
        kept = blocks_after_a_guard_restart(directory, service, engine, port)
        return {
            "kills": kills,
            "restored_s": restored_s,
            "pulls_again": [{"after_s": round(s, 3), "failed": failed} for s, failed in again[1:]],
            "idle_cpu_percent": idle,
            "blocks_deposited": CHAINS * CHAIN_BLOCKS,
            "blocks_after_guard_restart": kept,
        }
    finally:
        if engine is not None and engine.process.poll() is None:
            engine.kill()
        if service.process.poll() is None:
            service.stop()
        shutil.rmtree(directory)


def blocks_after_a_guard_restart(directory: Path, service: Service, engine: Engine, port: int) -> int:
    """Kill the guard's service and start another one on the same directory: what its engine still finds."""
    service.stop(signal.SIGKILL)
    engine.kill()
    service.socket.unlink(missing_ok=True)
    second = Service(directory)
    try:
        engine = Engine(second, port)
        engine.kill()
        return int(engine.said["restored"])
    finally:
        second.stop()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        engine_main(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(measure(int(sys.argv[1]), float(sys.argv[2]))), flush=True)
    # NIXL's threads outlive an orderly exit.
    sys.stdout.flush()
    os._exit(0)
