# SPDX-License-Identifier: Apache-2.0
"""What the router says when it is asked: plans, its status, where a prompt is in engine memory, metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from kvcr import __version__
from kvcr.dynamo.orders import Orders
from kvcr.keys import probe_key
from router_hints.agents import Agents
from router_hints.explain import PlanLog
from router_hints.failover import Failovers
from router_hints.g1 import EngineMemory
from router_hints.guards import GuardDirectory
from router_hints.heat import Heat, HotPrefix
from router_hints.index import LocationIndex
from router_hints.ledger import Ledger
from router_hints.metrics import STATES, Metrics
from router_hints.names import extend_names
from router_hints.settings import RouterSettings
from router_hints.tenants import header_of
from router_hints.workers import WorkerTable

HOT_PREFIXES = 10
"""Shown in the metrics, by rank, so that their labels stay few."""


class Answers:
    """Looks and changes nothing. On the event loop, but for :meth:`render`."""

    def __init__(
        self,
        name: str,
        settings: RouterSettings,
        *,
        metrics: Metrics,
        orders: Orders,
        workers: WorkerTable,
        guards: GuardDirectory,
        index: LocationIndex,
        g1: EngineMemory,
        ledger: Ledger,
        plans: PlanLog,
        failovers: Failovers,
        agents: Agents,
        alive: Callable[[], set[int]],
        heat: Callable[[], Heat | None],
        guard_beside: Callable[[int, int | None], str],
    ) -> None:
        """``alive``: ids of the workers that are registered; ``heat``: None before the first plan;
        ``guard_beside``: of a worker and its rank, None for its first; empty when there is none."""
        self._name = name
        self._settings = settings
        self._metrics = metrics
        self._orders = orders
        self._workers = workers
        self._guards = guards
        self._index = index
        self._g1 = g1
        self._ledger = ledger
        self._plans = plans
        self._failovers = failovers
        self._agents = agents
        self._alive = alive
        self._heat = heat
        self._guard_beside = guard_beside

    async def explain(self, query: dict[str, Any]) -> AsyncIterator[list[dict[str, Any]]]:
        """Plans by ``plan_id`` or ``request_id``, or the ``last`` N ones."""
        query = query or {}
        yield self._plans.find(
            plan_id=str(query.get("plan_id") or ""),
            request_id=str(query.get("request_id") or ""),
            last=int(query.get("last") or 20),
            inputs=bool(query.get("inputs")),
        )

    async def status(self, query: Any) -> AsyncIterator[dict[str, Any]]:
        """Orders in force, and what each worker is busy with as this router knows it. With ``chains``, a list
        of last position and key in hex, also the sessions that go through them."""
        now_s = time.monotonic()
        loads = self._ledger.loads(now_s)
        workers = {}
        for worker_id in sorted(self._alive()):
            card = self._workers.card(worker_id)
            ranks = [(worker_id, rank) for rank in range(card.first_rank, card.first_rank + card.ranks)]
            workers[f"{worker_id:x}"] = {
                "guard": self._guard_beside(worker_id, None),
                "requests": sum(loads.of(rank).requests for rank in ranks),
                "g1_blocks": sum(self._g1.blocks(rank) for rank in ranks),
                "down": self._workers.is_down(worker_id, now_s) or self._workers.is_dead(worker_id),
                "draining": worker_id in self._orders.draining,
            }
        hot = [
            {
                "key": prefix.key.hex(),
                "blocks": prefix.blocks,
                "per_s": round(prefix.per_s, 3),
                "guards": guards,
            }
            for prefix, guards in self._hot_prefixes()
        ]
        answer: dict[str, Any] = {
            "router": self._name,
            "mode": self._orders.mode.value,
            "tenant_header": header_of(self._settings.tenant_key),
            "workers": workers,
            "hot": hot,
        }
        answer |= {"version": __version__, "unix_s": time.time(), "guards": self._known_guards()}
        chains = query.get("chains") if isinstance(query, dict) else None
        if chains:
            answer["sessions"] = self._agents.sessions_through(chains)
        yield answer

    def _known_guards(self) -> dict[str, dict[str, Any]]:
        """How far this router follows each guard, and whether it names blocks as the guard does."""
        known = {}
        for guard in self._guards.all():
            known[guard.name] = {
                "sequence": self._index.sequence(guard.name),
                "blocks": self._index.blocks(guard.name),
                "probe": probe_key(guard.namespace, guard.layout).hex() if guard.layout is not None else "",
            }
        return known

    def _hot_prefixes(self) -> list[tuple[HotPrefix, tuple[str, ...]]]:
        """The hottest, and the guards that hold each to its end. From any thread."""
        heat = self._heat()
        hot = heat.hottest(HOT_PREFIXES, time.monotonic()) if heat is not None else []
        return [(prefix, self._index.lookup(prefix.key).guards) for prefix in hot]

    async def where(self, query: dict[str, Any]) -> AsyncIterator[list[dict[str, Any]]]:
        """Engines that have any of the blocks of a prompt (``tokens``, ``salt``) in their memory."""
        tokens = np.array(query.get("tokens") or (), dtype=np.uint32)
        names = extend_names(None, tokens, self._settings.block_size, str(query.get("salt") or ""))
        yield [
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "guard": self._guard_beside(worker_id, rank),
                "held": sum(held),
                "from_start": held.index(False) if False in held else len(held),
            }
            for (worker_id, rank), held in sorted(self._g1.held(names).items())
        ]

    def render(self) -> str:
        """Metrics text; gauges are read off now. Called from a thread of the runtime."""
        metrics, now = self._metrics, time.monotonic()
        metrics.retain_guards({guard.name for guard in self._guards.all()})
        for guard in self._index.guards():
            metrics.index_blocks.labels(guard).set(self._index.blocks(guard))
            metrics.inventory_lag.labels(guard).set(self._index.lag(guard))
        metrics.news_age_seconds.set(self._agents.replicas.stale_s)
        self._agents.measure()
        metrics.g1_blocks.set(len(self._g1))
        metrics.g1_parked.set(self._g1.parked_blocks)
        metrics.index_bytes.set(self._index.nbytes)
        metrics.index_evicted.set(self._index.evicted_blocks)
        for state in STATES:
            metrics.guards.labels(state).set(self._failovers.counts()[state.upper()])
        alive = set(self._alive())
        routable = {card.worker_id for card in self._workers.ready(alive, float("inf"))}
        down = {worker_id for worker_id in routable if self._workers.is_down(worker_id, now)}
        metrics.workers.labels("ready").set(len(routable - down))
        metrics.workers.labels("down").set(len(down))
        dead = {worker_id for worker_id in alive if self._workers.is_dead(worker_id)}
        metrics.workers.labels("dead").set(len(dead))
        metrics.workers.labels("refused").set(len(alive - routable - dead))
        metrics.show_hot((prefix, len(guards)) for prefix, guards in self._hot_prefixes())
        metrics.unguarded_ranks.set(
            sum(
                self._guards.beside(card, rank) is None
                for card in self._workers.cards()
                for rank in card.control_endpoints
            )
        )
        return metrics.render()
