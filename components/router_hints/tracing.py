# SPDX-License-Identifier: Apache-2.0
"""What the spans of a plan and of its hint say."""

from __future__ import annotations

from kvcr.tracing import Value
from router_hints.plans import Plan


def plan_attributes(made: Plan) -> dict[str, Value]:
    """Of ``kvcr.plan``: where the request goes, why, and where its blocks are expected to come from."""
    chosen = made.chosen
    return {
        "kvcr.plan_id": made.plan_id,
        "kvcr.worker": f"{made.rank[0]:x}",
        "kvcr.dp_rank": made.rank[1],
        "kvcr.mode": made.mode.value,
        "kvcr.reason": made.reason.value,
        "kvcr.blocks": made.blocks,
        "kvcr.g1_blocks": chosen.g1_blocks,
        "kvcr.local_blocks": chosen.local_blocks,
        "kvcr.copied_blocks": chosen.copied_blocks,
        "kvcr.candidates": len(made.candidates),
        "kvcr.result": "ok",
    }


def hint_attributes(made: Plan) -> dict[str, Value]:
    """Of ``kvcr.hint``: what its worker is asked to fetch."""
    return {
        "kvcr.plan_id": made.plan_id,
        "kvcr.mode": made.mode.value,
        "kvcr.sources": ", ".join(dict.fromkeys(run.guard for run in made.sources)),
        "kvcr.blocks": sum(run.count for run in made.sources),
        "kvcr.bytes": sum(run.byte_count for run in made.sources),
        "kvcr.give_up_ms": made.give_up_ms,
    }
