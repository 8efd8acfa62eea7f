# SPDX-License-Identifier: Apache-2.0
"""A router's sessions, signals and planner without any process: guards are names, actions are a list."""

from __future__ import annotations

import json
import time
from typing import Any

from dynamo.llm import compute_block_hash_for_seq

from kvcr.keys import KeySpace, extend_chain, pack_keys
from kvcr.layout import Layout
from kvcr.protocol.events import Act, ActionCode, ActionResult, Inventory, event
from kvcr.protocol.signals import SignalReply, check
from router_hints.actions import Actor
from router_hints.arrivals import Arrivals
from router_hints.cards import WorkerCard
from router_hints.costs import CostModel, Settings
from router_hints.desk import Desk
from router_hints.explain import PlanLog
from router_hints.forward import ForwardPlan
from router_hints.g1 import EngineMemory
from router_hints.guards import Guard, GuardDirectory
from router_hints.index import LocationIndex
from router_hints.kv_events import G1Change
from router_hints.ledger import Ledger
from router_hints.metrics import Metrics
from router_hints.placement import Placed, Placement
from router_hints.replicas import Replicas
from router_hints.requests import Prompt, read_prompt
from router_hints.sessions import SessionKey, SessionTable
from router_hints.signals import SignalHandler
from router_hints.underway import Underway
from router_hints.visits import Visit, Visits
from router_hints.workers import WorkerTable

BLOCK = 16
PART = 16 * 1024
MODEL = "tiny@test+0"
LAYOUT = Layout(MODEL, "float32", BLOCK, 2, 2, 16, part_bytes=PART)
SETTINGS = Settings(
    prefill_tokens_per_s=8000, host_bytes_per_s=1e9, domain_bytes_per_s=1e9, load_bytes_per_s=5e10
)


class World:
    """Guards, and what everybody knows of them. Shared by several routers of one test."""

    def __init__(self, count: int = 2, settings: Settings = SETTINGS) -> None:
        self.names = [f"g{n}" for n in range(1, count + 1)]
        self.ranks = {name: (n, 0) for n, name in enumerate(self.names, start=1)}
        self.settings = settings
        self.now_s = time.monotonic()
        self.sequences: dict[str, int] = dict.fromkeys(self.names, 0)
        self.routers: list[Router] = []

    def clock(self) -> float:
        return self.now_s

    def store(self, guard: str, tokens: list[int], salt: str = "") -> None:
        """The guard has these tokens' blocks now, and says so."""
        self._tell(guard, self.keys(tokens, salt), b"")

    def drop(self, guard: str, keys: bytes) -> None:
        self._tell(guard, b"", keys)

    @staticmethod
    def keys(tokens: list[int], salt: str = "") -> bytes:
        return pack_keys(extend_chain(KeySpace("dynamo", MODEL, salt=salt).root(), tokens, BLOCK))

    def _tell(self, guard: str, stored: bytes, removed: bytes) -> None:
        self.sequences[guard] += 1
        count = len(stored) // 16
        batch = Inventory(
            guard, 1, self.sequences[guard], 2, stored, bytes(8 * count), bytes(4 * count), removed
        )
        for router in self.routers:
            router.index.apply(batch)


class Router:
    """One router in a :class:`World`."""

    def __init__(self, world: World, name: str = "router-1") -> None:
        self.world = world
        self.name = name
        self.metrics = Metrics()
        self.guards = GuardDirectory()
        self.workers = WorkerTable(BLOCK)
        self.index = LocationIndex(max_blocks=100_000)
        self.g1 = EngineMemory()
        self.underway = Underway()
        self.ledger = Ledger()
        self.acts: list[tuple[str, dict[str, Any]]] = []
        """(guard, action) as sent"""
        self.mail: list[bytes] = []
        for guard in world.names:
            endpoint = f"tcp://{guard}:7100"
            self.guards.put(Guard(guard, 1, endpoint, "dynamo", LAYOUT))
            self.index.admit(guard, 1)
            self.index.begin_snapshot(guard)
            self.workers.put_card(
                WorkerCard(world.ranks[guard][0], block_size=BLOCK, control_endpoints={0: endpoint})
            )
        self.placement = Placement(
            workers=self.workers,
            guards=self.guards,
            index=self.index,
            ledger=self.ledger,
            costs=CostModel(world.settings),
            metrics=self.metrics,
            alive=lambda: [rank[0] for rank in world.ranks.values()],
            overlap=self._no_overlap,
            silent=set,
            free_blocks=dict,
            deadline_ms=2000.0,
            router=name,
            g1=self.g1,
            underway=self.underway,
        )
        self.desk = Desk(
            sessions=SessionTable(block_size=BLOCK),
            forward=ForwardPlan(),
            arrivals=Arrivals(),
            guards=self.guards,
            index=self.index,
            g1=self.g1,
            workers=self.workers,
            ledger=self.ledger,
            placement=lambda: self.placement,
            actor=Actor(self._publish, "dynamo", name, self.metrics),
            plans=PlanLog(),
        )
        self.replicas = Replicas(
            name, self.desk, self.mail.append, lambda: True, self.metrics, clock=world.clock
        )
        self.handler = SignalHandler(self.desk, clock=world.clock, audience=self.replicas)
        self.visits = Visits(self.desk, self.handler, self.metrics, clock=world.clock, audience=self.replicas)
        world.routers.append(self)

    # --- as a harness ---------------------------------------------------------------------------------

    async def signal(self, kind: str, session: str, tenant: str = "", **fields: Any) -> SignalReply:
        signal = check({"kind": kind, "session": session, **fields})
        return await self.handler.handle(signal, tenant, wait_s=0.0)

    async def turn(
        self,
        session: str,
        tokens: list[int],
        *,
        tenant: str = "",
        parent: str = "",
        signal: dict[str, Any] | None = None,
        decoded: list[int] | None = None,
        leave: bool = True,
        pin: str = "",
    ) -> tuple[Visit, Placed]:
        """One request of a session, from its arrival to its end."""
        prompt = self.prompt(session, tokens, tenant=tenant, parent=parent, signal=signal, pin=pin)
        visit = self.visits.arrive(prompt)
        placed = await self.placement.place(prompt, (), visit.turn, visit.view, visit.chain)
        self.visits.planned(visit, placed)
        for token in decoded or ():
            self.visits.output(visit, [token])
        if leave:
            self.visits.leave(visit)
        return visit, placed

    def prompt(
        self,
        session: str,
        tokens: list[int],
        *,
        tenant: str = "",
        parent: str = "",
        signal: dict[str, Any] | None = None,
        pin: str = "",
    ) -> Prompt:
        agent = {"session_id": session, "parent_session_id": parent}
        routing: dict[str, Any] = {"cache_salt": tenant}
        if pin:
            routing["backend_instance_id"] = self.world.ranks[pin][0]
        request = {"token_ids": tokens, "routing": routing, "agent_context": agent}
        return read_prompt(request, {"kvcr": json.dumps(signal)} if signal is not None else {})

    def busy(self, guard: str, tokens: int = 40_000) -> None:
        """Its worker has had so many tokens queued for minutes: other routers' requests, as it reports."""
        rank = self.world.ranks[guard]
        self.ledger.book(f"load on {guard}", rank, prefill_tokens=tokens, blocks=10, copies={})
        # The ledger takes the queue to have been since its last look what it is now.
        self.ledger._stepped_s = time.monotonic() - 1000.0
        self.ledger.loads(time.monotonic())

    # --- as engines ----------------------------------------------------------------------------------

    def in_g1(self, guard: str, tokens: list[int], salt: str = "") -> list[int]:
        """The engine beside this guard has these tokens' blocks. Returns its hashes."""
        local = compute_block_hash_for_seq(tokens, BLOCK, cache_namespace=salt or None)
        rank = self.world.ranks[guard]
        stored = tuple((hash((rank, at, each)) & 2**63 - 1, each) for at, each in enumerate(local))
        self.g1.begin_repair()
        self.g1.repair([G1Change(rank, stored)])
        return [each for each, _ in stored]

    # --- as guards ------------------------------------------------------------------------------------

    def sent(self, kind: str = "") -> list[tuple[str, dict[str, Any]]]:
        """Actions of this type since the last call, as (guard, payload)."""
        found = [(g, a) for g, a in self.acts if not kind or a["action_type"] == kind]
        self.acts = [each for each in self.acts if each not in found]
        return [(guard, each["payload"]) for guard, each in found]

    def answer(self, plan_id: str, code: str = ActionCode.DONE, blocks: int = 0, byte_count: int = 0) -> None:
        """Every guard that has to answer for this plan does."""
        batch = self.desk.actor.batch(plan_id)
        assert batch is not None
        for action_id, report in list(batch.reports.items()):
            if report.result == "pending":
                result = ActionResult(
                    report.guard, 1, plan_id, action_id, report.action, code, blocks, byte_count, 0.1
                )
                self.desk.actor.received(event.encode(result))

    async def _publish(self, subject: str, raw: bytes) -> bool:
        act = event.decode(raw)
        assert isinstance(act, Act)
        guard = subject.rsplit(".", 1)[1]
        self.acts += [(guard, each) for each in json.loads(act.envelope)["actions"]]
        return True

    @staticmethod
    async def _no_overlap(_: Prompt) -> dict[tuple[int, int], int]:
        return {}


def key(session: str, tenant: str = "") -> SessionKey:
    return SessionKey(tenant, session)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens; another seed, another prompt."""
    return [(seed * 7919 + i * 31) % 50_000 for i in range(count)]
