# SPDX-License-Identifier: Apache-2.0
"""Questions to a peer that wait for an answer, each until its own time is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from kvcr.guard.loop import Loop, Timer
from kvcr.protocol.peer import PeerRefused, ToClient

LATE_S = 0.01
"""Between the end of a wait for an answer and the verdict."""

Done = Callable[[ToClient | None, str], None]
"""``done(answer, "")``, or ``done(None, reason)``."""


class _Waiting(NamedTuple):
    done: Done
    timer: Timer


class Questions:
    """Belongs to the authority thread. Each ``done`` is called once."""

    def __init__(self, loop: Loop, late: Callable[[str], None]) -> None:
        """``late(reason)``: a question had no answer in time."""
        self._loop = loop
        self._late = late
        self._waiting: dict[int, _Waiting] = {}
        self._ops = itertools.count(1)

    def op(self) -> int:
        """Number of the next question, by which its answer is known."""
        return next(self._ops)

    def wait(self, op: int, timeout_s: float, done: Done) -> None:
        """For the answer to a question that matters to the whole link: ``late`` when it does not come."""
        # A peer that does not answer may be paused with our messages queued: the link starts afresh.
        reason = f"no answer within {timeout_s:.2f} s"

        def over() -> None:
            # The answer may be there already, unread, if this thread had much to do: it is read before then.
            waiting = self._waiting.get(op)
            if waiting is not None:
                timer = self._loop.later(LATE_S, lambda: self._late(reason))
                self._waiting[op] = waiting._replace(timer=timer)

        self._waiting[op] = _Waiting(done, self._loop.later(timeout_s, over))

    def try_for(self, op: int, timeout_s: float, done: Done) -> None:
        """For an answer that one can do without."""

        def over() -> None:
            self._waiting.pop(op, None)
            done(None, "no answer")

        self._waiting[op] = _Waiting(done, self._loop.later(timeout_s, over))

    def answered(self, reply: ToClient) -> None:
        """A message came; whatever nobody waits for any more is dropped."""
        waiting = self._waiting.pop(reply.op, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        if isinstance(reply, PeerRefused):
            waiting.done(None, f"refused, {reply.code}: {reply.reason}")
        else:
            waiting.done(reply, "")

    def take_all(self) -> list[Done]:
        """Forget all that wait, and return whom to tell."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.timer.cancel()
        return [each.done for each in waiting.values()]
