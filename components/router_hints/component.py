# SPDX-License-Identifier: Apache-2.0
"""The router as a Dynamo component: everything is built here, started, and taken down again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import Client, DistributedRuntime

from kvcr.dynamo.orders import Orders
from kvcr.errors import ProtocolError
from kvcr.protocol.events import state_subject
from kvcr.tracing import open_tracer
from router_hints.agents import Agents
from router_hints.answers import Answers
from router_hints.bus import Bus
from router_hints.costs import CostModel, Rank
from router_hints.discovery import Discovery
from router_hints.dispatch import Books, Context, Dispatcher
from router_hints.explain import PlanLog
from router_hints.failover import Failovers
from router_hints.g1 import EngineMemory
from router_hints.g1_repair import keep_repaired
from router_hints.guards import Guard, GuardDirectory
from router_hints.index import LocationIndex
from router_hints.inventory import InventoryClient
from router_hints.kv_events import decode_kv_events, kv_events_subject
from router_hints.ledger import Ledger
from router_hints.locations import LocationPublisher
from router_hints.metrics import Metrics
from router_hints.overlap import G1Overlap, decode_reports, kv_metrics_subject
from router_hints.placement import Placement
from router_hints.plans import NoWorker
from router_hints.settings import RouterSettings
from router_hints.underway import Underway
from router_hints.workers import WorkerTable

log = logging.getLogger(__name__)

_TICK_S = 1.0
_WAIT_S = 0.2


class RouterComponent:
    """One router on one runtime. One event loop."""

    def __init__(self, settings: RouterSettings, runtime: DistributedRuntime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._metrics = Metrics()
        self._orders = Orders()
        self._workers = WorkerTable(settings.block_size, draining=self._orders.draining)
        self._guards = GuardDirectory(domain_required=settings.domain_required)
        self._index = LocationIndex(max_blocks=settings.index_blocks)
        self._g1 = EngineMemory(max_blocks=settings.index_blocks)
        self._ledger = Ledger()
        self._costs = CostModel(settings.costs)
        self._plans = PlanLog(settings.kept_plans)
        self._alive: set[int] = set()
        self._publishing = False
        endpoint = runtime.endpoint(f"{settings.namespace}.{settings.component}.generate")
        self._endpoint = endpoint
        self._name = f"{settings.component}-{endpoint.connection_id():x}"
        self._tracer = open_tracer("kvcr-router", self._name)
        self._bus = Bus(settings.nats_url, f"kvcr {self._name}", self._metrics.bus_dropped.inc)
        self._locations = LocationPublisher(
            self._bus,
            settings.namespace,
            self._name,
            self._metrics,
            publishes=lambda: self._publishing,
            worker_of=self._worker_beside,
            guard_of=self._guard_beside,
        )
        self._inventory = InventoryClient(
            self._index,
            self._guards,
            self._metrics,
            self._name,
            settings.secret,
            on_batch=self._locations.inventory,
            on_snapshot=self._locations.snapshot,
        )
        self._failovers = Failovers(
            settings.namespace, self._workers, self._guards, self._metrics, settings.secret
        )
        self._bus.on_connect(self._failovers.catch_up)
        self._bus.on_connect(self._connected)
        self._placement: Placement | None = None
        self._agents = Agents(
            settings,
            self._name,
            guards=self._guards,
            index=self._index,
            g1=self._g1,
            workers=self._workers,
            ledger=self._ledger,
            plans=self._plans,
            metrics=self._metrics,
            bus=self._bus,
            placement=self._planning,
            orders=self._orders,
        )
        self._answers = Answers(
            self._name,
            settings,
            metrics=self._metrics,
            orders=self._orders,
            workers=self._workers,
            guards=self._guards,
            index=self._index,
            g1=self._g1,
            ledger=self._ledger,
            plans=self._plans,
            failovers=self._failovers,
            agents=self._agents,
            alive=lambda: self._alive,
            heat=lambda: self._placement.heat if self._placement is not None else None,
            guard_beside=self._guard_beside,
        )
        self._discovery = Discovery(
            settings,
            self._workers,
            self._guards,
            on_guard=self._guard_seen,
            on_guard_gone=self._forget_guard,
            orders=self._orders,
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until the runtime shuts down. ``stopping`` ends the wait for the first worker early."""
        settings = self._settings
        self._subscribe()
        await self._agents.start()
        self._bus.start()
        self._locations.start()
        self._inventory.start()
        await self._discovery.start()
        upkeep: list[asyncio.Task[None]] = []
        try:
            workers = self._runtime.endpoint(
                f"{settings.namespace}.{settings.worker_component}.{settings.worker_endpoint}"
            )
            client = await workers.client()
            own = await self._endpoint.client()
            overlap = G1Overlap(workers, settings.block_size)
            loop = asyncio.get_running_loop()
            upkeep.append(loop.create_task(self._keep_up(client, own)))
            upkeep.append(loop.create_task(keep_repaired(self._g1, overlap.dump, self._metrics)))
            if not await self._first_worker(stopping):
                return
            await self._serve(self._dispatcher(client, overlap))
        finally:
            for task in upkeep:
                task.cancel()
            await asyncio.gather(*upkeep, return_exceptions=True)
            await self._agents.close()
            await self._discovery.close()
            await self._inventory.close()
            await self._locations.close()
            await self._bus.close()
            await asyncio.to_thread(self._tracer.close)

    # --- parts -----------------------------------------------------------------------------------

    def _dispatcher(self, client: Client, overlap: G1Overlap) -> Dispatcher:
        replicas, underway = self._agents.replicas, Underway()
        self._placement = placement = Placement(
            workers=self._workers,
            guards=self._guards,
            index=self._index,
            ledger=self._ledger,
            costs=self._costs,
            metrics=self._metrics,
            alive=client.instance_ids,
            overlap=overlap.blocks,
            silent=self._inventory.silent,
            free_blocks=self._inventory.free_blocks,
            deadline_ms=self._settings.deadline_ms,
            router=self._name,
            replicas=lambda: (1 + len(replicas.others()), replicas.stale_s),
            orders=self._orders,
            g1=self._g1,
            underway=underway,
        )

        def send(request: dict[str, Any], worker_id: int, context: Context) -> Awaitable[AsyncIterator[Any]]:
            sent: Awaitable[AsyncIterator[Any]] = client.direct(
                request, worker_id, annotated=False, context=context
            )
            return sent

        return Dispatcher(
            placement,
            send,
            Books(
                workers=self._workers,
                guards=self._guards,
                bookings=replicas,
                visits=self._agents.visits,
                costs=self._costs,
                metrics=self._metrics,
                plans=self._plans,
                underway=underway,
                publish=self._bus.publish,
                namespace=self._settings.namespace,
                router=self._name,
                tracer=self._tracer,
            ),
            self._settings.tenant_key,
        )

    def _planning(self) -> Placement:
        if self._placement is None:
            raise NoWorker("no worker has been ready yet")
        return self._placement

    async def _connected(self, _: object) -> None:
        self._metrics.bus_connects.inc()

    def _subscribe(self) -> None:
        place = (self._settings.namespace, self._settings.worker_component, self._settings.worker_endpoint)
        self._bus.subscribe(f"kvcr.v1.{self._settings.namespace}.inventory.>", self._inventory.received)
        self._bus.subscribe_headed(state_subject(self._settings.namespace, ">"), self._failovers.received)
        self._bus.subscribe(kv_metrics_subject(*place), self._load_reports)
        self._bus.subscribe(kv_events_subject(*place), self._kv_events)

    async def _serve(self, dispatcher: Dispatcher) -> None:
        settings = self._settings
        self._endpoint.metrics.register_prometheus_expfmt_callback(self._answers.render)
        # The frontend finds the model here; the workers' own cards have no public endpoints.
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            self._endpoint,
            settings.model_path,
            settings.model_name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=settings.block_size,
        )
        log.info("router %s serves %s", self._name, settings.model_name)
        # What is there by now stays: left to the collector, it makes each full collection a pause of 25 ms.
        gc.collect()
        gc.freeze()
        explain = self._runtime.endpoint(f"{settings.namespace}.{settings.component}.explain")
        status = self._runtime.endpoint(f"{settings.namespace}.{settings.component}.status")
        where = self._runtime.endpoint(f"{settings.namespace}.{settings.component}.where")
        await asyncio.gather(
            self._endpoint.serve_endpoint(
                dispatcher.generate, metrics_labels=[("model", settings.model_name)]
            ),
            # The payload makes /health turn ready once we serve, and is a harmless request for canaries.
            explain.serve_endpoint(self._answers.explain, health_check_payload={"last": 1}),
            status.serve_endpoint(self._answers.status),
            where.serve_endpoint(self._answers.where),
        )

    # --- what changes around us --------------------------------------------------------------------

    async def _first_worker(self, stopping: asyncio.Event) -> bool:
        """Wait until there is a worker to route to; False when asked to stop first."""
        said = False
        while not self._workers.ready(self._alive, float("inf")):
            if not said:
                log.info("router %s waits for workers of %s", self._name, self._settings.worker_component)
                said = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    await stopping.wait()
            if stopping.is_set():
                return False
        return True

    async def _keep_up(self, client: Client, own: Client) -> None:
        """Notice workers that come and go, and whether we are the replica that publishes locations."""
        last_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            self._costs.relax(now_s - last_s)
            self._workers.expire(now_s)
            last_s = now_s
            # Averages need samples also while nothing is planned.
            self._ledger.loads(now_s)
            alive = set(client.instance_ids())
            for worker_id in self._alive - alive:
                self._forget_worker(worker_id)
            came = alive - self._alive
            for worker_id in came:
                self._g1.admit(worker_id)
            self._ledger.admit(self._ranks_of(came), self._ranks_of(self._alive & alive))
            self._alive = alive
            self._publishing = min(own.instance_ids(), default=0) in (0, self._endpoint.connection_id())
            await asyncio.sleep(_TICK_S if self._workers.ready(alive, float("inf")) else _WAIT_S)

    def _forget_worker(self, worker_id: int) -> None:
        self._locations.worker_gone(worker_id)
        for rank in self._ranks_of([worker_id]):
            self._costs.forget(rank)
        self._ledger.forget_worker(worker_id)
        self._g1.retire(worker_id)
        self._workers.forget(worker_id)

    def _ranks_of(self, workers: Iterable[int]) -> list[Rank]:
        return [
            (card.worker_id, rank)
            for card in map(self._workers.card, workers)
            for rank in range(card.first_rank, card.first_rank + card.ranks)
        ]

    def _guard_seen(self, guard: Guard) -> None:
        self._inventory.admit(guard)
        self._failovers.recorded(guard)

    def _forget_guard(self, name: str) -> None:
        self._inventory.retire(name)
        self._failovers.gone(name)
        self._costs.forget_guard(name)
        self._locations.gone(name)
        self._agents.forget_guard(name)

    def _load_reports(self, raw: bytes) -> None:
        now = time.monotonic()
        for report in decode_reports(raw):
            self._ledger.report(
                (report.worker_id, report.dp_rank),
                prefill_tokens=report.active_prefill_tokens or 0,
                blocks=report.active_decode_blocks or 0,
                now_s=now,
            )

    def _kv_events(self, raw: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            batch = decode_kv_events(raw)
            self._g1.take(batch)
            self._locations.kv_events(batch)

    def _worker_beside(self, guard: str) -> int:
        rank = self._agents.desk.engine_beside(guard)
        return rank[0] if rank is not None else 0

    def _guard_beside(self, worker_id: int, rank: int | None = None) -> str:
        first = self._workers.card(worker_id).first_rank
        return self._agents.desk.guard_beside((worker_id, first if rank is None else rank))
