# SPDX-License-Identifier: Apache-2.0
"""What must be true of a pool whenever the authority thread is between two calls."""

from __future__ import annotations

import numpy as np

from kvcr.pool.meta import Meta
from kvcr.pool.native import Backend
from kvcr.pool.record import seals_of
from kvcr.pool.state import I32, U64, Mask, SlotState, states_of


def find_broken(
    meta: Meta, backend: Backend, *, free: I32, cooling: I32, ready_count: int, digest: int, leases: I32
) -> list[str]:
    """The invariants that do not hold, in words. Together: each slot is in one state, and known to be."""
    states = states_of(meta.control)
    ready = np.flatnonzero(states == SlotState.READY).astype(np.int32)
    keys = meta.keys[ready]
    entries = meta.buckets[meta.buckets != 0] & np.uint64(0xFFFFFFFF)
    found: I32 = np.empty(len(ready), dtype=np.int32)
    generations: U64 = np.empty(len(ready), dtype=np.uint64)
    backend.lookup(keys, meta.buckets, meta.control, meta.keys, found, generations)
    checks = {
        "a slot is in no known state": int(states.max(initial=0)) <= max(SlotState),
        "the free list is not the FREE slots": _same_set(free, states == SlotState.FREE),
        "the cooling queue is not the COOLING slots": _same_set(cooling, states == SlotState.COOLING),
        "the index is not the READY slots": np.array_equal(
            np.sort(entries), ready.astype(np.uint64) + np.uint64(1)
        ),
        "a READY slot is not found by its key": bool((found == ready).all()),
        "a record does not match its seal": bool((seals_of(meta, ready) == meta.seals[ready]).all()),
        "the count of READY slots is off": ready_count == len(ready),
        "the digest is off": digest == int(np.bitwise_xor.reduce(keys[:, 0], initial=np.uint64(0))),
        "a lease count is negative": bool((leases >= 0).all()),
        "a free slot is leased": not leases[free].any(),
    }
    return [what for what, holds in checks.items() if not holds]


def _same_set(slots: I32, mask: Mask) -> bool:
    return np.array_equal(np.sort(slots), np.flatnonzero(mask))
