# SPDX-License-Identifier: Apache-2.0
"""One tensor-parallel rank of an engine in a process of its own, on :class:`kvcr.api.WorkerHandle`.

As a script it reads pickled calls on stdin and answers on stdout; :class:`Rank` is the other end. A block
holds what its key and the rank say. ``break_copies`` makes the rank fail as a broken device would.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_client import COMPONENTS, content

from kvcr.api import EngineConfig, HostBlockMemory, Layout, LoadSpec, SaveSpec, WorkerHandle

ANSWER_S = 60.0


class Rank:
    """The process of one rank; ended with the context."""

    def __init__(self, socket_path: str, layout: Layout, engine_id: str, rank: int, blocks: int) -> None:
        self.rank = rank
        paths = os.pathsep.join([str(COMPONENTS), str(Path(__file__).parent)])
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.call(socket_path, layout, engine_id, rank, blocks)

    def call(self, *call: Any) -> None:
        """Send a call, without waiting for its answer."""
        assert self.process.stdin is not None
        pickle.dump(call, self.process.stdin)
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)

    def ask(self, *call: Any) -> Any:
        self.call(*call)
        return self.answer()

    def save(self, spec: SaveSpec, keys: Sequence[bytes]) -> None:
        """Fill engine memory with these blocks and copy them to their slots; returns when that is over."""
        assert self.ask("save", spec, list(keys)) == [spec.job_id]

    def load(self, spec: LoadSpec) -> None:
        """Start a load; :meth:`loaded` has the result."""
        assert self.ask("load", spec) is None

    def loaded(self, keys: Sequence[bytes]) -> tuple[list[int], float, list[bool]]:
        """Statuses, seconds that the load took, and which of the blocks hold what they should."""
        statuses, seconds, right = self.ask("loaded", list(keys))
        return statuses, seconds, right

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue


class _Memory(HostBlockMemory):
    """Fails on demand, in ``store`` or in ``load``."""

    broken = ""

    def store(self, slots: Any, slot_ids: Any, block_ids: Any, fence: Any = None) -> None:
        if self.broken == "store":
            raise OSError("this device was told to fail")
        super().store(slots, slot_ids, block_ids, fence)

    def load(self, slots: Any, slot_ids: Any, block_ids: Any, fence: Any = None) -> None:
        if self.broken == "load":
            raise OSError("this device was told to fail")
        super().load(slots, slot_ids, block_ids)


class _Worker:
    def __init__(self, socket_path: str, layout: Layout, engine_id: str, rank: int, blocks: int) -> None:
        self.array = np.zeros((blocks, layout.part_bytes), np.uint8)
        self.memory = _Memory([self.array])
        config = EngineConfig(socket=socket_path, namespace="test")
        self.handle = WorkerHandle(config, layout, self.memory, engine_id=engine_id, rank=rank)
        self.rank = rank
        self.started_s = 0.0

    def connected(self) -> bool:
        return self.handle.wait_connected(ANSWER_S)

    def break_copies(self, which: str) -> None:
        self.memory.broken = which

    def save(self, spec: SaveSpec, keys: list[bytes]) -> list[int]:
        for row, key in zip(np.frombuffer(spec.block_ids, "<i4").tolist(), keys, strict=True):
            self.array[row] = self._content(key)
        self.handle.submit_save(spec)
        self.handle.wait_saves()
        return self.handle.take_saved_jobs()

    def load(self, spec: LoadSpec) -> None:
        self.array[:] = 0xAA
        self.started_s = time.monotonic()
        self.handle.submit_load(spec)

    def loaded(self, keys: list[bytes]) -> tuple[list[int], float, list[bool]]:
        while not (results := self.handle.take_loads()):
            time.sleep(0.001)
        took_s = time.monotonic() - self.started_s
        (result,) = results
        rows = result.block_ids.tolist()
        right = [
            bool((self.array[row] == self._content(key)).all()) for row, key in zip(rows, keys, strict=True)
        ]
        return result.statuses.tolist(), took_s, right

    def _content(self, key: bytes) -> Any:
        return content(key + bytes([self.rank]), self.array.shape[1])


def main() -> None:
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What libraries print must not get between the answers.
    os.dup2(2, 1)
    worker = _Worker(*pickle.load(calls))
    while True:
        try:
            verb, *arguments = pickle.load(calls)
        except EOFError:
            os._exit(0)
        pickle.dump(getattr(worker, verb)(*arguments), answers)
        answers.flush()


if __name__ == "__main__":
    main()
