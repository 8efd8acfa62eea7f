# SPDX-License-Identifier: Apache-2.0
"""The memory of an engine that computes nothing: blocks hold what their keys say."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvcr.api import (
    BlockStatus,
    EngineConfig,
    HostBlockMemory,
    KeySpace,
    Kvcr,
    Layout,
    extend_chain,
)

MODEL = "tiny@test+0"
PART_BYTES = 4096
BLOCKS = 128
PATIENCE_S = 10.0


def layout(block_size: int) -> Layout:
    return Layout(
        model=MODEL,
        dtype="float32",
        block_size=block_size,
        layers=2,
        kv_heads=2,
        head_size=16,
        part_bytes=PART_BYTES,
        engine="toy",
    )


class ToyEngine:
    """One rank beside one guard. Any thread, one request at a time."""

    def __init__(self, socket_path: str, block_size: int) -> None:
        self._block_size = block_size
        self._memory = np.zeros((BLOCKS, PART_BYTES), np.uint8)
        self._lock = threading.Lock()
        config = EngineConfig(socket=socket_path)
        self._kv = Kvcr.open(
            config, layout(block_size), HostBlockMemory([self._memory]), standing_blocks=16, wait_s=60.0
        )
        assert self._kv.connected, "no guard"

    def serve(self, request_id: str, tokens: list[int], hint: Any) -> dict[str, int]:
        """Blocks of the prompt by where they came from: the pool, peers, or nowhere (``computed``)."""
        count = max(0, len(tokens) - 1) // self._block_size
        root = KeySpace("dynamo", MODEL).root()
        keys = extend_chain(root, np.array(tokens[: count * self._block_size], np.uint32), self._block_size)
        with self._lock:
            local = self._leading(self._kv.query(keys))
            if hint is not None:
                self._kv.submit_hint(request_id, hint, keys)
            statuses = self._kv.deliver(request_id, keys, range(count), deadline_s=PATIENCE_S)
            self._kv.finish(request_id)
            loaded = self._leading(statuses)
            wrong = sum(bool((self._memory[row] != self._content(keys[row])).any()) for row in range(loaded))
            for row in range(loaded, count):
                self._memory[row] = self._content(keys[row])
            kept = 0 if _no_retain(hint) else count
            stored = self._kv.deposit(keys[:kept], range(kept), root=root, wait_s=PATIENCE_S)
        return {
            "local": local,
            "fetched": loaded - local,
            "computed": count - loaded,
            "wrong": wrong,
            "stored": int((stored == BlockStatus.OK).sum()),
        }

    @staticmethod
    def _leading(statuses: Any) -> int:
        bad = np.flatnonzero(statuses != BlockStatus.OK)
        return int(bad[0]) if len(bad) else len(statuses)

    @staticmethod
    def _content(key: bytes) -> Any:
        return np.frombuffer((key * (PART_BYTES // len(key)))[:PART_BYTES], np.uint8)


def _no_retain(hint: Any) -> bool:
    return hint is not None and any(action["payload"].get("no_retain") for action in hint["actions"])
