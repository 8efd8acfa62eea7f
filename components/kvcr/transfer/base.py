# SPDX-License-Identifier: Apache-2.0
"""The one interface of all transports: read a bounded step of blocks out of a peer's pool into ours.

A transport only moves and verifies bytes. It never touches a directory: slots are allocated before the
step and committed after it, both by the authority thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcr.layout import Layout
from kvcr.pool import checksum_parts
from kvcr.protocol.engine import BlockStatus

STEP_BYTES = 8 << 20
"""Most bytes of one step: pulls take turns by steps, and what one brought is published and told at once."""

COPY_STEP_BYTES = 16 << 20
"""The same for a copy between processes of this host. A step costs the guard 0.5 ms of the processor that
copying needs: 32 blocks of 1 MiB over CMA reached 0.43 of memcpy in steps of 8 MiB, 0.54 in steps of 16."""

MAX_STEP_PARTS = 8192
"""Blocks times ranks, however small they are: a step is one message to the NIXL process, and one back."""

INLINE_BYTES = 2 << 20
"""Most that the authority thread hashes, or copies and hashes, itself: 0.1 to 0.5 ms of its time. Handing a
job to a mover and its result back takes longer than that when the machine is busy."""

Post = Callable[[Callable[[], None]], None]
"""Hand a closure to the authority thread; may be called from any thread, never waits."""


@dataclass(frozen=True, slots=True)
class Step:
    """Blocks to read from one peer. All arrays have one entry a block, in prefix order."""

    pull: int
    source: int
    indices: npt.NDArray[np.int64]
    """Which blocks of the pull these are."""
    local_slots: npt.NDArray[np.int32]
    local_generations: npt.NDArray[np.uint64]
    remote_slots: npt.NDArray[np.int32]
    remote_generations: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    """[blocks, ranks], as the source leased them."""
    deadline_s: float
    """On ``time.monotonic``."""

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step. The bytes of a block with status OK are in its local slot and verified."""

    step: Step
    statuses: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint64]
    """[blocks, ranks] of what arrived."""
    seconds: float
    reason: str = ""
    corrupt: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """Blocks whose bytes differ from what the source leased; empty when none was compared."""
    slots_in_flight: bool = False
    """The slots may still be written to: keep them until the transport's ``quiet`` callback."""


class Transport(Protocol):
    """One way to one peer."""

    name: str
    """``shm``, ``nixl`` or a plugin's; label of the metrics."""

    def read(self, step: Step, done: Callable[[StepResult], None], quiet: Callable[[Step], None]) -> None:
        """Start a step; called by the authority thread, never waits.

        ``done`` is called once, on the authority thread, at ``step.deadline_s`` plus a little at the
        latest. When its result has ``slots_in_flight``, ``quiet`` follows once nothing can write to the
        local slots any more; until then they must not be reused.
        """

    def close(self) -> None:
        """Forget the peer. Steps under way still end."""


class LocalRegions:
    """Our own pool's bytes, as movers see them: one writable array per rank. Safe to share by threads,
    as every slot of a step belongs to that step alone. Rows behind the pool's slots are the canary's."""

    def __init__(
        self, layout: Layout, arrays: Sequence[npt.NDArray[np.uint8]], addresses: Sequence[int]
    ) -> None:
        self.layout = layout
        self.arrays = list(arrays)
        """[rows, slot_part_bytes] uint8 for each rank."""
        self.addresses = list(addresses)

    @property
    def slots(self) -> int:
        return int(self.arrays[0].shape[0])

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block, all ranks."""
        return self.layout.part_bytes * self.layout.ranks

    @property
    def blocks_per_step(self) -> int:
        return self.blocks_of(STEP_BYTES)

    def blocks_of(self, step_bytes: int) -> int:
        """How many blocks a step of that size has."""
        return max(1, min(step_bytes // self.block_bytes, MAX_STEP_PARTS // self.layout.ranks))

    def checksums(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """xxh3-64 of every rank's part of these slots: [blocks, ranks]."""
        return np.stack(
            [checksum_parts(array, slots, self.layout.part_bytes) for array in self.arrays], axis=1
        )


def verified(step: Step, found: npt.NDArray[np.uint64], started_s: float, now_s: float) -> StepResult:
    """Compare what arrived in the step's local slots, [blocks, ranks], with what the source leased."""
    corrupt = (found != step.checksums).any(axis=1)
    statuses = np.full(len(step), BlockStatus.OK, np.uint8)
    reason = ""
    if count := np.count_nonzero(corrupt):
        statuses[corrupt] = BlockStatus.FAILED
        reason = f"{count} blocks do not have the checksum their source recorded"
    return StepResult(step, statuses, found, now_s - started_s, reason, corrupt)


def failed(
    step: Step, status: BlockStatus, reason: str, seconds: float, *, in_flight: bool = False
) -> StepResult:
    """A step of which nothing arrived."""
    return StepResult(
        step,
        np.full(len(step), status, np.uint8),
        np.zeros_like(step.checksums),
        seconds,
        reason,
        slots_in_flight=in_flight,
    )
