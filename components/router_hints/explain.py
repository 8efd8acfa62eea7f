# SPDX-License-Identifier: Apache-2.0
"""The last plans, kept so that one can ask why a request went where it went."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from router_hints.planner import Estimate, Plan, SourceRun


class PlanLog:
    """The last ``size`` plans by id. One thread."""

    def __init__(self, size: int = 1000) -> None:
        self._size = size
        self._entries: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def record(self, plan: Plan, request_id: str, attempt: int, hint: dict[str, Any] | None) -> None:
        """Keep a plan as it is carried out; ``attempt`` counts from 0."""
        self._entries[plan.plan_id] = {
            "plan_id": plan.plan_id,
            "request_id": request_id,
            "attempt": attempt,
            "worker_id": plan.rank[0],
            "dp_rank": plan.rank[1],
            "reason": plan.reason.value,
            "prefill_tokens": plan.prefill_tokens,
            "give_up_ms": plan.give_up_ms,
            "planned_s": plan.planned_s,
            "sources": [_source(run) for run in plan.sources],
            "candidates": [_candidate(estimate) for estimate in plan.candidates],
            "kv_hint": hint,
            "outcome": "running",
            "first_output_s": None,
        }
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def first_output(self, plan_id: str, seconds: float) -> None:
        """The worker gave its first output this long after dispatch."""
        if plan_id in self._entries:
            self._entries[plan_id]["first_output_s"] = seconds

    def ended(self, plan_id: str, outcome: str) -> None:
        if plan_id in self._entries:
            self._entries[plan_id]["outcome"] = outcome

    def find(self, *, plan_id: str = "", request_id: str = "", last: int = 20) -> list[dict[str, Any]]:
        """The plan with this id, the plans of this request, or the ``last`` ones, oldest first."""
        if plan_id:
            found = self._entries.get(plan_id)
            return [] if found is None else [found]
        entries = list(self._entries.values())
        if request_id:
            return [entry for entry in entries if entry["request_id"] == request_id]
        return entries[-last:] if last > 0 else []


def _source(run: SourceRun) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(run)
    return built


def _candidate(estimate: Estimate) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(estimate)
    return built | {"total_s": estimate.total_s}
