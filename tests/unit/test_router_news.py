# SPDX-License-Identifier: Apache-2.0
"""Several routers that know what one knows, whatever of their news is lost, doubled or late."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from signal_desk import Router, World, key, tokens_of

from kvcr.errors import ProtocolError
from router_hints.news import Booked, news
from router_hints.replicas import BOOKING_TTL_S, LOST_AFTER, SILENT_S

HISTORY = tokens_of(4000)


def pair(world: World | None = None) -> tuple[World, Router, Router]:
    """Two routers that know each other."""
    world = world or World(2)
    one, two = Router(world, "router-1"), Router(world, "router-2")
    for router in (one, two):
        router.replicas.hello()
    deliver(one, two)
    return world, one, two


def deliver(
    *routers: Router, lose: float = 0.0, twice: float = 0.0, dice: random.Random | None = None
) -> int:
    """Hand all news over until nobody has any more; returns how many."""
    count = 0
    for _ in range(50):
        mail = [(router, raw) for router in routers for raw in router.mail]
        if not mail:
            return count
        for router in routers:
            router.mail.clear()
        for sender, raw in mail:
            count += 1
            if dice is not None and dice.random() < lose:
                continue
            for router in routers:
                if router is not sender:
                    router.replicas.received(raw)
                    if dice is not None and dice.random() < twice:
                        router.replicas.received(raw)
    raise AssertionError("routers talk without end")


def load_of(router: Router, guard: str) -> tuple[int, int]:
    load = router.ledger.loads(time.monotonic()).of(router.world.ranks[guard])
    return load.prefill_tokens, load.requests


# --- who is there -----------------------------------------------------------------------------------------


def test_replicas_find_each_other_and_agree_on_owners() -> None:
    world, one, two = pair()
    three = Router(world, "router-3")
    three.replicas.hello()
    deliver(one, two, three)
    routers = (one, two, three)
    owned = {router.name: 0 for router in routers}
    for n in range(300):
        owners = {router.replicas.owner(key(f"s{n}")) or router.name for router in routers}
        assert len(owners) == 1
        owned[owners.pop()] += 1
    assert min(owned.values()) > 60, "the load of planning ahead is spread"


def test_a_silent_replica_is_forgotten_with_its_bookings_and_one_that_leaves_at_once() -> None:
    world, one, two = pair()
    two.replicas.book("r1", world.ranks["g1"], prefill_tokens=500, blocks=10, copies={"g2": 1000})
    deliver(one, two)
    assert load_of(one, "g1") == (500, 1)
    world.now_s += SILENT_S + 1
    one.replicas.tick()
    assert one.replicas.others() == []
    assert load_of(one, "g1") == (0, 0)

    world, one, two = pair()
    two.replicas.book("r1", world.ranks["g1"], prefill_tokens=500, blocks=10, copies={})
    deliver(one, two)
    two.replicas.publish(
        news.encode(__import__("router_hints.news", fromlist=["Leaving"]).Leaving("router-2"))
    )
    deliver(one, two)
    assert (one.replicas.others(), load_of(one, "g1")) == ([], (0, 0))


def test_without_nats_nobody_is_dead() -> None:
    world, one, _ = pair()
    one.replicas.connected = lambda: False
    world.now_s += 60.0
    one.replicas.tick()
    assert one.replicas.others() == ["router-2"]
    assert one.replicas.stale_s == pytest.approx(60.0)


# --- bookings ---------------------------------------------------------------------------------------------


def test_bookings_of_one_are_load_at_the_other() -> None:
    world, one, two = pair()
    begun_s = time.monotonic()
    rank, copies = world.ranks["g1"], {"g2": 1000}
    one.replicas.book("r1", rank, prefill_tokens=500, blocks=10, copies=copies, copied_by_s=begun_s + 60)
    deliver(one, two)
    assert load_of(two, "g1") == (500, 1)
    assert two.ledger.loads(begun_s + 50).outgoing_bytes == copies
    assert two.ledger.loads(begun_s + 70).outgoing_bytes == {}, "by then its copies are over, there as here"
    one.replicas.first_output("r1")
    deliver(one, two)
    assert load_of(two, "g1") == (0, 1)
    one.replicas.release("r1")
    deliver(one, two)
    assert load_of(two, "g1") == (0, 0)


def test_a_replica_that_starts_is_told_what_is_in_flight() -> None:
    world, one, two = pair()
    one.replicas.book("r1", world.ranks["g1"], prefill_tokens=500, blocks=10, copies={})
    two.replicas.book("r2", world.ranks["g1"], prefill_tokens=300, blocks=10, copies={})
    two.replicas.first_output("r2")
    deliver(one, two)
    three = Router(world, "router-3")
    three.replicas.hello()
    deliver(one, two, three)
    assert load_of(three, "g1") == (500, 2)


def test_a_lone_replica_says_nothing_of_its_requests_and_tells_whoever_comes_whatever_it_says_first() -> None:
    world = World(2)
    one, two = Router(world, "router-1"), Router(world, "router-2")
    for number in range(3):
        name = f"r{number}"
        one.replicas.book(name, world.ranks["g1"], prefill_tokens=500, blocks=10, copies={})
    one.replicas.first_output("r1")
    one.replicas.release("r2")
    assert one.mail == []
    two.replicas.tick()
    two.mail[1:] = []
    deliver(one, two)
    assert load_of(two, "g1") == (500, 2)


def test_lost_releases_are_noticed_and_put_right() -> None:
    world, one, two = pair()
    one.replicas.book("r1", world.ranks["g1"], prefill_tokens=500, blocks=10, copies={})
    deliver(one, two)
    one.replicas.release("r1")
    one.mail.clear()  # the message is lost
    for _ in range(LOST_AFTER + 1):
        one.replicas.tick()
        deliver(one, two)
    assert load_of(two, "g1") == (0, 0)
    assert load_of(one, "g1") == (0, 0)


def test_what_nobody_speaks_of_is_not_believed_for_ever() -> None:
    world, one, two = pair()
    one.replicas.book("r1", world.ranks["g1"], prefill_tokens=500, blocks=10, copies={})
    deliver(one, two)
    for _ in range(int(BOOKING_TTL_S) + 2):
        world.now_s += 1.0
        one.replicas.tick()
        deliver(one, two)
        two.replicas.tick()
        two.mail.clear()
    assert load_of(two, "g1") == (0, 0)


@given(st.integers(0, 10_000), st.floats(0.0, 0.6))
@settings(max_examples=40, deadline=None)
def test_loads_agree_again_whatever_was_lost(seed: int, lose: float) -> None:
    dice = random.Random(seed)
    world, one, two = pair()
    running: list[tuple[Router, str]] = []
    for n in range(30):
        router = dice.choice((one, two))
        if running and dice.random() < 0.5:
            owner, request_id = running.pop(dice.randrange(len(running)))
            owner.replicas.release(request_id)
        else:
            rank = world.ranks[dice.choice(world.names)]
            router.replicas.book(f"r{n}", rank, prefill_tokens=dice.randrange(1000), blocks=5, copies={})
            running.append((router, f"r{n}"))
            if dice.random() < 0.5:
                router.replicas.first_output(f"r{n}")
        deliver(one, two, lose=lose, twice=0.2, dice=dice)
    # From now on nothing is lost. NATS came back, so everybody says hello.
    for router in (one, two):
        router.replicas.hello()
    for _ in range(2 * LOST_AFTER + 4):
        for router in (one, two):
            router.replicas.tick()
        deliver(one, two)
    for guard in world.names:
        assert load_of(one, guard) == load_of(two, guard)
        assert load_of(one, guard)[1] == sum(
            router.replicas._own[r].rank == world.ranks[guard] for router, r in running
        )


# --- sessions ---------------------------------------------------------------------------------------------


async def test_turns_of_one_session_at_two_routers_build_one_chain() -> None:
    _, one, two = pair()
    tokens = HISTORY
    for n, router in enumerate((one, two, one, two)):
        decoded = tokens_of(40, 20 + n)
        await router.turn("main", tokens, decoded=decoded, pin="g1")
        deliver(one, two)
        tokens = [*tokens, *decoded, *tokens_of(30, 60 + n)]
    for router in (one, two):
        session = router.desk.sessions.get(key("main"))
        assert session is not None
        assert session.chain is not None
        assert bytes(session.chain.keys) == World.keys(tokens[: len(tokens) - 30])
        assert (session.turns, session.home) == (4, "g1")


async def test_only_what_is_new_of_a_chain_is_sent() -> None:
    _, one, two = pair()
    await one.turn("main", HISTORY, decoded=tokens_of(32, 2), pin="g1")
    first = sum(map(len, one.mail))
    deliver(one, two)
    await one.turn("main", [*HISTORY, *tokens_of(32, 2), *tokens_of(32, 3)], pin="g1")
    second = sum(map(len, one.mail))
    assert second < first / 4
    deliver(one, two)
    mine, theirs = one.desk.sessions.get(key("main")), two.desk.sessions.get(key("main"))
    assert mine is not None
    assert theirs is not None
    assert mine.chain is not None
    assert theirs.chain is not None
    assert mine.chain.keys == theirs.chain.keys


async def test_a_router_that_lacks_the_beginning_asks_for_it() -> None:
    _, one, two = pair()
    await one.turn("main", HISTORY, pin="g1")
    one.mail.clear()  # lost
    await one.turn("main", [*HISTORY, *tokens_of(320, 3)], pin="g1")
    deliver(one, two)
    session = two.desk.sessions.get(key("main"))
    assert session is not None
    assert session.chain is not None
    assert bytes(session.chain.keys) == World.keys([*HISTORY, *tokens_of(320, 3)])


async def test_tenants_stay_apart_at_the_other_router_too() -> None:
    _, one, two = pair()
    await one.turn("main", HISTORY, tenant="a", pin="g1")
    deliver(one, two)
    assert two.desk.sessions.get(key("main", "a")) is not None
    assert two.desk.sessions.get(key("main", "b")) is None
    chain = two.desk.sessions.get(key("main", "a")).chain  # type: ignore[union-attr]
    assert chain is not None
    assert bytes(chain.keys) == World.keys(HISTORY, "a")


async def test_a_session_that_ended_ends_everywhere() -> None:
    _, one, two = pair()
    await one.turn("main", HISTORY, pin="g1")
    deliver(one, two)
    await one.signal("session_end", "main")
    deliver(one, two)
    assert two.desk.sessions.get(key("main")) is None


# --- announced turns --------------------------------------------------------------------------------------


async def test_a_turn_announced_at_one_router_is_served_at_the_other_as_planned() -> None:
    world, one, two = pair()
    await one.turn("main", HISTORY, pin="g1")
    world.store("g1", HISTORY)
    one.busy("g1", 3000)
    two.busy("g1", 3000)
    reply = await one.signal("next_turn", "main", starts_in_s=2.0)
    deliver(one, two)
    assert reply.guard == "g2"
    assert len(two.ledger.loads(time.monotonic()).announced) == 1
    _, placed = await two.turn("main", [*HISTORY, *tokens_of(40, 3)])
    assert placed.target is not None
    assert placed.target.name == "g2"
    assert placed.plan.chosen.joined
    assert two.sent("kv.prefetch") == [], "one owner acts"
    deliver(one, two)
    assert len(one.desk.forward) == 0
    assert one.ledger.loads(time.monotonic()).announced == ()


async def test_turns_of_a_dead_planner_are_planned_by_the_next_owner() -> None:
    world, one, two = pair()
    await one.turn("main", HISTORY, pin="g1")
    world.store("g1", HISTORY)
    for router in (one, two):
        router.busy("g1")
    await one.signal("next_turn", "main", starts_in_s=60.0)
    deliver(one, two)
    world.now_s += 50.0
    two.replicas.tick()
    two.replicas.adopt_orphans()
    await two.handler.tick()
    assert [guard for guard, _ in two.sent("kv.prefetch")] == ["g2"]


async def test_a_withdrawal_reaches_everybody() -> None:
    _, one, two = pair()
    await one.turn("main", HISTORY, pin="g1")
    await one.signal("next_turn", "main", signal_id="s1", starts_in_s=20.0)
    deliver(one, two)
    assert len(two.desk.forward) == 1
    await one.handler.withdraw("", "s1", wait_s=0.0)
    deliver(one, two)
    assert len(two.desk.forward) == 0


# --- noise ------------------------------------------------------------------------------------------------


@given(st.binary(max_size=100))
def test_garbage_is_refused(raw: bytes) -> None:
    _, one, _ = pair()
    with pytest.raises(ProtocolError):
        one.replicas.received(raw)


def test_own_news_that_come_back_change_nothing() -> None:
    _, one, _ = pair()
    one.replicas.received(news.encode(Booked("router-1", "r1", 1, 0, 100, 1, {})))
    assert load_of(one, "g1") == (0, 0)
