# SPDX-License-Identifier: Apache-2.0
"""What a deployment may decide differently about a pool: admission, eviction, placement, recovery.

A policy is pure: columns and the time in, an answer out. It is called on the guard's authority thread,
must not block, and cannot break the pool: answers that name blocks or slots it was not offered are ignored.
Another policy is named by its dotted path, ``--policy package.module:Class``.
"""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvcr.errors import ConfigError
from kvcr.layout import Layout


@dataclass(frozen=True)
class Offer:
    """Blocks about to be published, one entry each."""

    keys: bytes
    """16 bytes each"""
    parents: bytes
    """16 bytes each"""
    positions: npt.NDArray[np.uint32]
    """index of the block in its chain"""


@dataclass(frozen=True)
class Resident:
    """Every block of the pool, one entry each, in no order."""

    slots: npt.NDArray[np.int32]
    last_used_s: npt.NDArray[np.float64]
    stored_s: npt.NDArray[np.float64]
    positions: npt.NDArray[np.uint32]
    parents: npt.NDArray[np.int32]
    """index into these arrays of the block before it in its chain, -1 when that one is not here"""
    held: npt.NDArray[np.bool_]
    """leased or pinned: must stay"""
    demoted: npt.NDArray[np.bool_]
    """safe to evict, as the router said, and not used since"""


@dataclass(frozen=True)
class Watermarks:
    """Eviction runs ahead of demand: from when fewer than ``low`` slots would be left, up to ``high``."""

    low: int
    high: int


class OnMismatch(enum.StrEnum):
    """What a guard does when an engine attaches with another layout than its pool has."""

    COLD = "cold"
    """keep the pool for peers, refuse the engine, which serves without KVCR"""
    DISCARD = "discard"
    """make a new pool of the engine's layout"""
    FAIL = "fail"
    """end with an error"""


@runtime_checkable
class Policy(Protocol):
    """See the module. Implementations may keep state; they are called from one thread."""

    def admit(self, offer: Offer, now_s: float) -> npt.NDArray[np.bool_]:
        """Which of these blocks are worth a slot; the others' slots are freed."""

    def watermarks(self, slots: int) -> Watermarks:
        """How far ahead of demand to evict in a pool of ``slots``. Asked once for each pool."""

    def victims(self, resident: Resident, count: int, now_s: float) -> npt.NDArray[np.int32]:
        """Up to ``count`` slots to evict. Held blocks among them are not evicted."""

    def place(self, free: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.intp]:
        """``count`` distinct indices into ``free``, whose last entry was freed last: the slots to grant."""

    def on_mismatch(self, pool: Layout, engine: Layout) -> OnMismatch:
        """What to do when ``engine`` attaches to a pool of layout ``pool`` and they differ."""


DEMOTED_S = 1e9
"""How much older demoted blocks count: more than any uptime, and little enough to keep their order."""


class DefaultPolicy:
    """Demoted blocks first, then the least recently used, the tail of a chain before its head; everything is
    admitted.

    ``low`` and ``high``: the watermarks, as fractions of the pool.
    """

    def __init__(
        self, *, low: float = 1 / 32, high: float = 1 / 16, on_mismatch: OnMismatch | str = OnMismatch.COLD
    ) -> None:
        if not 0.0 <= low <= high <= 0.5:
            raise ConfigError(
                f"watermarks must be 0 <= low <= high <= 0.5 of the pool, got low={low}, high={high}"
            )
        self._low = low
        self._high = high
        try:
            self._on_mismatch = OnMismatch(on_mismatch)
        except ValueError:
            raise ConfigError(f"on_mismatch is {on_mismatch!r}, must be cold, discard or fail") from None

    def admit(self, offer: Offer, now_s: float) -> npt.NDArray[np.bool_]:
        """Everything."""
        return np.ones(len(offer.positions), dtype=np.bool_)

    def watermarks(self, slots: int) -> Watermarks:
        """Fractions of the pool, rounded down: a pool of a few slots evicts only on demand."""
        return Watermarks(low=int(slots * self._low), high=int(slots * self._high))

    def victims(self, resident: Resident, count: int, now_s: float) -> npt.NDArray[np.int32]:
        """Oldest use first, where a block counts as used when anything after it in its chain was."""
        # A demoted block that something in use comes after stays as long as that.
        used_s = np.where(resident.demoted, resident.last_used_s - DEMOTED_S, resident.last_used_s)
        recency = chain_recency(used_s, resident.parents)
        free_to_go = np.flatnonzero(~resident.held)
        if 0 < count < len(free_to_go):
            # Sorting is the expensive part: only sort what can be among the oldest.
            newest = np.partition(recency[free_to_go], count - 1)[count - 1]
            free_to_go = free_to_go[recency[free_to_go] <= newest]
        # Within one time of use, the end of a chain goes first.
        order = np.lexsort((-resident.positions[free_to_go].astype(np.int64), recency[free_to_go]))
        chosen: npt.NDArray[np.int32] = resident.slots[free_to_go[order[:count]]]
        return chosen

    def place(self, free: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.intp]:
        """The slots freed last, first: their pages are the likeliest to be in cache and TLB."""
        return np.arange(len(free) - 1, len(free) - count - 1, -1, dtype=np.intp)

    def on_mismatch(self, pool: Layout, engine: Layout) -> OnMismatch:
        """The one configured."""
        return self._on_mismatch


def chain_recency(
    last_used_s: npt.NDArray[np.float64], parents: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Time of the last use of each block or of any block after it in its chain.

    A block is worthless without the ones before it, so they must not look older. Pointer doubling: round
    *k* reaches ancestors up to 2**k away, so a chain of 4,096 blocks takes 12 rounds over the columns.
    """
    recency = last_used_s.copy()
    # One more entry than blocks: the parent of chains' heads, which is its own parent.
    ancestors = np.append(np.where(parents < 0, len(parents), parents), len(parents)).astype(np.intp)
    recency = np.append(recency, -np.inf)
    # Bounded by the number of bits of a length, so that a cycle in damaged records cannot hold us.
    for _ in range(max(1, len(parents)).bit_length()):
        if (ancestors == len(parents)).all():
            break
        np.maximum.at(recency, ancestors, recency.copy())
        ancestors = ancestors[ancestors]
    return recency[:-1]


def load_policy(path: str, **settings: Any) -> Policy:
    """An instance of the policy at ``package.module:Class``; empty means :class:`DefaultPolicy`.

    ``settings`` go to its constructor. Raises ConfigError naming what is wrong with ``path``.
    """
    if not path:
        return DefaultPolicy(**settings)
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"policy {path!r} must have the form package.module:Class")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy {path!r} cannot be loaded: {error}") from error
    policy = factory(**settings)
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy {path!r} lacks one of admit, watermarks, victims, place, on_mismatch")
    return policy
