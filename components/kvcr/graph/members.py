# SPDX-License-Identifier: Apache-2.0
"""What a launcher runs: servers and processes over all their incarnations, as ``graph.json`` shows them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcr.graph import infra, processes
from kvcr.graph.config import Kind
from kvcr.graph.plan import ProcessPlan, ServerPlan


class State(enum.StrEnum):
    """Of one process, as ``graph.json`` shows it."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to restart"
    ENDED = "ended"


@dataclass
class Server:
    """etcd or NATS; nothing runs here when it is somebody else's."""

    plan: ServerPlan
    running: infra.Server | None = None
    restarts: int = 0

    def shown(self, logs: Path) -> dict[str, Any]:
        """Its entry in ``graph.json``."""
        plan, running = self.plan, self.running
        up = plan.external or running is not None
        return {
            "name": plan.name,
            "component": plan.kind.value,
            "state": State.READY.value if up else State.ENDED.value,
            "pid": running.pid if running else None,
            "ports": {"client": plan.port} if plan.port else {},
            "urls": {"client": plan.url, **({"monitor": running.monitor_url} if running else {})},
            # NATS has none in Prometheus' format.
            "metrics": f"{running.monitor_url}/metrics" if running and plan.kind is Kind.ETCD else None,
            "log": None if plan.external else str(logs / f"{plan.name}.log"),
            "restarts": self.restarts,
        }


@dataclass
class Member:
    """One process of the graph over all its incarnations."""

    plan: ProcessPlan
    child: processes.Child | None = None
    state: State = State.ENDED
    restarts: int = 0
    restart_at_s: float = 0.0
    probe_at_s: float = 0.0
    failures_in_row: int = 0
    announced: dict[str, Any] = field(default_factory=dict)
    shared_memory: set[Path] = field(default_factory=set)
    """What the running incarnation and its children had mapped when it was ready."""
    instance: str | None = None
    """Dynamo instance id of the running incarnation in hex, which is its etcd lease too."""

    def shown(self, logs: Path) -> dict[str, Any]:
        """Its entry in ``graph.json``."""
        plan, child = self.plan, self.child
        alive = child is not None and self.state in (State.STARTING, State.READY)
        return {
            "name": plan.name,
            "component": plan.kind.value,
            "state": self.state.value,
            "pid": child.pid if child is not None and alive else None,
            "ports": dict(plan.ports),
            "urls": dict(plan.urls),
            "metrics": plan.metrics,
            "control": plan.control,
            "instance": self.instance,
            "log": str(logs / f"{plan.name}.log"),
            "restarts": self.restarts,
            "announced": self.announced,
            "argv": list(plan.argv),
        }
