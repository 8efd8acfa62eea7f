# SPDX-License-Identifier: Apache-2.0
"""The life of a slot, and the one word that says where in it the slot is.

::

    FREE(g) ── allocate ──> GRANTED(g) ── commit ──> READY(g) ── evict ──> COOLING(g+1)
      ^                        │  │                    │                       │
      │<──── give back ────────┘  └── quarantine ──┐   │                       │
      │        (g+1)                               v   v                       │
      │<──────────── requalify (g+1) ────── QUARANTINED(g)                     │
      └<────────────────────────── 2 s, no lease ──────────────────────────────┘

A (slot, generation) pair names at most one block for ever: the generation is raised whenever a slot
stops holding (or being promised to hold) something.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

STATE_SHIFT = 56
GENERATION_MASK = (1 << STATE_SHIFT) - 1

COOLING_S = 2.0
"""An evicted slot is not reused for this long: a lookup younger than that needs no lease."""


class SlotState(enum.IntEnum):
    """Top 8 bits of a control word. Zero is FREE, so a fresh sparse file is a pool of free slots."""

    FREE = 0
    GRANTED = 1
    """Promised to an engine or to a pull of the guard, who may be writing its bytes right now."""
    READY = 2
    """Holds the block its record names; the only state a lookup finds."""
    COOLING = 3
    """Evicted, and not reused yet because of lookups that are still young."""
    QUARANTINED = 4
    """Its bytes are not to be trusted, or something out of our control may still write to them."""


def pack_control(state: SlotState, generation: int) -> int:
    """The control word ``state << 56 | generation``. Raises ValueError on a generation over 56 bits."""
    if not 0 <= generation <= GENERATION_MASK:
        raise ValueError(f"generation {generation} is outside of 0..{GENERATION_MASK}")
    return state << STATE_SHIFT | generation


def unpack_control(word: int) -> tuple[SlotState, int]:
    """The inverse of :func:`pack_control`. Raises ValueError on a state that does not exist."""
    return SlotState(word >> STATE_SHIFT), word & GENERATION_MASK


def control_words(state: SlotState, generations: U64) -> U64:
    """:func:`pack_control` of an array of generations."""
    return generations | np.uint64(state << STATE_SHIFT)


def states_of(words: U64) -> U8:
    """The state byte of each control word; it may be no :class:`SlotState` in a damaged file."""
    return (words >> np.uint64(STATE_SHIFT)).astype(np.uint8)


def generations_of(words: U64) -> U64:
    """The generation of each control word."""
    return words & np.uint64(GENERATION_MASK)


def as_slots(slots: Any) -> I32:
    """Slots as a contiguous int32 array, without a copy where possible."""
    return np.ascontiguousarray(slots, dtype=np.int32)


def as_u64(values: Any) -> U64:
    """Values as a contiguous uint64 array, without a copy where possible."""
    return np.ascontiguousarray(values, dtype=np.uint64)
