# SPDX-License-Identifier: Apache-2.0
"""Traces replayed through the planner and through other ways to route, on the same simple engines.

Plain runs of the public Mooncake traces (conversation, synthetic; tool calls if the file is there), runs of
the conversation trace in which a worker is lost, one is added, a burst comes, or a prefix turns hot, a
generated trace of agents with their signals, and a sweep over the number of open requests. The keys of the
result are those of the plain conversation run; everything else is under ``runs``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import _common
from bench._replay_policies import POLICIES, Ours
from bench._replay_sim import Simulation
from bench._replay_traces import Notice, Request, agents, burst, hot_prefix, mooncake

HOW_TO_GET = """\
bench.replay reads the traces of the Mooncake project (FAST'25 release, Apache-2.0), which are not part of
this repository. Fetch them, and say where they are with --traces DIR or KVCR_TRACES=DIR:

  mkdir -p traces && cd traces
  base=https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces
  for t in conversation synthetic; do curl -fLo mooncake_${t}_trace.jsonl $base/${t}_trace.jsonl; done
"""

Figures = dict[str, dict[str, float]]


def compare(events: Sequence[Request | Notice], *, extra: Sequence[Any] = (), **scenario: Any) -> Figures:
    """Figures by policy. ``extra`` are further policies, made already."""
    found: Figures = {}
    for policy in [*(kind() for kind in POLICIES), *extra]:
        begun = time.perf_counter()
        found[policy.name] = Simulation(policy, events, **scenario).run()
        found[policy.name]["simulated_in_s"] = round(time.perf_counter() - begun, 2)
    return found


def show(title: str, figures: Figures) -> None:
    _common.say(f"\n{title}")
    _common.say(
        f"  {'':22}{'hit':>7}{'max/mean':>9}{'ttft mean':>10}{'p50':>8}{'p90':>8}{'p99':>9}"
        f"{'tokens/s':>10}{'moved GB':>10}"
    )
    for name, each in figures.items():
        _common.say(
            f"  {name:22}{each['hit']:7.3f}{each['max_over_mean_load']:9.3f}{each['ttft_mean_s']:10.3f}"
            f"{each['ttft_p50_s']:8.3f}{each['ttft_p90_s']:8.3f}{each['ttft_p99_s']:9.3f}"
            f"{each['output_tokens_per_s']:10.0f}{each['moved_bytes'] / 1e9:10.1f}"
        )


def measure(traces: Path, quick: bool) -> dict[str, Any]:
    runs: dict[str, Figures] = {}

    def note(name: str, title: str, figures: Figures) -> None:
        runs[name] = figures
        show(title, figures)

    conversation = mooncake(traces / "mooncake_conversation_trace.jsonl")
    note("conversation", "conversation trace, 8 workers, 5,000 blocks each", compare(conversation))
    synthetic = mooncake(traces / "mooncake_synthetic_trace.jsonl", 1500 if quick else None)
    note("synthetic", "synthetic trace", compare(synthetic))
    tools = traces / "mooncake_toolagent_trace.jsonl"
    if tools.exists():
        note("toolagent", "tool and agent trace", compare(mooncake(tools, 4000 if quick else None)))

    part = conversation[: 3000 if quick else None]
    middle_s = part[len(part) // 2].at_s
    note("worker_lost", "conversation, a worker lost in the middle", compare(part, lose_at_s=middle_s))
    note("worker_added", "conversation, a worker added in the middle", compare(part, add_at_s=middle_s))
    note("burst", "conversation, a burst of four times the rate", compare(burst(part)))
    note("hot_prefix", "conversation, one prefix turns hot for a minute", compare(hot_prefix(part)))

    note(
        "agents",
        "agents with signals: forks, compactions, one-offs, pauses",
        compare(agents(80 if quick else 240), workers=8, extra=[Ours(signals=False)]),
    )
    swept = conversation[: 1000 if quick else 4000]
    for concurrency in (16, 64) if quick else (8, 16, 32, 64, 128):
        note(
            f"concurrency_{concurrency}",
            f"conversation, {concurrency} requests open at any time",
            compare(swept, concurrency=concurrency),
        )
    return {**runs["conversation"], "runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="parts of the traces, fewer runs")
    parser.add_argument("--traces", default=os.environ.get("KVCR_TRACES", ""), help="folder of the traces")
    options = parser.parse_args()
    traces = Path(options.traces or "traces")
    missing = [
        name
        for name in ("mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl")
        if not (traces / name).exists()
    ]
    if missing:
        print(f"{traces / missing[0]} is not there.\n\n{HOW_TO_GET}", file=sys.stderr)
        return 2
    result = {"bench": "replay", "quick": options.quick, **measure(traces, options.quick)}
    print(json.dumps({**result, "machine": _common.machine(), "versions": _common.versions()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
