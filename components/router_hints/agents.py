# SPDX-License-Identifier: Apache-2.0
"""Sessions, signals and replicas of one router, put together. One event loop."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvcr.dynamo.actions import ensure_stream
from kvcr.dynamo.orders import Orders
from kvcr.protocol.events import results_subject
from kvcr.protocol.signals import signals_subject
from router_hints.actions import Actor
from router_hints.arrivals import Arrivals
from router_hints.bus import Bus
from router_hints.desk import Desk
from router_hints.explain import PlanLog
from router_hints.forward import ForwardPlan
from router_hints.g1 import EngineMemory
from router_hints.guards import GuardDirectory
from router_hints.http import SignalServer
from router_hints.index import LocationIndex
from router_hints.intake import Intake, Unavailable
from router_hints.ledger import Ledger
from router_hints.messages import message_markers
from router_hints.metrics import Metrics
from router_hints.news import ask_subject, news_subject
from router_hints.placement import Placement
from router_hints.replicas import Replicas
from router_hints.sessions import SessionTable
from router_hints.settings import RouterSettings
from router_hints.signals import SignalHandler
from router_hints.visits import Visits
from router_hints.workers import WorkerTable

log = logging.getLogger(__name__)

_TICK_S = 1.0
MAX_CHAINS = 200
MAX_SESSIONS = 1000


class Agents:
    """What a router knows and does for agent harnesses."""

    def __init__(
        self,
        settings: RouterSettings,
        name: str,
        *,
        guards: GuardDirectory,
        index: LocationIndex,
        g1: EngineMemory,
        workers: WorkerTable,
        ledger: Ledger,
        plans: PlanLog,
        metrics: Metrics,
        bus: Bus,
        placement: Callable[[], Placement],
        orders: Orders,
    ) -> None:
        """``placement()`` is asked when the first signal or request is planned."""
        self._bus = bus
        self._metrics = metrics
        self._namespace = settings.namespace
        self._sessions = SessionTable(
            block_size=settings.block_size, max_blocks=settings.session_blocks, ttl_s=settings.session_ttl_s
        )
        self._forward = ForwardPlan()
        desk = Desk(
            sessions=self._sessions,
            forward=self._forward,
            arrivals=Arrivals(),
            guards=guards,
            index=index,
            g1=g1,
            workers=workers,
            ledger=ledger,
            placement=placement,
            actor=Actor(bus.publish, settings.namespace, name, metrics, orders),
            plans=plans,
        )
        self.desk = desk
        self.replicas = Replicas(
            name,
            desk,
            lambda raw: bus.post(news_subject(settings.namespace), raw),
            lambda: bus.connected,
            metrics,
        )
        self.handler = SignalHandler(desk, audience=self.replicas)
        self.visits = Visits(
            desk,
            self.handler,
            metrics,
            audience=self.replicas,
            markers=message_markers(settings.model_path),
        )
        self._intake = Intake(self.handler, metrics, self.replicas.owner, self.replicas.others, self._ask)
        self._server = SignalServer(
            settings.signals_host, settings.signals_port, settings.signals_tokens, self._intake, metrics
        )
        self._upkeep: asyncio.Task[None] | None = None
        bus.subscribe(results_subject(settings.namespace), desk.actor.received)
        bus.subscribe(news_subject(settings.namespace), self.replicas.received)
        bus.answer(ask_subject(settings.namespace, name), self._answer)
        bus.answer(signals_subject(settings.namespace), self._intake.message, queue="routers")
        bus.on_connect(self._connected)

    async def start(self) -> None:
        """Take signals. Raises ConfigError when the port is taken."""
        await self._server.start()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up())

    async def close(self) -> None:
        await self._server.close()
        if self._upkeep is not None:
            self._upkeep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._upkeep
        await self.visits.close()
        await self.replicas.leave()

    def forget_guard(self, name: str) -> None:
        """The guard is gone: nothing arrives there any more."""
        self.desk.arrivals.forget_guard(name)

    def sessions_through(self, chains: Any) -> dict[str, dict[str, str]]:
        """Of each key in ``chains`` (position and hex) the session used last whose chain goes through it."""
        wanted = [(int(position), key, bytes.fromhex(key)) for position, key in chains[:MAX_CHAINS]]
        found: dict[str, dict[str, str]] = {}
        sessions = heapq.nlargest(MAX_SESSIONS, self._sessions.all(), key=lambda one: one.touched_s)
        # Two loops in Python, 30 ms at their limits: only when an operator lists blocks.
        for session in sessions:
            for position, name, key in wanted:
                if session.chain is not None and name not in found and session.chain.key(position) == key:
                    found[name] = {"tenant": session.key.tenant, "session": session.key.session}
        return found

    def measure(self) -> None:
        """Bring the gauges up to date."""
        self._metrics.sessions.set(len(self._sessions))
        self._metrics.session_blocks.set(self._sessions.blocks)
        for reason, count in self._sessions.forgotten.items():
            self._metrics.sessions_forgotten.labels(reason).set(count)
        self._metrics.announced.set(len(self._forward))

    async def _keep_up(self) -> None:
        while True:
            try:
                self._sessions.expire(self.handler.clock())
                self.replicas.tick()
                self.replicas.adopt_orphans()
                await self.handler.tick()
            except Exception:
                # Whatever it was, the next second is another one.
                log.exception("upkeep of sessions")
            await asyncio.sleep(_TICK_S)

    async def _connected(self, client: Client) -> None:
        self.replicas.hello()
        try:
            await ensure_stream(client.jetstream(), self._namespace)
        except (NatsError, TimeoutError) as error:
            log.warning("no JetStream for actions (%s): guards that are away do not get them later", error)

    async def _ask(self, router: str, payload: bytes, timeout_s: float) -> bytes:
        try:
            return await self._bus.request(ask_subject(self._namespace, router), payload, timeout_s)
        except TimeoutError as error:
            raise Unavailable(f"router {router} does not answer: {error}") from error

    async def _answer(self, payload: bytes, _: dict[str, str]) -> bytes:
        return await self._intake.answer(payload)
