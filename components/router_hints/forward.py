# SPDX-License-Identifier: Apache-2.0
"""The forward plan: turns that were announced, where each will run, and what is moved there ahead of it.

An announced turn is part of the load of the worker it is planned on until its request comes, or until it is
withdrawn, or is so late that it will not come. Pure: the time is an argument. One thread.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcr.protocol.signals import Signal
from router_hints.costs import Rank
from router_hints.sessions import SessionKey

MAX_TURNS = 10_000
LATE_S = 60.0
"""A turn that is this late does not come."""


class State(enum.StrEnum):
    SCHEDULED = "scheduled"
    """It has its worker, and is planned again shortly before it starts: to move blocks now is too early."""
    NOTED = "noted"
    """It has its worker, and nothing has to be moved."""
    MOVING = "moving"
    """Its blocks are under way."""
    READY = "ready"
    """They are there."""
    FAILED = "failed"
    """They did not arrive; the request will be planned without them."""


class TurnId(NamedTuple):
    tenant: str
    signal_id: str


def load_id(turn_id: TurnId) -> str:
    """Name of an announced turn in the ledger."""
    return f"{turn_id.tenant}/{turn_id.signal_id}"


@dataclass
class Announced:
    """One announced turn."""

    id: TurnId
    key: SessionKey
    signal: Signal
    received_s: float
    plan_id: str
    rank: Rank | None = None
    guard: str = ""
    state: State = State.NOTED
    act_at_s: float | None = None
    """When to plan it again; None for never."""
    prefill_tokens: int = 0
    """Tokens its worker will have to compute."""
    router: str = ""
    """Replica that plans it; empty for this one."""
    pinned: tuple[str, ...] = ()
    """Guards that were asked to pin its blocks."""

    @property
    def starts_s(self) -> float:
        return self.received_s + (self.signal.starts_in_s or 0.0)

    @property
    def ends_s(self) -> float:
        """From then on nobody waits for it."""
        deadline_s = self.signal.deadline_s
        late = self.starts_s + LATE_S
        return late if deadline_s is None else max(self.starts_s, min(late, self.received_s + deadline_s))


@dataclass
class ForwardPlan:
    """All announced turns, in the order in which they were announced."""

    max_turns: int = MAX_TURNS
    _turns: OrderedDict[TurnId, Announced] = field(default_factory=OrderedDict)
    _by_session: dict[SessionKey, list[TurnId]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Announced]:
        return iter(list(self._turns.values()))

    def put(self, turn: Announced) -> Announced | None:
        """Add a turn; returns the oldest one when it had to go for it."""
        self.take(turn.id)
        self._turns[turn.id] = turn
        self._by_session.setdefault(turn.key, []).append(turn.id)
        if len(self._turns) <= self.max_turns:
            return None
        return self.take(next(iter(self._turns)))

    def get(self, turn_id: TurnId) -> Announced | None:
        return self._turns.get(turn_id)

    def take(self, turn_id: TurnId) -> Announced | None:
        """Remove a turn: it came, or it will not."""
        turn = self._turns.pop(turn_id, None)
        if turn is not None:
            ids = self._by_session[turn.key]
            ids.remove(turn_id)
            if not ids:
                del self._by_session[turn.key]
        return turn

    def of(self, key: SessionKey) -> list[Announced]:
        """Turns of one session, the next one first."""
        turns = [self._turns[turn_id] for turn_id in self._by_session.get(key, ())]
        return sorted(turns, key=lambda turn: turn.starts_s)

    def due(self, now_s: float) -> list[Announced]:
        """Turns that this replica has to plan again now."""
        return [
            t for t in self._turns.values() if not t.router and t.act_at_s is not None and t.act_at_s <= now_s
        ]

    def late(self, now_s: float) -> list[Announced]:
        """Turns that nobody waits for any more."""
        return [t for t in self._turns.values() if t.ends_s < now_s]
