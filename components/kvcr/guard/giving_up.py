# SPDX-License-Identifier: Apache-2.0
"""The record of pulls that were stopped because recomputing would be done first: log, metrics, status."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvcr.guard.active import Active
from kvcr.guard.meters import Meters
from kvcr.guard.pulls import Phase, Projection
from kvcr.protocol.engine import BlockStatus

log = logging.getLogger(__name__)

KEPT = 32


@dataclass(frozen=True, slots=True)
class GaveUp:
    """One decision, with what went into it. Durations are from the start of the pull."""

    request_id: str
    plan_id: str
    peer: str
    transport: str
    estimate: str
    """Whose ``recompute_ms`` it is: ``planner`` or ``engine``."""
    recompute_ms: float
    projected_ms: float
    blocks_here: int
    blocks_left: int
    bytes_per_s: float
    rate: str
    """Where ``bytes_per_s`` is from: ``pull`` (this one so far), ``link`` (those before), or ``none``."""


def gave_up(active: Active, projection: Projection) -> GaveUp:
    """The decision to stop this pull, as it was ``projected``."""
    pull, fetch = active.pull, active.fetch
    open_ = np.flatnonzero(pull.phase != Phase.FINAL)
    source = int(pull.source[open_[0]])
    link = active.links[source] if source >= 0 else None
    return GaveUp(
        request_id=fetch.request_id,
        plan_id=fetch.plan_id,
        peer=link.label if link is not None else "",
        transport=link.transport.name if link is not None and link.transport is not None else "",
        estimate="engine" if fetch.local_estimate else "planner",
        recompute_ms=fetch.give_up_ms,
        projected_ms=1000 * (projection.finish_s - pull.started_s),
        blocks_here=int((pull.statuses == BlockStatus.OK).sum()),
        blocks_left=len(open_),
        bytes_per_s=projection.blocks_per_s * active.block_bytes,
        rate="pull" if projection.own else "link" if projection.blocks_per_s else "none",
    )


class GiveUps:
    """Belongs to the authority thread."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._last: deque[GaveUp] = deque(maxlen=KEPT)

    def record(self, decision: GaveUp) -> None:
        self._last.append(decision)
        log.info(
            "request %s plan %s: gave up a pull from %s over %s: %d blocks here, %d left at %.0f MB/s (%s) "
            "would end %.0f ms after its start, recomputing takes %.0f ms (%s)",
            decision.request_id,
            decision.plan_id or "-",
            decision.peer,
            decision.transport or "-",
            decision.blocks_here,
            decision.blocks_left,
            decision.bytes_per_s / 1e6,
            decision.rate,
            decision.projected_ms,
            decision.recompute_ms,
            decision.estimate,
        )
        meters = self._meters
        meters.gave_up.inc(estimate=decision.estimate, rate=decision.rate, transport=decision.transport)
        meters.gave_up_blocks.inc(decision.blocks_left)
        for name in ("recompute_ms", "projected_ms", "blocks_here", "blocks_left", "bytes_per_s"):
            meters.last_give_up.set(getattr(decision, name), input=name)

    def status(self) -> list[dict[str, Any]]:
        """JSON-ready: the last decisions, the newest last."""
        return [asdict(decision) for decision in self._last]
