# SPDX-License-Identifier: Apache-2.0
"""Dropping blocks for good: out of every tier of this guard, out of its engine's memory, and not back again.

What is dropped: the blocks named, and with ``descendants`` those whose chain goes through one of them. What
stays: blocks that a pin holds. Readers under a lease are not waited for: their slots rest until they are
through, and a check of the generation tells them. Copies on their way here are not published, and fills under
way are refused by :mod:`kvcr.guard.tombstones`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kvcr.guard.fetches import Fetches
from kvcr.guard.g1 import G1Drops
from kvcr.guard.loop import Loop
from kvcr.guard.reports import End, Outcome
from kvcr.guard.tombstones import Tombstones
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol.codec import u64
from kvcr.protocol.events import ActionCode, InvalidatePayload
from kvcr.transfer.base import LocalRegions

G1_WAIT_S = 1.0
"""How long the result waits for the engine's G1. An engine at work answers within a step; an idle one does
before its next request, and the result says ``deferred``."""

Slots = np.ndarray[Any, np.dtype[np.int32]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class Host(Protocol):
    """What dropping needs of the guard."""

    @property
    def local(self) -> LocalRegions | None: ...

    def pool_changed(self) -> None: ...


class Invalidations:
    """Belongs to the authority thread."""

    def __init__(self, host: Host, loop: Loop, fetches: Fetches, tombstones: Tombstones, g1: G1Drops) -> None:
        self._host = host
        self._loop = loop
        self._fetches = fetches
        self._tombstones = tombstones
        self._g1 = g1

    def invalidate(self, pool: Pool, payload: InvalidatePayload, end: End) -> None:
        """Raises ProtocolError, before anything is done, on a ragged column."""
        now_s, extra = time.monotonic(), u64(payload.engine_hashes)
        found = pool.through(payload.keys) if payload.descendants else resident(pool, payload.keys)
        pinned = pool.pinned(found, now_s)
        gone, kept = pool.record(found[~pinned]), pool.record(found[pinned])
        named = _split(payload.keys) - _split(kept.keys)
        self._drop(pool, found[~pinned], "invalidated")
        stopped = self._fetches.forbid(named, and_after=payload.descendants)
        hashes = np.setdiff1d(np.concatenate([gone.engine_hashes, extra]), kept.engine_hashes)
        blocks = len(gone.engine_hashes) + stopped
        code = ActionCode.PARTIAL if pinned.any() else ActionCode.DONE if blocks else ActionCode.MISS
        detail = f"{int(pinned.sum())} blocks are pinned and stay" if pinned.any() else ""
        local = self._host.local
        byte_count = blocks * local.block_bytes if local is not None else 0

        def number(drop_id: int) -> None:
            self._tombstones.bury(b"".join(named) + gone.keys, pool.epoch, drop_id, now_s)

        # What the pool does not have is nameless here, and may be in G1 all the same.
        nameless = b"".join(named - _split(gone.keys))
        self._drop_g1(hashes, nameless, Outcome(code, blocks, byte_count, detail), number, end)

    def discard(self, pool: Pool, keys: bytes) -> int:
        """The end of a move, at its source: drop what nobody reads and no pin holds, in G1 too."""
        slots = resident(pool, keys)
        nameless = b"".join(_split(keys) - _split(pool.record(slots).keys))
        slots = slots[~(pool.pinned(slots, time.monotonic()) | pool.leased(slots))]
        hashes = pool.record(slots).engine_hashes
        self._drop(pool, slots, "moved")
        if len(hashes) or nameless:
            self._g1.drop(hashes, lambda count: None, nameless)
        return len(slots)

    def _drop(self, pool: Pool, slots: Slots, reason: str) -> None:
        pool.evict(slots, time.monotonic(), reason)
        self._host.pool_changed()

    def _drop_g1(
        self, hashes: Hashes, keys: bytes, outcome: Outcome, number: Callable[[int], None], end: End
    ) -> None:
        """Ask the engine, and end with ``outcome``: as it is if the engine answers soon, else as deferred.

        ``keys``: of blocks of which no hash is known. ``number`` gets the number of the drop. It is sent
        without any block too: by it, what is filled by later requests is told from what was under way.
        """
        ended = False

        def finish(final: Outcome) -> None:
            nonlocal ended
            if not ended:
                ended = True
                timer.cancel()
                end(final)

        def dropped(count: int) -> None:
            code = ActionCode.DONE if count and outcome.code is ActionCode.MISS else outcome.code
            finish(outcome._replace(code=code, detail=_join(outcome.detail, f"{count} in G1")))

        def late() -> None:
            code = outcome.code if outcome.code is ActionCode.PARTIAL else ActionCode.DEFERRED
            note = "the engine drops its own before its next request"
            finish(outcome._replace(code=code, detail=_join(outcome.detail, note)))

        timer = self._loop.later(G1_WAIT_S, late)
        number(self._g1.drop(hashes, dropped, keys))
        if not len(hashes) and not keys:
            finish(outcome)


def resident(pool: Pool, keys: bytes) -> Slots:
    """Slots of those of these blocks that are here."""
    slots = np.unique(pool.lookup(keys).slots)
    found: Slots = slots[slots >= 0]
    return found


def _split(keys: bytes) -> set[bytes]:
    return {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
