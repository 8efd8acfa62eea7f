# SPDX-License-Identifier: Apache-2.0
"""The workers a request may go to: alive by discovery, not marked down, and of our block size.

Pure: who is alive comes from the Dynamo client, cards from etcd, the time is an argument. Without a card
(etcd is away, or it is not there yet) a worker is still routed to, as one of whom nothing is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from router_hints.cards import WorkerCard
from router_hints.costs import Rank

FIRST_DOWN_S = 1.0
LONGEST_DOWN_S = 30.0
"""A worker that cannot be reached is tried again after 1, 2, 4 ... 30 s; a restarted one has a new id
and does not wait."""
DEAD_S = 120.0
"""A worker that is proven dead is not tried at all. By then its lease is gone, and its id with it."""


@dataclass
class _Down:
    until_s: float
    step_s: float


@dataclass
class WorkerTable:
    """State of all workers of one endpoint. One thread."""

    block_size: int
    draining: Collection[int] = ()
    """Workers that get no new request, by order of the operator."""
    _cards: dict[int, WorkerCard] = field(default_factory=dict)
    _down: dict[int, _Down] = field(default_factory=dict)
    _dead_until_s: dict[int, float] = field(default_factory=dict)

    def put_card(self, card: WorkerCard) -> str:
        """Take a new or changed card. Returns why the worker is refused, or the empty string."""
        self._cards[card.worker_id] = card
        return self._refusal(card)

    def drop_card(self, worker_id: int) -> None:
        self._cards.pop(worker_id, None)

    def card(self, worker_id: int) -> WorkerCard:
        return self._cards.get(worker_id) or WorkerCard(worker_id)

    def cards(self) -> list[WorkerCard]:
        return list(self._cards.values())

    def rank_at(self, endpoint: str) -> Rank | None:
        """The rank whose card names this control endpoint."""
        for card in self._cards.values():
            for rank, control in card.control_endpoints.items():
                if control == endpoint:
                    return card.worker_id, rank
        return None

    def mark_down(self, worker_id: int, now_s: float) -> None:
        """A dispatch to it failed: no request for a while, longer each time."""
        known = self._down.get(worker_id)
        step_s = FIRST_DOWN_S if known is None else min(LONGEST_DOWN_S, known.step_s * 2)
        self._down[worker_id] = _Down(now_s + step_s, step_s)

    def mark_dead(self, worker_id: int, now_s: float) -> None:
        """Its engine is proven dead: no request, not even when nobody else is left."""
        self._dead_until_s[worker_id] = now_s + DEAD_S

    def expire(self, now_s: float) -> None:
        """Drop marks of death that are over. Call it every few seconds."""
        self._dead_until_s = {w: until_s for w, until_s in self._dead_until_s.items() if until_s > now_s}

    def is_dead(self, worker_id: int) -> bool:
        return worker_id in self._dead_until_s

    def mark_up(self, worker_id: int) -> None:
        """It gave an output."""
        self._down.pop(worker_id, None)

    def forget(self, worker_id: int) -> None:
        """Discovery says it is gone."""
        self._cards.pop(worker_id, None)
        self._down.pop(worker_id, None)

    def ready(self, alive: Iterable[int], now_s: float, without: Iterable[int] = ()) -> list[WorkerCard]:
        """Cards of the workers that may get a request at ``now_s``, in order of their ids."""
        excluded = set(without)
        return [
            card
            for card in map(self.card, sorted(alive))
            if card.worker_id not in excluded
            and card.worker_id not in self._dead_until_s
            and card.worker_id not in self.draining
            and not self._refusal(card)
            and (card.worker_id not in self._down or self._down[card.worker_id].until_s <= now_s)
        ]

    def is_down(self, worker_id: int, now_s: float) -> bool:
        known = self._down.get(worker_id)
        return known is not None and known.until_s > now_s

    def _refusal(self, card: WorkerCard) -> str:
        if card.block_size and card.block_size != self.block_size:
            return (
                f"worker {card.worker_id:x} ({card.model_name}) has KV blocks of {card.block_size} tokens, "
                f"this router and its KvRouter use {self.block_size}: it gets no requests. Start the router "
                f"with --block-size {card.block_size}, or the worker with --block-size {self.block_size}"
            )
        return ""
