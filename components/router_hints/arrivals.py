# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way to guards: a request that is planned there meanwhile joins the transfer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvcr.keys import KEY_BYTES
from router_hints.chains import common_blocks
from router_hints.turns import Arriving

OVERDUE_S = 10.0
"""A transfer that is this late has failed, or is in the index already."""


@dataclass(frozen=True)
class _Transfer:
    guard: str
    first: int
    keys: bytes
    """of the whole chain up to the last block that is moved"""
    ready_s: float


class Arrivals:
    """Transfers by the plan that asked for them. One thread."""

    def __init__(self) -> None:
        self._transfers: dict[str, _Transfer] = {}
        self._by_head: dict[bytes, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def begin(self, plan_id: str, guard: str, first: int, keys: bytes, ready_s: float) -> None:
        """Blocks from position ``first`` to the end of ``keys`` were asked for; they are expected then.

        ``keys`` begins with the first block of the chain.
        """
        self.end(plan_id)
        if len(keys) > first * KEY_BYTES:
            self._transfers[plan_id] = _Transfer(guard, first, keys, ready_s)
            self._by_head.setdefault(keys[:KEY_BYTES], {})[plan_id] = None

    def end(self, plan_id: str) -> None:
        """They arrived, or will not."""
        transfer = self._transfers.pop(plan_id, None)
        if transfer is not None:
            head = transfer.keys[:KEY_BYTES]
            plans = self._by_head[head]
            del plans[plan_id]
            if not plans:
                del self._by_head[head]

    def forget_guard(self, guard: str) -> None:
        for plan_id in [p for p, transfer in self._transfers.items() if transfer.guard == guard]:
            self.end(plan_id)

    def expire(self, now_s: float) -> None:
        for plan_id in [p for p, transfer in self._transfers.items() if transfer.ready_s + OVERDUE_S < now_s]:
            self.end(plan_id)

    def of(self, keys: bytes | bytearray, now_s: float) -> tuple[Arriving, ...]:
        """What is on its way of the chain with these keys."""
        found = []
        for plan_id in self._by_head.get(bytes(keys[:KEY_BYTES]), ()):
            transfer = self._transfers[plan_id]
            count = common_blocks(keys, transfer.keys) - transfer.first
            if count > 0 and transfer.ready_s + OVERDUE_S >= now_s:
                found.append(
                    Arriving(
                        guard=transfer.guard,
                        first=transfer.first,
                        count=count,
                        ready_in_s=max(0.0, transfer.ready_s - now_s),
                    )
                )
        return tuple(found)
