# SPDX-License-Identifier: Apache-2.0
"""What each worker would cost: the planner's estimates, term by term. Pure, as the planner is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from router_hints.costs import CostModel, Prefill, Rank
from router_hints.index import IndexView
from router_hints.ledger import Load, Loads
from router_hints.plans import Estimate, Estimates, RequestView, SourceRun, Worker
from router_hints.topology import Topology
from router_hints.turns import Kind, Turn
from router_hints.ways import OWN, Holder, find_ways

LONG_IDLE_S = 600.0
"""A session that slept this long is woken up, whatever the harness calls the turn."""
_LATER_WEIGHT = 0.25
"""Seconds of a later turn count less than those of this one: by then much will have changed."""
_SECONDS_A_TURN = 60.0
_MOST_TURNS = 4.0
_COPY_WEIGHT = 0.1
"""Price of a second of copying to those who do not wait for it."""
_SPIKE_WEIGHT = 1.0
"""The same for a copy away from a spike: when that is over the copy has served once."""
_AHEAD_WEIGHT = 0.5
"""The same ahead of time: the queues that decide are a guess, and differ less by the time of the request."""
_BEHIND_WEIGHT = 6.0
"""Price of a second of prefill at a worker that is busier than others, to those who come after it."""
_POOL_WEIGHT = 0.4
"""Chance that a block pushed out of a full pool would have been used again."""
_FULL = 0.95
"""Part of the engine memory in use at which it counts as full."""
_HOT_HORIZON_S = 1.0
_BUSIEST = 0.95
_JOIN_S = 0.001
"""Copies under way are joined unless new ones would be quicker by more than this."""
_REPLICA = 0.9
"""Who has this part of the longest prefix that anybody has counts as one of its holders."""


class Scene:
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
        self.copies_s = [0.0] * len(workers)
        """until the copies of each worker are in its pool"""
        self._loads_s = [0.0] * len(workers)
        """what its engine then loads"""
        self._starts_in_s = request.turn.starts_in_s if request.ahead else 0.0
        self._announced = self._announced_turns()
        self._waits = [self._wait_s(*each) for each in zip(workers, self._prefills, strict=True)]
        self._choose_lengths()
        self._resident = self._own_prefixes()
        self._joined = self._join()
        longest = max(self._resident)
        self._replicas = sum(own >= _REPLICA * longest > 0 for own in self._resident)
        self._longest = longest
        self._turns = _later_turns(request.turn)
        self._best = best = self._resident.index(longest)
        self._spike = _spike(loads.of(workers[best].rank)) if longest else 0.0
        """how much of the queue at the best holder is new: 0 a trend, 1 a spike"""
        rate_per_s = _rate_of(request.rates_per_s, longest)
        self._hot_as_it_is_s = self._hot_s(rate_per_s, self._replicas)
        self._hot_with_one_more_s = self._hot_s(rate_per_s, self._replicas + 1)

    # --- blocks ----------------------------------------------------------------------------------

    def _choose_lengths(self) -> None:
        """How many of its runs each worker takes: blocks are reused as a prefix, so each way to get them is
        the runs up to one of them, and none that is waited for longer than computing its blocks takes. Guards
        copy while the request waits for its turn: so much of a copy costs it nothing."""
        ways, size = self._ways, self.request.block_size
        most = int(ways.counts.max(initial=0)) if ways.sources else 0
        if not most:
            return
        # As wide as the longest way, of what may be much wider.
        first, end, copied = ways.first[:, :most], ways.end[:, :most], ways.source[:, :most] != OWN
        elapsed = np.cumsum(ways.seconds[:, :most], axis=1)
        starts = np.array([self._g1[row] for row in self._guarded])
        block_s = np.array([self._prefills[row].seconds(size) for row in self._guarded])
        reused = end - starts[:, None]
        loads_s = reused * ways.load_block_s[:, None]
        copies_s = elapsed - loads_s
        free_s = np.array([self.free_s(row) for row in self._guarded])
        gain = reused * block_s[:, None] - np.maximum(0.0, copies_s - free_s[:, None]) - loads_s
        numbers = np.arange(most)
        gain[numbers >= ways.counts[:, None]] = -np.inf
        if self._no_budget:
            # Up to the first copy.
            gain[np.maximum.accumulate(copied, axis=1)] = -np.inf
        last = gain.argmax(axis=1)
        targets = np.arange(len(last))
        copied &= numbers <= last[:, None]
        blocks = ((end - first) * copied).sum(axis=1).tolist()
        runs, worth = copied.sum(axis=1).tolist(), (gain[targets, last] > 0).tolist()
        ends = end[targets, last].tolist()
        copying, loading = copies_s[targets, last].tolist(), loads_s[targets, last].tolist()
        for way, row in enumerate(self._guarded):
            if worth[way]:
                self._kept[row] = int(last[way]) + 1
                self._reused[row] = ends[way]
                self.copies_s[row], self._loads_s[row] = copying[way], loading[way]
                self._copied[row] = blocks[way], runs[way]

    def _own_prefixes(self) -> list[int]:
        """Leading blocks that each worker has without any copy."""
        ways, own = self._ways, list(self._g1)
        if not ways.sources:
            return own
        for way in np.flatnonzero((ways.counts > 0) & (ways.source[:, 0] == OWN)).tolist():
            own[self._guarded[way]] = int(ways.end[way, 0])
        return own

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

    @property
    def moves(self) -> bool:
        """Whether copies leave their source: a session that slept, alone with its blocks, goes to
        another home because its old one is busy by trend."""
        turn = self.request.turn
        sleeper = turn.kind is Kind.WAKE_UP or turn.idle_s >= LONG_IDLE_S
        return sleeper and not turn.parent and not is_last(turn) and self._spike < 0.5 and self._replicas == 1

    def over_replicated(self, row: int) -> bool:
        """Enough guards keep this prefix."""
        limit = self.costs.settings.max_replicas
        return 0 < limit <= self._replicas and self._resident[row] < _REPLICA * self._longest

    @property
    def no_budget(self) -> bool:
        """Copies were not considered, and there would have been some."""
        return self._no_budget and bool((self._ways.source[:, 0] != OWN).any() and self._ways.counts.any())

    # --- seconds ---------------------------------------------------------------------------------

    def estimates(self) -> Estimates:
        """The cost terms of every worker.

        A plain loop: with 64 workers it takes as long as arrays of 64 (0.2 ms), with two a tenth.
        """
        request, settings, turn = self.request, self.costs.settings, self.request.turn
        starts_in_s = self._starts_in_s
        loads = [self.loads.of(worker.rank) for worker in self.workers]
        # What was sent to each lately says who will come, but where all are saturated only queues count.
        busy = [
            min(1.0, load.tokens_per_s / prefill.tokens_per_s)
            for load, prefill in zip(loads, self._prefills, strict=True)
        ]
        least, slack = min(busy), 1.0 - sum(busy) / len(busy)
        bet = self._spike * _SPIKE_WEIGHT + (_AHEAD_WEIGHT if request.ahead else 0.0)
        copy_price = _COPY_WEIGHT + bet / (1 + self._turns)
        if settings.copy_budget_bytes_per_s:
            copy_price += self.loads.copied_bytes_per_s / settings.copy_budget_bytes_per_s
        needed_blocks = -(-(request.tokens + (turn.osl or 0)) // request.block_size)
        kept = not is_last(turn)
        replica_blocks = _REPLICA * self._longest
        replicas_left = not 0 < settings.max_replicas <= self._replicas
        home, free = request.session.home, self.loads.free_blocks
        rows, totals = [], []
        for row, (worker, load, prefill, wait_s, g1, reused, resident, (copied, runs), loaded_s) in enumerate(
            zip(
                self.workers,
                loads,
                self._prefills,
                self._waits,
                self._g1,
                self._reused,
                self._resident,
                self._copied,
                self._loads_s,
                strict=True,
            )
        ):
            speed = prefill.tokens_per_s
            joins = row in self._joined
            copies_s = self.copies_s[row]
            prefill_s = prefill.overhead_s + max(1, request.tokens - reused * request.block_size) / speed
            behind_s = _BEHIND_WEIGHT * prefill_s * (busy[row] - least) * slack
            # Recomputing what has to leave a full engine memory, and a part of what leaves a full pool.
            new_blocks = max(0, needed_blocks - g1)
            pressure = 0.0
            if worker.kv_blocks:
                over = load.blocks + needed_blocks - g1 - _FULL * worker.kv_blocks
                pressure = min(max(over, 0.0), new_blocks)
            if kept and worker.guard in free:
                pushed = request.reusable_blocks - resident - free[worker.guard]
                pressure += _POOL_WEIGHT * max(0.0, pushed)
            later_s = _LATER_WEIGHT * self._turns * load.slow_tokens / speed + behind_s
            delay_s = self._delay_s(worker, starts_in_s, wait_s + prefill_s) if self._announced else 0.0
            pressure_s = pressure * request.block_size / speed
            copy_s = 0.0 if joins or not copied else (copies_s + loaded_s) * copy_price
            one_more = replicas_left and resident < replica_blocks
            hot_s = self._hot_with_one_more_s if one_more else self._hot_as_it_is_s
            jitter_s = self._jitter_s(worker, speed) if self.loads.unseen_tokens > 0 else 0.0
            late_s = max(0.0, copies_s - self.free_s(row)) + loaded_s
            load_s = load.requests * settings.decode_s
            bias = _bias(request, worker) if request.preferred_taints else 1.0
            # In the order of Estimate.total_s, so that both are the same to the last bit.
            cluster_s = later_s + delay_s + pressure_s + copy_s + hot_s + jitter_s
            totals.append((wait_s + late_s + prefill_s + load_s + cluster_s + 1e-3) * bias)
            rows.append(
                (
                    worker.rank,
                    wait_s,
                    late_s,
                    prefill_s,
                    load_s,
                    later_s,
                    delay_s,
                    pressure_s,
                    copy_s,
                    hot_s,
                    jitter_s,
                    bias,
                    g1,
                    reused - g1 - copied,
                    copied,
                    runs,
                    joins,
                    bool(home) and worker.guard == home,
                )
            )
        return Estimates(rows, totals)

    def _join(self) -> set[int]:
        """Workers whose copies are under way already; what is left of them is what they take."""
        joined = set()
        for row, worker in enumerate(self.workers if self.request.session.arriving else ()):
            if self._copied[row][0]:
                ready_in_s = self._ready_in_s(worker.guard, row)
                if ready_in_s is not None and ready_in_s <= self.copies_s[row] + _JOIN_S:
                    self.copies_s[row] = ready_in_s
                    joined.add(row)
        return joined

    def _ready_in_s(self, guard: str, row: int) -> float | None:
        """When everything this worker lacks will have arrived from a transfer under way; None: not all."""
        blocks, ready_s = self._resident[row], None
        for part in sorted(self.request.session.arriving, key=lambda part: part.first):
            if part.guard == guard and part.first <= blocks:
                blocks = max(blocks, part.first + part.count)
                # One that is overdue is there any moment.
                ready_s = max(ready_s or 0.0, part.ready_in_s)
        return ready_s if blocks >= self._reused[row] else None

    def free_s(self, row: int) -> float:
        """How long copies may take before the request waits for them. What is not kept goes straight into
        engine memory, which a request gets when it is its turn."""
        return self._starts_in_s + (0.0 if nobody_comes_back(self.request) else self._waits[row])

    def _announced_turns(self) -> dict[Rank, list[tuple[float, float]]]:
        """When each turn begins, and how long it computes, in the order they come."""
        turns: dict[Rank, list[tuple[float, float]]] = {}
        for turn in self.loads.announced:
            seconds = self.costs.prefill(turn.rank).seconds(turn.prefill_tokens)
            turns.setdefault(turn.rank, []).append((turn.starts_in_s, seconds))
        for each in turns.values():
            each.sort()
        return turns

    def _wait_s(self, worker: Worker, prefill: Prefill) -> float:
        """Its queue at that time: what is queued now and announced drains; the trend stays."""
        load, speed, starts_in_s = self.loads.of(worker.rank), prefill.tokens_per_s, self._starts_in_s
        done_s = min(load.head_s, load.head_tokens / speed)
        queued_s = load.prefill_tokens / speed - done_s
        wait_s = max(0.0, queued_s - starts_in_s)
        if worker.rank in self._announced:
            left_s, at_s = queued_s, 0.0
            for begins_s, seconds in self._announced[worker.rank]:
                if begins_s > starts_in_s:
                    break
                left_s, at_s = max(0.0, left_s - (begins_s - at_s)) + seconds, begins_s
            wait_s = max(0.0, left_s - (starts_in_s - at_s))
        if starts_in_s > 0:
            wait_s = max(wait_s, load.slow_tokens / speed)
        wait_s *= self.costs.wait_factor(worker.rank)
        if worker.max_requests:
            wait_s += max(0, load.requests - worker.max_requests + 1) * self.costs.settings.slot_wait_s
        return wait_s

    def _delay_s(self, worker: Worker, starts_in_s: float, busy_s: float) -> float:
        return sum(
            (
                max(0.0, min(busy_s, starts_in_s + busy_s - begins_s))
                for begins_s, _ in self._announced.get(worker.rank, ())
                if begins_s > starts_in_s
            ),
            0.0,
        )

    def _jitter_s(self, worker: Worker, speed: float) -> float:
        request, (worker_id, rank) = self.request, worker.rank
        seed = f"{request.router}/{request.plan_id}/{worker_id}.{rank}".encode()
        part = int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest(), "little")
        return part / 2**32 * self.loads.unseen_tokens / speed

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


def _bias(request: RequestView, worker: Worker) -> float:
    wishes = request.preferred_taints or {}
    wish = sum(weight for taint, weight in wishes.items() if taint in worker.taints)
    return math.exp(-math.tanh(wish))


def _rate_of(rates_per_s: Sequence[float], blocks: int) -> float:
    """Arrivals of the deepest prefix that is counted within so many blocks."""
    if not blocks or not rates_per_s:
        return 0.0
    return rates_per_s[min(len(rates_per_s), blocks.bit_length()) - 1]


def nobody_comes_back(request: RequestView) -> bool:
    """Whether this context begins and ends with this request. The last turn of a session that had others may
    still be forked from: its blocks are only made safe to evict, when it is over."""
    turn = request.turn
    return turn.kind is Kind.ONE_OFF or (turn.last and not request.session.home)


def is_last(turn: Turn) -> bool:
    return turn.last or turn.kind is Kind.ONE_OFF


def _later_turns(turn: Turn) -> float:
    """Turns still to come that would use what is put where this one runs."""
    if is_last(turn):
        return 0.0
    if turn.runs_s is not None:
        return min(_MOST_TURNS, turn.runs_s / _SECONDS_A_TURN)
    if turn.next_in_s is not None:
        return _SECONDS_A_TURN / (_SECONDS_A_TURN + turn.next_in_s)
    return 0.5


def _spike(load: Load) -> float:
    now = max(load.prefill_tokens, load.fast_tokens)
    return 1.0 - min(1.0, load.slow_tokens / now) if now and load.slow_tokens < now else 0.0
