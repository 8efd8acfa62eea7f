# SPDX-License-Identifier: Apache-2.0
"""The actions of hints on real guards: over JetStream, and as they ride on requests through an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acting_router import ActingRouter, one
from deployment import Deployment
from engine_client import EngineClient, GuardProcess, chain, engine_hashes
from waiting import PATIENCE_S, eventually

from kvcr.graph.infra import start_nats
from kvcr.keys import BlockKey, pack_keys
from kvcr.protocol.engine import BlockStatus, FetchLease, Granted, Source
from kvcr.protocol.events import (
    ACTION_VERSION,
    CANCEL,
    DEMOTE,
    FETCH,
    INVALIDATE,
    PIN,
    PREFETCH,
    UNPIN,
    ActionResult,
    CancelPayload,
    DemotePayload,
    FetchSource,
    InvalidatePayload,
    PinPayload,
    PrefetchPayload,
    UnpinPayload,
    action,
    envelope,
)

NOBODY = "tcp://127.0.0.1:9"


@contextlib.contextmanager
def a_pair(
    deployment: Deployment, *arguments: str, **options: Any
) -> Iterator[tuple[EngineClient, EngineClient]]:
    """Guards ``a`` and ``b``, each with an engine."""
    with (
        deployment.guard("a", *arguments, **options, wait=False) as a,
        deployment.guard("b", *arguments, **options, wait=False) as b,
        EngineClient(a.wait_ready(), "engine-a") as source,
        EngineClient(b.wait_ready(), "engine-b") as target,
    ):
        yield source, target


def acting(deployment: Deployment) -> ActingRouter:
    return ActingRouter(deployment.nats_url, deployment.namespace)


def code(result: ActionResult) -> tuple[str, int]:
    return result.code, result.blocks


def here(engine: EngineClient, keys: Sequence[BlockKey]) -> list[bool]:
    """Which of these blocks are in the pool, right or not."""
    return (engine.reader.lookup(pack_keys(keys)).slots >= 0).tolist()


def counted(guard: GuardProcess, kind: str, how: str) -> float:
    return guard.metrics().get(f'kvcr_actions_total{{action="{kind}",code="{how}"}}', 0.0)


def prefetch(
    plan_id: str, root: bytes, keys: Sequence[BlockKey], endpoint: str, **more: Any
) -> PrefetchPayload:
    return PrefetchPayload(
        **{
            "plan_id": plan_id,
            "keys": pack_keys(keys),
            "engine_hashes": engine_hashes(keys),
            "parent": root.hex(),
            "first": 0,
            "sources": [FetchSource(endpoint, 0, len(keys))],
            **more,
        }
    )


# --- invalidate --------------------------------------------------------------------------------------


async def test_invalidate_drops_a_tail_its_descendants_and_g1_and_keeps_the_head(
    deployment: Deployment,
) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(12, "session")
        engine.deposit(keys, root)
        # What was decoded later is not named, and goes all the same.
        payload = InvalidatePayload(plan_id="p", keys=pack_keys(keys[4:8]))
        async with acting(deployment) as router:
            await router.send("a", "p", one("p", INVALIDATE, payload))
            _, hashes = await asyncio.to_thread(engine.carry_out_drop)
            result = await router.result("p")
        assert code(result) == ("done", 8)
        assert result.byte_count == 8 * engine.layout.part_bytes
        assert "8 in G1" in result.detail
        assert (result.guard, result.action_type) == ("a", INVALIDATE)
        assert engine.right(keys) == [True] * 4 + [False] * 8
        assert sorted(hashes) == sorted(int.from_bytes(key[:8], "little") for key in keys[4:])
        assert counted(guard, INVALIDATE, "done") == 1
        assert guard.metrics()['kvcr_evicted_blocks_total{reason="invalidated"}'] == 8
        assert guard.metrics()["kvcr_g1_dropped_blocks_total"] == 8


async def test_invalidate_of_what_was_evicted_still_finds_what_comes_after_it(deployment: Deployment) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(6, "session")
        engine.deposit(keys[:2], root)
        engine.deposit(keys[3:], keys[2], first=3)
        async with acting(deployment) as router:
            result = router.ask("a", "p", INVALIDATE, InvalidatePayload(plan_id="p", keys=keys[2]))
            dropping = asyncio.to_thread(engine.carry_out_drop, 0)
            assert code((await asyncio.gather(result, dropping))[0]) == ("done", 3)
        assert engine.right(keys) == [True, True, False, False, False, False]


async def test_a_pinned_block_is_not_invalidated(deployment: Deployment) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(4, "session")
        engine.deposit(keys, root)
        async with acting(deployment) as router:
            pin = PinPayload(plan_id="pin", keys=keys[3], pin_id="kept", ttl_s=60)
            assert code(await router.ask("a", "pin", PIN, pin)) == ("done", 1)
            payload = InvalidatePayload(plan_id="p", keys=pack_keys(keys))
            await router.send("a", "p", one("p", INVALIDATE, payload))
            await asyncio.to_thread(engine.carry_out_drop)
            result = await router.result("p")
            assert code(result) == ("partial", 3)
            assert "1 blocks are pinned" in result.detail
        assert engine.right(keys) == [False, False, False, True]


async def test_what_an_old_request_fills_late_stays_dead_and_a_new_one_stores_again(
    deployment: Deployment,
) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(8, "session")
        engine.deposit(keys[:6], root)
        late, new = engine.reserve(4), engine.reserve(8)
        async with acting(deployment) as router:
            payload = InvalidatePayload(plan_id="p", keys=pack_keys(keys[2:4]))
            await router.send("a", "p", one("p", INVALIDATE, payload))
            drop_id, _ = await asyncio.to_thread(engine.carry_out_drop)
            await router.result("p")
        # Under way when the blocks died: a block named, and two decoded after it that the guard never saw.
        engine.deposit(keys[4:8], keys[3], first=4, granted=late)
        assert here(engine, keys) == [True] * 2 + [False] * 6
        assert guard.metrics()["kvcr_dead_fills_total"] == 4
        # The same prefix, computed by a request that began after the drop.
        engine.deposit(keys, root, drops=drop_id, granted=new)
        assert engine.right(keys) == [True] * 8


async def test_a_copy_of_invalidated_blocks_that_is_under_way_is_not_published(
    deployment: Deployment,
) -> None:
    with a_pair(deployment) as (source, target), silent(1) as (slow,):
        open_link(source, target)
        root, keys = chain(12, "session")
        source.deposit(keys, root)
        sources = [Source(slow, 0, 12), Source(source.guard.endpoint, 0, 12)]
        async with acting(deployment) as router:
            # In this order on one socket: the copy still waits for its first source.
            target.start_fetch("r", keys, root, sources)
            payload = InvalidatePayload(plan_id="p", keys=pack_keys(keys[3:5]))
            target.act("r", one("p", INVALIDATE, payload))
            # This engine does not say whether it has them in its own memory.
            assert code(await router.result("p")) == ("deferred", 9)
        progress = await asyncio.to_thread(target.end_of_fetch)
        assert list(progress.statuses) == [BlockStatus.OK] * 3 + [BlockStatus.GONE] * 9
        assert here(target, keys) == [True] * 3 + [False] * 9
        # A request that asks later gets them: what is dead is that copy, not the content.
        _, progress = target.fetch("r2", keys, root, sources[1:])
        assert set(progress.statuses) == {BlockStatus.OK}


async def test_an_idle_engine_drops_before_its_next_request_and_the_result_says_so(
    deployment: Deployment,
) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        async with acting(deployment) as router:
            chains = [chain(1, f"session {turn}") for turn in range(50)]
            for root, keys in chains:
                engine.deposit(keys, root)
            for turn, (_, keys) in enumerate(chains):
                payload = InvalidatePayload(plan_id=f"p{turn}", keys=pack_keys(keys))
                await router.send("a", f"p{turn}", one(f"p{turn}", INVALIDATE, payload))
            for turn in range(50):
                assert code(await router.result(f"p{turn}")) == ("deferred", 1)
        # The engine wakes up: what was merged meanwhile adds up to the rest.
        dropped = 0
        while dropped < 50:
            dropped += len(engine.carry_out_drop()[1])
        assert guard.wait_metric("kvcr_g1_dropped_blocks_total", 50) == 50


# --- prefetch ----------------------------------------------------------------------------------------


async def test_prefetch_copies_ahead_of_the_request(deployment: Deployment) -> None:
    with a_pair(deployment) as (source, target):
        root, keys = chain(12, "session")
        source.deposit(keys, root)
        async with acting(deployment) as router:
            # A router has no engine hashes: they come from the source with the blocks.
            payload = prefetch("p", root, keys, source.guard.endpoint, engine_hashes=bytes(8 * 12))
            result = await router.ask("b", "p", PREFETCH, payload)
            invalidation = InvalidatePayload(plan_id="q", keys=pack_keys(keys[8:]))
            await router.send("b", "q", one("q", INVALIDATE, invalidation))
            _, hashes = await asyncio.to_thread(target.carry_out_drop)
            assert sorted(hashes) == sorted(np.frombuffer(engine_hashes(keys[8:]), "<u8").tolist())
        assert (code(result), result.byte_count) == (("done", 12), 12 * source.layout.part_bytes)
        assert target.right(keys) == [True] * 8 + [False] * 4
        assert source.right(keys) == [True] * 12
        assert counted(target.guard, PREFETCH, "done") == 1


async def test_a_prefetch_to_positions_that_no_block_has_is_refused(deployment: Deployment) -> None:
    with a_pair(deployment) as (source, target):
        root, keys = chain(2, "nowhere")
        source.deposit(keys, root)
        open_link(source, target)
        async with acting(deployment) as router:
            for plan_id, first in (("p", -1), ("q", 1 << 63)):
                payload = prefetch(plan_id, root, keys, source.guard.endpoint, first=first)
                result = await router.ask("b", plan_id, PREFETCH, payload)
                assert (result.code, str(first) in result.detail) == ("refused", True), result


async def test_a_prefetch_that_moves_frees_the_source_when_the_copy_is_committed(
    deployment: Deployment,
) -> None:
    with a_pair(deployment) as (source, target):
        root, keys = chain(12, "session")
        source.deposit(keys, root)
        async with acting(deployment) as router:
            payload = prefetch("p", root, keys, source.guard.endpoint, mode="move")
            result = router.ask("b", "p", PREFETCH, payload)
            dropping = asyncio.to_thread(source.carry_out_drop)
            answers = await asyncio.gather(result, dropping)
        assert code(answers[0]) == ("done", 12)
        assert len(answers[1][1]) == 12
        assert target.right(keys) == [True] * 12
        assert here(source, keys) == [False] * 12


@pytest.mark.parametrize("withdrawn", [False, True])
async def test_a_request_that_comes_during_its_prefetch_shares_the_transfer(
    deployment: Deployment, withdrawn: bool
) -> None:
    """And when the prefetch is withdrawn then, the request gets by itself what it still lacks."""
    with a_pair(deployment) as (source, target), silent(1) as (slow,):
        open_link(source, target)
        root, keys = chain(12, "session")
        source.deposit(keys, root)
        payload = prefetch("p", root, keys, slow)
        payload.sources.append(FetchSource(source.guard.endpoint, 0, 12))
        async with acting(deployment) as router:
            # In this order on one socket: the prefetch still waits for its first source.
            target.act("before", one("p", PREFETCH, payload))
            sources = [Source(source.guard.endpoint, 0, 12)]
            target.start_fetch("r", keys, root, sources)
            if withdrawn:
                target.act("after", one("c", CANCEL, CancelPayload(plan_id="p")))
            lease = await asyncio.to_thread(target.receive, target.scheduler, FetchLease)
            progress = await asyncio.to_thread(target.end_of_fetch)
            result = await router.result("p")
            if withdrawn:
                assert code(await router.result("c")) == ("done", 0)
        assert (lease.available, set(progress.statuses)) == (12, {BlockStatus.OK})
        expected = (12, ("cancelled", 0)) if withdrawn else (0, ("done", 12))
        assert (progress.pulled_blocks, code(result)) == expected, result.detail
        assert target.right(keys) == [True] * 12
        # Every block travelled once, and no slot is lost.
        assert target.guard.wait_metric('kvcr_pulled_blocks_total{transport="shm"}', 1 + 12) == 1 + 12
        metrics = target.guard.metrics()
        assert metrics["kvcr_prefetching_blocks"] == 0
        assert metrics['kvcr_pool_slots{state="granted"}'] == 0


async def test_a_prefetch_is_bounded_by_a_share_of_the_pool_until_its_blocks_are_used(
    deployment: Deployment,
) -> None:
    with a_pair(deployment) as (source, target):
        # A quarter of 64 slots.
        root, keys = chain(17, "too long")
        source.deposit(keys, root)
        async with acting(deployment) as router:
            refused = await router.ask("b", "p", PREFETCH, prefetch("p", root, keys, source.guard.endpoint))
            assert code(refused) == ("refused", 0)
            assert "the limit is 16 of the pool's 64" in refused.detail
            first = prefetch("q", root, keys[:10], source.guard.endpoint)
            assert code(await router.ask("b", "q", PREFETCH, first)) == ("done", 10)
            other_root, other = chain(10, "other")
            source.deposit(other, other_root)
            second = prefetch("r", other_root, other, source.guard.endpoint)
            assert (await router.ask("b", "r", PREFETCH, second)).code == "refused"
            # A request uses what the first one brought.
            target.fetch("request", keys[:10], root, [Source(source.guard.endpoint, 0, 10)])
            again = prefetch("s", other_root, other, source.guard.endpoint)
            assert code(await router.ask("b", "s", PREFETCH, again)) == ("done", 10)


async def test_a_prefetch_from_nobody_ends_by_its_deadline_and_one_withdrawn_before_it_came_does_not_begin(
    deployment: Deployment,
) -> None:
    with deployment.guard("b") as guard, EngineClient(guard, "engine"):
        root, keys = chain(4, "session")
        async with acting(deployment) as router:
            payload = prefetch("p", root, keys, NOBODY, deadline_ms=1500)
            result = await router.ask("b", "p", PREFETCH, payload)
            assert result.code in ("failed", "too_slow"), result
            assert await router.ask("b", "c", CANCEL, CancelPayload(plan_id="q"))
            result = await router.ask("b", "q", PREFETCH, prefetch("q", root, keys, NOBODY))
            assert (result.code, result.detail) == ("cancelled", "withdrawn before it came")
        assert guard.metrics()['kvcr_pool_slots{state="granted"}'] == 0


# --- move, as it rides on a request ------------------------------------------------------------------


async def test_a_move_keeps_what_is_pinned_at_the_source_and_everything_when_the_copy_fails(
    deployment: Deployment,
) -> None:
    with a_pair(deployment) as (source, target):
        root, keys = chain(12, "session")
        source.deposit(keys, root)
        sources = [Source(source.guard.endpoint, 0, 12)]
        async with acting(deployment) as router:
            # Too late before it begins.
            target.fetch("r0", keys, root, sources, move=True, plan_id="p0", action_id="0", deadline_ms=0.0)
            assert code(await router.result("p0")) == ("too_slow", 0)
            assert here(source, keys) == [True] * 12

            pin = PinPayload(plan_id="pin", keys=pack_keys(keys[:2]), pin_id="kept", ttl_s=60)
            assert code(await router.ask("a", "pin", PIN, pin)) == ("done", 2)
            target.fetch("r1", keys, root, sources, move=True, plan_id="p1", action_id="0")
            result = await router.result("p1")
            assert (result.action_type, code(result)) == (FETCH, ("partial", 12))
            assert "2 blocks are in use or pinned at the source" in result.detail
        assert target.right(keys) == [True] * 12
        assert here(source, keys) == [True] * 2 + [False] * 10
        assert source.guard.wait_metric('kvcr_evicted_blocks_total{reason="moved"}', 10) == 10
        assert target.guard.wait_metric("kvcr_moved_blocks_total", 10) == 10


async def test_a_move_of_what_its_target_has_already_frees_the_source(deployment: Deployment) -> None:
    with a_pair(deployment) as (source, target):
        root, keys = chain(12, "session")
        source.deposit(keys, root)
        target.deposit(keys, root)
        async with acting(deployment) as router:
            sources = [Source(source.guard.endpoint, 0, 12)]
            target.fetch("r", keys, root, sources, move=True, plan_id="p", action_id="0")
            assert code(await router.result("p")) == ("done", 0)
            # A plan that names the target as its own source drops nothing.
            own = [Source(target.guard.endpoint, 0, 12)]
            target.fetch("r2", keys, root, own, move=True, plan_id="q", action_id="0")
            assert code(await router.result("q")) == ("partial", 0)
        assert here(source, keys) == [False] * 12
        assert target.right(keys) == [True] * 12


async def test_a_move_whose_source_dies_after_the_copy_is_a_copy(deployment: Deployment) -> None:
    with a_pair(deployment) as (source, target):
        # Few enough to be read from the source's files without a word to it.
        open_link(source, target)
        root, keys = chain(4, "session")
        source.deposit(keys, root)
        sources = [Source(source.guard.endpoint, 0, 4)]
        os.kill(source.guard.pid, signal.SIGSTOP)
        async with acting(deployment) as router:
            target.fetch("r", keys, root, sources, move=True, plan_id="p", action_id="0")
            result = await router.result("p")
            assert code(result) == ("partial", 4)
            assert "kept its blocks" in result.detail
        assert target.right(keys) == [True] * 4
        os.kill(source.guard.pid, signal.SIGCONT)


# --- pin and demote ----------------------------------------------------------------------------------


async def test_pinned_blocks_survive_pressure_until_the_pin_ends(deployment: Deployment) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(8, "pinned")
        engine.deposit(keys, root)
        async with acting(deployment) as router:
            long = PinPayload(plan_id="p1", keys=pack_keys(keys[:4]), pin_id="long", ttl_s=600)
            short = PinPayload(plan_id="p2", keys=pack_keys(keys), pin_id="short", ttl_s=600)
            assert code(await router.ask("a", "p1", PIN, long)) == ("done", 4)
            assert code(await router.ask("a", "p2", PIN, short)) == ("done", 8)
            assert guard.metrics()["kvcr_pinned_blocks"] == 8
            press(engine, "first")
            assert engine.right(keys) == [True] * 8
            # Another pin holds the first half.
            unpin = UnpinPayload(plan_id="p3", pin_id="short")
            assert code(await router.ask("a", "p3", UNPIN, unpin)) == ("done", 8)
            assert code(await router.ask("a", "p4", UNPIN, unpin)) == ("miss", 0)
            press(engine, "second")
            assert engine.right(keys) == [True] * 4 + [False] * 4
            # And one that ends by itself.
            root, keys = chain(2, "briefly")
            engine.deposit(keys, root)
            brief = PinPayload(plan_id="p5", keys=pack_keys(keys), pin_id="brief", ttl_s=0.5)
            await router.ask("a", "p5", PIN, brief)
            await asyncio.sleep(0.6)
            press(engine, "third")
            assert here(engine, keys) == [False, False]


async def test_pins_take_no_more_than_their_share(deployment: Deployment) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(20, "session")
        engine.deposit(keys, root)
        async with acting(deployment) as router:
            most = PinPayload(plan_id="p1", keys=pack_keys(keys[:16]), pin_id="1", ttl_s=60)
            assert code(await router.ask("a", "p1", PIN, most)) == ("done", 16)
            more = PinPayload(plan_id="p2", keys=pack_keys(keys[16:]), pin_id="2", ttl_s=60)
            refused = await router.ask("a", "p2", PIN, more)
            assert code(refused) == ("refused", 0)
            assert "the limit is 16" in refused.detail
            forever = PinPayload(plan_id="p3", keys=pack_keys(keys[:1]), pin_id="3", ttl_s=1e9)
            assert "ttl_s is 1e+09" in (await router.ask("a", "p3", PIN, forever)).detail


async def test_demoted_blocks_are_served_until_they_are_the_first_to_go(deployment: Deployment) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        root, old = chain(10, "older")
        engine.deposit(old, root)
        root, child = chain(10, "child")
        engine.deposit(child, root)
        async with acting(deployment) as router:
            # The child's own blocks; what it shares with its parent is not named.
            payload = DemotePayload(plan_id="p", keys=pack_keys(child[4:6]))
            assert code(await router.ask("a", "p", DEMOTE, payload)) == ("done", 6)
        assert engine.right(child) == [True] * 10
        # 44 of the pool's 64 slots are free, and six are to be made so.
        for name, count in (("one", 24), ("two", 22)):
            root, filler = chain(count, name)
            engine.deposit(filler, root, granted=patiently(engine, count))
        assert here(engine, child) == [True] * 4 + [False] * 6
        assert here(engine, old) == [True] * 10


def press(engine: EngineClient, name: str) -> None:
    """Deposit as much as the pool has room for, and more."""
    for part in range(4):
        root, keys = chain(14, f"{name} {part}")
        engine.deposit(keys, root, granted=patiently(engine, 14))


def patiently(engine: EngineClient, count: int) -> Granted:
    """Slots, once those that were evicted for them have rested for 2 s."""
    deadline_s = time.monotonic() + PATIENCE_S
    while len((granted := engine.reserve(count)).slots) // 4 < count and time.monotonic() < deadline_s:
        engine.give_back(granted)
        time.sleep(0.2)
    return granted


def open_link(source: EngineClient, target: EngineClient) -> None:
    """One block is copied, so that the next copy needs no handshake."""
    root, keys = chain(1, "opens the link")
    source.deposit(keys, root)
    target.fetch("opens the link", keys, root, [Source(source.guard.endpoint, 0, 1)])
    assert target.right(keys) == [True]


@contextlib.contextmanager
def silent(count: int) -> Iterator[list[str]]:
    """Control endpoints of guards that never answer: each costs a pull one second."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        yield [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in sockets]


# --- both ways in, and what is wrong with an action ---------------------------------------------------


async def test_actions_on_a_request_are_carried_out_in_order(deployment: Deployment) -> None:
    with a_pair(deployment) as (source, target):
        root, keys = chain(12, "session")
        source.deposit(keys, root)
        ahead = prefetch("plan", root, keys, source.guard.endpoint)
        pin = PinPayload(plan_id="plan", keys=pack_keys(keys), pin_id="x", ttl_s=9)
        hint = envelope(
            "plan",
            [
                action("0", PREFETCH, ACTION_VERSION, ahead),
                action("1", PIN, ACTION_VERSION, pin),
                action("2", "kv.teleport", "1.0", CancelPayload(plan_id="plan")),
                action("3", UNPIN, ACTION_VERSION, UnpinPayload(plan_id="plan", pin_id="x")),
            ],
        )
        async with acting(deployment) as router:
            await router.send("b", "warm up", envelope("warm up", []))
            target.act("request", hint)
            await router.result("plan", "3")
            assert [(r.action_id, r.code, r.blocks) for r in router.heard] == [
                ("0", "done", 12),
                ("1", "done", 12),
                ("2", "refused", 0),
                ("3", "done", 12),
            ]
        assert counted(target.guard, "unknown", "refused") == 1


async def test_nonsense_is_refused_and_harms_nobody(deployment: Deployment) -> None:
    def wrong(
        action_id: str, kind: str, payload: dict[str, Any], version: str = ACTION_VERSION
    ) -> dict[str, Any]:
        return {"action_id": action_id, "action_type": kind, "action_version": version, "payload": payload}

    columns = {"keys": "", "engine_hashes": "", "parent": "zz", "first": 0, "sources": []}
    actions = [
        wrong("0", PIN, {}, version="9.0"),
        wrong("1", PIN, {"keys": 7}),
        wrong("2", INVALIDATE, {"plan_id": "p", "keys": "AAAA"}),
        wrong("3", PREFETCH, {"plan_id": "p", **columns}),
        wrong("4", PIN, {"plan_id": "p", "keys": "A" * (4 * 16 * 32_769 // 3), "pin_id": "x", "ttl_s": 1}),
        wrong("", CANCEL, {"plan_id": "p"}),
    ]
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        async with acting(deployment) as router:
            await router.send("a", "p", {"actions": actions})
            await router.send("a", "q", b"{no json")
            await router.send("a", "r", {"actions": [1, 2]})
            await router.send("a", "s", {"actions": [{}] * 65})
            await eventually(lambda: len(router.heard) == 10, f"all refused, heard {router.heard}")
            assert {result.code for result in router.heard} == {"refused"}
            assert all(result.detail for result in router.heard)
        root, keys = chain(2, "still serving")
        engine.deposit(keys, root)
        assert engine.right(keys) == [True, True]
        assert guard.process.poll() is None


async def test_an_action_that_comes_twice_is_carried_out_once_and_answered_twice(
    deployment: Deployment,
) -> None:
    with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(3, "session")
        engine.deposit(keys, root)
        async with acting(deployment) as router:
            payload = InvalidatePayload(plan_id="p", keys=pack_keys(keys))
            await router.send("a", "p", one("p", INVALIDATE, payload))
            drop_id, _ = await asyncio.to_thread(engine.carry_out_drop)
            await router.result("p")
            # Stored again by a new request; the message that comes again must not take them.
            engine.deposit(keys, root, drops=drop_id)
            await router.send("a", "p", one("p", INVALIDATE, payload))
            await eventually(lambda: len(router.heard) == 2, "a second answer")
            assert router.heard[0] == router.heard[1]
        assert engine.right(keys) == [True] * 3
        assert guard.metrics()["kvcr_actions_repeated_total"] == 1
        assert counted(guard, INVALIDATE, "done") == 1


# --- weather -----------------------------------------------------------------------------------------


async def test_actions_wait_for_a_guard_that_is_away_and_those_that_expired_do_nothing(
    deployment: Deployment,
) -> None:
    root, keys = chain(4, "session")
    async with acting(deployment) as router:
        with deployment.guard("a") as guard, EngineClient(guard, "engine") as engine:
            engine.deposit(keys, root)
        await router.send(
            "a",
            "late",
            one("late", INVALIDATE, InvalidatePayload(plan_id="late", keys=keys[0])),
            expires_s=0.5,
        )
        await router.send("a", "p", one("p", DEMOTE, DemotePayload(plan_id="p", keys=keys[1])))
        await asyncio.sleep(0.6)
        with deployment.guard("a") as guard:
            assert code(await router.result("p")) == ("done", 3)
            expired = await router.result("late")
            assert (expired.code, expired.blocks) == ("expired", 0)
            assert counted(guard, INVALIDATE, "expired") == 1
            with EngineClient(guard, "engine-2") as engine:
                assert engine.right(keys) == [True] * 4


async def test_a_guard_that_dies_in_mid_action_gets_it_again(deployment: Deployment) -> None:
    root, keys = chain(12, "session")
    with (
        silent(6) as slow,
        deployment.guard("a") as a,
        EngineClient(a, "engine-a") as source,
    ):
        source.deposit(keys, root)
        payload = prefetch("p", root, keys, slow[0], deadline_ms=60_000)
        payload.sources.extend(FetchSource(endpoint, 0, 12) for endpoint in [*slow[1:], a.endpoint])
        async with acting(deployment) as router:
            with deployment.guard("b") as b, EngineClient(b, "engine-b"):
                await router.send("b", "p", one("p", PREFETCH, payload))
                await eventually(lambda: b.metrics().get("kvcr_prefetching_blocks") == 12, "it is under way")
                b.process.kill()
                b.process.wait()
            assert not router.heard
            with deployment.guard("b") as b, EngineClient(b, "engine-b2") as target:
                assert code(await router.result("p", timeout_s=60)) == ("done", 12)
                assert target.right(keys) == [True] * 12
                assert len(router.heard) == 1


async def test_nats_may_go_and_come_back_empty(
    deployment: Deployment, tmp_path: Path, namespace: str
) -> None:
    server = await asyncio.to_thread(start_nats, tmp_path / "nats", tmp_path / "nats.log")
    own = Deployment(deployment.etcd_url, server.url, namespace, deployment.directory)
    try:
        with own.guard("a") as guard, EngineClient(guard, "engine") as engine:
            root, keys = chain(3, "session")
            engine.deposit(keys, root)
            async with acting(own) as router:
                payload = DemotePayload(plan_id="p", keys=pack_keys(keys))
                assert code(await router.ask("a", "p", DEMOTE, payload)) == ("done", 3)
                await asyncio.to_thread(server.kill)
                # What rides on requests goes on, and its result is told when there is somebody to tell.
                engine.act("request", one("q", DEMOTE, DemotePayload(plan_id="q", keys=pack_keys(keys))))
                await eventually(lambda: counted(guard, DEMOTE, "done") == 2, "it is carried out")
                server = await asyncio.to_thread(
                    start_nats, tmp_path / "another", tmp_path / "nats.log", port=server.port
                )
                assert code(await router.result("q")) == ("done", 3)
                await router.ensure_stream()
                payload = DemotePayload(plan_id="r", keys=pack_keys(keys))
                assert code(await router.ask("a", "r", DEMOTE, payload)) == ("done", 3)
    finally:
        await asyncio.to_thread(server.stop)
