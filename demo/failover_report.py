# SPDX-License-Identifier: Apache-2.0
"""What a failover cost, as figures for a benchmark and as a table for a person."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from demo.load import Outcome, Request
from demo.scenes.failover import Failover
from demo.table import print_table, seconds, size

PHASES = ("before", "during", "after")
"""The fault, until the worker that died answers again through the frontend."""


def figures(seen: Failover) -> dict[str, Any]:
    """Everything as numbers; times in seconds. None where there is nothing to measure."""
    windows = {
        "before": (seen.loaded_s, seen.killed_s),
        "during": (seen.killed_s, seen.back_s),
        "after": (seen.back_s, seen.ended_s),
    }
    phases = {name: [r for r in seen.requests if phase_of(r, seen) == name] for name in PHASES}
    moved = first_turns_after_death(seen)
    return {
        "kvcr": "on" if seen.guarded else "off",
        "ttft_s": {name: quantiles(ttfts(requests)) for name, requests in phases.items()},
        "stall_s": quantiles(stalls(seen)),
        "moved_sessions_ttft_s": quantiles(ttfts(moved)),
        "moved_sessions_computed_tokens": sum(
            r.answer.prompt_tokens - r.answer.cached_tokens for r in moved if r.answer is not None
        ),
        "output_tokens_per_s": {
            name: round(sum(lo <= s < hi for r in seen.requests for s in r.text_s) / (hi - lo), 2)
            for name, (lo, hi) in windows.items()
        },
        "requests": {
            outcome.value: sum(r.outcome is outcome for r in seen.requests if r.sent_s >= seen.loaded_s)
            for outcome in Outcome
        },
        "requests_by_phase": {
            name: {outcome.value: sum(r.outcome is outcome for r in requests) for outcome in Outcome}
            for name, requests in phases.items()
        },
        "serves_again_s": round(seen.back_s - seen.killed_s, 3),
        "processes_gone_s": round(seen.gone_s - seen.killed_s, 4),
        "active_s": round(seen.active_s - seen.killed_s, 4) if seen.active_s is not None else None,
        "served_from_dead_pool": {
            "bytes": seen.served_bytes,
            "blocks": seen.served_blocks,
            "transfers": seen.transfers,
        },
        "returned": {
            "ttft_s": round(seen.returned.answer.ttft_s, 4),
            "ttft_computed_s": round(seen.computed.answer.ttft_s, 4),
            "prompt_tokens": seen.returned.answer.prompt_tokens,
            "computed_tokens": seen.returned.computed_tokens,
            "pulled_blocks": seen.returned.pulled_blocks,
        },
        "home": {
            "went_home": seen.home.worker.label == seen.victim.label,
            "own_tokens": seen.home.own_tokens,
            "pulled_tokens": seen.home.pulled_tokens,
            "computed_tokens": seen.home.computed_tokens,
        },
    }


def phase_of(request: Request, seen: Failover) -> str:
    """Which phase a request counts for: that of its sending, but one the kill broke belongs to the fault.

    Empty for the first turns, which compute the documents.
    """
    if request.sent_s < seen.loaded_s:
        return ""
    if request.sent_s >= seen.back_s:
        return "after"
    broken = request.outcome is not Outcome.OK and request.ended_s >= seen.killed_s
    return "during" if request.sent_s >= seen.killed_s or broken else "before"


def first_turns_after_death(seen: Failover) -> list[Request]:
    """The first answer after the death of each session at home on the dead worker, or in mid-stream there."""
    sessions = {
        r.session
        for r in seen.requests
        if r.home == seen.victim.label or (r.sent_s < seen.killed_s and phase_of(r, seen) == "during")
    }
    first: dict[int, Request] = {}
    for request in seen.requests:
        if request.session in sessions and request.sent_s >= seen.killed_s and request.outcome is Outcome.OK:
            first.setdefault(request.session, request)
    return list(first.values())


def stalls(seen: Failover) -> list[float]:
    """The pause that the kill made in each stream that was under way, on either worker."""
    return [
        pause_s
        for request in seen.requests
        if (pause_s := request.pause_s(seen.killed_s)) is not None and request.sent_s >= seen.loaded_s
    ]


def ttfts(requests: Iterable[Request]) -> list[float]:
    return [r.ttft_s for r in requests if r.ttft_s is not None]


def quantiles(samples: Sequence[float]) -> dict[str, Any]:
    """P50, P90 and P95 (nearest rank) and how many there are; None without samples."""
    ordered = sorted(samples)

    def rank(share: float) -> float | None:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 4) if ordered else None

    return {"p50": rank(0.5), "p90": rank(0.9), "p95": rank(0.95), "requests": len(ordered)}


def show(reports: Mapping[str, Mapping[str, Any]], out: TextIO = sys.stdout) -> None:
    """The table; one column for each of ``reports``, which are :func:`figures` by title."""
    rows = [(title, *(cell(report) for report in reports.values())) for title, cell in _ROWS]
    print(file=out)
    print_table("An engine killed in mid-stream", ("", *reports), rows, out)


def _ttft(phase: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda report: _quantiles(report["ttft_s"][phase])


def _quantiles(found: Mapping[str, Any]) -> str:
    if not found["requests"]:
        return "-"
    values = " / ".join(seconds(found[name]) for name in ("p50", "p90", "p95"))
    return f"{values}  ({found['requests']})"


def _pool(report: Mapping[str, Any]) -> str:
    served = report["served_from_dead_pool"]
    if report["kvcr"] == "off":
        return "no pool"
    return f"{size(served['bytes'])}, {served['blocks']} blocks in {served['transfers']} transfers"


def _returned(report: Mapping[str, Any]) -> str:
    found = report["returned"]
    return f"{found['computed_tokens']} of {found['prompt_tokens']} tokens, {seconds(found['ttft_s'])}"


def _home(report: Mapping[str, Any]) -> str:
    found = report["home"]
    where = "at home" if found["went_home"] else "on the other worker"
    return f"{where}, {found['computed_tokens']} computed, {found['pulled_tokens']} pulled"


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("TTFT before: P50 / P90 / P95 (requests)", _ttft("before")),
    ("TTFT during the fault", _ttft("during")),
    ("TTFT after the return", _ttft("after")),
    ("pause of the streams under way at the kill", lambda r: _quantiles(r["stall_s"])),
    ("first answer of the dead worker's sessions: TTFT", lambda r: _quantiles(r["moved_sessions_ttft_s"])),
    ("  prompt tokens computed for it", lambda r: str(r["moved_sessions_computed_tokens"])),
    (
        "output tokens/s before / during / after",
        lambda r: " / ".join(f"{r['output_tokens_per_s'][phase]:.1f}" for phase in PHASES),
    ),
    (
        "requests: successful / failed / hung",
        lambda r: " / ".join(str(r["requests"][outcome.value]) for outcome in Outcome),
    ),
    ("worker serves again, seen at the frontend", lambda r: f"{r['serves_again_s']:.1f} s"),
    ("the kernel has ended the worker's processes", lambda r: seconds(r["processes_gone_s"])),
    ("guard ACTIVE", lambda r: "no guard" if r["active_s"] is None else seconds(r["active_s"])),
    ("served from the dead worker's pool", _pool),
    ("a known prompt on the returned worker computes", _returned),
    ("a session of it that slept goes on", _home),
)
