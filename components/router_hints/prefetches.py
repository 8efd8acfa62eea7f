# SPDX-License-Identifier: Apache-2.0
"""The copies of a plan that rides on no request, as actions for the guard of its target."""

from __future__ import annotations

import numpy as np

from kvcr.protocol.events import PREFETCH, FetchSource, PrefetchPayload
from router_hints.actions import Order
from router_hints.chains import Chain
from router_hints.desk import Desk
from router_hints.plans import Plan


def prefetches(desk: Desk, guard: str, made: Plan, chain: Chain, deadline_s: float) -> list[Order]:
    """Copies and moves apart: an action has one mode for all of its blocks."""
    orders = []
    for frees in (False, True):
        runs = [run for run in made.sources if run.frees is frees]
        if not runs:
            continue
        first = min(run.first for run in runs)
        end = max(run.first + run.count for run in runs)
        # Those the target's engine had once are known; the others come with the blocks, from their source.
        hashes = np.zeros(end - first, np.uint64)
        if names := chain.cut_names(first, end):
            hashes = desk.g1.engine_hashes(desk.engine_beside(guard), names)
        payload = PrefetchPayload(
            plan_id=made.plan_id,
            keys=chain.cut(first, end),
            engine_hashes=hashes.astype("<u8").tobytes(),
            parent=chain.parent_of(first).hex(),
            first=first,
            sources=[FetchSource(run.endpoint, run.first - first, run.count, run.guard) for run in runs],
            mode="move" if frees else "copy",
            give_up_ms=0.0,
            deadline_ms=1e3 * deadline_s,
        )
        orders.append(Order(guard, PREFETCH, payload))
    return orders


def partly_moved(made: Plan) -> bool:
    """Whether some of its blocks leave their source and others do not."""
    return len({run.frees for run in made.sources}) == 2
