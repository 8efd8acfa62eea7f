# SPDX-License-Identifier: Apache-2.0
"""From a signal to the actions that guards are sent, with the planner and every table but no process."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from signal_desk import BLOCK, PART, Router, World, key, tokens_of

from kvcr.protocol.events import ActionCode
from router_hints.plans import Mode
from router_hints.turns import Kind

HISTORY = tokens_of(4000)
BLOCKS = len(HISTORY) // BLOCK


def keys_in(payload: dict[str, Any]) -> bytes:
    return base64.b64decode(payload["keys"])


@pytest.fixture
def world() -> World:
    return World(2)


@pytest.fixture
def router(world: World) -> Router:
    return Router(world)


async def used(router: Router, session: str = "main", tokens: list[int] = HISTORY, guard: str = "g1") -> None:
    """A session that ran beside ``guard``, which keeps its blocks."""
    await router.turn(session, tokens, pin=guard)
    router.world.store(guard, tokens)
    router.sent()


# --- ahead of a request ---------------------------------------------------------------------------------


async def test_the_next_turn_is_prefetched_from_a_busy_holder_to_a_worker_with_room(router: Router) -> None:
    await used(router)
    router.busy("g1")
    reply = await router.signal("next_turn", "main", starts_in_s=2.0)
    assert (reply.decision, reply.result, reply.reason) == ("prefetch", "pending", "next_turn")
    assert (reply.guard, reply.worker_id, reply.blocks, reply.bytes) == ("g2", 2, BLOCKS, BLOCKS * PART)
    ((guard, payload),) = router.sent("kv.prefetch")
    assert guard == "g2"
    assert keys_in(payload) == World.keys(HISTORY)
    assert payload["sources"] == [{"endpoint": "tcp://g1:7100", "first": 0, "count": BLOCKS, "guard": "g1"}]
    assert (payload["mode"], payload["first"], payload["plan_id"]) == ("copy", 0, reply.plan_id)
    router.answer(reply.plan_id, blocks=BLOCKS, byte_count=BLOCKS * PART)
    again = router.handler.reply("", reply.signal_id)
    assert again is not None
    assert (again.result, again.blocks, again.bytes) == ("done", BLOCKS, BLOCKS * PART)
    assert router.desk.sessions.get(key("main")).home == "g2"  # type: ignore[union-attr]


async def test_a_request_that_arrives_during_its_prefetch_goes_to_the_target_and_joins(
    router: Router,
) -> None:
    await used(router)
    router.busy("g1", 3000)
    await router.signal("next_turn", "main", starts_in_s=2.0)
    _, placed = await router.turn("main", [*HISTORY, *tokens_of(40, 9)])
    assert placed.target is not None
    assert placed.target.name == "g2"
    assert placed.plan.chosen.joined
    assert placed.plan.moved_bytes == 0
    assert placed.hint is not None, "the engine waits for what is on its way"


async def test_a_withdrawn_turn_is_cancelled_and_no_load_any_more(router: Router) -> None:
    await used(router)
    router.busy("g1")
    reply = await router.signal("next_turn", "main", signal_id="s1", starts_in_s=2.0)
    assert len(router.ledger.loads(0.0).announced) == 1
    withdrawn = await router.handler.withdraw("", "s1", wait_s=0.0)
    assert withdrawn is not None
    assert withdrawn.result == "withdrawn"
    assert [(g, p["plan_id"]) for g, p in router.sent("kv.cancel")] == [("g2", reply.plan_id)]
    assert len(router.ledger.loads(0.0).announced) == 0
    assert await router.handler.withdraw("", "never sent") is None


async def test_a_copy_that_is_too_early_waits_and_is_planned_again(router: Router, world: World) -> None:
    await used(router)
    router.busy("g1")
    reply = await router.signal("next_turn", "main", starts_in_s=120.0)
    assert (reply.result, reply.reason) == ("scheduled", "too_early")
    assert router.sent() == []
    world.now_s += 60.0
    await router.handler.tick()
    assert router.sent() == []
    world.now_s += 50.0
    await router.handler.tick()
    assert [guard for guard, _ in router.sent("kv.prefetch")] == ["g2"]
    assert router.handler.reply("", reply.signal_id).result == "pending"  # type: ignore[union-attr]


async def test_a_turn_that_does_not_come_is_forgotten(router: Router, world: World) -> None:
    await used(router)
    await router.signal("next_turn", "main", starts_in_s=10.0)
    assert len(router.desk.forward) == 1
    world.now_s += 100.0
    await router.handler.tick()
    assert len(router.desk.forward) == 0
    assert router.ledger.loads(0.0).announced == ()


async def test_a_signal_sent_again_is_the_same_signal(router: Router) -> None:
    await used(router)
    router.busy("g1")
    first = await router.signal("next_turn", "main", signal_id="s1", starts_in_s=2.0)
    second = await router.signal("next_turn", "main", signal_id="s1", starts_in_s=2.0)
    assert second.plan_id == first.plan_id
    assert len(router.sent("kv.prefetch")) == 1


async def test_a_failed_prefetch_leaves_the_session_where_it_was(router: Router) -> None:
    await used(router)
    router.busy("g1")
    reply = await router.signal("next_turn", "main", starts_in_s=2.0)
    router.answer(reply.plan_id, ActionCode.FAILED)
    assert router.handler.reply("", reply.signal_id).result == "failed"  # type: ignore[union-attr]
    assert router.desk.sessions.get(key("main")).home == "g1"  # type: ignore[union-attr]
    assert len(router.desk.arrivals) == 0


async def test_a_fork_copies_what_its_parent_has_and_its_request_finds_it(router: Router) -> None:
    await used(router)
    router.busy("g1")
    reply = await router.signal(
        "fork", "child", parent="main", isl=4040, osl=200, starts_in_s=1.0, runs_s=350.0
    )
    assert (reply.decision, reply.guard) == ("prefetch", "g2")
    ((_, payload),) = router.sent("kv.prefetch")
    assert payload["mode"] == "copy", "the parent goes on"
    router.answer(reply.plan_id, blocks=BLOCKS)
    router.world.store("g2", HISTORY)
    _, placed = await router.turn("child", [*HISTORY, *tokens_of(40, 5)], parent="main")
    assert placed.target is not None
    assert placed.target.name == "g2"
    assert router.desk.sessions.get(key("main")).home == "g1"  # type: ignore[union-attr]


async def test_a_session_that_wakes_up_is_moved(router: Router) -> None:
    await used(router)
    router.busy("g1")
    reply = await router.signal("wake_up", "main", idle_s=2400.0, isl=4040, osl=100)
    assert reply.decision == "move"
    ((guard, payload),) = router.sent("kv.prefetch")
    assert (guard, payload["mode"]) == ("g2", "move")
    _, placed = await router.turn("main", [*HISTORY, *tokens_of(40, 5)])
    assert placed.target is not None
    assert placed.target.name == "g2"


async def test_what_another_session_shares_is_copied_where_the_rest_is_moved(router: Router) -> None:
    await used(router)
    await used(router, "other", [*HISTORY[:1600], *tokens_of(800, 3)])
    router.busy("g1")
    await router.signal("wake_up", "main", idle_s=2400.0)
    payloads = {payload["mode"]: payload for _, payload in router.sent("kv.prefetch")}
    assert keys_in(payloads["copy"]) == World.keys(HISTORY[:1600])
    assert keys_in(payloads["move"]) == World.keys(HISTORY)[100 * 16 :]
    assert payloads["move"]["parent"] == World.keys(HISTORY)[99 * 16 : 100 * 16].hex()


async def test_a_wake_up_in_the_header_moves_with_the_request(router: Router) -> None:
    await used(router)
    router.busy("g1")
    signal = {"kind": "wake_up", "idle_s": 2400.0}
    _, placed = await router.turn("main", [*HISTORY, *tokens_of(40, 5)], signal=signal)
    assert placed.plan.mode is Mode.MOVE
    assert placed.hint is not None
    assert placed.hint["actions"][0]["payload"]["mode"] == "move"


async def test_a_request_that_moves_a_part_frees_it_once_the_target_has_it(router: Router) -> None:
    """A hint has one mode for all of its blocks: those that another session shares must not leave."""
    await used(router)
    await used(router, "other", [*HISTORY[:1600], *tokens_of(800, 3)])
    router.busy("g1")
    _, placed = await router.turn("main", HISTORY, signal={"kind": "wake_up", "idle_s": 2400.0})
    assert placed.plan.mode is Mode.MOVE
    assert placed.hint is not None
    assert placed.hint["actions"][0]["payload"]["mode"] == "copy"
    await asyncio.sleep(0.05)
    assert router.sent("kv.invalidate") == [], "the copy has not arrived"
    router.world.store("g2", HISTORY)
    await _background(router)
    ((guard, payload),) = router.sent("kv.invalidate")
    assert (guard, payload["descendants"]) == ("g1", False)
    moved = World.keys(HISTORY)[100 * 16 : 249 * 16]
    assert keys_in(payload) == moved


async def test_a_long_silence_is_a_wake_up_without_any_signal(router: Router, world: World) -> None:
    await used(router)
    router.busy("g1")
    world.now_s += 2400.0
    _, placed = await router.turn("main", [*HISTORY, *tokens_of(40, 5)])
    assert placed.plan.mode is Mode.MOVE


@pytest.mark.parametrize("way", ["header", "before"])
async def test_of_a_one_off_nothing_is_kept(router: Router, way: str) -> None:
    await used(router)
    router.busy("g1")
    signal = {"kind": "one_off", "next_in_s": None}
    if way == "before":
        assert (await router.signal("one_off", "once")).result == "noted"
    _, placed = await router.turn(
        "once", [*HISTORY, *tokens_of(40, 6)], signal=signal if way == "header" else None
    )
    assert placed.plan.no_retain
    assert placed.hint is not None
    assert placed.hint["actions"][0]["payload"]["no_retain"] is True
    assert router.desk.sessions.get(key("once")) is None


async def test_a_one_off_says_so_even_when_nothing_is_fetched(router: Router) -> None:
    _, placed = await router.turn("once", HISTORY, signal={"kind": "one_off"})
    assert placed.plan.sources == ()
    assert placed.hint is not None
    payload = placed.hint["actions"][0]["payload"]
    assert (payload["no_retain"], payload["sources"], payload["last_key"]) == (True, [], "")


async def test_header_and_signal_before_it_are_one_turn(router: Router) -> None:
    await router.signal("next_turn", "main", isl=4040, runs_s=99.0, starts_in_s=3.0)
    visit, _ = await router.turn("main", HISTORY, signal={"kind": "next_turn", "osl": 77, "runs_s": 5.0})
    assert (visit.turn.osl, visit.turn.runs_s, visit.turn.isl) == (77, 5.0, 4040)
    assert visit.turn.starts_in_s == 0.0
    assert len(router.desk.forward) == 0


async def test_a_bad_header_is_counted_and_the_request_goes_on(router: Router) -> None:
    visit, placed = await router.turn("main", HISTORY, signal={"kind": "next_turn", "isl": -1})
    assert (visit.turn.kind, visit.turn.session) == (Kind.TURN, "main")
    assert placed.plan.rank[0] in (1, 2)
    text = router.metrics.render()
    assert 'kvcr_router_signals_refused_total{field="isl",input="header"} 1.0' in text


# --- compaction ------------------------------------------------------------------------------------------


async def test_compaction_invalidates_the_own_chain_after_the_kept_head_on_every_holder(
    router: Router,
) -> None:
    answer = tokens_of(160, 8)
    await router.turn("main", HISTORY, decoded=answer, pin="g1")
    router.world.store("g1", [*HISTORY, *answer])
    router.world.store("g2", HISTORY)
    router.sent()
    reply = await router.signal("compaction", "main", keeps=330, isl_before=4160, isl_after=500)
    assert (reply.decision, reply.result) == ("invalidate", "pending")
    sent = router.sent("kv.invalidate")
    assert sorted(guard for guard, _ in sent) == ["g1", "g2"]
    dead = World.keys([*HISTORY, *answer])[330 // BLOCK * 16 :]
    for _, payload in sent:
        assert keys_in(payload) == dead, "decoded blocks included, kept head spared"
        assert payload["descendants"] is True
    router.answer(reply.plan_id, blocks=240)
    assert router.handler.reply("", reply.signal_id).blocks == 480  # type: ignore[union-attr]
    chain = router.desk.sessions.get(key("main")).chain  # type: ignore[union-attr]
    assert chain is not None
    assert chain.blocks == 20


async def test_what_a_fork_shares_survives_the_compaction(router: Router) -> None:
    await used(router)
    await used(router, "child", [*HISTORY[:2400], *tokens_of(800, 3)], "g2")
    await router.signal("compaction", "main", keeps=160)
    for _, payload in router.sent("kv.invalidate"):
        assert keys_in(payload) == World.keys(HISTORY)[150 * 16 :]


async def test_compaction_stops_copies_under_way(router: Router) -> None:
    await used(router)
    router.busy("g1")
    reply = await router.signal("next_turn", "main", starts_in_s=2.0)
    router.sent()
    await router.signal("compaction", "main", keeps=160)
    assert [(g, p["plan_id"]) for g, p in router.sent("kv.cancel")] == [("g2", reply.plan_id)]
    assert sorted(guard for guard, _ in router.sent("kv.invalidate")) == ["g1", "g2"]


async def test_compaction_told_with_the_compacted_request_kills_what_it_left(router: Router) -> None:
    await used(router)
    compacted = [*HISTORY[:800], *tokens_of(300, 4)]
    await router.turn("main", compacted, signal={"kind": "compaction", "isl_before": 4000})
    await _background(router)
    ((guard, payload),) = router.sent("kv.invalidate")
    assert guard == "g1"
    assert keys_in(payload) == World.keys(HISTORY)[50 * 16 :]


async def test_a_compaction_signal_that_is_late_does_not_kill_the_new_context(router: Router) -> None:
    await used(router)
    await used(router, tokens=[*HISTORY[:800], *tokens_of(300, 4)])
    await router.signal("compaction", "main", keeps=160, isl_before=4000, isl_after=1100)
    ((_, payload),) = router.sent("kv.invalidate")
    assert keys_in(payload) == World.keys(HISTORY)[50 * 16 :]


async def test_a_compaction_that_says_nothing_of_what_is_kept_kills_nothing(router: Router) -> None:
    await used(router)
    reply = await router.signal("compaction", "main")
    assert (reply.decision, reply.result) == ("none", "noted")
    assert "keeps" in reply.reason
    assert router.sent() == []


# --- engine memory ---------------------------------------------------------------------------------------


def hashes_in(payload: dict[str, Any]) -> list[int]:
    return np.frombuffer(base64.b64decode(payload["engine_hashes"]), "<u8").tolist()


@pytest.mark.parametrize("salt", ["", "tenant"])
async def test_a_compaction_names_what_is_only_in_engine_memory(router: Router, salt: str) -> None:
    await router.turn("main", HISTORY, tenant=salt, pin="g1")
    hashes = router.in_g1("g2", HISTORY, salt)
    await router.signal("compaction", "main", tenant=salt, keeps=160)
    sent = dict(router.sent("kv.invalidate"))
    assert hashes_in(sent["g2"]) == hashes[10:], "no pool has them, and it never ran there"
    assert hashes_in(sent["g1"]) == [], "it may have them: it ran there"


async def test_what_a_session_left_behind_is_dropped_from_engine_memory_too(router: Router) -> None:
    await used(router)
    hashes = router.in_g1("g1", HISTORY)
    await router.turn("main", [*HISTORY[:800], *tokens_of(300, 4)], signal={"kind": "compaction"})
    await _background(router)
    ((_, payload),) = router.sent("kv.invalidate")
    assert hashes_in(payload) == hashes[50:]


async def test_a_prefetch_names_the_hashes_its_target_knows(router: Router) -> None:
    await used(router)
    router.busy("g1")
    hashes = router.in_g1("g2", HISTORY[: 4 * BLOCK])
    await router.signal("next_turn", "main", starts_in_s=2.0)
    ((guard, payload),) = router.sent("kv.prefetch")
    assert (guard, payload["first"]) == ("g2", 4), "what is in its engine's memory is not copied"
    assert hashes_in(payload) == [0] * (BLOCKS - 4), "and the rest it cannot know"
    assert len(hashes) == 4


async def test_an_announced_turn_stays_where_engine_memory_has_it(router: Router) -> None:
    await router.turn("main", HISTORY, pin="g2")
    router.in_g1("g2", HISTORY)
    reply = await router.signal("next_turn", "main", starts_in_s=2.0)
    assert (reply.worker_id, reply.reason) == (2, "resident"), "nobody's pool has it"


async def test_the_places_of_a_session_name_the_tier(router: Router) -> None:
    await used(router)
    router.in_g1("g2", HISTORY[: 7 * BLOCK])
    info = router.handler.describe("", "main")
    assert info is not None
    assert [(p.tier, p.guard, p.worker_id, p.blocks, p.leading_blocks) for p in info.places] == [
        ("G1", "g2", 2, 7, 7),
        ("G2", "g1", 1, BLOCKS, BLOCKS),
    ]


# --- the end ---------------------------------------------------------------------------------------------


async def test_a_sub_agent_that_is_done_leaves_its_own_blocks_first_to_go(router: Router) -> None:
    await used(router)
    child = [*HISTORY, *tokens_of(800, 3)]
    await used(router, "child", child, "g2")
    reply = await router.signal("sub_agent_done", "child")
    assert reply.decision == "demote"
    ((guard, payload),) = router.sent("kv.demote")
    assert guard == "g2"
    assert keys_in(payload) == World.keys(child)[BLOCKS * 16 :], "the parent's prefix stays"
    assert router.desk.sessions.get(key("child")) is None
    assert router.desk.sessions.get(key("main")) is not None


@pytest.mark.parametrize("way", ["signal", "header"])
async def test_the_end_of_a_session(router: Router, way: str) -> None:
    await used(router)
    if way == "signal":
        await router.signal("session_end", "main")
    else:
        await router.turn("main", HISTORY, signal={"kind": "session_end"})
        await _background(router)
    ((guard, payload),) = router.sent("kv.demote")
    assert guard == "g1"
    assert keys_in(payload) == World.keys(HISTORY)


async def test_a_session_ends_with_the_turn_after_which_none_comes(router: Router) -> None:
    await used(router)
    _, placed = await router.turn("main", HISTORY, signal={"kind": "next_turn", "next_in_s": None})
    await _background(router)
    assert not placed.plan.no_retain, "it had turns before: others may have forked from it"
    ((guard, payload),) = router.sent("kv.demote")
    assert (guard, keys_in(payload)) == ("g1", World.keys(HISTORY))
    assert router.desk.sessions.get(key("main")) is None


async def test_pin_and_unpin(router: Router) -> None:
    await used(router)
    reply = await router.signal("pin", "main", ttl_s=30.0, signal_id="p1")
    ((guard, payload),) = router.sent("kv.pin")
    assert (guard, payload["ttl_s"], keys_in(payload)) == ("g1", 30.0, World.keys(HISTORY))
    router.answer(reply.plan_id, blocks=BLOCKS)
    await router.handler.withdraw("", "p1", wait_s=0.0)
    ((guard, unpin),) = router.sent("kv.unpin")
    assert (guard, unpin["pin_id"]) == ("g1", payload["pin_id"])


# --- tenants, and asking ---------------------------------------------------------------------------------


async def test_a_tenant_acts_on_its_own_sessions_only(router: Router) -> None:
    await router.turn("main", HISTORY, tenant="one", pin="g1")
    router.world.store("g1", HISTORY, salt="one")
    router.sent()
    for kind in ("compaction", "session_end", "pin"):
        fields: dict[str, Any] = (
            {"keeps": 0} if kind == "compaction" else {"ttl_s": 5.0} if kind == "pin" else {}
        )
        reply = await router.signal(kind, "main", tenant="two", **fields)
        assert reply.result == "unknown_session"
    assert router.sent() == []
    router.busy("g1")
    stolen = await router.signal("fork", "child", tenant="two", parent="main", starts_in_s=1.0)
    assert (stolen.decision, stolen.blocks) == ("none", 0)
    assert router.handler.describe("two", "main") is None
    assert router.handler.reply("one", stolen.signal_id) is None
    assert await router.handler.withdraw("one", stolen.signal_id) is None
    mine = await router.signal("compaction", "main", tenant="one", keeps=0)
    assert mine.decision == "invalidate"


async def test_where_a_sessions_blocks_are_and_why(router: Router) -> None:
    await used(router)
    router.world.store("g2", HISTORY[:800])
    router.busy("g1")
    await router.signal("next_turn", "main", starts_in_s=5.0, signal_id="s9")
    info = router.handler.describe("", "main")
    assert info is not None
    assert (info.tokens, info.blocks, info.home, info.turns) == (4000, BLOCKS, "g1", 1)
    assert {(p.guard, p.blocks, p.leading_blocks) for p in info.places} == {("g1", 250, 250), ("g2", 50, 50)}
    (announced,) = info.announced
    assert (announced.signal_id, announced.state, announced.guard) == ("s9", "moving", "g2")
    assert info.last_plan is not None
    assert (info.last_plan.decision, info.last_plan.reason, info.last_plan.sources) == (
        "prefetch",
        "next_turn",
        ["g1"],
    )
    assert router.handler.describe("", "nobody") is None


async def test_without_any_worker_a_signal_is_answered(router: Router) -> None:
    router.world.ranks.clear()
    reply = await router.signal("next_turn", "main")
    assert (reply.result, reply.reason) == ("no_worker", "no worker is ready")


# --- several turns ---------------------------------------------------------------------------------------


async def test_with_signals_turns_after_the_first_go_where_its_prefix_is_copied_meanwhile(
    router: Router,
) -> None:
    """t1 to t4 of one prefix; A (g1) has it and runs t1."""
    await used(router)
    router.busy("g1", 20_000)
    replies = [
        await router.signal("fork", f"t{n}", parent="main", isl=4040, starts_in_s=2.0 + n, runs_s=60.0)
        for n in (2, 3, 4)
    ]
    assert [reply.guard for reply in replies] == ["g2"] * 3
    assert len(router.sent("kv.prefetch")) == 1, "one copy serves all three"
    router.answer(replies[0].plan_id, blocks=BLOCKS)
    router.world.store("g2", HISTORY)
    for n in (2, 3, 4):
        _, placed = await router.turn(f"t{n}", [*HISTORY, *tokens_of(40, n)], parent="main")
        assert placed.target is not None
        assert placed.target.name == "g2"


async def _background(router: Router) -> None:
    for task in list(router.visits._tasks):
        await task
