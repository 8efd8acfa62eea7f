# SPDX-License-Identifier: Apache-2.0
"""Which blocks are copied from G1 to granted slots of the pool, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.client import Grants, SaveSpec
from kvcr.config import EngineConfig
from kvcr.vllm.port import SchedulerPort
from kvcr.vllm.requests import RequestState, SchedulerCounters

MAX_SAVES_PER_STEP = 2048
"""Blocks looked at for saving in one step; the rest follows in the next. Keeps a step's cost bounded."""

MAX_CORRUPT = 65_536
"""Keys of damaged blocks that are remembered until they are saved again."""

Positions = npt.NDArray[np.int64]


@dataclass
class _Job:
    request_id: str
    keys: list[bytes]
    ranks_left: int


class Saves:
    """Jobs from the step that plans them until all ranks have finished them. On the scheduler's thread."""

    def __init__(
        self, handle: SchedulerPort, config: EngineConfig, *, block_size: int, group: int, ranks: int
    ) -> None:
        self._handle = handle
        self._config = config
        self._block_size = block_size
        self._group = group
        self._ranks = ranks
        self._jobs: dict[int, _Job] = {}
        self._assigned: set[bytes] = set()
        """Keys being saved."""
        self._corrupt: set[bytes] = set()
        """Keys that the directory may still list though their bytes did not verify."""
        self._next_job = 1

    def plan(
        self, output: Any, requests: Mapping[str, RequestState], counters: SchedulerCounters
    ) -> list[SaveSpec]:
        """Jobs for the blocks that are full after this step (``output``: vLLM's) and not in the pool."""
        budget = min(self._handle.grants_available, MAX_SAVES_PER_STEP)
        if not output.num_scheduled_tokens or budget == 0:
            return []
        candidates = self._candidates(output, requests)
        if not candidates:
            return []
        present = self._handle.lookup(
            b"".join(state.chain.blob(state.saved, stop) for state, stop in candidates)
        )
        plans: list[tuple[RequestState, Positions]] = []
        offset = 0
        for state, stop in candidates:
            start = state.saved
            here = present[offset : offset + stop - start]
            offset += stop - start
            if self._corrupt:
                # The guard has been told, and has dropped them by the time that it hears of this save.
                rows = state.chain.rows(np.arange(start, stop)).tolist()
                here &= np.fromiter((key not in self._corrupt for key in rows), np.bool_, len(rows))
            positions, state.saved = self._choose(state, start, here, budget, counters)
            budget -= len(positions)
            if len(positions):
                plans.append((state, positions))
        if not plans:
            return []
        grants = self._handle.take_grants(sum(len(positions) for _, positions in plans))
        return self._specs(output, plans, grants)

    def done(self, job_id: int, ranks: int, requests: Mapping[str, RequestState]) -> None:
        """So many more ranks have finished a job."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.ranks_left -= ranks
        if job.ranks_left > 0:
            return
        del self._jobs[job_id]
        self._assigned.difference_update(job.keys)
        state = requests.get(job.request_id)
        if state is not None:
            state.jobs.discard(job_id)

    def damaged(self, keys: frozenset[bytes]) -> None:
        """Their bytes in the pool did not verify: they are saved again with the next request."""
        if len(self._corrupt) < MAX_CORRUPT:
            self._corrupt |= keys

    def _candidates(
        self, output: Any, requests: Mapping[str, RequestState]
    ) -> list[tuple[RequestState, int]]:
        """Requests with blocks that are full after this step and were not looked at yet."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        found = []
        left = MAX_SAVES_PER_STEP
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None:
                continue
            # Not past the hashed blocks: tokens of speculation may yet be rejected.
            full = min((computed[request_id] + scheduled) // self._block_size, state.chain.extend())
            if not self._config.deposit_decode:
                full = min(full, state.request.num_prompt_tokens // self._block_size)
            full = min(full, state.saved + left, state.keep)
            if full > state.saved:
                found.append((state, full))
                left -= full - state.saved
        return found

    def _choose(
        self,
        state: RequestState,
        start: int,
        present: npt.NDArray[np.bool_],
        budget: int,
        counters: SchedulerCounters,
    ) -> tuple[Positions, int]:
        """Positions to save, and the position up to which nothing is left to do."""
        positions = np.flatnonzero(~present) + start
        keys = state.chain.rows(positions).tolist()
        if not self._assigned.isdisjoint(keys):
            # Another request computes the same blocks right now. A loop over blocks: 50 ns each, then only.
            fresh = np.fromiter((key not in self._assigned for key in keys), np.bool_, len(keys))
            positions, keys = positions[fresh], state.chain.rows(positions[fresh]).tolist()
        left = start + len(present)
        if len(positions) > budget:
            counters.short_of_slots += 1
            left = int(positions[budget])
            positions, keys = positions[:budget], keys[:budget]
        self._assigned.update(keys)
        self._corrupt.difference_update(keys)
        return positions, left

    def _specs(
        self, output: Any, plans: list[tuple[RequestState, Positions]], grants: Grants
    ) -> list[SaveSpec]:
        specs = []
        offset = 0
        for state, at in plans:
            chain = state.chain
            request_id = state.request.request_id
            where = slice(offset, offset + len(at))
            offset += len(at)
            table = np.array(output.kv_connector_block_state.get_block_ids(request_id)[self._group], "<i4")
            keys = chain.rows(at)
            hashes = chain.engine_hashes(int(at[0]), int(at[-1]) + 1)[at - at[0]]
            specs.append(
                SaveSpec(
                    job_id=self._next_job,
                    request_id=request_id,
                    pool_token=grants.pool_token,
                    epoch=grants.epoch,
                    slots=grants.slots[where].astype("<i4").tobytes(),
                    generations=grants.generations[where].astype("<u8").tobytes(),
                    block_ids=table[at].tobytes(),
                    keys=keys.tobytes(),
                    parents=chain.parent_rows(at).tobytes(),
                    engine_hashes=hashes.astype("<u8").tobytes(),
                    positions=at.astype("<u4").tobytes(),
                    drops=state.drops,
                )
            )
            self._jobs[self._next_job] = _Job(request_id, keys.tolist(), self._ranks)
            state.jobs.add(self._next_job)
            self._next_job += 1
        return specs
