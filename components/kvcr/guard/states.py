# SPDX-License-Identifier: Apache-2.0
"""The guard's changes of state, as they are told to whoever subscribed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvcr.guard.view import GuardState
from kvcr.protocol.events import StateChange

log = logging.getLogger(__name__)


class States:
    """Belongs to the authority thread."""

    def __init__(self, name: str, incarnation: int) -> None:
        self._name = name
        self._incarnation = incarnation
        self._subscribers: list[Callable[[StateChange], None]] = []
        self._changed_s = time.monotonic()
        self.last = self._change(0, GuardState.EMPTY, GuardState.EMPTY, 0.0)
        """A new object for each change."""

    def subscribe(self, callback: Callable[[StateChange], None]) -> None:
        """Call back with the last change, and with every one from now on."""
        self._subscribers.append(callback)
        callback(self.last)

    def changed(self, previous: GuardState, state: GuardState, epoch: int) -> StateChange:
        """It is in effect: tell everybody."""
        now_s = time.monotonic()
        self.last = self._change(epoch, previous, state, now_s - self._changed_s)
        self._changed_s = now_s
        for callback in list(self._subscribers):
            try:
                callback(self.last)
            except Exception:
                # The state has changed, whoever cannot hear of it.
                log.exception("a subscriber to the state failed and is dropped")
                self._subscribers.remove(callback)
        return self.last

    @property
    def age_s(self) -> float:
        """Since the last change."""
        return time.monotonic() - self._changed_s

    def _change(self, epoch: int, previous: GuardState, state: GuardState, seconds: float) -> StateChange:
        return StateChange(
            self._name,
            self._incarnation,
            epoch=epoch,
            previous=previous,
            state=state,
            worker_id=0,
            unix_s=time.time(),
            seconds=seconds,
        )
