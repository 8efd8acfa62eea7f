# SPDX-License-Identifier: Apache-2.0
"""From a prompt to a plan and its hint: gathers what the planner needs, and nothing else."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvcr.dynamo.orders import Orders, RouterMode
from kvcr.keys import KEY_BYTES, KeySpace, extend_packed
from router_hints.cards import WorkerCard
from router_hints.chains import Chain, as_array
from router_hints.costs import CostModel, Rank
from router_hints.g1 import EngineMemory
from router_hints.guards import Guard, GuardDirectory
from router_hints.heat import Heat
from router_hints.hints import build_envelope
from router_hints.index import IndexView, LocationIndex
from router_hints.inputs import PlanInputs
from router_hints.ledger import Ledger
from router_hints.metrics import Metrics
from router_hints.planner import Plan, RequestView, Worker, plan
from router_hints.requests import Prompt
from router_hints.turns import SessionView, Turn
from router_hints.underway import Underway
from router_hints.workers import WorkerTable

log = logging.getLogger(__name__)

Overlap = Callable[[Prompt], Awaitable[dict[Rank, int]]]
Alive = Callable[[], Collection[int]]

_TURN = Turn()
_NOWHERE = SessionView()


@dataclass(frozen=True)
class Placed:
    """A plan, ready to be carried out."""

    plan: Plan
    hint: dict[str, Any] | None
    target: Guard | None
    """The guard beside the chosen rank."""
    inputs: PlanInputs | None = None
    """What the plan was made from."""
    keys: bytes = b""
    """Of the blocks of its prompt that can be reused, 16 bytes each."""


class Placement:
    """One event loop. Reads the shared state, changes none of it but :attr:`heat`."""

    def __init__(
        self,
        *,
        workers: WorkerTable,
        guards: GuardDirectory,
        index: LocationIndex,
        ledger: Ledger,
        costs: CostModel,
        metrics: Metrics,
        alive: Alive,
        overlap: Overlap,
        silent: Callable[[], Collection[str]],
        free_blocks: Callable[[], Mapping[str, int]],
        deadline_ms: float,
        router: str,
        replicas: Callable[[], tuple[int, float]] = lambda: (1, 0.0),
        orders: Orders | None = None,
        g1: EngineMemory | None = None,
        underway: Underway | None = None,
    ) -> None:
        """``replicas()``: how many routers share the workers, and the age of what is known of the others.
        ``alive()`` gives the instance ids discovery knows, ``overlap`` the G1 blocks of each rank for a
        prompt, ``g1`` those for a chain whose tokens are gone, ``underway`` what ranks compute now,
        ``silent()`` the guards that must not be sources, ``free_blocks()`` the room in their pools."""
        self._workers = workers
        self._guards = guards
        self._index = index
        self._ledger = ledger
        self._costs = costs
        self._metrics = metrics
        self._alive = alive
        self._overlap = overlap
        self._silent = silent
        self._free_blocks = free_blocks
        self._deadline_ms = deadline_ms
        self._router = router
        self._replicas = replicas
        self._orders = orders or Orders()
        self._g1 = g1 if g1 is not None else EngineMemory()
        self._underway = underway if underway is not None else Underway()
        self.heat = Heat()
        """How often each prefix of the requests so far is asked for."""

    async def place(
        self,
        prompt: Prompt,
        without: Iterable[int] = (),
        turn: Turn = _TURN,
        session: SessionView = _NOWHERE,
        chain: Chain | None = None,
    ) -> Placed:
        """Plan for ``prompt``, on no worker in ``without``. ``chain`` spares hashing it.

        Raises :class:`router_hints.planner.NoWorker`."""
        asked = self._overlap(prompt)
        begun = time.perf_counter()
        view = prompt.view(uuid.uuid4().hex, self._workers.block_size)
        chains = self._chains(prompt, view.reusable_blocks, chain)
        hashed_s = time.perf_counter() - begun
        g1_blocks = await asked
        begun = time.perf_counter() - hashed_s
        first_space = next(iter(chains.values()), b"")
        for rank, blocks in self._underway.leading(first_space).items():
            # It queues behind a prompt that begins alike, and finds those blocks when its turn comes.
            g1_blocks[rank] = max(blocks, g1_blocks.get(rank, 0))
        candidates = self._candidates(g1_blocks, without)
        rates = self.heat.seen(first_space, time.monotonic())
        view = replace(view, router=self._router, rates_per_s=rates, turn=turn, session=session)
        inputs, made = self._plan(view, candidates, chains, prompt.keyed)
        target = next(guard for worker, guard in candidates if worker.rank == made.rank)
        hint = None
        if target is not None:
            space = target.key_space(prompt.salt)
            keys = chains.get(space, b"") if space is not None else b""
            hint = build_envelope(made, keys, deadline_ms=self._deadline_ms)
        if hint is not None and self._orders.mode is RouterMode.SHADOW:
            blocks = sum(source.count for source in made.sources)
            log.info("shadow: plan %s would copy %d blocks to worker %x", made.plan_id, blocks, made.rank[0])
            hint = None
        self._metrics.plan_seconds.observe(time.perf_counter() - begun)
        return Placed(made, hint, target, inputs, first_space)

    def place_ahead(self, plan_id: str, turn: Turn, session: SessionView, chain: Chain | None) -> Placed:
        """Plan for a turn that is only announced, whose prompt begins with ``chain``. Raises NoWorker."""
        size = self._workers.block_size
        # The turn goes on after its chain, unless it begins with a part of it only.
        tokens = chain.blocks * size + 1 if chain is not None else 1
        if turn.isl is not None:
            tokens = max(1, min(tokens, turn.isl))
        view = RequestView(
            plan_id,
            tokens,
            size,
            affinity=bytes(chain.keys[:KEY_BYTES]) if chain is not None else b"",
            turn=turn,
            session=session,
            ahead=True,
            router=self._router,
        )
        candidates = self._candidates(self._g1.leading(chain.cut_names(0)) if chain is not None else {}, ())
        chains = {chain.space: chain.cut(0, view.reusable_blocks)} if chain is not None else {}
        inputs, made = self._plan(view, candidates, chains, keyed=True)
        self._metrics.plans.labels(made.reason.value).inc()
        target = next(guard for worker, guard in candidates if worker.rank == made.rank)
        return Placed(made, None, target, inputs)

    def _plan(
        self,
        view: RequestView,
        candidates: list[tuple[Worker, Guard | None]],
        chains: dict[KeySpace, bytes],
        keyed: bool,
    ) -> tuple[PlanInputs, Plan]:
        routers, stale_s = self._replicas()
        held = self._look_up(chains, view.reusable_blocks)
        off = self._orders.mode is RouterMode.OFF
        arguments = (
            view,
            [worker for worker, _ in candidates],
            held.without(held.guards if off else self._silent()),
            self._guards.holders if keyed else {},
            self._ledger.loads(
                time.monotonic(), routers=routers, stale_s=stale_s, free_blocks=self._free_blocks()
            ),
            self._costs,
            self._guards.topology,
            time.time(),
        )
        return PlanInputs.taken(*arguments), plan(*arguments)

    def _candidates(
        self, g1_blocks: dict[Rank, int], without: Iterable[int]
    ) -> list[tuple[Worker, Guard | None]]:
        alive, excluded = self._alive(), list(without)
        cards = self._workers.ready(alive, time.monotonic(), excluded)
        if not cards:
            # Everybody left is marked down: better to try one of them than to refuse.
            cards = self._workers.ready(alive, float("inf"), excluded)
        return [
            self._candidate(card, (card.worker_id, rank), g1_blocks)
            for card in cards
            for rank in range(card.first_rank, card.first_rank + card.ranks)
        ]

    def _candidate(
        self, card: WorkerCard, rank: Rank, g1_blocks: dict[Rank, int]
    ) -> tuple[Worker, Guard | None]:
        guard = self._guards.beside(card, rank[1])
        name = guard.name if guard is not None else ""
        blocks = g1_blocks.get(rank, 0)
        return Worker(rank, blocks, name, card.taints, card.max_requests, card.kv_blocks), guard

    def _chains(self, prompt: Prompt, blocks: int, known: Chain | None) -> dict[KeySpace, bytes]:
        """The prompt's keys in each key space a guard uses: one, except while models are being replaced."""
        if not prompt.keyed or blocks == 0:
            return {}
        size = self._workers.block_size
        spaces = {guard.key_space(prompt.salt) for guard in self._guards.all()} - {None}
        chains = {}
        for space in spaces:
            if space is not None and known is not None and known.space == space:
                chains[space] = known.cut(0, blocks)
            elif space is not None:
                tokens = as_array(prompt.tokens)[: blocks * size]
                chains[space] = extend_packed(space.root(), tokens, size)
        return chains

    def _look_up(self, chains: dict[KeySpace, bytes], blocks: int) -> IndexView:
        """One row for each guard that holds any of the blocks, found by its own keys."""
        views = [self._index.lookup(keys) for keys in chains.values()]
        views = [view for view in views if view.guards]
        if not views:
            return IndexView.empty(blocks)
        if len(views) == 1:
            return views[0]
        return IndexView(
            tuple(guard for view in views for guard in view.guards),
            np.concatenate([view.held for view in views]),
        )

    def count(self, made: Plan, prompt: Prompt) -> None:
        """Count a plan of :meth:`place` that is carried out."""
        size = self._workers.block_size
        self._metrics.plans.labels(made.reason.value).inc()
        self._metrics.planned_tokens.labels("g1").inc(made.chosen.g1_blocks * size)
        self._metrics.planned_tokens.labels("g2").inc(made.chosen.local_blocks * size)
        self._metrics.planned_tokens.labels("peer").inc(made.chosen.copied_blocks * size)
        self._metrics.planned_tokens.labels("compute").inc(made.prefill_tokens)
        if prompt.unkeyed_reason:
            self._metrics.unkeyed.labels(prompt.unkeyed_reason).inc()
