# SPDX-License-Identifier: Apache-2.0
"""How often each prefix is asked for: what tells a hot prefix from a busy worker.

A request is counted at depths 1, 2, 4, ... of its chain, so the rate of any prefix is known to within a
factor of two of its length, at a dozen dictionary updates a request. Pure: the time is an argument.
"""

from __future__ import annotations

import math

from kvcr.keys import KEY_BYTES

WINDOW_S = 10.0
"""Time constant of the average."""
MAX_PREFIXES = 100_000


class Heat:
    """Arrivals a second by prefix. One thread; the prefixes not seen for longest are forgotten."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max = max_prefixes
        self._seen: dict[bytes, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def seen(self, keys: bytes, now_s: float) -> tuple[float, ...]:
        """Count one request with these block keys.

        Returns the arrivals a second, before this one, of its first 1, 2, 4, ... blocks.
        """
        rates = []
        depth = 1
        while depth * KEY_BYTES <= len(keys):
            key = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
            rate, at_s = self._seen.pop(key, (0.0, now_s))
            rate *= math.exp(-max(0.0, now_s - at_s) / WINDOW_S)
            rates.append(rate)
            self._seen[key] = (rate + 1 / WINDOW_S, now_s)
            depth *= 2
        while len(self._seen) > self._max:
            del self._seen[next(iter(self._seen))]
        return tuple(rates)
