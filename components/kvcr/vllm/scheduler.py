# SPDX-License-Identifier: Apache-2.0
"""The connector inside vLLM's scheduler: what to load, what to save, what to fetch. Never waits.

vLLM calls every method on the scheduler's thread.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.client import LoadSpec
from kvcr.client.hints import FetchHint, missing_run, sources_for
from kvcr.config import EngineConfig
from kvcr.keys import BlockKey, KeySpace
from kvcr.protocol.engine import DropG1, Source
from kvcr.vllm import g1
from kvcr.vllm.chain import RequestChain, key_space
from kvcr.vllm.hints import request_actions, request_hint, traceparent
from kvcr.vllm.metadata import StepMetadata, WorkerMetadata
from kvcr.vllm.port import SchedulerPort
from kvcr.vllm.requests import RequestState, SchedulerCounters
from kvcr.vllm.saves import Saves
from kvcr.vllm.seen import SeenBlocks, hashes_of_running
from kvcr.vllm.speed import PrefillSpeed

MAX_ROOTS = 4096
"""Key-space roots kept; one per tenant and adapter seen."""

MIN_DEADLINE_S = 0.05

MIN_LOCAL_ESTIMATE_MS = 200.0
"""A pull is given this long however fast the engine computes: what is won below is within the noise."""

LEASE_WAIT_SHARE = 0.05
"""Share of the time to recompute that a request may wait for the lease reply, if that is more than
``lease_wait_ms``: where recomputing takes seconds, going cold after 50 ms is the dear choice. (On two busy
cores one reply in five took longer than 50 ms, with 14 s to recompute.)"""

FETCH_PAUSE_S = 1.0
"""After a guard missed a lease reply, requests go on without asking it for this long: each one that asks
waits for it."""


class ConnectorScheduler:
    """``model`` is the model identity of the key space, ``ranks`` the number of workers."""

    def __init__(
        self,
        handle: SchedulerPort,
        config: EngineConfig,
        *,
        model: str,
        block_size: int,
        group: int = 0,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle = handle
        self._config = config
        self._model = model
        self._block_size = block_size
        self._group = group
        self._clock = clock
        self._block_pool: Any = None
        self._seen = SeenBlocks(0)
        self._requests: dict[str, RequestState] = {}
        self._roots: dict[KeySpace, BlockKey] = {}
        self._loads: list[LoadSpec] = []
        self._delayed: list[str] = []
        self._saves = Saves(handle, config, block_size=block_size, group=group, ranks=ranks)
        self._drops = 0
        self._no_fetch_before_s = 0.0
        self.prefill = PrefillSpeed()
        self._counters = SchedulerCounters()

    # --- life of a request ----------------------------------------------------------------------

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's G1 block pool: read for headroom and for what G1 has."""
        self._block_pool = block_pool
        self._seen = SeenBlocks(len(block_pool.blocks))

    def on_new_request(self, request: Any) -> None:
        """Compute the request's keys and pass its hint, if it has one, to the guard."""
        # An engine that was idle has not read its socket since: what was dropped meanwhile goes now.
        self._handle.poll()
        self._carry_out_drops()
        space = key_space(self._config.namespace, self._model, self._group, request)
        chain = RequestChain(request, self._root(space), self._block_size)
        state = RequestState(request, chain, self._config.load_deadline_ms, self._config.lease_wait_ms / 1000)
        state.drops = self._drops
        self._requests[request.request_id] = state
        keyed = chain.extend()
        self._counters.keyless_blocks += len(request.block_hashes) - keyed
        hint = request_hint(request, self._counters.skipped)
        if hint is not None:
            # A hint with an estimate knows what waiting is worth; others are held to our own bound.
            if hint.give_up_ms > 0:
                state.deadline_ms = hint.deadline_ms
                state.lease_wait_s = max(state.lease_wait_s, LEASE_WAIT_SHARE * hint.give_up_ms / 1000)
            else:
                state.deadline_ms = min(state.deadline_ms, hint.deadline_ms)
            if hint.no_retain:
                state.one_off, state.keep = True, 0
        if keyed and not request.skip_reading_prefix_cache and self._clock() >= self._no_fetch_before_s:
            self._fetch(state, hint)
        actions = request_actions(request, self._counters.skipped)
        if actions is not None:
            self._handle.act(request.request_id, actions)

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``: None while it is open what a fetch will bring."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        first = num_computed_tokens // self._block_size
        if state.g1_hits is None:
            state.g1_hits = first
        if state.load_failed or request.skip_reading_prefix_cache:
            return 0, False
        # At least one token must be left for the engine to compute.
        stop = min((request.num_tokens - 1) // self._block_size, state.chain.extend())
        if stop <= first:
            return 0, False
        self._handle.poll()
        fetch = self._handle.fetch_state(request.request_id)
        if fetch is not None and not fetch.settled:
            if self._clock() < fetch.sent_s + state.lease_wait_s:
                return None, False
            if not fetch.answered:
                self._counters.lease_timeouts += 1
                self._no_fetch_before_s = self._clock() + FETCH_PAUSE_S
        if not state.queried:
            state.queried = True
            self._counters.queried_blocks += stop - first
        present = self._handle.lookup(state.chain.blob(first, stop))
        if fetch is not None and not state.spent:
            _mark(present, first, fetch.first, fetch.expected())
        count = _leading(present)
        if self._block_pool is not None:
            # vLLM reserves G1 for the whole load and cannot preempt it: never ask for more than is free.
            count = min(count, self._block_pool.get_num_free_blocks())
        state.offer = (first, count)
        return count * self._block_size, count > 0

    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """``update_state_after_alloc``: plan the load into these blocks. Called again, with 0, after it."""
        state = self._requests.get(request.request_id)
        if num_external_tokens == 0 or state is None:
            return
        first, offered = state.offer
        count = min(num_external_tokens // self._block_size, offered)
        block_ids = blocks.get_block_ids()[0][first : first + count]
        keys = state.chain.blob(first, first + count)
        present = self._handle.lookup(keys)
        fetch = self._handle.fetch_state(request.request_id)
        local = int(present.sum())
        deadline_s = state.deadline_ms / 1000
        if fetch is not None and local < count:
            deadline_s = max(MIN_DEADLINE_S, fetch.sent_s + deadline_s - self._clock())
        self._loads.append(
            LoadSpec(
                request_id=request.request_id,
                first=first,
                keys=keys,
                block_ids=np.array(block_ids, "<i4").tobytes(),
                deadline_s=deadline_s,
                fetching=fetch is not None and local < count,
                fetch_first=fetch.first if fetch is not None else 0,
                fetch_count=fetch.count if fetch is not None else 0,
            )
        )
        state.loading_into = frozenset(block_ids)
        self._handle.use(keys)
        self._counters.asked_blocks += count
        self._counters.local_blocks += local
        self._counters.fetched_blocks += count - local

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """``request_finished``: True while workers still read the request's blocks to save them."""
        state = self._requests.pop(request.request_id, None)
        self._handle.finish(request.request_id)
        if state is not None and state.keep < len(block_ids) and self._block_pool is not None:
            # A one-off turn takes what it brought. What was there before it belongs to others too.
            first = max(state.keep, (state.g1_hits or 0) if state.one_off else 0)
            g1.drop_own(self._block_pool, block_ids[first:])
        if state is not None and state.g1_hits is not None and self._block_pool is not None:
            state.chain.extend()
            self._seen.note(state.chain, state.g1_hits)
        if state is None or not state.jobs:
            return False
        self._delayed.append(request.request_id)
        return True

    # --- steps ----------------------------------------------------------------------------------

    def build_metadata(self, output: Any) -> StepMetadata:
        """``build_connector_meta``: the loads and saves of this step."""
        self._handle.poll()
        self._carry_out_drops()
        self.prefill.step(self._clock(), _prompt_tokens(output))
        preempted = sorted(output.preempted_req_ids or ())
        for request_id in preempted:
            # Workers finish these saves before they start the step, so nothing holds the blocks any more.
            state = self._requests.get(request_id)
            if state is not None:
                state.jobs.clear()
        metadata = StepMetadata(
            self._loads, self._saves.plan(output, self._requests, self._counters), preempted, self._delayed
        )
        self._loads, self._delayed = [], []
        return metadata

    def take_output(self, output: Any) -> None:
        """``update_connector_output``: which loads and saves are over."""
        self.prefill.ended(self._clock())
        if output.invalid_block_ids:
            self._note_failed(output.invalid_block_ids)
        for request_id in output.finished_recving or ():
            state = self._requests.get(request_id)
            if state is not None:
                state.loading_into = frozenset()
                state.spent = state.one_off
        worker = output.kv_connector_worker_meta
        if isinstance(worker, WorkerMetadata):
            for job_id, ranks in worker.saved.items():
                self._saves.done(job_id, ranks, self._requests)
            self._saves.damaged(worker.corrupt)

    def reset(self, model: str) -> None:
        """``reset_cache``: blocks belong to other weights now. Running requests are not keyed any more."""
        self._model = model
        self._roots.clear()
        self._seen.clear()
        for state in self._requests.values():
            state.chain.end()
            state.load_failed = True

    def take_counters(self) -> SchedulerCounters:
        counters, self._counters = self._counters, SchedulerCounters()
        return counters

    def close(self) -> None:
        self._handle.close()

    # --- inside ---------------------------------------------------------------------------------

    def _root(self, space: KeySpace) -> BlockKey:
        root = self._roots.get(space)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[space] = space.root()
        return root

    def _fetch(self, state: RequestState, hint: FetchHint | None) -> None:
        request, chain = state.request, state.chain
        stop = min((request.num_tokens - 1) // self._block_size, len(chain))
        if hint is not None:
            hashes = chain.engine_hashes(0, stop if hint.stock_hashes else 0)
            sources = sources_for(hint, chain.blob(0, len(chain)), hashes, self._counters.skipped)
        else:
            own = self._handle.own_endpoint
            sources = [Source(peer, 0, stop) for peer in self._config.peers if peer != own]
        if not sources or stop == 0:
            return
        present = self._handle.lookup(chain.blob(0, stop))
        present[: self._g1_run(request, stop)] = True
        run = missing_run(sources, present)
        if run is None:
            return
        first, count = run
        self._counters.fetches += 1
        give_up_ms = hint.give_up_ms if hint is not None else 0.0
        local_estimate = give_up_ms <= 0 and self._config.local_estimate
        if local_estimate and self.prefill.tokens_per_s:
            recompute_ms = self.prefill.recompute_ms(count * self._block_size)
            give_up_ms = max(MIN_LOCAL_ESTIMATE_MS, recompute_ms)
        self._handle.fetch(
            request.request_id,
            first=first,
            parent=chain.parent(first),
            keys=chain.blob(first, first + count),
            engine_hashes=chain.engine_hashes(first, first + count),
            sources=sources,
            deadline_ms=state.deadline_ms,
            give_up_ms=give_up_ms,
            plan_id=hint.plan_id if hint is not None else "",
            no_retain=hint.no_retain if hint is not None else False,
            move=hint.move if hint is not None else False,
            action_id=hint.action_id if hint is not None else "",
            local_estimate=local_estimate,
            traceparent=traceparent(request, hint),
        )

    def _g1_run(self, request: Any, stop: int) -> int:
        """Blocks from the start that vLLM's own prefix cache has."""
        if self._block_pool is None:
            return 0
        # By bisection, a dozen looks into a dict: vLLM frees the tail of a chain before its head. Where that
        # is not so, a block is taken to be in G1 that is not, and is computed.
        hashes = request.block_hashes
        return bisect.bisect_left(
            range(stop),
            True,
            key=lambda position: self._block_pool.get_cached_block(hashes[position], [self._group]) is None,
        )

    def _carry_out_drops(self) -> None:
        """Forget blocks in G1 as the guard asks, and keep nothing more of requests whose chain they end."""
        drops = self._handle.take_drops()
        if not drops:
            return
        named = [self._named(drop) for drop in drops]
        counts = g1.drop(self._block_pool, named) if self._block_pool is not None else [0] * len(drops)
        for drop, hashes, count in zip(drops, named, counts, strict=True):
            tails = frozenset(each.to_bytes(8, "big") for each in hashes.tolist())
            for state in self._requests.values():
                position = g1.first_among(state.request.block_hashes, tails)
                if position is not None:
                    state.keep = min(state.keep, position)
            self._drops = max(self._drops, drop.drop_id)
            self._handle.dropped(drop, count)

    def _named(self, drop: DropG1) -> npt.NDArray[np.uint64]:
        """The engine's hashes of the blocks of a drop."""
        hashes = [np.frombuffer(drop.engine_hashes, "<u8").astype(np.uint64)]
        if drop.keys:
            hashes.append(self._seen.hashes(drop.keys))
            hashes += [hashes_of_running(state.chain, drop.keys) for state in self._requests.values()]
        return np.concatenate(hashes)

    def _note_failed(self, invalid: Iterable[int]) -> None:
        """A request some of whose load failed recomputes: asking the pool for it again would loop."""
        failed = set(invalid)
        for state in self._requests.values():
            if not failed.isdisjoint(state.loading_into):
                state.load_failed = True


def _prompt_tokens(output: Any) -> int:
    """Tokens of a step that belong to prefills, but for a token or so each."""
    scheduled = output.num_scheduled_tokens
    return int(sum(scheduled.values())) - len(scheduled)


def _leading(mask: npt.NDArray[np.bool_]) -> int:
    """Number of True entries before the first False."""
    misses = np.flatnonzero(~mask)
    return int(misses[0]) if len(misses) else len(mask)


def _mark(present: npt.NDArray[np.bool_], first: int, other_first: int, other: npt.NDArray[np.bool_]) -> None:
    """``present[i]`` is about position ``first + i``: or-in what ``other`` says from ``other_first`` on."""
    start, stop = max(first, other_first), min(first + len(present), other_first + len(other))
    if stop > start:
        present[start - first : stop - first] |= other[start - other_first : stop - other_first]
