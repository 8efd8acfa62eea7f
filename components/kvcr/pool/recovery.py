# SPDX-License-Identifier: Apache-2.0
"""Attach: the directory is the recovered state. One vectorised pass over it, no journal, no loop.

A guard killed at any moment leaves a prefix of its stores in program order, and the control word is
the last store of a commit and the first of an eviction. So every READY word stands for a whole
record; the seal guards against damage by others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcr.errors import PoolCorrupt
from kvcr.pool.meta import Geometry, Meta, boot_id, time_namespace
from kvcr.pool.native import Backend
from kvcr.pool.record import first_of_each, seals_of
from kvcr.pool.state import (
    GENERATION_MASK,
    I32,
    Mask,
    SlotState,
    control_words,
    generations_of,
    states_of,
)


class Recovery(NamedTuple):
    """What an attach found, in slots."""

    ready: int
    granted: int
    cooling: int
    quarantined: int
    damaged: int
    """READY with a record that does not match its seal, or in no known state: now QUARANTINED."""
    duplicates: int
    """READY with a key that a lower slot has too: now COOLING."""
    unindexed: int
    """READY, but both index buckets are full: now COOLING."""


def require_same_clock(geometry: Geometry) -> None:
    """Raise PoolCorrupt if the times in the directory are of another boot or time namespace."""
    body = geometry.body
    for name, found, ours in (
        ("boot id", body.boot_id, boot_id()),
        ("time namespace", body.time_namespace, time_namespace()),
    ):
        if found != ours:
            raise PoolCorrupt(
                f"the pool was made under {name} {found}, this process has {ours}: its times mean nothing "
                "here; remove the pool's directory to start cold"
            )


def recover(meta: Meta, backend: Backend) -> Recovery:
    """Bring the directory into a state the pool can go on from, and rebuild the index."""
    slots = meta.geometry.slots
    words = np.empty(slots, dtype=np.uint64)
    backend.load_words(meta.control, np.arange(slots, dtype=np.int32), words)
    states = states_of(words)

    ready = np.flatnonzero(states == SlotState.READY)
    whole = seals_of(meta, ready) == meta.seals[ready]
    unknown = np.flatnonzero(states > max(SlotState))
    damaged = np.concatenate([ready[~whole], unknown]).astype(np.int32)
    _move(meta, backend, damaged, SlotState.QUARANTINED)
    ready = ready[whole]

    first = first_of_each(meta.keys[ready])
    duplicates = ready[~first].astype(np.int32)
    _move(meta, backend, duplicates, SlotState.COOLING, next_generation=True)
    ready = ready[first].astype(np.int32)

    meta.buckets[:] = 0
    indexed: Mask = np.empty(len(ready), dtype=np.bool_)
    backend.insert(meta.buckets, meta.keys[ready], ready, indexed)
    _move(meta, backend, ready[~indexed], SlotState.COOLING, next_generation=True)

    return Recovery(
        ready=int(np.count_nonzero(indexed)),
        granted=int(np.count_nonzero(states == SlotState.GRANTED)),
        cooling=int(np.count_nonzero(states == SlotState.COOLING)) + len(duplicates) + int((~indexed).sum()),
        quarantined=int(np.count_nonzero(states == SlotState.QUARANTINED)) + len(damaged),
        damaged=len(damaged),
        duplicates=len(duplicates),
        unindexed=int(np.count_nonzero(~indexed)),
    )


def _move(
    meta: Meta, backend: Backend, slots: I32, state: SlotState, *, next_generation: bool = False
) -> None:
    generations = generations_of(meta.control[slots])
    if next_generation:
        generations = (generations + np.uint64(1)) & np.uint64(GENERATION_MASK)
    backend.store_words(meta.control, slots, control_words(state, generations))
