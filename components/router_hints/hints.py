# SPDX-License-Identifier: Apache-2.0
"""From a plan to the ``kv_hint`` envelope a request carries, and to its copy on NATS."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcr.keys import KEY_BYTES
from kvcr.protocol.events import FetchPayload, FetchSource, HintNotice, envelope, fetch_action
from router_hints.planner import Plan


def build_envelope(plan: Plan, keys: bytes, *, deadline_ms: float) -> dict[str, Any] | None:
    """The hint for the target's guard and engine, or None when there is nothing to say.

    ``keys`` are the request's block keys in the *target's* key space, 16 bytes each, from its first block on.
    A copy may take ``deadline_ms``, or half the time to recompute if that is more: a source that hangs then
    costs a request half as long again as no hint would have. A request of which nothing is to be kept says so
    even when nothing is fetched for it.
    """
    if not plan.sources and not plan.no_retain:
        return None
    last = max((run.first + run.count for run in plan.sources), default=0) - 1
    payload = FetchPayload(
        plan_id=plan.plan_id,
        sources=[FetchSource(run.endpoint, run.first, run.count, run.guard) for run in plan.sources],
        last_key=keys[last * KEY_BYTES : (last + 1) * KEY_BYTES].hex() if plan.sources else "",
        mode="move" if plan.sources and all(run.frees for run in plan.sources) else "copy",
        no_retain=plan.no_retain,
        give_up_ms=round(plan.give_up_ms, 3),
        deadline_ms=max(deadline_ms, round(plan.give_up_ms / 2, 3)),
    )
    return envelope(plan.plan_id, [fetch_action(f"{plan.plan_id}.0", payload)])


def build_notice(plan: Plan, hint: dict[str, Any], *, request_id: str, router: str) -> HintNotice:
    """The copy of an attached hint for whoever watches the hints of the target's guard."""
    return HintNotice(
        plan_id=plan.plan_id,
        request_id=request_id,
        router=router,
        worker_id=plan.rank[0],
        envelope=msgspec.json.encode(hint),
        reason=plan.reason.value,
    )
