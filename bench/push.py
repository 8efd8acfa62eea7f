# SPDX-License-Identifier: Apache-2.0
"""Pull or push over TCP: a NIXL READ by the destination against a NIXL WRITE by the source.

Two processes, agents made as a guard makes them, pools in shared memory, UCX held to TCP. Every round has a
READ, a WRITE with its notification, and a memcpy of the same blocks, one after the other; the figures are
medians of the rounds' ratios. ``push_over_pull`` decides whether guards should be able to push.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench._common import run

SHAPES = ((64, 256 << 10), (32, 1 << 20), (16, 2560 << 10))
ROUNDS, QUICK_ROUNDS = 25, 7
SETTINGS = {"512k segments": {"UCX_TCP_TX_SEG_SIZE": "512k", "UCX_TCP_RX_SEG_SIZE": "512k"}, "UCX's own": {}}


class Side:
    """One process's pool, and an agent on it."""

    def __init__(self, name: str, blocks: int, block_bytes: int) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.blocks, self.block_bytes = blocks, block_bytes
        self.memory = mmap.mmap(-1, blocks * block_bytes)
        self.array = np.frombuffer(self.memory, np.uint8).reshape(blocks, block_bytes)
        self.array[:] = np.arange(blocks, dtype=np.uint8)[:, None]
        self.address = int(self.array.__array_interface__["data"][0])
        self.agent = nixl_agent(
            name,
            nixl_agent_config(
                enable_prog_thread=False, enable_listen_thread=False, num_threads=0, backends=["UCX"]
            ),
        )
        self.agent.register_memory([(self.address, len(self.memory), 0, "")], "DRAM")
        self.grid = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(self.address), "DRAM")
        self.remote: Any = None

    def _rows(self, address: int) -> Any:
        return np.array([[address, self.block_bytes, 0, self.block_bytes, self.blocks]], np.uint64)

    def meet(self, metadata: bytes, address: int) -> None:
        name = self.agent.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        self.remote = self.agent.prep_xfer_dlist(name, self._rows(address), "DRAM")

    def move(self, operation: str, note: bytes = b"") -> None:
        """All blocks, to the end."""
        every = np.arange(self.blocks, dtype=np.int32)
        handle = self.agent.make_prepped_xfer(operation, self.grid, every, self.remote, every, note)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"{operation} ended in state {state}")
        handle.release()


def source() -> None:
    """The other process: answers READs, and pushes when told to."""
    blocks, block_bytes = int(sys.argv[2]), int(sys.argv[3])
    sock = socket.socket(fileno=int(sys.argv[4]))
    side = Side("source", blocks, block_bytes)
    metadata = side.agent.get_agent_metadata()
    sock.sendall(struct.pack("<QI", side.address, len(metadata)) + metadata)
    address, size = struct.unpack("<QI", sock.recv(12, socket.MSG_WAITALL))
    side.meet(sock.recv(size, socket.MSG_WAITALL), address)
    sock.setblocking(False)
    while True:
        side.agent.get_new_notifs()
        try:
            order = sock.recv(1)
        except BlockingIOError:
            continue
        if not order:
            return
        side.move("WRITE", b"pushed")


def measure_shape(blocks: int, block_bytes: int, rounds: int, settings: dict[str, str]) -> dict[str, Any]:
    """One shape in fresh processes: UCX reads its environment when it is loaded."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "UCX_TLS": "tcp,self", **settings}
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.push", "source", str(blocks), str(block_bytes), str(theirs.fileno())],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    try:
        side = Side("destination", blocks, block_bytes)
        address, size = struct.unpack("<QI", ours.recv(12, socket.MSG_WAITALL))
        side.meet(ours.recv(size, socket.MSG_WAITALL), address)
        metadata = side.agent.get_agent_metadata()
        ours.sendall(struct.pack("<QI", side.address, len(metadata)) + metadata)
        spare = np.empty_like(side.array)

        def push() -> None:
            ours.sendall(b"p")
            while not side.agent.get_new_notifs():
                pass

        def copy() -> None:
            np.copyto(spare, side.array)

        def pull() -> None:
            side.move("READ")

        for warm in (pull, push, copy):
            warm()
        times: dict[str, list[float]] = {"pull": [], "push": [], "memcpy": []}
        for _ in range(rounds):
            for name, function in (("pull", pull), ("push", push), ("memcpy", copy)):
                times[name].append(_timed(function))
    finally:
        ours.close()
        child.wait(20)
    ratio = [p / q for p, q in zip(times["pull"], times["push"], strict=True)]
    return {
        "blocks": blocks,
        "block_bytes": block_bytes,
        "pull_over_memcpy": _median(times["memcpy"], times["pull"]),
        "push_over_memcpy": _median(times["memcpy"], times["push"]),
        "push_over_pull": round(statistics.median(ratio), 2),
        "pull_gb_per_s": round(blocks * block_bytes / statistics.median(times["pull"]) / 1e9, 2),
    }


def _median(these: list[float], those: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(these, those, strict=True)), 2)


def _timed(function: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def measure(quick: bool) -> dict[str, Any]:
    """A row for each shape and setting, each in a process of its own."""
    rows = []
    for setting, environment in SETTINGS.items():
        for blocks, block_bytes in SHAPES:
            done = subprocess.run(
                [sys.executable, "-m", "bench.push", "shape", str(blocks), str(block_bytes),
                 str(QUICK_ROUNDS if quick else ROUNDS), json.dumps(environment)],
                env={**os.environ, "UCX_TLS": "tcp,self", **environment},
                stdout=subprocess.PIPE, check=True, timeout=120,
            )  # fmt: skip
            row = {"setting": setting, **json.loads(done.stdout.splitlines()[-1])}
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    ours = [row["push_over_pull"] for row in rows if row["setting"] == "512k segments"]
    return {"push_over_pull": round(statistics.median(ours), 2), "rows": rows}


if __name__ == "__main__":
    if sys.argv[1:2] == ["source"]:
        source()
        os._exit(0)
    if sys.argv[1:2] == ["shape"]:
        figures = measure_shape(*(int(word) for word in sys.argv[2:5]), settings=json.loads(sys.argv[5]))
        print(json.dumps(figures), flush=True)
        os._exit(0)
    raise SystemExit(run("push", measure, "Pull or push over TCP, which decides how guards transfer."))
