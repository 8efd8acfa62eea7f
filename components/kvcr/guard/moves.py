# SPDX-License-Identifier: Apache-2.0
"""The second half of a move: once the copy is committed here, its source drops its own. Authority thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvcr.guard.active import Ended
from kvcr.guard.link import PeerLink
from kvcr.guard.meters import Meters
from kvcr.keys import KEY_BYTES
from kvcr.protocol.engine import BlockStatus


class Freed(NamedTuple):
    """What the sources of a move let go."""

    asked: int
    dropped: int
    reason: str
    """Why it is fewer than asked; empty when it is not."""


def free_sources(ended: Ended, own_name: str, meters: Meters, done: Callable[[Freed], None]) -> None:
    """Ask each source to drop what arrived of its blocks; then ``done``, also when there is nothing to ask.

    A source that does not answer keeps its blocks: the next plan finds them in two places.
    """
    blobs = [(link, _arrived(ended, index, link, own_name)) for index, link in enumerate(ended.links)]
    blobs = [(link, keys) for link, keys in blobs if keys]
    left = len(blobs)
    asked = sum(len(keys) for _, keys in blobs) // KEY_BYTES
    count, reasons = 0, []

    def answered(link: PeerLink, dropped: int | None, reason: str) -> None:
        nonlocal left, count
        left -= 1
        count += dropped or 0
        if dropped is None:
            reasons.append(f"{link.name or link.endpoint} kept its blocks: {reason}")
        if left == 0:
            finish()

    def finish() -> None:
        if count < asked and not reasons:
            reasons.append(f"{asked - count} blocks are in use or pinned at the source, and kept")
        meters.moved_blocks.inc(count)
        done(Freed(asked, count, "; ".join(reasons)))

    if not blobs:
        finish()
    for link, keys in blobs:
        _discard(link, keys, ended.fetch.plan_id, answered)


def _discard(
    link: PeerLink, keys: bytes, plan_id: str, answered: Callable[[PeerLink, int | None, str], None]
) -> None:
    def opened(reason: str) -> None:
        if reason:
            answered(link, None, reason)
        else:
            link.discard(keys, plan_id, lambda dropped, reason: answered(link, dropped, reason))

    # Nothing may have been copied, as all of it was here: then nobody has opened the link yet.
    link.when_ready(time.monotonic(), opened)


def _arrived(ended: Ended, index: int, link: PeerLink, own_name: str) -> bytes:
    """Keys of this source's blocks that are committed here now."""
    fetch = ended.fetch
    if not fetch.move or fetch.no_retain or link.name == own_name:
        return b""
    source = fetch.sources[index]
    positions = np.arange(fetch.first, fetch.first + len(ended.statuses))
    chosen = (positions >= source.first) & (positions < source.first + source.count)
    chosen &= ended.statuses == BlockStatus.OK
    # Whatever made room since: the last copy must not go.
    chosen &= ended.pool.lookup(fetch.keys).slots >= 0
    return np.frombuffer(fetch.keys, f"V{KEY_BYTES}")[chosen].tobytes()
