# SPDX-License-Identifier: Apache-2.0
"""Sessions and plans as they are shown to whoever asks."""

from __future__ import annotations

from kvcr.keys import KEY_BYTES
from kvcr.protocol.signals import AnnouncedTurn, BlockPlace, LastPlan, SessionInfo
from router_hints.chains import Chain
from router_hints.costs import Rank
from router_hints.desk import Desk
from router_hints.plans import Mode, Plan
from router_hints.sessions import SessionKey


def last_plan(made: Plan, kind: str, guard: str) -> LastPlan:
    """A plan in a few words."""
    return LastPlan(
        plan_id=made.plan_id,
        signal=kind,
        decision=decision_of(made),
        reason=made.reason.value,
        worker_id=made.rank[0],
        guard=guard,
        blocks=sum(run.count for run in made.sources),
        bytes=made.moved_bytes,
        sources=sorted({run.guard for run in made.sources}),
        expected_s=round(made.chosen.ttft_s, 6),
    )


def decision_of(made: Plan) -> str:
    if made.mode is Mode.PREFETCH and any(run.frees for run in made.sources):
        return Mode.MOVE.value
    return made.mode.value


def describe(desk: Desk, tenant: str, name: str, now_s: float) -> SessionInfo | None:
    """Where a session's blocks are, its last plan and the reason. None: unknown to this tenant."""
    session = desk.sessions.get(SessionKey(tenant, name))
    if session is None:
        return None
    chain = session.chain
    return SessionInfo(
        session=name,
        parent=session.parent,
        home=session.home,
        worker_id=session.rank[0] if session.rank else 0,
        tokens=chain.tokens if chain is not None else 0,
        blocks=chain.blocks if chain is not None else 0,
        shared_blocks=desk.sessions.shared_blocks(session),
        children=sorted(child.key.session for child in desk.sessions.children(session)),
        turns=session.turns,
        running=session.running,
        idle_s=round(max(0.0, now_s - session.touched_s), 3),
        places=_places(desk, chain) if chain is not None else [],
        announced=[
            AnnouncedTurn(
                signal_id=turn.signal.signal_id,
                kind=turn.signal.kind.value,
                starts_in_s=round(max(0.0, turn.starts_s - now_s), 3),
                worker_id=turn.rank[0] if turn.rank else 0,
                guard=turn.guard,
                state=turn.state.value,
                plan_id=turn.plan_id,
            )
            for turn in desk.forward.of(session.key)
        ],
        last_plan=session.plan,
    )


def keys_of(desk: Desk, tenant: str, name: str) -> list[str] | None:
    """Keys of a session's blocks in order, hex. None: unknown to this tenant."""
    session = desk.sessions.get(SessionKey(tenant, name))
    if session is None:
        return None
    blob = bytes(session.chain.keys) if session.chain is not None else b""
    return [blob[first : first + KEY_BYTES].hex() for first in range(0, len(blob), KEY_BYTES)]


def _places(desk: Desk, chain: Chain) -> list[BlockPlace]:
    view = desk.index.lookup(bytes(chain.keys))
    places = [
        _place(guard, desk.engine_beside(guard), "G2", view.held[row].tolist())
        for row, guard in enumerate(view.guards)
    ]
    for rank, held in desk.g1.held(chain.cut_names(0)).items():
        places.append(_place(desk.guard_beside(rank), rank, "G1", held))
    return sorted(places, key=lambda place: (place.tier, place.guard, place.worker_id))


def _place(guard: str, rank: Rank | None, tier: str, held: list[bool]) -> BlockPlace:
    return BlockPlace(
        guard=guard,
        tier=tier,
        blocks=sum(held),
        leading_blocks=held.index(False) if False in held else len(held),
        worker_id=rank[0] if rank is not None else 0,
    )
