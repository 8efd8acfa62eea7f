# SPDX-License-Identifier: Apache-2.0
"""How often each prefix is asked for: what tells a hot prefix from a busy worker.

A request is counted at depths 1, 2, 4, ... of its chain, so the rate of any prefix is known to within a
factor of two of its length, at a dozen dictionary updates a request. Pure: the time is an argument.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from kvcr.keys import KEY_BYTES

WINDOW_S = 10.0
"""Time constant of the average."""
MAX_PREFIXES = 100_000
RECENT = 4096
"""Prefixes that :meth:`Heat.hottest` looks at, the last ones seen: a hot one is among them by its nature."""
COOL_PER_S = 0.01
"""A slower prefix is not hot: it was asked for once, 23 s ago."""
_SAME = 0.5
"""A prefix that goes on into one with this part of its rate is that one, not another hot prefix."""


class HotPrefix(NamedTuple):
    """A prefix that many requests share."""

    key: bytes
    """Of its last block, 16 bytes."""
    blocks: int
    per_s: float
    """Requests a second that begin with it."""


class _Seen(NamedTuple):
    per_s: float
    at_s: float
    blocks: int
    shorter: bytes
    """Key of the same chain at half the depth; empty at depth 1."""


class Heat:
    """Arrivals a second by prefix. One thread counts; the prefixes not seen for longest are forgotten."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max = max_prefixes
        self._seen: dict[bytes, _Seen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def seen(self, keys: bytes, now_s: float) -> tuple[float, ...]:
        """Count one request with these block keys.

        Returns the arrivals a second, before this one, of its first 1, 2, 4, ... blocks.
        """
        rates = []
        depth, shorter = 1, b""
        while depth * KEY_BYTES <= len(keys):
            key = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
            before = self._seen.pop(key, None)
            rate = _faded(before, now_s) if before is not None else 0.0
            rates.append(rate)
            self._seen[key] = _Seen(rate + 1 / WINDOW_S, now_s, depth, shorter)
            depth, shorter = depth * 2, key
        while len(self._seen) > self._max:
            del self._seen[next(iter(self._seen))]
        return tuple(rates)

    def hottest(self, count: int, now_s: float) -> list[HotPrefix]:
        """The prefixes asked for most, at most ``count``, hottest first; of a chain the longest part that is.

        May be called from any thread: it looks at a copy, made in one step.
        """
        recent = list(self._seen.items())[-RECENT:]
        rates = {key: _faded(entry, now_s) for key, entry in recent}
        same = {
            entry.shorter for key, entry in recent if rates[key] >= _SAME * rates.get(entry.shorter, math.inf)
        }
        found = [HotPrefix(key, entry.blocks, rates[key]) for key, entry in recent if key not in same]
        found = [prefix for prefix in found if prefix.per_s >= COOL_PER_S]
        return heapq.nlargest(count, found, key=lambda prefix: (prefix.per_s, prefix.blocks))


def _faded(entry: _Seen, now_s: float) -> float:
    return entry.per_s * math.exp(-max(0.0, now_s - entry.at_s) / WINDOW_S)
