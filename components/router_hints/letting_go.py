# SPDX-License-Identifier: Apache-2.0
"""What a session, or one of its copies, leaves behind, as actions for the guards that have it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from kvcr.protocol.events import INVALIDATE, DemotePayload, InvalidatePayload
from router_hints.actions import Order
from router_hints.chains import Chain
from router_hints.desk import Desk
from router_hints.placement import Placed
from router_hints.sessions import Piece, Session

ACT_WITHIN_S = 30.0
"""A guard that reads an action later than this leaves it, unless the signal has a deadline."""
_FREE_TRIES = 20
_FREE_EVERY_S = 0.5


async def let_go(desk: Desk, session: Session, pieces: Iterable[Piece], plan_id: str, kind: str) -> int:
    """Tell every guard that may have any of these blocks, or is beside an engine that has; returns how
    many guards that were. ``kind``: ``kv.invalidate`` or ``kv.demote``."""
    orders = []
    for piece in pieces:
        holders = set(desk.index.lookup(piece.keys).guards) | session.guards
        for guard in desk.guards.all():
            if guard.key_space(session.key.tenant) != piece.space:
                continue
            hashes = _in_g1(desk, guard.name, piece.names) if kind == INVALIDATE else b""
            if guard.name not in holders and not hashes:
                continue
            payload: msgspec.Struct = DemotePayload(plan_id=plan_id, keys=piece.keys)
            if kind == INVALIDATE:
                payload = InvalidatePayload(plan_id=plan_id, keys=piece.keys, engine_hashes=hashes)
            orders.append(Order(guard.name, kind, payload))
    if orders:
        await desk.actor.act(plan_id, orders, expires_in_s=ACT_WITHIN_S)
    return len({order.guard for order in orders})


async def free_sources(desk: Desk, placed: Placed, chain: Chain) -> None:
    """Drop what a request's copy was to move at its sources, once the target has it.

    For a plan that moves only a part: the hint on a request has one mode for all of its blocks, so it
    asked for a copy. What the target never got stays where it is.
    """
    plan_id, target = placed.plan.plan_id, placed.target.name if placed.target is not None else ""
    for run in placed.plan.sources:
        keys = chain.cut(run.first, run.first + run.count)
        for _ in range(_FREE_TRIES if run.frees else 0):
            row = desk.index.lookup(keys).row(target)
            if row is not None and row.all():
                hashes = _in_g1(desk, run.guard, chain.cut_names(run.first, run.first + run.count))
                payload = InvalidatePayload(
                    plan_id=plan_id, keys=keys, descendants=False, engine_hashes=hashes
                )
                await desk.actor.act(
                    plan_id, [Order(run.guard, INVALIDATE, payload)], expires_in_s=ACT_WITHIN_S
                )
                break
            await asyncio.sleep(_FREE_EVERY_S)


def _in_g1(desk: Desk, guard: str, names: bytes) -> bytes:
    """Engine hashes of those of these blocks that the engine beside this guard has in its memory."""
    hashes = desk.g1.engine_hashes(desk.engine_beside(guard), names)
    known: bytes = hashes[hashes != 0].astype("<u8").tobytes()
    return known
