# SPDX-License-Identifier: Apache-2.0
"""What the kernel's TCP does on this machine: the bytes of some blocks over one connection on loopback.

Without leases, checksums or a pool: no pull over TCP on one host can be much faster, as each byte is copied
into the kernel and out of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]

RECEIVE_BYTES = 1 << 20

Times = dict[str, list[float]]


def pulls(block_bytes: int, reps: Mapping[int, int]) -> dict[int, Times]:
    """``reps[n]`` times the bytes of ``n`` blocks, each after a copy of as many in this process."""
    most = max(reps) * block_bytes
    source, target = np.ones(most, np.uint8), np.ones(most, np.uint8)
    result: dict[int, Times] = {}
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "bench._transfer_socket", str(server.getsockname()[1]), str(most)]
        sender = stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=dict(os.environ)))
        sock, _ = server.accept()
        stack.enter_context(sock)
        for blocks, times in reps.items():
            nbytes = blocks * block_bytes
            row: Times = {"memcpy": [], "pull": []}
            for number in range(times + 1):
                started_s = time.perf_counter()
                np.copyto(target[:nbytes], source[:nbytes])
                copied_s = time.perf_counter()
                sock.sendall(nbytes.to_bytes(8, "little"))
                left = memoryview(target)[:nbytes]
                while left:
                    left = left[sock.recv_into(left[:RECEIVE_BYTES]) :]
                ended_s = time.perf_counter()
                if number:
                    row["memcpy"].append(copied_s - started_s)
                    row["pull"].append(ended_s - copied_s)
            result[blocks] = row
        sock.shutdown(socket.SHUT_WR)
        sender.wait()
    return result


def send(port: int, most: int) -> None:
    """The other process: as many bytes as are asked for, until nobody asks."""
    content = np.ones(most, np.uint8)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while asked := sock.recv(8, socket.MSG_WAITALL):
            sock.sendall(memoryview(content)[: int.from_bytes(asked, "little")])


if __name__ == "__main__":
    send(int(sys.argv[1]), int(sys.argv[2]))
