# SPDX-License-Identifier: Apache-2.0
"""What everything about sessions and signals is read from and written into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router_hints.actions import Actor
from router_hints.arrivals import Arrivals
from router_hints.chains import Chain
from router_hints.costs import Rank
from router_hints.explain import PlanLog
from router_hints.forward import Announced, ForwardPlan
from router_hints.g1 import EngineMemory
from router_hints.guards import GuardDirectory
from router_hints.index import LocationIndex
from router_hints.ledger import Ledger
from router_hints.placement import Placement
from router_hints.sessions import SessionKey, SessionTable
from router_hints.workers import WorkerTable


@dataclass(frozen=True)
class Desk:
    """Everything signals are read from and written into."""

    sessions: SessionTable
    forward: ForwardPlan
    arrivals: Arrivals
    guards: GuardDirectory
    index: LocationIndex
    """G2 and lower, by guard"""
    g1: EngineMemory
    workers: WorkerTable
    ledger: Ledger
    placement: Callable[[], Placement]
    """what plans; there is none before the first worker is"""
    actor: Actor
    plans: PlanLog

    def engine_beside(self, guard: str) -> Rank | None:
        """The rank whose guard this is; None while no worker says so."""
        known = self.guards.get(guard)
        return self.workers.rank_at(known.endpoint) if known is not None else None

    def guard_beside(self, rank: Rank) -> str:
        """Name of the guard of this rank; empty without one."""
        found = self.guards.beside(self.workers.card(rank[0]), rank[1])
        return found.name if found is not None else ""

    def chain_of(self, turn: Announced) -> Chain | None:
        """The blocks an announced turn will begin with: its session's, or for a new one its parent's."""
        session = self.sessions.get(turn.key)
        chain = session.chain if session is not None else None
        if chain is None and turn.signal.parent:
            parent = self.sessions.get(SessionKey(turn.key.tenant, turn.signal.parent))
            chain = parent.chain if parent is not None else None
        return chain
