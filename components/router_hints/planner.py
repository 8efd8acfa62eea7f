# SPDX-License-Identifier: Apache-2.0
"""Where a request runs, and which KV blocks go there first.

Pure functions: no I/O, no clock, no state. For every worker and every way to get the blocks it lacks, the
planner estimates the time to the first output, adds what the choice costs everybody else, and takes the
cheapest; the same inputs always give the same plan, so a plan can be explained by planning again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from router_hints.costs import CostModel, Rank
from router_hints.estimates import Scene, nobody_comes_back
from router_hints.index import IndexView
from router_hints.ledger import Loads
from router_hints.plans import (
    Estimate,
    Estimates,
    Mode,
    NoWorker,
    Plan,
    Reason,
    Release,
    RequestView,
    SourceRun,
    Worker,
)
from router_hints.topology import Topology
from router_hints.turns import Kind, Turn
from router_hints.ways import MAX_RUNS, Holder

__all__ = [
    "MAX_RUNS",
    "Estimate",
    "Holder",
    "Mode",
    "NoWorker",
    "Plan",
    "Reason",
    "Release",
    "RequestView",
    "SourceRun",
    "Worker",
    "plan",
    "release",
]

PREFETCH_MARGIN_S = 15.0
"""A prefetch starts at most this much before it has to."""

NEAR_FACTOR = 1.05
_NEAR_S = 0.002
"""Estimates this close are equal: what is left of them is noise, and noise must not pick a favourite."""


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
    """Choose the worker and the copies for one request, or for a turn that is announced.

    ``index`` has a row for each guard that holds any of the request's blocks, computed with that guard's
    own keys; a guard without an entry in ``holders`` is no source. Raises :class:`NoWorker`.
    """
    eligible = _eligible(request, workers)
    scene = Scene(request, eligible, index, holders, loads, costs, topology)
    estimates = scene.estimates()
    row = _cheapest(request, estimates, loads)
    chosen = estimates[row]
    sources, reason, again_in_s = scene.sources(row, chosen), None, None
    if sources and request.ahead:
        reason, again_in_s = _not_now(request.turn, scene.copies_s[row])
        if reason is not None:
            sources = ()
    moves = bool(sources) and scene.moves
    if moves:
        shared = request.session.shared_blocks
        sources = tuple(part for run in sources for part in _split(run, shared))
    no_retain = nobody_comes_back(request) or (bool(sources) and scene.over_replicated(row))
    recompute_s = costs.prefill(chosen.rank).seconds(chosen.copied_blocks * request.block_size)
    mode = _mode(request, bool(sources), moves, no_retain)
    reason = reason or _reason(
        request, chosen, estimates, scene.copies_s[row] if sources else None, moves, scene.no_budget
    )
    return Plan(
        plan_id=request.plan_id,
        rank=chosen.rank,
        mode=mode,
        reason=reason,
        sources=sources,
        give_up_ms=1e3 * (recompute_s + scene.free_s(row)) if sources else 0.0,
        prefill_tokens=request.tokens - chosen.reused_blocks * request.block_size,
        blocks=-(-request.tokens // request.block_size),
        chosen=chosen,
        candidates=estimates,
        planned_s=now_s,
        no_retain=no_retain,
        again_in_s=again_in_s,
        copies_s=scene.copies_s[row] if sources else 0.0,
        spare=_spare(request, sources) if mode is Mode.COPY and reason is Reason.COPY else (),
    )


def release(request: RequestView, index: IndexView, holders: Mapping[str, Holder], now_s: float) -> Release:
    """What a compaction, or the end of a session, lets go of: dead blocks on every holder.

    ``index`` and ``request.prompt_tokens`` are of the session's chain as it was. Blocks that another living
    session shares stay, and so does the head that the compacted context begins with.
    """
    turn, size = request.turn, request.block_size
    compacted = turn.kind is Kind.COMPACTION
    kept = 0
    if compacted:
        kept = next((tokens for tokens in (turn.keeps, turn.isl_after) if tokens is not None), 0)
    first = max(kept // size, request.session.shared_blocks)
    end = index.blocks
    if compacted and turn.isl_before is not None:
        end = min(end, -(-turn.isl_before // size))
    expired = turn.expires_in_s is not None and turn.expires_in_s <= 0
    names = [
        guard
        for row, guard in enumerate(index.guards)
        if guard in holders and first < end and index.held[row, first:end].any()
    ]
    if not compacted and turn.kind is not Kind.END:
        names = []
    mode = Mode.INVALIDATE if compacted else Mode.DEMOTE
    return Release(
        plan_id=request.plan_id,
        mode=mode if names and not expired else Mode.NONE,
        reason=Reason.TOO_LATE if expired else Reason.COMPACTED if compacted else Reason.ENDED,
        first=first,
        end=end,
        holders=tuple(sorted(names)) if not expired else (),
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


def _cheapest(request: RequestView, estimates: Estimates, loads: Loads) -> int:
    """Number of the candidate that gets the request."""
    totals = estimates.total_s
    limit = min(totals) * NEAR_FACTOR + _NEAR_S
    near = [row for row, total in enumerate(totals) if total <= limit]
    home, copied, ranks = (estimates.column(name) for name in ("at_home", "copied_blocks", "rank"))
    reused = [estimates.column(name) for name in ("g1_blocks", "local_blocks", "copied_blocks")]

    def order(row: int) -> tuple[bool, int, int, int]:
        have = sum(column[row] for column in reused)
        return not home[row], copied[row], -have, loads.of(ranks[row]).requests

    orders = {row: order(row) for row in near} if len(near) > 1 else {near[0]: ()}
    first = min(orders.values())
    equal = [row for row in near if orders[row] == first]
    if len(equal) == 1:
        return equal[0]
    return min(equal, key=lambda row: _rendezvous(request, ranks[row]))


def _rendezvous(request: RequestView, rank: Rank) -> bytes:
    """Order of equals: stable for one session or prefix, even over them, unmoved by workers that come and
    go."""
    stable = request.turn.session.encode() or request.affinity
    return hashlib.blake2b(stable + b"%d.%d" % rank, digest_size=8).digest()


def _not_now(turn: Turn, copies_s: float) -> tuple[Reason | None, float | None]:
    """Why nothing is copied ahead of a turn at this moment, and when to look again."""
    if turn.expires_in_s is not None and copies_s > turn.expires_in_s:
        return Reason.TOO_LATE, None
    early_s = turn.starts_in_s - copies_s - PREFETCH_MARGIN_S
    return (Reason.TOO_EARLY, early_s) if early_s > 0 else (None, None)


def _split(run: SourceRun, shared: int) -> tuple[SourceRun, ...]:
    """What others share of it is copied, the rest is moved."""
    kept = min(max(0, shared - run.first), run.count)
    block_bytes = run.byte_count // run.count
    parts = (
        SourceRun(run.guard, run.endpoint, run.first, kept, kept * block_bytes),
        SourceRun(
            run.guard,
            run.endpoint,
            run.first + kept,
            run.count - kept,
            (run.count - kept) * block_bytes,
            frees=True,
        ),
    )
    return tuple(part for part in parts if part.count)


def _spare(request: RequestView, sources: Sequence[SourceRun]) -> tuple[SourceRun, ...]:
    """Two places for one session are one too many for the pools, as what is pushed out for them is in none.
    A prefix that is asked for often stays where it is, and so does what other sessions share."""
    parts = (part for run in sources for part in _split(run, request.session.shared_blocks))
    return tuple(part for part in parts if part.frees)


def _mode(request: RequestView, copies: bool, moves: bool, no_retain: bool) -> Mode:
    if request.ahead:
        return Mode.PREFETCH if copies else Mode.NONE
    if no_retain:
        return Mode.NO_RETAIN
    if not copies:
        return Mode.NONE
    return Mode.MOVE if moves else Mode.COPY


def _reason(
    request: RequestView,
    chosen: Estimate,
    estimates: Estimates,
    copies_s: float | None,
    moves: bool,
    no_budget: bool,
) -> Reason:
    if request.pinned_worker is not None:
        return Reason.PINNED
    if nobody_comes_back(request):
        return Reason.ONE_OFF
    if copies_s is not None:
        if chosen.joined:
            return Reason.JOIN
        if moves:
            return Reason.WAKE_UP
        if request.ahead:
            return Reason.NEXT_TURN
        hot_s = max(estimates.column("hot_s")) - chosen.hot_s
        return Reason.SPREAD if hot_s > copies_s else Reason.COPY
    if no_budget:
        return Reason.BUDGET
    if not request.reusable_blocks:
        return Reason.SHORT
    return Reason.RESIDENT if chosen.reused_blocks else Reason.COLD
