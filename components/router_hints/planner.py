# SPDX-License-Identifier: Apache-2.0
"""Where a request runs, and which KV blocks go there first.

Pure functions: no I/O, no clock, no state. For every worker and every way to get the blocks it lacks, the
planner estimates the time to the first output, adds what the choice costs everybody else, and takes the
cheapest; the same inputs always give the same plan, so a plan can be explained by planning again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from router_hints.costs import CostModel, Prefill, Rank
from router_hints.index import IndexView
from router_hints.ledger import Load, Loads
from router_hints.plans import (
    Estimate,
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
from router_hints.ways import MAX_RUNS, OWN, Holder, find_ways

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

LONG_IDLE_S = 600.0
"""A session that slept this long is woken up, whatever the harness calls the turn."""
PREFETCH_MARGIN_S = 15.0
"""A prefetch starts at most this much before it has to."""

_NEAR_FACTOR = 1.05
_NEAR_S = 0.002
"""Estimates this close are equal: what is left of them is noise, and noise must not pick a favourite."""
_LATER_WEIGHT = 0.25
"""Seconds of a later turn count less than those of this one: by then much will have changed."""
_SECONDS_A_TURN = 60.0
_MOST_TURNS = 4.0
_COPY_WEIGHT = 0.1
"""Price of a second of copying to those who do not wait for it."""
_SPIKE_WEIGHT = 1.0
"""The same for a copy away from a spike: when that is over the copy has served once."""
_BEHIND_WEIGHT = 3.0
_POOL_WEIGHT = 0.4
"""Chance that a block pushed out of a full pool would have been used again."""
_FULL = 0.95
"""Part of the engine memory in use at which it counts as full."""
_HOT_HORIZON_S = 1.0
_BUSIEST = 0.95
_REPLICA = 0.9
"""Who has this part of the longest prefix that anybody has counts as one of its holders."""


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
    scene = _Scene(request, eligible, index, holders, loads, costs, topology)
    estimates = tuple(scene.estimate(row) for row in range(len(eligible)))
    chosen = _cheapest(request, estimates, loads)
    row = next(row for row, worker in enumerate(eligible) if worker.rank == chosen.rank)
    sources, reason, again_in_s = scene.sources(row, chosen), None, None
    if sources and request.ahead:
        reason, again_in_s = _not_now(request.turn, scene.raw_fetch_s[row])
        if reason is not None:
            sources = ()
    moves = bool(sources) and scene.moves(row)
    if moves:
        shared = request.session.shared_blocks
        sources = tuple(part for run in sources for part in _split(run, shared))
    no_retain = _is_last(request.turn) or (bool(sources) and scene.over_replicated(row))
    copied_tokens = chosen.copied_blocks * request.block_size
    return Plan(
        plan_id=request.plan_id,
        rank=chosen.rank,
        mode=_mode(request, bool(sources), moves, no_retain),
        reason=reason or _reason(request, chosen, estimates, bool(sources), moves, scene.no_budget),
        sources=sources,
        give_up_ms=1e3 * costs.prefill(chosen.rank).seconds(copied_tokens) if sources else 0.0,
        prefill_tokens=request.tokens - chosen.reused_blocks * request.block_size,
        blocks=-(-request.tokens // request.block_size),
        chosen=chosen,
        candidates=estimates,
        planned_s=now_s,
        no_retain=no_retain,
        again_in_s=again_in_s,
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


class _Scene:
    """Everything the estimates of one plan share."""

    def __init__(
        self,
        request: RequestView,
        workers: Sequence[Worker],
        index: IndexView,
        holders: Mapping[str, Holder],
        loads: Loads,
        costs: CostModel,
        topology: Topology,
    ) -> None:
        self.request, self.workers, self.loads, self.costs = request, workers, loads, costs
        blocks = min(request.reusable_blocks, index.blocks) if index.guards else request.reusable_blocks
        self._g1 = [min(worker.g1_blocks, request.reusable_blocks) for worker in workers]
        self._guarded = [row for row, worker in enumerate(workers) if worker.guard in holders]
        targets = [holders[workers[row].guard] for row in self._guarded]
        starts = [self._g1[row] for row in self._guarded]
        self._ways = find_ways(targets, starts, index, holders, blocks, loads.outgoing_bytes, costs, topology)
        self._way_of = {row: way for way, row in enumerate(self._guarded)}
        budget = costs.settings.copy_budget_bytes_per_s
        self._no_budget = bool(budget) and loads.copied_bytes_per_s >= budget
        self._prefills = [costs.prefill(worker.rank) for worker in workers]
        self._kept = [0] * len(workers)
        """runs each worker takes"""
        self._reused = list(self._g1)
        self._copied = [(0, 0)] * len(workers)
        """blocks and runs that each worker gets from others"""
        self.raw_fetch_s = [0.0] * len(workers)
        self._choose_lengths()
        self._resident = [self._own_prefix(row) for row in range(len(workers))]
        longest = max(self._resident)
        self._replicas = sum(own >= _REPLICA * longest > 0 for own in self._resident)
        self._longest = longest
        self._turns = _later_turns(request.turn)
        self._best = best = max(range(len(workers)), key=lambda row: self._resident[row])
        self._spike = _spike(loads.of(workers[best].rank)) if longest else 0.0
        """how much of the queue at the best holder is new: 0 a trend, 1 a spike"""
        rate_per_s = _rate_of(request.rates_per_s, longest)
        self._hot_as_it_is_s = self._hot_s(rate_per_s, self._replicas)
        self._hot_with_one_more_s = self._hot_s(rate_per_s, self._replicas + 1)
        self._announced: dict[Rank, list[tuple[float, float]]] = {}
        for turn in loads.announced:
            seconds = costs.prefill(turn.rank).seconds(turn.prefill_tokens)
            self._announced.setdefault(turn.rank, []).append((turn.starts_in_s, seconds))
        for turns in self._announced.values():
            turns.sort()

    # --- blocks ----------------------------------------------------------------------------------

    def _choose_lengths(self) -> None:
        """How many of its runs each worker takes: blocks are reused as a prefix, so each way to get them is
        the runs up to one of them, and none that is slower than computing its blocks."""
        ways, size = self._ways, self.request.block_size
        if not ways.counts.any():
            return
        elapsed = np.cumsum(ways.seconds, axis=1)
        starts = np.array([self._g1[row] for row in self._guarded])
        block_s = np.array([self._prefills[row].seconds(size) for row in self._guarded])
        gain = (ways.end - starts[:, None]) * block_s[:, None] - elapsed
        gain[np.arange(gain.shape[1]) >= ways.counts[:, None]] = -np.inf
        if self._no_budget:
            # Up to the first copy.
            gain[np.maximum.accumulate(ways.source != OWN, axis=1)] = -np.inf
        last = gain.argmax(axis=1)
        targets = np.arange(len(last))
        copied = ways.source != OWN
        copied &= np.arange(gain.shape[1]) <= last[:, None]
        blocks = ((ways.end - ways.first) * copied).sum(axis=1).tolist()
        runs, worth = copied.sum(axis=1).tolist(), (gain[targets, last] > 0).tolist()
        ends, taken_s = ways.end[targets, last].tolist(), elapsed[targets, last].tolist()
        for way, row in enumerate(self._guarded):
            if worth[way]:
                self._kept[row] = int(last[way]) + 1
                self._reused[row], self.raw_fetch_s[row] = ends[way], taken_s[way]
                self._copied[row] = blocks[way], runs[way]

    def _own_prefix(self, row: int) -> int:
        """Leading blocks that the worker has without any copy."""
        way = self._way_of.get(row)
        if way is not None and self._ways.counts[way] and self._ways.source[way, 0] == OWN:
            return int(self._ways.end[way, 0])
        return self._g1[row]

    def sources(self, row: int, chosen: Estimate) -> tuple[SourceRun, ...]:
        """The copies of one worker, in prefix order."""
        if not chosen.copied_blocks:
            return ()
        way, ways, runs = self._way_of[row], self._ways, []
        for at in range(self._kept[row]):
            if ways.source[way, at] != OWN:
                holder = ways.sources[ways.source[way, at]]
                first = int(ways.first[way, at])
                count = int(ways.end[way, at]) - first
                runs.append(SourceRun(holder.name, holder.endpoint, first, count, count * holder.block_bytes))
        return tuple(runs)

    def moves(self, row: int) -> bool:
        """Whether the copies leave their source: a session that slept, alone with its blocks, goes to
        another home because its old one is busy by trend."""
        turn = self.request.turn
        sleeper = turn.kind is Kind.WAKE_UP or turn.idle_s >= LONG_IDLE_S
        return (
            sleeper and not turn.parent and not _is_last(turn) and self._spike < 0.5 and self._replicas == 1
        )

    def over_replicated(self, row: int) -> bool:
        """Enough guards keep this prefix."""
        limit = self.costs.settings.max_replicas
        return 0 < limit <= self._replicas and self._resident[row] < _REPLICA * self._longest

    @property
    def no_budget(self) -> bool:
        """Copies were not considered, and there would have been some."""
        return self._no_budget and bool((self._ways.source[:, 0] != OWN).any() and self._ways.counts.any())

    # --- seconds ---------------------------------------------------------------------------------

    def estimate(self, row: int) -> Estimate:
        """The cost terms of one worker."""
        request, worker, turn = self.request, self.workers[row], self.request.turn
        load, prefill, settings = self.loads.of(worker.rank), self._prefills[row], self.costs.settings
        starts_in_s = turn.starts_in_s if request.ahead else 0.0
        copied_blocks, runs = self._copied[row]
        fetch_s, joined = self.raw_fetch_s[row], False
        ready_in_s = None
        if copied_blocks and request.session.arriving:
            ready_in_s = self._ready_in_s(worker.guard, row)
        if ready_in_s is not None and ready_in_s <= fetch_s:
            fetch_s, joined = ready_in_s, True
        copy_s = 0.0
        if copied_blocks and not joined:
            spike = self._spike * _SPIKE_WEIGHT / (1 + self._turns)
            copy_s = fetch_s * (_COPY_WEIGHT + spike)
            if settings.copy_budget_bytes_per_s:
                copy_s += fetch_s * self.loads.copied_bytes_per_s / settings.copy_budget_bytes_per_s
        wait_s = self._wait_s(worker, load, prefill, starts_in_s)
        prefill_s = prefill.overhead_s + prefill.seconds(
            max(1, request.tokens - self._reused[row] * request.block_size)
        )
        return Estimate(
            rank=worker.rank,
            wait_s=wait_s,
            fetch_s=max(0.0, fetch_s - starts_in_s),
            prefill_s=prefill_s,
            load_s=load.requests * settings.decode_s,
            later_s=_LATER_WEIGHT * self._turns * prefill.seconds(load.slow_tokens)
            + self._behind_s(load, prefill, prefill_s),
            delay_s=self._delay_s(worker.rank, starts_in_s, wait_s + prefill_s),
            pressure_s=self._pressure_s(row, worker, load, prefill) + self._pool_s(row, prefill),
            copy_s=copy_s,
            hot_s=self._hot_with_one_more_s if self._joins(row) else self._hot_as_it_is_s,
            jitter_s=self._jitter_s(worker, prefill),
            bias=_bias(request, worker),
            g1_blocks=self._g1[row],
            local_blocks=self._reused[row] - self._g1[row] - copied_blocks,
            copied_blocks=copied_blocks,
            runs=runs,
            joined=joined,
            at_home=bool(worker.guard) and worker.guard == request.session.home,
        )

    def _ready_in_s(self, guard: str, row: int) -> float | None:
        """When everything this worker lacks will have arrived from a transfer under way; None: not all."""
        blocks = self._resident[row]
        ready_s = 0.0
        for part in sorted(self.request.session.arriving, key=lambda part: part.first):
            if part.guard == guard and part.first <= blocks:
                blocks = max(blocks, part.first + part.count)
                ready_s = max(ready_s, part.ready_in_s)
        return ready_s if ready_s and blocks >= self._reused[row] else None

    def _wait_s(self, worker: Worker, load: Load, prefill: Prefill, starts_in_s: float) -> float:
        """Its queue at that time: what is queued now and announced drains; the trend stays."""
        done_s = min(load.head_s, prefill.seconds(load.head_tokens))
        wait_s = prefill.seconds(load.prefill_tokens) - done_s
        at_s = 0.0
        for begins_s, seconds in self._announced.get(worker.rank, ()):
            if begins_s > starts_in_s:
                break
            wait_s = max(0.0, wait_s - (begins_s - at_s)) + seconds
            at_s = begins_s
        wait_s = max(0.0, wait_s - (starts_in_s - at_s))
        if starts_in_s > 0:
            wait_s = max(wait_s, prefill.seconds(load.slow_tokens))
        ahead = load.requests - worker.max_requests + 1 if worker.max_requests else 0
        wait_s *= self.costs.wait_factor(worker.rank)
        return wait_s + max(0, ahead) * self.costs.settings.slot_wait_s

    def _delay_s(self, rank: Rank, starts_in_s: float, busy_s: float) -> float:
        if rank not in self._announced:
            return 0.0
        ends_s = starts_in_s + busy_s
        return sum(
            max(0.0, min(busy_s, ends_s - begins_s))
            for begins_s, _ in self._announced.get(rank, ())
            if begins_s > starts_in_s
        )

    def _pressure_s(self, row: int, worker: Worker, load: Load, prefill: Prefill) -> float:
        if not worker.kv_blocks:
            return 0.0
        size = self.request.block_size
        needed = -(-(self.request.tokens + (self.request.turn.osl or 0)) // size) - self._g1[row]
        over = min(needed, load.blocks + needed - _FULL * worker.kv_blocks)
        return prefill.seconds(max(0.0, over) * size)

    def _behind_s(self, load: Load, prefill: Prefill, prefill_s: float) -> float:
        """What those who come after this one will wait for it, at the pace at which work arrives there."""
        # Not by a queue's busy / (1 - busy): near saturation that is all noise, and outweighs real queues.
        return _BEHIND_WEIGHT * prefill_s * min(1.0, prefill.seconds(load.tokens_per_s))

    def _pool_s(self, row: int, prefill: Prefill) -> float:
        """Part of what this prompt will push out of the worker's pool has to be computed again."""
        free_blocks = self.loads.free_blocks.get(self.workers[row].guard)
        if free_blocks is None or _is_last(self.request.turn):
            return 0.0
        new = self.request.reusable_blocks - self._resident[row]
        return _POOL_WEIGHT * prefill.seconds(max(0, new - free_blocks) * self.request.block_size)

    def _joins(self, row: int) -> bool:
        """Whether the worker will be one more holder of the prefix."""
        return self._resident[row] < _REPLICA * self._longest and not self.over_replicated(row)

    def _hot_s(self, rate_per_s: float, replicas: int) -> float:
        """Followers' queue (M/D/1) at so many holders.

        None of them waits longer than computing the prefix elsewhere takes.
        """
        if not self._longest or rate_per_s <= 0:
            return 0.0
        size, prefill = self.request.block_size, self._prefills[self._best]
        service_s = prefill.overhead_s + prefill.seconds(max(1, self.request.tokens - self._longest * size))
        busy = min(_BUSIEST, rate_per_s * service_s / replicas)
        queue_s = min(service_s * busy / (2 * (1 - busy)), prefill.seconds(self._longest * size))
        return _HOT_HORIZON_S * rate_per_s * queue_s

    def _jitter_s(self, worker: Worker, prefill: Prefill) -> float:
        if self.loads.unseen_tokens <= 0:
            return 0.0
        request = self.request
        seed = f"{request.router}/{request.plan_id}/{worker.rank[0]}.{worker.rank[1]}".encode()
        part = int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest(), "little") / 2**32
        return part * prefill.seconds(self.loads.unseen_tokens)


def _cheapest(request: RequestView, estimates: Sequence[Estimate], loads: Loads) -> Estimate:
    totals = [estimate.total_s for estimate in estimates]
    limit = min(totals) * _NEAR_FACTOR + _NEAR_S
    near = [estimate for estimate, total in zip(estimates, totals, strict=True) if total <= limit]
    return min(
        near,
        key=lambda e: (
            not e.at_home,
            e.copied_blocks,
            -e.reused_blocks,
            loads.of(e.rank).requests,
            _rendezvous(request, e.rank),
        ),
    )


def _rendezvous(request: RequestView, rank: Rank) -> bytes:
    """Order of equals: stable for one session or prefix, even over them, unmoved by workers that come and
    go."""
    stable = request.turn.session.encode() or request.affinity
    return hashlib.blake2b(stable + b"%d.%d" % rank, digest_size=8).digest()


def _bias(request: RequestView, worker: Worker) -> float:
    wishes = request.preferred_taints
    if not wishes:
        return 1.0
    wish = sum(weight for taint, weight in wishes.items() if taint in worker.taints)
    return math.exp(-math.tanh(wish))


def _rate_of(rates_per_s: Sequence[float], blocks: int) -> float:
    """Arrivals of the deepest prefix that is counted within so many blocks."""
    if not blocks or not rates_per_s:
        return 0.0
    return rates_per_s[min(len(rates_per_s), blocks.bit_length()) - 1]


def _is_last(turn: Turn) -> bool:
    return turn.last or turn.kind is Kind.ONE_OFF


def _later_turns(turn: Turn) -> float:
    """Turns still to come that would use what is put where this one runs."""
    if _is_last(turn):
        return 0.0
    if turn.runs_s is not None:
        return min(_MOST_TURNS, turn.runs_s / _SECONDS_A_TURN)
    if turn.next_in_s is not None:
        return _SECONDS_A_TURN / (_SECONDS_A_TURN + turn.next_in_s)
    return 0.5


def _spike(load: Load) -> float:
    now = max(load.prefill_tokens, load.fast_tokens)
    return 1.0 - min(1.0, load.slow_tokens / now) if now and load.slow_tokens < now else 0.0


def _not_now(turn: Turn, fetch_s: float) -> tuple[Reason | None, float | None]:
    """Why nothing is copied ahead of a turn at this moment, and when to look again."""
    if turn.expires_in_s is not None and fetch_s > turn.expires_in_s:
        return Reason.TOO_LATE, None
    early_s = turn.starts_in_s - fetch_s - PREFETCH_MARGIN_S
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
    estimates: Sequence[Estimate],
    copies: bool,
    moves: bool,
    no_budget: bool,
) -> Reason:
    if request.pinned_worker is not None:
        return Reason.PINNED
    if _is_last(request.turn):
        return Reason.ONE_OFF
    if copies:
        if chosen.joined:
            return Reason.JOIN
        if moves:
            return Reason.WAKE_UP
        if request.ahead:
            return Reason.NEXT_TURN
        hot_s = max(estimate.hot_s for estimate in estimates) - chosen.hot_s
        return Reason.SPREAD if hot_s > chosen.fetch_s else Reason.COPY
    if no_budget:
        return Reason.BUDGET
    return Reason.RESIDENT if chosen.reused_blocks else Reason.COLD
