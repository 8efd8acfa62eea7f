# SPDX-License-Identifier: Apache-2.0
"""What routers are told about the pool: numbered batches of changes, kept for those who miss some."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.events import Heartbeat, Inventory, event

log = logging.getLogger(__name__)

RING_BATCHES = 1024
RING_BYTES = 16 << 20
"""Batches kept for routers that missed some; beyond them a router takes a snapshot."""

TIER = 2
"""Of what a pool holds, and peers serve of it."""


class InventoryLog:
    """Belongs to the authority thread."""

    def __init__(self, guard: str, incarnation: int) -> None:
        self.guard = guard
        self.incarnation = incarnation
        self.sequence = 0
        """of the last batch"""
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._subscribers: list[Callable[[Inventory], None]] = []

    def subscribe(self, callback: Callable[[Inventory], None]) -> None:
        self._subscribers.append(callback)

    def collect(self, pool: Pool) -> None:
        """Publish what changed since the last call, if anything."""
        changes = pool.drain_changes()
        if changes.stored_keys or changes.removed_keys:
            self._publish(
                changes.stored_keys,
                np.ascontiguousarray(changes.stored_hashes, "<u8").tobytes(),
                np.ascontiguousarray(changes.stored_positions, "<u4").tobytes(),
                changes.removed_keys,
            )

    def heartbeat(self, pool: Pool | None) -> Heartbeat:
        """Sequence, count and digest, true of one moment."""
        if pool is None:
            return Heartbeat(self.guard, self.incarnation, self.sequence, 0, 0)
        self.collect(pool)
        return Heartbeat(self.guard, self.incarnation, self.sequence, pool.ready_count, pool.digest)

    def all_removed(self, pool: Pool) -> None:
        """Tell everyone that all that ``pool`` holds is gone: it is about to be replaced."""
        self.collect(pool)
        cursor = 0
        while cursor >= 0:
            page = pool.snapshot(cursor, MAX_BLOCKS_PER_MESSAGE)
            cursor = page.next_cursor
            if page.keys:
                self._publish(b"", b"", b"", page.keys)

    def replay(self, first: int, last: int, most_bytes: int) -> list[bytes] | None:
        """Encoded batches ``first..last``, cut off at ``most_bytes``; None when some are no longer here."""
        if first < 1 or last > self.sequence or not self._ring or self._ring[0][0] > first:
            return None
        batches = []
        for sequence, raw in self._ring:
            if first <= sequence <= last:
                most_bytes -= len(raw)
                if most_bytes < 0:
                    break
                batches.append(raw)
        return batches

    def _publish(self, stored: bytes, hashes: bytes, positions: bytes, removed: bytes) -> None:
        width = MAX_BLOCKS_PER_MESSAGE
        removals = [removed[at : at + KEY_BYTES * width] for at in range(0, len(removed), KEY_BYTES * width)]
        starts = list(range(0, len(stored) // KEY_BYTES, width))
        # A key may be in both, evicted and stored again: every removal goes out before the first store.
        for removal in removals[:-1] if starts else removals:
            self._send(b"", b"", b"", removal)
        for number, start in enumerate(starts):
            end = start + width
            self._send(
                stored[KEY_BYTES * start : KEY_BYTES * end],
                hashes[8 * start : 8 * end],
                positions[4 * start : 4 * end],
                removals[-1] if removals and number == 0 else b"",
            )

    def _send(self, stored: bytes, hashes: bytes, positions: bytes, removed: bytes) -> None:
        self.sequence += 1
        batch = Inventory(
            guard=self.guard,
            incarnation=self.incarnation,
            sequence=self.sequence,
            tier=TIER,
            stored_keys=stored,
            stored_hashes=hashes,
            stored_positions=positions,
            removed_keys=removed,
        )
        self._keep(batch)
        self._tell(batch)

    def _keep(self, batch: Inventory) -> None:
        raw = event.encode(batch)
        self._ring.append((batch.sequence, raw))
        self._ring_bytes += len(raw)
        while len(self._ring) > RING_BATCHES or self._ring_bytes > RING_BYTES:
            self._ring_bytes -= len(self._ring.popleft()[1])

    def _tell(self, batch: Inventory) -> None:
        for subscriber in list(self._subscribers):
            try:
                subscriber(batch)
            except Exception:
                # The pool has changed, whoever cannot hear of it; heartbeats show a router what it missed.
                log.exception("an inventory subscriber failed and is dropped")
                self._subscribers.remove(subscriber)
