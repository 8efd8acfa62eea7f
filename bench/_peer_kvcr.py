# SPDX-License-Identifier: Apache-2.0
"""One process of NVIDIA's kvcr, as its own tests of the public API would build it.

Runs under the interpreter of :mod:`bench.peer_venv`, where ``kvcr`` is NVIDIA's package. Imports nothing of
ours.
"""

from __future__ import annotations

import mmap
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from kvcr.control_channels import ZmqPeerControlChannel
from kvcr.types import BlockKey, MemoryRef, OpEntryStatus, RegionDescriptor

from kvcr import KVCR, KVCRBindings
from kvcr.config import KVCRBackendConfigs, KVCRConfig, LocalDramOptions

LOOPBACK = "127.0.0.1"
POLL_S = 0.0001
"""Between two looks at what completed: its interface has no way to wait."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "big"))


def hint(endpoint: str, numbers: Iterable[int]) -> dict[str, Any]:
    """The router's word that ``endpoint`` has these blocks."""
    payload = {"source_control_endpoint": endpoint, "block_hashes": list(numbers)}
    fetch = {"action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "actions": [fetch]}


class _Numbers:
    """Keys of these benchmarks are numbers."""

    def encode(self, number: int) -> BlockKey:
        return key(number)

    def decode(self, block: BlockKey) -> int:
        return int.from_bytes(block, "big")


class Node:
    """An engine with ``blocks`` of memory of its own and, if wanted, a pool of ``pool_blocks`` beside it."""

    def __init__(
        self,
        name: str,
        *,
        block_bytes: int,
        blocks: int,
        pool_blocks: int = 0,
        port: int = 0,
        guard: Any = None,
        operation_timeout_ms: int = 1000,
        abandon_timeout_ms: int = 5000,
    ) -> None:
        """``guard``: a KVCRGuardConfig, whose service then owns the pool. Time-outs: the defaults of kvcr."""
        self._name = name
        self._pins: list[tuple[int, list[BlockKey]]] = []
        self._pin_count = 0
        self._map = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = np.frombuffer(self._map, np.uint8).reshape(blocks, block_bytes)
        """uint8[blocks, block_bytes]: the engine's memory."""
        self.memory[:, ::4096] = 1  # every page is there before anything is measured
        pool = None
        if pool_blocks:
            self._pool = mmap.mmap(-1, pool_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pool = np.frombuffer(self._pool, np.uint8)
            pool[::4096] = 1
        channel = ZmqPeerControlChannel(LOOPBACK, port or free_port(), LOOPBACK)
        self.endpoint: str = channel.endpoint
        regions = [RegionDescriptor(addr=self.memory.ctypes.data, size=block_bytes, count=blocks, label="")]
        self.kvcr = KVCR(
            KVCRConfig(
                nixl_agent_name=name,
                pool_layouts=[("", block_bytes)],
                operation_timeout_ms=operation_timeout_ms,
                abandon_timeout_ms=abandon_timeout_ms,
                nixl_listen_port=free_port(),
            ),
            KVCRBindings(
                request_pin=self._request_pin,
                poll_pin_results=self._poll_pins,
                release_pin=lambda _handle: True,
                framework_control=channel,
                key_adapter=_Numbers(),
            ),
            KVCRBackendConfigs(
                framework_regions=regions,
                local_dram=LocalDramOptions(pools=[("", pool.ctypes.data, pool.nbytes)])
                if pool is not None
                else None,
            ),
            guard,
        )

    def deposit(self, numbers: range, first_slot: int = 0) -> int:
        """Copy blocks of the engine's memory into the pool; returns how many it took."""
        entries = {key(number): [self._ref(first_slot + i)] for i, number in enumerate(numbers)}
        return succeeded(self.wait(self.kvcr.deposit(entries)))

    def start_deliver(self, numbers: range, first_slot: int = 0, request: str = "") -> Any:
        """Have blocks copied into the engine's memory, from wherever they are; returns a handle."""
        entries = {key(number): [self._ref(first_slot + i)] for i, number in enumerate(numbers)}
        return self.kvcr.deliver(entries, request) if request else self.kvcr.deliver(entries)

    def hits(self, numbers: range) -> int:
        """Blocks that are resident here."""
        return sum(status.value == "HIT" for status, _ in self.kvcr.query([key(n) for n in numbers]))

    def wait(self, handle: Any, timeout_s: float = 60.0) -> dict[Any, Any]:
        """The result of one operation, when nothing else is under way. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for done, result in self.kvcr.poll_completed():
                if done == handle:
                    return result
            time.sleep(POLL_S)
        raise TimeoutError(f"{self._name}: nothing after {timeout_s:g} s")

    def _ref(self, slot: int) -> MemoryRef:
        return MemoryRef(end_point_name=self._name, element_index=slot)

    def _request_pin(self, keys: Iterable[BlockKey]) -> int:
        self._pin_count += 1
        self._pins.append((self._pin_count, list(keys)))
        return self._pin_count

    def _poll_pins(self) -> Iterator[Any]:
        """No block of the engine's own memory is offered to peers."""
        pending, self._pins = self._pins, []
        for number, keys in pending:
            yield number, (f"pin{number}", dict.fromkeys(keys))


def succeeded(result: dict[Any, Any]) -> int:
    return sum(entry.status is OpEntryStatus.SUCCESS for entry in result.values())
