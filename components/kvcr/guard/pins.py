# SPDX-License-Identifier: Apache-2.0
"""Pins: blocks that stay, whatever the pressure, until a time. Belongs to the authority thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool

MAX_PINS = 4096
MAX_TTL_S = 24 * 3600.0

MAX_ID_CHARACTERS = 256

MAX_PINNED_FRACTION = 0.25
"""Of the pool: what pins may hold together, so that eviction always finds something."""


@dataclass(slots=True)
class _Pin:
    keys: set[bytes]
    until_s: float


class Pins:
    """Who pinned what. Times are of ``time.monotonic``; pins end with the guard's process."""

    def __init__(self) -> None:
        self._pins: dict[str, _Pin] = {}

    def pin(self, pool: Pool, pin_id: str, keys: bytes, ttl_s: float, now_s: float) -> tuple[int, str]:
        """Hold what is here of these blocks for ``ttl_s``. A pin that exists is added to and prolonged. Only
        what is here is remembered: a block that comes later has to be named again.

        Returns how many blocks were here, and why none of them is pinned (empty when they are).
        """
        self._expire(now_s)
        if not 0 < ttl_s <= MAX_TTL_S:
            return 0, f"ttl_s is {ttl_s:g}, it must be above 0 and at most {MAX_TTL_S:g}"
        if len(pin_id) > MAX_ID_CHARACTERS:
            return 0, f"its id has {len(pin_id)} characters, at most {MAX_ID_CHARACTERS} are kept"
        if pin_id not in self._pins and len(self._pins) >= MAX_PINS:
            return 0, f"{MAX_PINS} pins are held"
        before = self._pins.get(pin_id)
        named = list({*_split(keys), *(before.keys if before else ())})
        found = pool.lookup(b"".join(named)).slots
        here = [key for key, slot in zip(named, found, strict=True) if slot >= 0]
        slots = found[found >= 0]
        new = int(np.count_nonzero(~pool.pinned(slots, now_s)))
        held, most = pool.pinned_count(now_s), int(pool.slots * MAX_PINNED_FRACTION)
        if held + new > most:
            return 0, f"{held} blocks are pinned and {new} would come on top, the limit is {most}"
        # A block that many pins hold is in one slot, and remembered by each of them.
        others, most = sum(len(pin.keys) for pin in self._pins.values() if pin is not before), _names(pool)
        if others + len(here) > most:
            return 0, f"pins name {others} blocks and this one would name {len(here)}, the limit is {most}"
        until_s = max(before.until_s if before else 0.0, now_s + ttl_s)
        # What it held before is prolonged too.
        self._pins[pin_id] = _Pin(set(here), until_s)
        return pool.pin(b"".join(here), until_s), ""

    def unpin(self, pool: Pool, pin_id: str, now_s: float) -> int | None:
        """End a pin; blocks that another one holds stay pinned as long as that does. None: no such pin."""
        self._expire(now_s)
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return None
        count = pool.unpin(b"".join(pin.keys))
        for other in self._pins.values():
            if shared := pin.keys & other.keys:
                pool.pin(b"".join(shared), other.until_s)
        return count

    def _expire(self, now_s: float) -> None:
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.until_s <= now_s]:
            del self._pins[pin_id]


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def _names(pool: Pool) -> int:
    """How many blocks all pins together may name, each counted once a pin; one takes about 100 bytes."""
    return max(pool.slots, MAX_PINS)
