# SPDX-License-Identifier: Apache-2.0
"""An engine of one rank in a process of its own, on :mod:`kvcr.api`, that can be stopped and killed.

As a script it takes one JSON list a line, ``[verb, salt, count]``, and answers with one value a line;
:class:`MortalEngine` is the other end. Blocks hold what their keys say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from engine_client import COMPONENTS, LAYOUT, chain, content

from kvcr.api import BlockStatus, EngineConfig, HostBlockMemory, Kvcr

BLOCKS = 64
ANSWER_S = 60.0


class MortalEngine:
    """The process; ended with the context."""

    def __init__(self, socket_path: str, prefix: Sequence[str] = ()) -> None:
        """``prefix``: a command that runs the engine, e.g. in another namespace."""
        paths = os.pathsep.join([str(COMPONENTS), os.path.dirname(__file__)])
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__, socket_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
        )
        assert self._read() == "up"

    @property
    def pid(self) -> int:
        return self._process.pid

    def deposit(self, salt: str, count: int) -> int:
        """How many blocks of a chain are committed then."""
        return int(self._ask("deposit", salt, count))

    def read(self, salt: str, count: int) -> int:
        """How many blocks of a chain are in the pool, with the right bytes."""
        return int(self._ask("read", salt, count))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> MortalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, "the engine ended, or did not answer"
        return json.loads(line)


def main(socket_path: str) -> None:
    memory = np.zeros((BLOCKS, LAYOUT.part_bytes), np.uint8)
    config = EngineConfig(socket=socket_path, namespace="test")
    kv = Kvcr.open(config, LAYOUT, HostBlockMemory([memory]), standing_blocks=8)
    print(json.dumps("up"), flush=True)
    for line in sys.stdin:
        verb, salt, count = json.loads(line)
        root, keys = chain(count, salt)
        if verb == "deposit":
            for row, key in enumerate(keys):
                memory[row] = content(key, LAYOUT.part_bytes)
            statuses = kv.deposit(keys, range(count), root=root, wait_s=10.0)
            good = int((statuses == BlockStatus.OK).sum())
        else:
            memory[:count] = 0xAA
            statuses = kv.deliver(salt, keys, range(count), deadline_s=10.0)
            good = sum(
                status == BlockStatus.OK and bool((memory[row] == content(key, LAYOUT.part_bytes)).all())
                for row, (key, status) in enumerate(zip(keys, statuses.tolist(), strict=True))
            )
        print(json.dumps(good), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
