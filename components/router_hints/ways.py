# SPDX-License-Identifier: Apache-2.0
"""The ways to get the blocks of one request to each worker: from its own pool, or copied from others.

For every target the blocks it lacks are walked in prefix order, each run from the holder that gives it at
the lowest price a block. Whether a way is worth going, and how far, is the planner's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router_hints.costs import CostModel
from router_hints.index import IndexView
from router_hints.topology import Topology

try:
    from router_hints import _native
except ImportError:  # built without a compiler
    _native = None  # type: ignore[assignment]

MAX_RUNS = 32
"""Runs of blocks considered for one worker: bounds the hint, and the time to plan."""

OWN = -1
"""As a source: the target's own pool."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Holder:
    """One guard as a source of copies."""

    name: str
    endpoint: str
    layout_digest: str
    """Blocks move only between guards with the same one."""
    block_bytes: int
    """Bytes of one block, over all ranks."""


@dataclass(frozen=True)
class Ways:
    """For each target, its runs in prefix order: arrays ``[targets, MAX_RUNS]``, valid up to ``counts``."""

    first: Ints
    end: Ints
    source: Ints
    """row in ``sources``, or :data:`OWN`"""
    seconds: Floats
    counts: Ints
    load_block_s: Floats
    """of each target: one block from its pool into its engine"""
    sources: tuple[Holder, ...]


def find_ways(
    targets: Sequence[Holder],
    starts: Sequence[int],
    index: IndexView,
    holders: Mapping[str, Holder],
    blocks: int,
    outgoing_bytes: Mapping[str, int],
    costs: CostModel,
    topology: Topology,
) -> Ways:
    """Ways to the first ``blocks`` blocks for each target, which already has those before its start.

    Guards without an entry in ``holders`` are no sources; those with another layout than a target's, or that
    the topology does not open to it, are none for that target.
    """
    # In the order of their names: replicas that learnt of them in another order decide alike.
    rows = sorted(
        (r for r, guard in enumerate(index.guards) if guard in holders), key=index.guards.__getitem__
    )
    sources = tuple(holders[index.guards[row]] for row in rows)
    names, target_names = [source.name for source in sources], [target.name for target in targets]
    shape = (len(targets), MAX_RUNS)
    ways = Ways(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float64),
        np.zeros(len(targets), np.int32),
        np.array([t.block_bytes / costs.settings.load_bytes_per_s for t in targets], dtype=np.float64),
        sources,
    )
    if not sources or not targets or not blocks:
        return ways
    held = np.ascontiguousarray(index.held[rows, :blocks])
    paths = topology.paths(names, target_names)
    positions = {name: row for row, name in enumerate(names)}
    own = np.array([positions.get(target.name, OWN) for target in targets], dtype=np.int32)
    codes: dict[str, int] = {}
    there = np.array([codes.setdefault(s.layout_digest, len(codes)) for s in sources])
    here = np.array([codes.get(target.layout_digest, -1) for target in targets])
    usable = (here[:, None] == there) & paths.open
    has_own = np.flatnonzero(own >= 0)
    usable[has_own, own[has_own]] = False
    walk = walk_in_python if _native is None else _native.walk
    walk(
        held,
        usable,
        own,
        np.array(starts, dtype=np.int32),
        np.array([source.block_bytes for source in sources], dtype=np.float64),
        np.array([outgoing_bytes.get(name, 0) for name in names], dtype=np.float64),
        costs.rates(names, target_names, paths.links),
        ways.load_block_s,
        costs.settings.copy_latency_s,
        ways.first,
        ways.end,
        ways.source,
        ways.seconds,
        ways.counts,
    )
    return ways


def walk_in_python(
    held: Flags,
    usable: Flags,
    own: Ints,
    starts: Ints,
    block_bytes: Floats,
    queued_bytes: Floats,
    bytes_per_s: Floats,
    own_block_s: Floats,
    latency_s: float,
    out_first: Ints,
    out_end: Ints,
    out_source: Ints,
    out_seconds: Floats,
    out_counts: Ints,
) -> None:
    """What ``router_hints._native.walk`` does, in numpy."""
    blocks = held.shape[1]
    gaps = np.where(held, np.int32(blocks), np.arange(blocks, dtype=np.int32))
    ends = np.minimum.accumulate(gaps[:, ::-1], axis=1)[:, ::-1]
    for target, start in enumerate(starts):
        mine = None if own[target] == OWN else ends[own[target]]
        next_own = None if mine is None else _next_held(mine)
        latency = np.full(len(held), latency_s)
        queued = queued_bytes.copy()
        position, count = int(start), 0
        while position < blocks and count < out_first.shape[1]:
            if mine is not None and mine[position] > position:
                end, source = int(mine[position]), OWN
                seconds = (end - position) * float(own_block_s[target])
            else:
                # Up to where the target's own blocks go on: those are cheaper than anybody's.
                limit = blocks if next_own is None else int(next_own[position])
                counts = np.minimum(ends[:, position], limit) - position
                offers = np.flatnonzero(usable[target] & (counts > 0))
                if not len(offers):
                    break
                each = latency[offers] + (
                    (queued[offers] + counts[offers] * block_bytes[offers]) / bytes_per_s[target, offers]
                )
                # What arrives in the pool still has to be loaded, as what was there.
                each += counts[offers] * own_block_s[target]
                # By seconds a block, so that a long run far away competes with a short one nearby.
                best = int(np.argmin(each / counts[offers]))
                source = int(offers[best])
                end, seconds = position + int(counts[source]), float(each[best])
                # Its queue and its lease are paid for once.
                latency[source] = queued[source] = 0.0
            out_first[target, count], out_end[target, count] = position, end
            out_source[target, count], out_seconds[target, count] = source, seconds
            position, count = end, count + 1
        out_counts[target] = count


def _next_held(ends: Ints) -> Ints:
    """First position at or after each one that is held; the number of blocks where none is."""
    blocks = len(ends)
    positions = np.arange(blocks, dtype=np.int32)
    held = np.where(ends > positions, positions, np.int32(blocks))
    return np.minimum.accumulate(held[::-1])[::-1]
