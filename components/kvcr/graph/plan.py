# SPDX-License-Identifier: Apache-2.0
"""What is to run for a graph: servers, processes, and what they have in common. Values only.

Made by :mod:`kvcr.graph.planning`, started by the launcher, or written down as files for other launchers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcr.graph.config import Graph, Kind, Restart

WAVES: tuple[tuple[Kind, ...], ...] = (
    (Kind.GUARD,),
    (Kind.WORKER, Kind.FRONTEND),
    # Ready only once it knows a worker; started before, it would log a refused health check every second.
    (Kind.ROUTER,),
)
"""Kinds that start together; a wave starts when all of the one before are ready, servers before all."""


@dataclass(frozen=True)
class ServerPlan:
    """etcd or NATS: one of our own on ``port``, or somebody else's at ``url``."""

    kind: Kind
    url: str
    port: int
    """0 when the server is external."""
    config: str | None = None

    @property
    def name(self) -> str:
        """Of the server: its log, its directory, its host name in a container network."""
        return self.kind.value.lower()

    @property
    def external(self) -> bool:
        return self.port == 0


@dataclass(frozen=True)
class ProcessPlan:
    """One process to run."""

    name: str
    kind: Kind
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the launcher's own environment."""
    restart: Restart
    start_timeout_s: float
    health_url: str | None
    """Answers 200 once the process is ready; None: it prints a line of JSON with ``"ready": true``."""
    ports: Mapping[str, int] = field(default_factory=dict)
    urls: Mapping[str, str] = field(default_factory=dict)
    metrics: str | None = None
    control: str | None = None
    """Control endpoint of the guard, also on its worker: the join between the two."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path to text: what has to be there before the process starts."""


@dataclass(frozen=True)
class Plan:
    """All of a graph's processes, in no particular order, and what they have in common."""

    graph: Graph
    namespace: str
    model: str | None
    served_model: str | None
    servers: tuple[ServerPlan, ...]
    processes: tuple[ProcessPlan, ...]

    @property
    def etcd(self) -> str | None:
        return next((server.url for server in self.servers if server.kind is Kind.ETCD), None)

    @property
    def nats(self) -> str | None:
        return next((server.url for server in self.servers if server.kind is Kind.NATS), None)

    @property
    def url(self) -> str | None:
        """Base URL of the OpenAI API, when the graph has a frontend."""
        found = [process.urls["openai"] for process in self.processes if process.kind is Kind.FRONTEND]
        return found[0] if found else None
