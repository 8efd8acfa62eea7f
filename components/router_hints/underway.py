# SPDX-License-Identifier: Apache-2.0
"""Prompts that are being computed. A request that queues behind one of them on the same worker finds its
blocks in engine memory when its turn comes, which no event says yet. Pure. One thread."""

from __future__ import annotations

from kvcr.keys import KEY_BYTES
from router_hints.chains import common_blocks
from router_hints.costs import Rank

KEPT = 4
"""Prompts remembered of one rank that begin with the same block: many that do are alike further on, too."""


class Underway:
    """By the plan that sent them."""

    def __init__(self) -> None:
        self._heads: dict[bytes, dict[Rank, dict[str, bytes]]] = {}
        """keys by first key, rank and plan, oldest first"""
        self._places: dict[str, tuple[bytes, Rank]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def begin(self, plan_id: str, rank: Rank, keys: bytes) -> None:
        """A prompt with these keys, 16 bytes each, is on its way to this rank, which keeps its blocks."""
        if not keys:
            return
        head = keys[:KEY_BYTES]
        plans = self._heads.setdefault(head, {}).setdefault(rank, {})
        plans[plan_id] = keys
        self._places[plan_id] = head, rank
        if len(plans) > KEPT:
            self.end(next(iter(plans)))

    def end(self, plan_id: str) -> None:
        """It gave its first output, or never will. Again: nothing."""
        head, rank = self._places.pop(plan_id, (b"", None))
        if rank is None:
            return
        ranks = self._heads[head]
        del ranks[rank][plan_id]
        if not ranks[rank]:
            del ranks[rank]
            if not ranks:
                del self._heads[head]

    def leading(self, keys: bytes) -> dict[Rank, int]:
        """Leading blocks of a prompt that each rank will have, once it has computed what it was sent."""
        found = {}
        for rank, plans in self._heads.get(keys[:KEY_BYTES], {}).items():
            most = 0
            for theirs in plans.values():
                at = slice(most * KEY_BYTES, (most + 1) * KEY_BYTES)
                # A key names all tokens before it: who differs right after the best so far is no better.
                if theirs[at] and theirs[at] == keys[at]:
                    most = common_blocks(keys, theirs, most)
            found[rank] = most
        return found
