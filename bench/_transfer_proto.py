# SPDX-License-Identifier: Apache-2.0
"""How fast a pull over shared memory could be: two processes, a socket, and nothing else.

A holder answers keys with the places of blocks in its tmpfs file; the reader copies them from its map of that
file and says that it is done. No checksum, no slot, no commit, no engine: a floor, not a product.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import tempfile
import time

import numpy as np

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

POOL_BYTES = 256 << 20
KEY_BYTES = 16
_DONE = b"done"


def pulls(block_bytes: int, count: int, times: int) -> list[float]:
    """Seconds of each of ``times`` pulls of ``count`` blocks."""
    blocks = POOL_BYTES // block_bytes
    keys = [os.urandom(KEY_BYTES) for _ in range(blocks)]
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(POOL_BYTES)
        pool = np.frombuffer(mmap.mmap(file.fileno(), POOL_BYTES), np.uint8)
        pool[:] = 3
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _hold(theirs, {key: slot for slot, key in enumerate(keys)})
        theirs.close()
        target = np.ones(POOL_BYTES, np.uint8)
        source_at, target_at = pool.ctypes.data, target.ctypes.data
        took_s = []
        for number in range(times + 5):
            first = number * count % (blocks - count + 1)
            wanted = keys[first : first + count]
            started_s = time.perf_counter()
            ours.send(b"".join(wanted))
            for index, slot in enumerate(np.frombuffer(ours.recv(65536), np.int32).tolist()):
                _memcpy(
                    target_at + (first + index) * block_bytes, source_at + slot * block_bytes, block_bytes
                )
            ours.send(_DONE)
            ours.recv(64)
            took_s.append(time.perf_counter() - started_s)
        ours.close()
        os.waitpid(pid, 0)
    return took_s[5:]


def _hold(sock: socket.socket, slots: dict[bytes, int]) -> None:
    while message := sock.recv(65536):
        if message == _DONE:
            sock.send(_DONE)
            continue
        keys = (message[at : at + KEY_BYTES] for at in range(0, len(message), KEY_BYTES))
        sock.send(np.array([slots[key] for key in keys], np.int32).tobytes())
    os._exit(0)
