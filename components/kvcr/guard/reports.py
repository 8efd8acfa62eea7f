# SPDX-License-Identifier: Apache-2.0
"""What became of each action of a hint: counted, logged once, and told to whoever subscribed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvcr.guard.active import Ended
from kvcr.guard.meters import Meters
from kvcr.protocol.engine import BlockStatus
from kvcr.protocol.events import ACTIONS, FETCH, ActionCode, ActionResult

log = logging.getLogger(__name__)

KNOWN = ACTIONS | {FETCH}
MAX_DETAIL = 300
MAX_UNTOLD = 256
"""Results kept for a cluster thread that is still starting while an engine is served already."""


class Outcome(NamedTuple):
    """How one action went; the fields are those of :class:`ActionResult`."""

    code: ActionCode
    blocks: int = 0
    byte_count: int = 0
    detail: str = ""


End = Callable[[Outcome], None]
"""Called once, by whoever carries out an action, when it has ended."""


class Reports:
    """Belongs to the authority thread."""

    def __init__(self, guard: str, incarnation: int, meters: Meters) -> None:
        self._guard = guard
        self._incarnation = incarnation
        self._meters = meters
        self._subscribers: list[Callable[[ActionResult], None]] = []
        self._untold: deque[ActionResult] = deque(maxlen=MAX_UNTOLD)

    def subscribe(self, callback: Callable[[ActionResult], None]) -> None:
        """Call back with every result from now on; the first one also with those nobody heard."""
        self._subscribers.append(callback)
        while self._untold:
            callback(self._untold.popleft())

    def ended(
        self,
        plan_id: str,
        action_id: str,
        action_type: str,
        code: ActionCode,
        *,
        asked_by: str,
        blocks: int = 0,
        byte_count: int = 0,
        seconds: float = 0.0,
        detail: str = "",
    ) -> ActionResult:
        """An action ended now. ``asked_by``: the router or the request, for the log."""
        result = ActionResult(
            guard=self._guard,
            incarnation=self._incarnation,
            plan_id=plan_id,
            action_id=action_id,
            action_type=action_type,
            code=code.value,
            blocks=blocks,
            byte_count=byte_count,
            seconds=seconds,
            detail=detail[:MAX_DETAIL],
        )
        # Not every type that somebody makes up becomes a time series.
        self._meters.actions.inc(action=action_type if action_type in KNOWN else "unknown", code=result.code)
        log.info(
            "action %s %s of plan %s, asked by %s: %s, %d blocks, %.3f s%s",
            action_type[:80],
            action_id[:80],
            plan_id[:80],
            asked_by[:80],
            result.code,
            blocks,
            seconds,
            f" ({result.detail})" if detail else "",
        )
        self.tell(result)
        return result

    def tell(self, result: ActionResult) -> None:
        """Tell the subscribers, of a result that was counted before too."""
        if not self._subscribers:
            self._untold.append(result)
        for subscriber in list(self._subscribers):
            try:
                subscriber(result)
            except Exception:
                # The action is done, whoever cannot hear of it.
                log.exception("a subscriber to results failed and is dropped")
                self._subscribers.remove(subscriber)


def code_of_copy(ended: Ended) -> ActionCode:
    """How the copy of a fetch went."""
    arrived = int((ended.statuses == BlockStatus.OK).sum())
    if arrived == len(ended.statuses):
        return ActionCode.DONE
    if ended.cancelled:
        return ActionCode.CANCELLED
    if arrived:
        return ActionCode.PARTIAL
    return code_of_failures(set(np.unique(ended.statuses).tolist()))


def code_of_failures(statuses: set[int]) -> ActionCode:
    """Of blocks none of which arrived."""
    if BlockStatus.TOO_SLOW in statuses:
        return ActionCode.TOO_SLOW
    return ActionCode.MISS if statuses <= {BlockStatus.MISS} else ActionCode.FAILED
