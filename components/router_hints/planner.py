# SPDX-License-Identifier: Apache-2.0
"""Where a request runs, and which KV blocks are copied there first.

One pure function: no I/O, no clock, no state. For every worker and every way to get the blocks it lacks,
the planner estimates the time to the first output and takes the cheapest; the same inputs always give the
same plan, so a plan can be explained by planning again.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router_hints.costs import CostModel, Rank
from router_hints.index import IndexView
from router_hints.ledger import Loads
from router_hints.topology import Topology

MAX_RUNS = 32
"""Runs of blocks considered for one worker: bounds the hint, and the time to plan."""

_NEAR_FACTOR = 1.05
_NEAR_S = 0.002
"""Estimates this close are equal: what is left of them is noise, and noise must not pick a favourite."""


class Reason(enum.StrEnum):
    """Why the plan is what it is, in one word for metrics and logs."""

    PINNED = "pinned"
    """The request named its worker."""
    COPY = "copy"
    """Blocks are copied to the cheapest worker."""
    RESIDENT = "resident"
    """The cheapest worker has blocks itself."""
    COLD = "cold"
    """Nothing is reused: nobody has the prefix, or fetching it costs more than computing it."""


@dataclass(frozen=True)
class RequestView:
    """What the planner has to know of a request."""

    plan_id: str
    prompt_tokens: int
    block_size: int
    affinity: bytes
    """Decides between equals: requests with the same start go to the same worker."""
    pinned_worker: int | None = None
    pinned_rank: int | None = None
    required_taints: frozenset[str] = frozenset()
    preferred_taints: Mapping[str, float] | None = None
    """Weight by taint, positive to prefer and negative to avoid."""

    @property
    def reusable_blocks(self) -> int:
        """Full blocks whose KV may be reused: an engine always computes at least the last token."""
        return max(0, self.prompt_tokens - 1) // self.block_size


@dataclass(frozen=True)
class Worker:
    """One candidate: an engine replica, and the guard beside it."""

    rank: Rank
    g1_blocks: int = 0
    """Leading blocks in its engine memory."""
    guard: str = ""
    """Name of its guard; empty: no KVCR here, and no hint."""
    taints: frozenset[str] = frozenset()
    max_requests: int = 0
    """Size of its batch; 0 when unknown."""


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
class SourceRun:
    """Blocks ``first .. first + count`` of the request come from this guard."""

    guard: str
    endpoint: str
    first: int
    count: int
    byte_count: int


@dataclass(frozen=True)
class Estimate:
    """Cost terms of one candidate, in seconds, for its cheapest way to get the blocks."""

    rank: Rank
    wait_s: float
    fetch_s: float
    prefill_s: float
    load_s: float
    """What its other requests slow it down by."""
    bias: float
    """Factor from preferred taints; below 1 is preferred."""
    g1_blocks: int
    local_blocks: int
    """Blocks beyond G1 that its own guard has."""
    copied_blocks: int
    sources: tuple[SourceRun, ...]

    @property
    def total_s(self) -> float:
        # A floor under the biased part, so that a preference counts between idle workers too.
        return (self.wait_s + self.fetch_s + self.prefill_s + self.load_s + 1e-3) * self.bias

    @property
    def reused_blocks(self) -> int:
        return self.g1_blocks + self.local_blocks + self.copied_blocks


@dataclass(frozen=True)
class Plan:
    """The decision, and what it was made from."""

    plan_id: str
    rank: Rank
    reason: Reason
    sources: tuple[SourceRun, ...]
    give_up_ms: float
    """What recomputing the copied blocks would take: a slower copy is not worth its wait."""
    prefill_tokens: int
    """Tokens left to compute."""
    blocks: int
    """Blocks the whole prompt occupies."""
    chosen: Estimate
    candidates: tuple[Estimate, ...]
    planned_s: float

    @property
    def byte_counts(self) -> dict[str, int]:
        """Bytes asked of each source guard."""
        totals: dict[str, int] = {}
        for run in self.sources:
            totals[run.guard] = totals.get(run.guard, 0) + run.byte_count
        return totals


class NoWorker(Exception):
    """No candidate may run the request; the message says which condition left none."""


def plan(
    request: RequestView,
    workers: Sequence[Worker],
    index: IndexView,
    holders: Mapping[str, Holder],
    loads: Loads,
    costs: CostModel,
    topology: Topology,
    now_s: float,
) -> Plan:
    """Choose the worker and the copies for one request.

    ``index`` has a row for each guard that holds any of the request's blocks, computed with that guard's
    own keys; a guard without an entry in ``holders`` is no source. Raises :class:`NoWorker`.
    """
    eligible = _eligible(request, workers)
    sources = _Sources(index, holders, request.reusable_blocks, loads, topology)
    estimates = tuple(_estimate(request, worker, sources, holders, loads, costs) for worker in eligible)
    best = min(estimate.total_s for estimate in estimates)
    near = [e for e in estimates if e.total_s <= best * _NEAR_FACTOR + _NEAR_S]
    chosen = min(
        near,
        key=lambda e: (
            e.copied_blocks,
            -e.reused_blocks,
            loads.of(e.rank).requests,
            _rendezvous(request, e.rank),
        ),
    )

    copied_tokens = chosen.copied_blocks * request.block_size
    return Plan(
        plan_id=request.plan_id,
        rank=chosen.rank,
        reason=_reason(request, chosen),
        sources=chosen.sources,
        give_up_ms=1e3 * costs.prefill(chosen.rank).seconds(copied_tokens) if chosen.sources else 0.0,
        prefill_tokens=request.prompt_tokens - chosen.reused_blocks * request.block_size,
        blocks=-(-request.prompt_tokens // request.block_size),
        chosen=chosen,
        candidates=estimates,
        planned_s=now_s,
    )


def _eligible(request: RequestView, workers: Sequence[Worker]) -> list[Worker]:
    if not workers:
        raise NoWorker("no worker is ready")
    eligible = [worker for worker in workers if request.required_taints <= worker.taints]
    if not eligible:
        raise NoWorker(f"none of {len(workers)} workers has the taints {sorted(request.required_taints)}")
    if request.pinned_worker is not None:
        eligible = [worker for worker in eligible if worker.rank[0] == request.pinned_worker]
        if not eligible:
            raise NoWorker(f"the request is pinned to worker {request.pinned_worker}, which is not ready")
    if request.pinned_rank is not None:
        eligible = [worker for worker in eligible if worker.rank[1] == request.pinned_rank]
        if not eligible:
            raise NoWorker(f"no eligible worker has data-parallel rank {request.pinned_rank}")
    return eligible


class _Sources:
    """All holders of the request's blocks as arrays, one entry each, in the order of their names."""

    def __init__(
        self, index: IndexView, holders: Mapping[str, Holder], blocks: int, loads: Loads, topology: Topology
    ) -> None:
        self.blocks = blocks
        self.names = sorted(guard for guard in index.guards if guard in holders)
        self.holders = [holders[name] for name in self.names]
        rows = [index.guards.index(name) for name in self.names]
        self.ends = _ends(index.held[rows, :blocks])
        """int32 [sources, blocks]: end of the run at a position; the position itself where not held"""
        self.block_bytes = np.array([holder.block_bytes for holder in self.holders], dtype=np.float64)
        self.queued = np.array([loads.outgoing_bytes.get(n, 0) for n in self.names], dtype=np.float64)
        self.topology = topology.among(self.names)
        self.same_way: dict[tuple[int, bytes, bytes], list[_Segment]] = {}
        """segments of workers without blocks of their own, by where they start and what sources cost them"""
        self._layout_codes: dict[str, int] = {}
        self._layouts = np.array(
            [self._layout_codes.setdefault(h.layout_digest, len(self._layout_codes)) for h in self.holders],
            dtype=np.int32,
        )

    def row(self, guard: str) -> int | None:
        return self.names.index(guard) if guard in self.names else None

    def usable_by(self, target: Holder) -> npt.NDArray[np.bool_]:
        """Which of them may give blocks to ``target``: another guard with the same layout."""
        usable: npt.NDArray[np.bool_] = self._layouts == self._layout_codes.get(target.layout_digest, -1)
        row = self.row(target.name)
        if row is not None:
            usable[row] = False
        return usable


def _ends(held: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    blocks = held.shape[1]
    gaps = np.where(held, np.int32(blocks), np.arange(blocks, dtype=np.int32))
    return np.minimum.accumulate(gaps[:, ::-1], axis=1)[:, ::-1]


@dataclass(frozen=True)
class _Segment:
    """One step of getting blocks to a worker: from its own pool (``source`` is None) or from a source."""

    first: int
    end: int
    source: int | None
    seconds: float


def _estimate(
    request: RequestView,
    worker: Worker,
    sources: _Sources,
    holders: Mapping[str, Holder],
    loads: Loads,
    costs: CostModel,
) -> Estimate:
    load = loads.of(worker.rank)
    prefill = costs.prefill(worker.rank)
    ahead = load.requests - worker.max_requests + 1 if worker.max_requests else 0
    wait_s = prefill.seconds(load.prefill_tokens) + max(0, ahead) * costs.settings.slot_wait_s

    g1_blocks = min(worker.g1_blocks, sources.blocks)
    target = holders.get(worker.guard)
    segments = [] if target is None else _segments(target, g1_blocks, sources, costs)
    # Blocks are reused as a prefix, so each way to get them is: the segments up to one of them.
    kept, reused, fetch_s = 0, g1_blocks, 0.0
    saved_s = 0.0
    elapsed_s = 0.0
    for count, segment in enumerate(segments, start=1):
        elapsed_s += segment.seconds
        gain_s = prefill.seconds((segment.end - g1_blocks) * request.block_size) - elapsed_s
        if gain_s > saved_s:
            kept, reused, fetch_s, saved_s = count, segment.end, elapsed_s, gain_s

    runs = _source_runs(segments[:kept], sources)
    copied = sum(run.count for run in runs)
    return Estimate(
        rank=worker.rank,
        wait_s=wait_s,
        fetch_s=fetch_s,
        prefill_s=prefill.overhead_s + prefill.seconds(request.prompt_tokens - reused * request.block_size),
        load_s=load.requests * costs.settings.decode_s,
        bias=_bias(request, worker),
        g1_blocks=g1_blocks,
        local_blocks=reused - g1_blocks - copied,
        copied_blocks=copied,
        sources=runs,
    )


def _segments(target: Holder, start: int, sources: _Sources, costs: CostModel) -> list[_Segment]:
    """The blocks after ``start`` that somebody has, in prefix order, each from its cheapest holder."""
    if not sources.names:
        return []
    own_row = sources.row(target.name)
    usable = sources.usable_by(target)
    bytes_per_s, latency_s = costs.copies(sources.names, target.name, sources.topology.links(target.name))
    if own_row is not None:
        return _walk(target, start, sources, costs, sources.ends[own_row], usable, bytes_per_s, latency_s)
    way = (start, usable.tobytes(), bytes_per_s.tobytes())
    if way not in sources.same_way:
        sources.same_way[way] = _walk(target, start, sources, costs, None, usable, bytes_per_s, latency_s)
    return sources.same_way[way]


def _walk(
    target: Holder,
    start: int,
    sources: _Sources,
    costs: CostModel,
    own: npt.NDArray[np.int32] | None,
    usable: npt.NDArray[np.bool_],
    bytes_per_s: npt.NDArray[np.float64],
    latency_s: float,
) -> list[_Segment]:
    next_own = None if own is None else _next_held(own)
    latency = np.full(len(usable), latency_s)
    queued = sources.queued.copy()
    segments: list[_Segment] = []
    position = start
    while position < sources.blocks and len(segments) < MAX_RUNS:
        if own is not None and own[position] > position:
            end = int(own[position])
            seconds = (end - position) * target.block_bytes / costs.settings.load_bytes_per_s
            segments.append(_Segment(position, end, None, seconds))
            position = end
            continue
        # Up to where the target's own blocks go on: those are cheaper than anybody's.
        limit = sources.blocks if next_own is None else int(next_own[position])
        counts = np.minimum(sources.ends[:, position], limit) - position
        offers = np.flatnonzero(usable & (counts > 0))
        if not len(offers):
            break
        seconds_each = latency[offers] + (
            (queued[offers] + counts[offers] * sources.block_bytes[offers]) / bytes_per_s[offers]
        )
        # By seconds a block, so that a long run far away competes with a short one nearby.
        best = int(np.argmin(seconds_each / counts[offers]))
        source = int(offers[best])
        end = position + int(counts[source])
        segments.append(_Segment(position, end, source, float(seconds_each[best])))
        # Its queue and its lease are paid for once.
        latency[source] = queued[source] = 0.0
        position = end
    return segments


def _next_held(ends: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """First position at or after each one that is held; the number of blocks where none is."""
    blocks = len(ends)
    positions = np.arange(blocks, dtype=np.int32)
    held = np.where(ends > positions, positions, np.int32(blocks))
    return np.minimum.accumulate(held[::-1])[::-1]


def _source_runs(segments: Sequence[_Segment], sources: _Sources) -> tuple[SourceRun, ...]:
    runs = []
    for segment in segments:
        if segment.source is not None:
            holder, count = sources.holders[segment.source], segment.end - segment.first
            runs.append(
                SourceRun(holder.name, holder.endpoint, segment.first, count, count * holder.block_bytes)
            )
    return tuple(runs)


def _bias(request: RequestView, worker: Worker) -> float:
    wishes = request.preferred_taints or {}
    wish = sum(weight for taint, weight in wishes.items() if taint in worker.taints)
    return math.exp(-math.tanh(wish))


def _rendezvous(request: RequestView, rank: Rank) -> bytes:
    """Order of equals: stable for one prefix, even over prefixes, unmoved by workers that come and go."""
    return hashlib.blake2b(request.affinity + b"%d.%d" % rank, digest_size=8).digest()


def _reason(request: RequestView, chosen: Estimate) -> Reason:
    if request.pinned_worker is not None:
        return Reason.PINNED
    if chosen.sources:
        return Reason.COPY
    return Reason.RESIDENT if chosen.reused_blocks else Reason.COLD
