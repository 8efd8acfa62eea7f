# SPDX-License-Identifier: Apache-2.0
"""Gauges, as they are when somebody looks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from kvcr.guard.meters import Meters
from kvcr.guard.transit import TransitSlots
from kvcr.guard.view import GuardState
from kvcr.pool import Pool


def refresh(
    meters: Meters,
    pool: Pool | None,
    *,
    state: GuardState,
    peers: Iterable[Mapping[str, Any]],
    lease_count: int,
    transit: TransitSlots,
    sequence: int,
    nixl_restarts: int,
) -> None:
    """On the metrics thread: reads only. ``peers``: as in the status; ``sequence``: of the inventory."""
    for each in GuardState:
        meters.state.set(float(each is state), state=each.value.lower())
    meters.peer_ready.clear()
    meters.peer_way.clear()
    known = {peer["name"] or peer["endpoint"]: peer for peer in peers}
    for of_peers in (meters.peer_pulled_bytes, meters.peer_rate):
        of_peers.retain("peer", known)
    for label, peer in known.items():
        meters.peer_ready.set(float(peer["ready"]), peer=label)
        meters.peer_pulled_bytes.inc(0, peer=label)
        if peer["ready"]:
            meters.peer_way.set(
                peer["canary_bytes_per_s"],
                peer=label,
                transport=peer["transport"],
                via=peer["via"],
                why=peer["why"],
            )
    meters.leases.set(lease_count)
    if pool is not None:
        meters.epoch.set(pool.epoch)
        meters.transit_slots.set(transit.used, kind="used")
        meters.transit_slots.set(transit.limit(pool), kind="limit")
        meters.inventory_sequence.set(sequence)
        meters.nixl_restarts.set(nixl_restarts)
        meters.pinned_blocks.set(pool.pinned_count(time.monotonic()))
        for slot_state, count in pool.counts().items():
            meters.pool_slots.set(count, state=slot_state.name.lower())
