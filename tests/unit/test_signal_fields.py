# SPDX-License-Identifier: Apache-2.0
"""Each field of a signal, changed alone, changes what is done. The rest of each pair is the same."""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec
from signal_desk import BLOCK, Router, World, key, tokens_of

from router_hints.costs import Settings
from router_hints.planner import Mode

HISTORY = tokens_of(4000)


async def outcome(
    kind: str,
    session: str = "main",
    *,
    busy: int = 40_000,
    world: World | None = None,
    tenant: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """What one signal does where g1 has the session ``main`` and is busy, and g2 is idle."""
    world = world or World(2)
    router = Router(world)
    for name in ("main", "other"):
        await router.turn(name, HISTORY if name == "main" else tokens_of(4000, 5), pin="g1", tenant=tenant)
        world.store("g1", HISTORY if name == "main" else tokens_of(4000, 5), salt=tenant)
    router.busy("g1", busy)
    router.sent()
    reply = await router.signal(kind, session, tenant=tenant, **fields)
    acts = router.sent()
    info = router.handler.describe(tenant, session)
    return {
        "decision": reply.decision,
        "reason": reply.reason,
        "result": reply.result,
        "guard": reply.guard,
        "blocks": reply.blocks,
        "acts": [(guard, _plain(payload)) for guard, payload in acts],
        "announced": [turn.signal_id for turn in info.announced] if info else [],
        "load": sum(turn.prefill_tokens for turn in router.ledger.loads(time.monotonic()).announced),
    }


def _plain(payload: dict[str, Any]) -> dict[str, Any]:
    """Without what is new in every plan."""
    return {name: value for name, value in payload.items() if name not in ("plan_id", "pin_id")}


async def test_kind() -> None:
    turn = await outcome("next_turn")
    woken = await outcome("wake_up")
    ended = await outcome("session_end")
    assert (turn["decision"], woken["decision"], ended["decision"]) == ("prefetch", "move", "demote")


async def test_session() -> None:
    assert (await outcome("next_turn", "main"))["acts"] != (await outcome("next_turn", "other"))["acts"]
    assert (await outcome("next_turn", "nobody"))["acts"] == []


async def test_parent() -> None:
    known = await outcome("fork", "child", parent="main")
    unknown = await outcome("fork", "child", parent="nobody")
    assert (known["decision"], unknown["decision"]) == ("prefetch", "none")
    # A wake-up of a session whose parent goes on is copied, never moved.
    assert (await outcome("wake_up", parent="root"))["decision"] == "prefetch"
    assert (await outcome("wake_up"))["decision"] == "move"


async def test_signal_id() -> None:
    world = World(2)
    router = Router(world)
    await router.turn("main", HISTORY, pin="g1")
    world.store("g1", HISTORY)
    router.busy("g1")
    for signal_id, sent in (("a", 1), ("a", 0), ("b", 0)):
        # The second is the first again. The third is another one, and joins what is on its way.
        await router.signal("next_turn", "main", starts_in_s=1.0, signal_id=signal_id)
        assert len(router.sent("kv.prefetch")) == sent
    assert len(router.desk.forward.of(key("main"))) == 2


async def test_isl() -> None:
    part = await outcome("fork", "child", parent="main", isl=1601)
    whole = await outcome("fork", "child", parent="main", isl=4100)
    assert (part["blocks"], whole["blocks"]) == (100, 250)
    assert (await outcome("next_turn", isl=9000))["load"] > (await outcome("next_turn", isl=4100))["load"]


async def test_osl() -> None:
    """A long answer does not fit beside what the idle worker already keeps in engine memory."""
    for osl, guard in ((10, "g2"), (2000, "g1")):
        router = Router(World(2))
        await router.turn("main", HISTORY, pin="g1")
        router.world.store("g1", HISTORY)
        for card in router.workers.cards():
            router.workers.put_card(msgspec.structs.replace(card, kv_blocks=600))
        router.busy("g1", 1200)
        router.ledger.book("keeps", router.world.ranks["g2"], prefill_tokens=0, blocks=300, copies={})
        assert (await router.signal("next_turn", "main", osl=osl)).guard == guard


async def test_starts_in_s() -> None:
    soon = await outcome("next_turn", starts_in_s=2.0)
    late = await outcome("next_turn", starts_in_s=300.0)
    assert (soon["result"], late["result"]) == ("pending", "scheduled")


async def test_runs_s() -> None:
    """A short visit waits where its prefix is; for a long one, the copy away from a busy worker pays off."""
    costs = Settings(prefill_tokens_per_s=2000, host_bytes_per_s=8.2e6, domain_bytes_per_s=8.2e6)
    for runs_s, guard in ((1.0, "g1"), (900.0, "g2")):
        made = await outcome("fork", "child", parent="main", runs_s=runs_s, busy=750, world=World(2, costs))
        assert made["guard"] == guard


async def test_next_in_s() -> None:
    """None: nothing of the turn is kept. A number: it comes back, and is."""
    for next_in_s, no_retain in ((None, True), (5.0, False)):
        router = Router(World(2))
        signal = {"kind": "next_turn", "next_in_s": next_in_s}
        _, placed = await router.turn("main", HISTORY, signal=signal)
        assert placed.plan.no_retain is no_retain
        assert (placed.plan.mode is Mode.NO_RETAIN) is no_retain


async def test_keeps() -> None:
    for keeps in (160, 800):
        ((_, payload),) = (await outcome("compaction", keeps=keeps))["acts"]
        assert base64.b64decode(payload["keys"]) == World.keys(HISTORY)[keeps // BLOCK * 16 :]


async def test_isl_after() -> None:
    for after in (160, 800):
        ((_, payload),) = (await outcome("compaction", isl_after=after))["acts"]
        assert base64.b64decode(payload["keys"]) == World.keys(HISTORY)[after // BLOCK * 16 :]


async def test_isl_before() -> None:
    """Says whether the context that the router knows is the one before or the one after."""
    before = await outcome("compaction", isl_before=4000, isl_after=400)
    after = await outcome("compaction", isl_before=90_000, isl_after=4000)
    assert len(before["acts"]) == 1
    assert after["acts"] == []


async def test_idle_s() -> None:
    assert (await outcome("next_turn", idle_s=5.0))["decision"] == "prefetch"
    assert (await outcome("next_turn", idle_s=2400.0))["decision"] == "move"


async def test_deadline_s() -> None:
    """A copy that would be late is not begun, and one that is takes no longer than that."""
    slow = Settings(prefill_tokens_per_s=2000, host_bytes_per_s=4e6, domain_bytes_per_s=4e6)
    world = lambda: World(2, slow)  # noqa: E731
    hasty = await outcome("next_turn", starts_in_s=5.0, deadline_s=0.2, world=world())
    patient = await outcome("next_turn", starts_in_s=5.0, deadline_s=9.0, world=world())
    assert (hasty["decision"], hasty["reason"]) == ("none", "too_late")
    ((_, payload),) = patient["acts"]
    assert 8000 < payload["deadline_ms"] <= 9000


async def test_ttl_s() -> None:
    for ttl_s in (5.0, 50.0):
        ((_, payload),) = (await outcome("pin", ttl_s=ttl_s))["acts"]
        assert payload["ttl_s"] == ttl_s


async def test_a_tenants_signal_reaches_its_own_session() -> None:
    assert (await outcome("next_turn", tenant="one"))["decision"] == "prefetch"
