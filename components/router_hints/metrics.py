# SPDX-License-Identifier: Apache-2.0
"""Counters of the router, served by the Dynamo system server under ``/metrics``."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvcr.protocol.events import ACTIONS, FETCH, ActionCode
from kvcr.protocol.signals import Signal
from router_hints.heat import HotPrefix

_PLAN_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_OUTPUT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

STATES = ("empty", "standby", "checking", "active")
"""Of guards, see :class:`kvcr.guard.view.GuardState`."""
_CODES = frozenset(ActionCode)
_FIELDS = {*Signal.__struct_fields__, "wait_s"}


class RequestOutcome(enum.StrEnum):
    """How a request, or one attempt of it, ended."""

    OK = "ok"
    CANCELLED = "cancelled"
    """The client left."""
    UNREACHABLE = "unreachable"
    """The worker could not be reached before its first output: planned again."""
    LOST = "lost"
    """The worker went away after its first output."""
    ERROR = "error"
    """The worker answered with an error."""
    NO_WORKER = "no_worker"
    INVALID = "invalid"


class Metrics:
    """One registry for one router."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvcr_router_requests_total",
            "Requests by the guard beside their worker (empty: none) and how they ended",
            ["guard", "outcome"],
            registry=registry,
        )
        self.hints = Counter(
            "kvcr_router_hints_total", "Hints attached to requests", ["action"], registry=registry
        )
        self.hinted_blocks = Counter(
            "kvcr_router_hinted_blocks_total", "Blocks that hints asked to copy", registry=registry
        )
        self.plans = Counter(
            "kvcr_router_plans_total", "Plans by their reason", ["reason"], registry=registry
        )
        self.plan_seconds = Histogram(
            "kvcr_router_plan_seconds", "Time to plan one request", buckets=_PLAN_BUCKETS, registry=registry
        )
        self.first_output_seconds = Histogram(
            "kvcr_router_first_output_seconds",
            "From arrival at the router to the first output of the worker",
            buckets=_OUTPUT_BUCKETS,
            registry=registry,
        )
        self.planned_tokens = Counter(
            "kvcr_router_planned_tokens_total",
            "Prompt tokens by where the plan expects their KV: g1, g2 (own pool), peer, compute",
            ["tier"],
            registry=registry,
        )
        self.unkeyed = Counter(
            "kvcr_router_unkeyed_requests_total",
            "Requests whose blocks have no key, and so no hint",
            ["reason"],
            registry=registry,
        )
        self.index_blocks = Gauge(
            "kvcr_router_index_blocks", "Blocks indexed for a guard", ["guard"], registry=registry
        )
        self.inventory_lag = Gauge(
            "kvcr_router_inventory_lag_batches",
            "Batches of changes that a guard has published and the index has not",
            ["guard"],
            registry=registry,
        )
        self.index_evicted = Gauge(
            "kvcr_router_index_evicted_blocks",
            "Blocks evicted from the index because it is full, since the start",
            registry=registry,
        )
        self.index_bytes = Gauge("kvcr_router_index_bytes", "Memory of the index", registry=registry)
        self.index_rebuild_seconds = Gauge(
            "kvcr_router_index_rebuild_seconds",
            "From the start of this router until it knew 99 % of the blocks that guards hold; 0 until then",
            registry=registry,
        )
        self.index_resyncs = Counter(
            "kvcr_router_index_resyncs_total",
            "Replays and snapshots asked of guards, by what made them necessary",
            ["reason"],
            registry=registry,
        )
        self.inventory_messages = Counter(
            "kvcr_router_inventory_messages_total",
            "Inventory messages by what they did",
            ["outcome"],
            registry=registry,
        )
        self.workers = Gauge(
            "kvcr_router_workers",
            "Workers: ready, down, dead, refused",
            ["state"],
            registry=registry,
        )
        self.unguarded_ranks = Gauge(
            "kvcr_router_ranks_without_guard",
            "Ranks whose card names a guard that is not registered",
            registry=registry,
        )
        self.guards = Gauge(
            "kvcr_router_guards", "Guards by the state of their engine", ["state"], registry=registry
        )
        self.unready_sources = Gauge(
            "kvcr_router_unready_sources",
            "Guards that a guard cannot read from, by its own word: no plan copies from them to it",
            ["guard"],
            registry=registry,
        )
        self.state_changes = Counter(
            "kvcr_router_state_changes_total",
            "Changes of state heard from guards, by the new state. ignored: of a guard without a record; "
            "unsigned: not signed with the deployment's secret",
            ["state"],
            registry=registry,
        )
        self.hot_requests = Gauge(
            "kvcr_router_hot_prefix_requests_per_second",
            "Requests that begin with a hot prefix, 1 being the hottest",
            ["rank"],
            registry=registry,
        )
        self.hot_blocks = Gauge(
            "kvcr_router_hot_prefix_blocks",
            "Its length, to within a factor of two",
            ["rank"],
            registry=registry,
        )
        self.hot_guards = Gauge(
            "kvcr_router_hot_prefix_guards", "Guards that hold its last block", ["rank"], registry=registry
        )
        self.hot_key = Gauge(
            "kvcr_router_hot_prefix_key",
            "First 6 bytes of the key of its last block, as a number: shown in hex it is what kvcr top shows",
            ["rank"],
            registry=registry,
        )
        self.locations = Counter(
            "kvcr_router_location_events_total",
            "Block-location events published",
            ["tier"],
            registry=registry,
        )
        self.signals = Counter(
            "kvcr_router_signals_total",
            "Signals by kind and by the way they came: header, http, nats",
            ["kind", "input"],
            registry=registry,
        )
        self.signals_refused = Counter(
            "kvcr_router_signals_refused_total",
            "Signals refused, by the field that was wrong (empty: the whole; unknown: no field of ours)",
            ["input", "field"],
            registry=registry,
        )
        self.actions = Counter(
            "kvcr_router_actions_total",
            "Actions that ride on no request: sent, and by the code of each answer",
            ["action", "code"],
            registry=registry,
        )
        self.acted_blocks = Counter(
            "kvcr_router_acted_blocks_total",
            "Blocks that guards say such actions changed",
            ["action"],
            registry=registry,
        )
        self.acted_bytes = Counter(
            "kvcr_router_acted_bytes_total", "Bytes of those", ["action"], registry=registry
        )
        self.sessions = Gauge("kvcr_router_sessions", "Sessions known", registry=registry)
        self.session_blocks = Gauge(
            "kvcr_router_session_blocks", "Blocks in the chains of those sessions", registry=registry
        )
        self.sessions_forgotten = Gauge(
            "kvcr_router_sessions_forgotten",
            "Sessions dropped since the start: idle for too long, for want of room, or ended",
            ["reason"],
            registry=registry,
        )
        self.announced = Gauge(
            "kvcr_router_announced_turns", "Announced turns whose request has not come", registry=registry
        )
        self.replicas = Gauge(
            "kvcr_router_replicas", "Routers that are heard, this one included", registry=registry
        )
        self.g1_blocks = Gauge(
            "kvcr_router_g1_blocks",
            "Blocks in the memory of all engines",
            registry=registry,
        )
        self.g1_parked = Gauge(
            "kvcr_router_g1_parked_blocks",
            "Blocks that an engine stored after one this router does not know",
            registry=registry,
        )
        self.g1_repairs = Counter(
            "kvcr_router_g1_repairs_total",
            "Times the view of engine memory was read again from Dynamo's KvRouter",
            registry=registry,
        )
        self.news_age_seconds = Gauge(
            "kvcr_router_news_age_seconds",
            "How long ago the other router that is heard least was heard; 0 without others",
            registry=registry,
        )
        self.bus_connects = Counter(
            "kvcr_router_bus_connects_total",
            "Connections made to NATS, the first one included",
            registry=registry,
        )
        self.bus_dropped = Counter(
            "kvcr_router_bus_dropped_total", "Messages not published because NATS was away", registry=registry
        )

        self._told: set[str] = set()
        """Guards that may be labels."""

        # There from the first scrape on: an increase is only seen from a zero.
        for tier in ("g1", "g2", "peer", "compute"):
            self.planned_tokens.labels(tier)
        self.hints.labels(FETCH)

    def refused(self, way: str, field: str) -> None:
        """A signal was refused. What clients call their fields is no label: they may make up any number."""
        known = field in _FIELDS or not field
        self.signals_refused.labels(way, field if known else "unknown").inc()

    def ended(self, guard: str, outcome: RequestOutcome) -> None:
        """A request, or an attempt of it, on the worker beside this guard; "" without one."""
        self._told.add(guard)
        self.requests.labels(guard, outcome.value).inc()

    def retain_guards(self, known: Collection[str]) -> None:
        """Forget what was told of guards that are gone: a name may be a pod's, new at each restart."""
        for name in self._told - {"", *known}:
            self._told.discard(name)
            for metric in (self.requests, self.index_blocks, self.inventory_lag, self.unready_sources):
                metric.remove_by_labels({"guard": name})
        self._told.update(known)

    def state_changed(self, state: str) -> None:
        """A guard's state is its word: one of a later release, or of whoever writes to NATS, is no label."""
        self.state_changes.labels(state if state in STATES else "unknown").inc()

    def answered(self, action: str, code: str, blocks: int, nbytes: int) -> None:
        """A guard's answer to an action; what it calls action and code is its word, too."""
        action = action if action in ACTIONS else "unknown"
        self.actions.labels(action, code if code in _CODES else "unknown").inc()
        self.acted_blocks.labels(action).inc(blocks)
        self.acted_bytes.labels(action).inc(nbytes)

    def show_hot(self, prefixes: Iterable[tuple[HotPrefix, int]]) -> None:
        """The hottest prefixes in order, each with the number of guards that hold it."""
        gauges = (self.hot_requests, self.hot_blocks, self.hot_guards, self.hot_key)
        for gauge in gauges:
            gauge.clear()
        for rank, (prefix, guards) in enumerate(prefixes, 1):
            key = int.from_bytes(prefix.key[:6])
            for gauge, value in zip(gauges, (prefix.per_s, prefix.blocks, guards, key), strict=True):
                gauge.labels(f"{rank:02}").set(value)

    def render(self) -> str:
        """All of them as Prometheus text."""
        return generate_latest(self.registry).decode()
