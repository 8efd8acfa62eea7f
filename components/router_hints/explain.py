# SPDX-License-Identifier: Apache-2.0
"""The last plans, kept so that one can ask why a request went where it went, and how to tell a person."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcr.tables import paragraph, table
from router_hints.inputs import PlanInputs
from router_hints.planner import NEAR_FACTOR, Estimate, Plan, SourceRun
from router_hints.plans import Reason

_TERMS = (
    "wait_s",
    "fetch_s",
    "prefill_s",
    "load_s",
    "later_s",
    "delay_s",
    "pressure_s",
    "copy_s",
    "hot_s",
    "jitter_s",
)
_WORDS = {
    Reason.PINNED: "the request named its worker",
    Reason.COPY: "copying to the cheapest worker",
    Reason.SPREAD: "many ask for this prefix; copied before its holders queue",
    Reason.WAKE_UP: "the session slept, and would wait where it was",
    Reason.JOIN: "its blocks are already on their way there",
    Reason.NEXT_TURN: "copied ahead of an announced turn",
    Reason.ONE_OFF: "nobody comes back for it, nothing is kept",
    Reason.RESIDENT: "the cheapest worker has blocks itself",
    Reason.COLD: "nobody has the prefix, or fetching costs more than computing",
    Reason.SHORT: "the prompt is shorter than a block",
    Reason.TOO_EARLY: "planned again shortly before the turn",
    Reason.TOO_LATE: "not to be done before the deadline",
    Reason.BUDGET: "copies have used up their bytes a second",
    Reason.COMPACTED: "what follows the kept head is dead",
    Reason.ENDED: "the session is over",
}


@dataclass
class _Entry:
    """One plan, and what became of it. Written out only when somebody asks."""

    plan: Plan
    request_id: str
    attempt: int
    hint: dict[str, Any] | None
    inputs: PlanInputs | None
    outcome: str = "running"
    first_output_s: float | None = None

    def told(self, inputs: bool) -> dict[str, Any]:
        told = describe(self.plan) | {
            "request_id": self.request_id,
            "attempt": self.attempt,
            "kv_hint": self.hint,
            "outcome": self.outcome,
            "first_output_s": self.first_output_s,
        }
        if inputs:
            told["inputs"] = self.inputs.to_text() if self.inputs is not None else ""
        return told


class PlanLog:
    """The last ``size`` plans by id. One thread."""

    def __init__(self, size: int = 1000) -> None:
        self._size = size
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def record(
        self,
        plan: Plan,
        request_id: str,
        attempt: int,
        hint: dict[str, Any] | None,
        inputs: PlanInputs | None = None,
    ) -> None:
        """Keep a plan as it is carried out; ``attempt`` counts from 0."""
        self._entries[plan.plan_id] = _Entry(plan, request_id, attempt, hint, inputs)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def first_output(self, plan_id: str, seconds: float) -> None:
        """The worker gave its first output this long after dispatch."""
        if plan_id in self._entries:
            self._entries[plan_id].first_output_s = seconds

    def ended(self, plan_id: str, outcome: str) -> None:
        if plan_id in self._entries:
            self._entries[plan_id].outcome = outcome

    def find(
        self, *, plan_id: str = "", request_id: str = "", last: int = 20, inputs: bool = False
    ) -> list[dict[str, Any]]:
        """The plan with this id, the plans of this request, or the ``last`` ones, oldest first.

        With ``inputs`` each comes with what it was made from, for :func:`replay`.
        """
        if plan_id:
            found = [self._entries[plan_id]] if plan_id in self._entries else []
        elif request_id:
            found = [entry for entry in self._entries.values() if entry.request_id == request_id]
        else:
            found = list(self._entries.values())[-last:] if last > 0 else []
        return [entry.told(inputs) for entry in found]


def describe(plan: Plan) -> dict[str, Any]:
    """A plan as plain values: the decision, and every candidate with its cost terms in seconds."""
    return {
        "plan_id": plan.plan_id,
        "worker_id": plan.rank[0],
        "dp_rank": plan.rank[1],
        "mode": plan.mode.value,
        "reason": plan.reason.value,
        "no_retain": plan.no_retain,
        "again_in_s": plan.again_in_s,
        "prefill_tokens": plan.prefill_tokens,
        "moved_bytes": plan.moved_bytes,
        "give_up_ms": plan.give_up_ms,
        "planned_s": plan.planned_s,
        "sources": [_source(run) for run in plan.sources],
        "candidates": [_candidate(estimate) for estimate in plan.candidates],
    }


def replay(entry: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Plan again from a logged entry: whether it is the same, and what differs where it is not.

    Raises ValueError when the entry has no inputs.
    """
    if not entry.get("inputs"):
        raise ValueError(
            f"plan {entry.get('plan_id')} was logged without its inputs: it cannot be made again"
        )
    again = msgspec.to_builtins(describe(PlanInputs.from_text(str(entry["inputs"])).plan()))
    different = [
        f"{name}: logged {entry.get(name)!r}, now {value!r}"
        for name, value in again.items()
        if msgspec.to_builtins(entry.get(name)) != value
    ]
    return not different, different


def tell(entry: Mapping[str, Any]) -> str:
    """A logged plan for a person: candidates by cost, their terms, the winner."""
    workers = PlanInputs.from_text(str(entry["inputs"])).workers if entry.get("inputs") else []
    guards = {worker.rank: worker.guard for worker in workers if worker.guard}
    chosen = (entry["worker_id"], entry["dp_rank"])
    beside = f", {guards[chosen]}" if chosen in guards else ""
    reason = Reason(entry["reason"])
    lines = [
        f"request {entry.get('request_id', '-')}, attempt {entry.get('attempt', 0)}",
        f"  plan {entry['plan_id']}",
        f"  to worker {chosen[0]:x} rank {chosen[1]}{beside}: mode {entry['mode']}, reason {reason.value}"
        + (", nothing retained" if entry.get("no_retain") else "")
        + (f", again in {entry['again_in_s']:.1f} s" if entry.get("again_in_s") is not None else ""),
        f"  {entry['prefill_tokens']} tokens to compute, {entry['moved_bytes'] / 1e6:.1f} MB to move; "
        f"outcome {entry.get('outcome', '-')}, first output after {_seconds(entry.get('first_output_s'))}",
    ]
    for run in entry["sources"]:
        lines.append(
            f"  from {run['guard']}: blocks {run['first']} to {run['first'] + run['count'] - 1}"
            + (", which leave it" if run.get("frees") else "")
        )
    lines.insert(3, f"  {_WORDS[reason]}")
    terms = [term for term in _TERMS if any(candidate[term] >= 0.0005 for candidate in entry["candidates"])]
    names = [term.removesuffix("_s").upper() for term in terms]
    rows = []
    for candidate in sorted(entry["candidates"], key=lambda each: each["total_s"]):
        rank = tuple(candidate["rank"])
        rows.append(
            [
                "->" if rank == chosen else "",
                guards.get(rank, f"{rank[0]:x}.{rank[1]}"),
                *(f"{candidate[term]:.3f}" for term in ("total_s", *terms, "bias")),
                *(candidate[f"{kind}_blocks"] for kind in ("g1", "local", "copied")),
            ]
        )
    header = ["", "WORKER", "TOTAL", *names, "BIAS", "G1", "OWN", "COPIED"]
    lines.append(table(header, rows, right=range(2, len(header))))
    if not rows[0][0] and reason is not Reason.PINNED:
        lines.append(
            paragraph(
                "  ",
                f"totals within {NEAR_FACTOR - 1:.0%} count as equal: home goes first, then fewest copied, "
                "most reused, fewest requests",
            )
        )
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _source(run: SourceRun) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(run)
    return built


def _candidate(estimate: Estimate) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(estimate)
    return built | {"rank": list(estimate.rank), "total_s": estimate.total_s}
