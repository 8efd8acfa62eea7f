# SPDX-License-Identifier: Apache-2.0
"""The record of pulls that were stopped because recomputing would be done first: log, metrics, status."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from kvcr.guard.meters import Meters

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
