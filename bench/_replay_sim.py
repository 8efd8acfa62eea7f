# SPDX-License-Identifier: Apache-2.0
"""A deployment in simulated time: engines that compute prompts one after the other and answer them together.

Deliberately simple, and the same for every policy: a worker computes one prompt at a time at a fixed speed,
finds the blocks of those before it, decodes all it has begun at once, each slower the more there are, and
keeps the KV blocks of the last 5,000 in an LRU. A copy takes its bytes over a link's bandwidth and waits
for its source's earlier copies.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench._replay_traces import TOKENS, Notice, Request

PREFILL_TOKENS_PER_S = 7000.0
OVERHEAD_S = 0.02
ITL_S = 0.015
ITL_SHARE_S = 0.0003
"""Time between tokens, and what each other request of the batch adds to it."""
BLOCK_BYTES = TOKENS * 128 * 1024
LINK_BYTES_PER_S = 1e10
LOAD_BYTES_PER_S = 4e10
COPY_LATENCY_S = 0.003


@dataclass
class Worker:
    """One engine and its cache."""

    name: int
    capacity: int
    since_s: float = 0.0
    until_s: float | None = None
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    demoted: set[int] = field(default_factory=set)
    """of its cache, what may be evicted first"""
    free_at_s: float = 0.0
    sends_until_s: float = 0.0
    running: int = 0
    computed_tokens: int = 0
    queued_tokens: int = 0
    coming: Counter[int] = field(default_factory=Counter)
    """blocks of prompts before the next one's turn: it will find them"""

    def overlap(self, blocks: Sequence[int]) -> int:
        """Leading blocks it has."""
        for position, block in enumerate(blocks):
            if block not in self.cache:
                return position
        return len(blocks)

    def keep(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Put blocks in the cache, the head last to be evicted. Returns what came and what went."""
        stored = [block for block in blocks if block not in self.cache]
        for block in reversed(blocks):
            self.cache[block] = None
        self.use(blocks)
        removed = []
        while len(self.cache) > self.capacity:
            removed.append(self.cache.popitem(last=False)[0])
        self.demoted.difference_update(removed)
        return stored, removed

    def use(self, blocks: Sequence[int]) -> None:
        """Count a use of blocks it has: the head is the last of them to be evicted."""
        for block in reversed(blocks):
            self.cache.move_to_end(block)
        self.demoted.difference_update(blocks)

    def demote(self, blocks: Sequence[int]) -> None:
        """Those of them that are here are the first to be evicted, the tail before the head."""
        here = [block for block in blocks if block in self.cache]
        for block in here:
            self.cache.move_to_end(block, last=False)
        self.demoted.update(here)


@dataclass
class Choice:
    """Where a request goes, and what is copied there first: blocks by source."""

    worker: int
    copies: dict[int, list[int]] = field(default_factory=dict)
    keep: bool = True
    note: Any = None


class Policy(Protocol):
    """A router. All calls in order of simulated time."""

    name: str

    def choose(self, request: Request, number: int, sim: Simulation) -> Choice: ...
    def first_output(self, number: int, seconds: float, sim: Simulation) -> None: ...
    def ended(self, number: int, sim: Simulation) -> None: ...
    def changed(self, worker: int, stored: list[int], removed: list[int], sim: Simulation) -> None: ...
    def lost(self, worker: int, sim: Simulation) -> None: ...
    def added(self, worker: int, sim: Simulation) -> None: ...
    def notice(self, notice: Notice, sim: Simulation) -> None: ...


@dataclass
class _Running:
    request: Request
    choice: Choice
    arrived_s: float
    sent_s: float
    prefill_tokens: int
    started: bool = False


class Simulation:
    """One run of one policy over one trace."""

    def __init__(
        self,
        policy: Policy,
        events: Sequence[Request | Notice],
        *,
        workers: int = 8,
        capacity: int = 5000,
        lose_at_s: float | None = None,
        add_at_s: float | None = None,
        concurrency: int | None = None,
    ) -> None:
        """``concurrency``: that many requests are open at any time, whatever their time stamps say."""
        self.policy = policy
        self.workers = {name: Worker(name, capacity) for name in range(workers)}
        self.now_s = 0.0
        self._capacity = capacity
        self._queue: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._running: dict[int, _Running] = {}
        self._held_back: list[Request] = []
        self._hits = self._blocks = 0
        self.moved_bytes = 0
        self._ttfts: list[float] = []
        self._outputs = 0
        self._end_s = 0.0
        if concurrency:
            self._held_back = [event for event in reversed(events) if isinstance(event, Request)]
            for _ in range(min(concurrency, len(self._held_back))):
                self.at(0.0, "arrive", self._held_back.pop())
        else:
            for event in events:
                self.at(event.at_s, "arrive" if isinstance(event, Request) else "notice", event)
        if lose_at_s is not None:
            self.at(lose_at_s, "lose", 3)
        if add_at_s is not None:
            self.at(add_at_s, "add", workers)

    def at(self, at_s: float, kind: str, payload: Any) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), kind, payload))

    @property
    def alive(self) -> list[int]:
        return [name for name, worker in self.workers.items() if worker.until_s is None]

    def run(self) -> dict[str, float]:
        """The figures of the run."""
        while self._queue:
            self.now_s, _, kind, payload = heapq.heappop(self._queue)
            getattr(self, f"_{kind}")(payload)
        ttfts = sorted(self._ttfts)
        loads = [
            worker.computed_tokens / max(1.0, (worker.until_s or self._end_s) - worker.since_s)
            for worker in self.workers.values()
        ]
        return {
            "hit": round(self._hits / self._blocks, 4),
            "max_over_mean_load": round(max(loads) / statistics.mean(loads), 4),
            "ttft_mean_s": round(statistics.mean(ttfts), 4),
            "ttft_p50_s": round(statistics.median(ttfts), 4),
            "ttft_p90_s": round(ttfts[int(0.9 * len(ttfts))], 4),
            "ttft_p99_s": round(ttfts[int(0.99 * len(ttfts))], 4),
            "output_tokens_per_s": round(self._outputs / self._end_s, 1),
            "moved_bytes": self.moved_bytes,
        }

    # --- events ----------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        self._send(request, self.now_s)

    def _notice(self, notice: Notice) -> None:
        self.policy.notice(notice, self)

    def _first(self, number: int) -> None:
        running = self._running.get(number)
        if running is None:
            return
        worker = self.workers[running.choice.worker]
        running.started = True
        worker.queued_tokens -= running.prefill_tokens
        worker.running += 1
        self._ttfts.append(self.now_s - running.arrived_s)
        if running.choice.keep:
            worker.coming -= Counter(running.request.full_blocks)
            self.keep(worker.name, running.request.full_blocks)
        self.policy.first_output(number, self.now_s - running.sent_s, self)
        itl_s = ITL_S + ITL_SHARE_S * worker.running
        self.at(self.now_s + running.request.output * itl_s, "end", number)

    def _end(self, number: int) -> None:
        running = self._running.pop(number, None)
        if running is None:
            return
        self.workers[running.choice.worker].running -= 1
        self._outputs += running.request.output
        self._end_s = max(self._end_s, self.now_s)
        self.policy.ended(number, self)
        if self._held_back:
            self.at(self.now_s, "arrive", self._held_back.pop())

    def _landed(self, payload: tuple[int, tuple[int, ...]]) -> None:
        worker, blocks = payload
        if self.workers[worker].until_s is None:
            self.keep(worker, blocks)

    def _lose(self, name: int) -> None:
        """The engine dies; whoever it was answering is sent again, from the start."""
        worker = self.workers[name]
        worker.until_s = self.now_s
        self.policy.lost(name, self)
        for number, running in list(self._running.items()):
            if running.choice.worker == name:
                del self._running[number]
                self.policy.ended(number, self)
                if running.started:
                    # Its tokens so far were streamed: the client saw its first one.
                    self._ttfts.pop()
                self._send(running.request, running.arrived_s)

    def _add(self, name: int) -> None:
        self.policy.added(name, self)
        self.workers[name] = Worker(name, self._capacity, since_s=self.now_s, free_at_s=self.now_s)

    # --- what events do --------------------------------------------------------------------------

    def _send(self, request: Request, arrived_s: float) -> None:
        number = next(self._numbers)
        choice = self.policy.choose(request, number, self)
        worker = self.workers[choice.worker]
        ready_s = self.now_s + self.copy(choice.copies)
        copied = {block for blocks in choice.copies.values() for block in blocks}
        have = 0
        for block in request.blocks[: (request.tokens - 1) // TOKENS]:
            if block not in worker.cache and block not in copied and not worker.coming[block]:
                break
            have += 1
        worker.use([block for block in request.blocks[:have] if block in worker.cache])
        self._hits += have
        self._blocks += len(request.blocks)
        prefill = max(1, request.tokens - have * TOKENS)
        load_s = have * BLOCK_BYTES / LOAD_BYTES_PER_S
        begins_s = max(ready_s, worker.free_at_s)
        worker.free_at_s = begins_s + OVERHEAD_S + load_s + prefill / PREFILL_TOKENS_PER_S
        worker.computed_tokens += prefill
        worker.queued_tokens += prefill
        if choice.keep:
            worker.coming.update(request.full_blocks)
        self._running[number] = _Running(request, choice, arrived_s, self.now_s, prefill)
        self.at(worker.free_at_s, "first", number)

    def copy(self, copies: dict[int, list[int]]) -> float:
        """Begin these copies; seconds until the last one is there."""
        longest_s = 0.0
        for source, blocks in copies.items():
            byte_count = len(blocks) * BLOCK_BYTES
            sender = self.workers[source]
            sender.sends_until_s = max(self.now_s, sender.sends_until_s) + byte_count / LINK_BYTES_PER_S
            longest_s = max(longest_s, sender.sends_until_s - self.now_s + COPY_LATENCY_S)
            self.moved_bytes += byte_count
        return longest_s

    def keep(self, name: int, blocks: Sequence[int]) -> None:
        stored, removed = self.workers[name].keep(blocks)
        self.policy.changed(name, stored, removed, self)

    def drop(self, name: int, blocks: Sequence[int]) -> None:
        cache = self.workers[name].cache
        gone = [block for block in blocks if block in cache]
        for block in gone:
            del cache[block]
        self.workers[name].demoted.difference_update(gone)
        self.policy.changed(name, [], gone, self)

    def demote(self, name: int, blocks: Sequence[int]) -> None:
        self.workers[name].demote(blocks)
