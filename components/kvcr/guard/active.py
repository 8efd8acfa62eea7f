# SPDX-License-Identifier: Apache-2.0
"""A Fetch under way, and what is left of it when it is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcr.guard.choosing import PeerContext
from kvcr.guard.link import PeerLink
from kvcr.guard.loop import Timer
from kvcr.guard.pulls import Indices, Pull
from kvcr.guard.tracing import FetchTrace
from kvcr.guard.transit import Handover
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol.engine import BlockStatus, Fetch, ToEngine


class Asker(Protocol):
    """The engine, as a fetch sees it."""

    def broadcast(self, message: ToEngine) -> None:
        """Send to every process of the engine."""


@dataclass(slots=True)
class Account:
    """What a pull did at one source, told to it when the pull ends."""

    leases: list[int] = field(default_factory=list)
    blocks: int = 0
    transport: str = ""
    corrupt_slots: list[int] = field(default_factory=list)
    corrupt_generations: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Active:
    """A Fetch under way."""

    number: int
    fetch: Fetch
    pull: Pull
    hashes: npt.NDArray[np.uint64]
    keys: list[bytes]
    parents: bytes
    """16 bytes for each key: the one before it"""
    asker: Asker
    answer: Callable[[ToEngine], None]
    """To the scheduler connection that asked."""
    origin: object
    """That connection."""
    links: list[PeerLink]
    pool: Pool
    context: PeerContext
    owned: npt.NDArray[np.bool_]
    """Blocks that others may be waiting for."""
    accounts: dict[int, Account] = field(default_factory=dict)
    timers: list[Timer] = field(default_factory=list)
    steps: int = 0
    reported: bool = False
    """The final FetchProgress was sent."""
    pulled: dict[str, int] = field(default_factory=dict)
    """Blocks by transport."""
    cancelled: bool = False
    dead: set[int] = field(default_factory=set)
    """Blocks invalidated while they were on their way: not published when they arrive."""

    handover: Handover | None = None
    """Of a no-retain Fetch: blocks the engine has not taken yet."""
    lease_of: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Lease at its source of each block, 0: none."""
    claim: int = 0
    """Blocks that are leased and need a slot."""
    given_up: bool = False
    """Stopped, as recomputing is faster; steps under way may still bring something."""
    untold: bool = False
    """Blocks became OK without a step of ours, and the engine was not told."""
    trace: FetchTrace | None = None
    over: bool = False
    """Closed: whatever still comes for it is too late."""

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block, all ranks."""
        return self.context.local.block_bytes

    def learn(self, indices: Indices, hashes: npt.NDArray[np.uint64]) -> None:
        """Take a source's engine hashes of these blocks where whoever asked did not know them."""
        self.hashes[indices] = np.where(self.hashes[indices] == 0, hashes, self.hashes[indices])

    def account(self, source: int) -> Account:
        """What was done at one of its sources."""
        return self.accounts.setdefault(source, Account())

    def key_blob(self, indices: Indices) -> bytes:
        """Keys of these blocks, 16 bytes each."""
        return _rows(self.fetch.keys)[indices].tobytes()

    def parent_blob(self, indices: Indices) -> bytes:
        """Keys of the blocks before these, 16 bytes each."""
        return _rows(self.parents)[indices].tobytes()

    def source_failed(self, source: int, reason: str) -> None:
        """Nothing more is to be had from this source."""
        self.pull.source_failed(source, BlockStatus.GONE, f"{self.links[source].label}: {reason}")

    def moved_at(self, source: int, transport: str, started_s: float, good: int, bad: int) -> None:
        """For the trace: a step that ended."""
        if self.trace is not None:
            self.trace.moved(
                self.links[source].label, transport, started_s, good, good * self.block_bytes, bad
            )

    def count_by_transport(self, transport: str, blocks: int) -> None:
        """``blocks`` more arrived by this transport."""
        self.pulled[transport] = self.pulled.get(transport, 0) + blocks


@dataclass(frozen=True, slots=True)
class Ended:
    """A Fetch that is over: no step of it is under way, and its leases are given back."""

    fetch: Fetch
    pool: Pool
    statuses: npt.NDArray[np.uint8]
    """:class:`BlockStatus` of each key of the fetch"""
    links: list[PeerLink]
    """to each of its sources"""
    copied_blocks: int
    byte_count: int
    seconds: float
    cancelled: bool
    reason: str


def _rows(blob: bytes) -> npt.NDArray[np.void]:
    """A blob of keys as an array of them."""
    return np.frombuffer(blob, f"V{KEY_BYTES}")
