# SPDX-License-Identifier: Apache-2.0
"""The primitives from signal to bytes: a harness says what comes, real guards move and drop blocks."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest

from kvcr.harness import SignalRefused, headers
from kvcr.protocol.engine import BlockStatus
from kvcr.protocol.signals import signals_subject
from router_hints.http import MAX_WAIT_S
from router_hints.names import extend_names, unpack
from tests.integration.live import Live, engine_hashes, keys_of
from tests.integration.router_stack import BLOCK, until
from tests.integration.test_router import prompt_of

pytestmark = pytest.mark.timeout(240)

BLOCKS = 20


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """``a`` is busy all the time, ``b`` has nothing to do."""
    made = Live(tmp_path_factory.mktemp("live"), slots=1200)
    try:
        made.keep_busy("a")
        yield made
    finally:
        made.close()


@pytest.fixture
def main(request: pytest.FixtureRequest) -> str:
    """Another session for every test."""
    return f"main of {request.node.name}"


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> str:
    """Another history for every test."""
    return prompt_of(BLOCKS, request.node.name[-40:])


def pulled(live: Live, node: str) -> float:
    metrics = live.nodes[node].guard.metrics()
    return sum(v for k, v in metrics.items() if k.startswith("kvcr_pulled_blocks_total"))


# --- copy, prefetch, move -----------------------------------------------------------------------------------


def test_a_fork_is_copied_to_the_worker_with_room_before_its_request(
    live: Live, prompt: str, main: str
) -> None:
    tokens = live.ran(main, prompt, "a")
    before = pulled(live, "b")
    reply = live.kv.fork(
        f"child of {main}",
        parent=main,
        isl=len(tokens) + 20,
        osl=50,
        starts_in_s=3.0,
        runs_s=350.0,
        wait_s=MAX_WAIT_S,
    )
    assert (reply.decision, reply.result, reply.guard) == ("prefetch", "done", "b"), reply
    assert (reply.blocks, reply.bytes) == (BLOCKS, BLOCKS * live.a.engine.layout.part_bytes)
    assert live.b.has(tokens) == [True] * BLOCKS, "byte for byte"
    assert live.a.has(tokens) == [True] * BLOCKS, "the parent keeps its own"
    until(lambda: pulled(live, "b") == before + BLOCKS, "counted, a moment later")
    node, hint = live.ask(f"child of {main}", prompt + "y" * 40)
    assert (node.name, hint) == ("b", None), "nothing is left to fetch"
    assert live.kv.session(f"child of {main}").last_plan.reason == "resident"  # type: ignore[union-attr]


def test_the_next_turn_is_prefetched_and_its_request_goes_there(live: Live, prompt: str, main: str) -> None:
    tokens = live.ran(main, prompt, "a")
    reply = live.kv.next_turn(main, starts_in_s=2.0, isl=400, osl=20, wait_s=MAX_WAIT_S)
    assert (reply.decision, reply.reason, reply.result) == ("prefetch", "next_turn", "done"), reply
    assert live.b.has(tokens) == [True] * BLOCKS
    until(lambda: set(places(live, main, "G2")) == {"a", "b"}, "the router knows both places")
    info = live.kv.session(main)
    assert info is not None
    assert info.home == "b"
    node, _ = live.ask(main, prompt + "z" * 40)
    assert node.name == "b"


def test_a_prefetch_that_is_withdrawn_before_its_time_moves_nothing(
    live: Live, prompt: str, main: str
) -> None:
    live.ran(main, prompt, "a")
    before = pulled(live, "b")
    reply = live.kv.next_turn(main, starts_in_s=120.0)
    assert reply.result == "scheduled"
    assert live.kv.withdraw(reply.signal_id).result == "withdrawn"  # type: ignore[union-attr]
    assert live.kv.session(main).announced == []  # type: ignore[union-attr]
    assert pulled(live, "b") == before


def test_a_session_that_wakes_up_is_moved_and_its_source_freed_after_the_copy(
    live: Live, prompt: str, main: str
) -> None:
    tokens = live.ran(main, prompt, "a")
    live.trending()
    reply = live.kv.wake_up(main, idle_s=2400.0, isl=400, osl=20, wait_s=MAX_WAIT_S)
    assert (reply.decision, reply.result) == ("move", "done"), reply
    assert live.b.has(tokens) == [True] * BLOCKS
    until(lambda: live.a.has(tokens) == [False] * BLOCKS, "the source is freed")
    until(lambda: list(places(live, main, "G2")) == ["b"], "one home")
    node, _ = live.ask(main, prompt + "z" * 40)
    assert node.name == "b"


# --- no-retain ----------------------------------------------------------------------------------------------


def test_a_one_off_fetches_once_and_leaves_nothing(live: Live, prompt: str, main: str) -> None:
    tokens = live.ran(main, prompt, "a")
    before = live.stack.indexed("b")
    assert live.kv.one_off(f"once, {main}", isl=400, osl=5).result == "noted"
    prompt = prompt + "w" * 40
    with live.busy("a"):
        node, hint = live.ask(f"once, {main}", prompt)
    assert node.name == "b"
    assert hint is not None
    assert hint["actions"][0]["payload"]["no_retain"] is True
    assert node.fetch(hint, live.tokens(prompt)) == [BlockStatus.OK] * BLOCKS
    node.engine.finish("request")
    until(lambda: live.b.has(tokens) == [False] * BLOCKS, "nothing of it stays")
    assert live.stack.indexed("b") == before, "nor was it ever published"
    assert live.kv.session(f"once, {main}") is None


# --- invalidate ---------------------------------------------------------------------------------------------


def test_a_compaction_drops_the_tail_on_every_holder_and_spares_what_a_fork_shares(
    live: Live, prompt: str, main: str
) -> None:
    tokens = live.ran(main, prompt, "a")
    live.deposit("b", tokens)
    # The fork shares the first twelve blocks and goes its own way.
    fork = live.ran(f"child of {main}", prompt[: 12 * 16 - 8] + "!" * 80, "b", parent=main)
    shared = sum(x == y for x, y in zip(keys_of(tokens), keys_of(fork), strict=False))
    assert 10 <= shared <= 12
    reply = live.kv.compaction(main, keeps=3 * 16, isl_before=len(tokens), isl_after=100, wait_s=MAX_WAIT_S)
    assert (reply.decision, reply.result) == ("invalidate", "done"), reply
    assert sorted(action.guard for action in reply.actions) == ["a", "b"]
    expected = [True] * shared + [False] * (BLOCKS - shared)
    assert live.a.has(tokens) == expected
    assert live.b.has(tokens) == expected
    assert all(live.b.has(fork)), "the fork lost nothing"
    assert reply.blocks == 2 * (BLOCKS - shared)
    dead = engine_hashes(keys_of(tokens)[shared:])
    for node in (live.a, live.b):
        until(lambda node=node: set(dead) <= set(node.engine.dropped), "G1 was told as well")


def test_a_compaction_that_rides_on_the_compacted_request(live: Live, prompt: str, main: str) -> None:
    tokens = live.ran(main, prompt, "a")
    compacted = prompt[:80] + " and a summary of the rest"
    signal = '{"kind": "compaction", "isl_before": 328, "isl_after": 110}'
    live.ask(main, compacted, headers={"x-dynamo-meta-kvcr": signal})
    kept = sum(x == y for x, y in zip(keys_of(tokens), keys_of(live.tokens(compacted)), strict=False))
    assert kept >= 4
    until(lambda: live.a.has(tokens) == [True] * kept + [False] * (BLOCKS - kept), "what it left is dropped")


def hashes_in_g1(tokens: list[int]) -> list[int]:
    """What fake workers call these blocks."""
    names = extend_names(None, np.array(tokens, np.uint32), BLOCK, "")
    return [name ^ 1 for name in unpack(names)]


def places(live: Live, session: str, tier: str) -> dict[str, int]:
    info = live.kv.session(session)
    assert info is not None
    return {place.guard: place.blocks for place in info.places if place.tier == tier}


def test_a_compaction_drops_what_is_only_in_engine_memory(live: Live, prompt: str, main: str) -> None:
    tokens = live.tokens(prompt)
    # The worker announces them in G1, and no pool gets them.
    status, _ = live.stack.ask(prompt, headers=headers(main), nvext=live.pin("b"))
    assert status == 200
    until(lambda: places(live, main, "G1").get("b") == BLOCKS, "the router sees them in G1")
    assert places(live, main, "G2") == {}
    reply = live.kv.compaction(
        main, keeps=3 * BLOCK, isl_before=len(tokens), isl_after=100, wait_s=MAX_WAIT_S
    )
    assert (reply.decision, reply.result) == ("invalidate", "done"), reply
    expected = hashes_in_g1(tokens)
    until(lambda: set(expected[3:]) <= set(live.b.engine.dropped), "the engine dropped them")
    assert not set(expected[:3]) & set(live.b.engine.dropped), "the kept head stays"


def test_engine_memory_is_known_again_after_a_restart_and_shown_by_where(
    live: Live, prompt: str, main: str
) -> None:
    live.stack.ask(prompt, headers=headers(main), nvext=live.pin("b"))
    until(lambda: places(live, main, "G1").get("b") == BLOCKS, "the router sees them in G1")
    known = live.stack.metrics()["kvcr_router_g1_blocks"]
    late = live.stack.router(name="late")
    try:
        until(lambda: g1_blocks(live, "late") >= known, "a router that starts late knows engine memory")
    finally:
        late.stop()
    where = cli(live, "where", prompt, "--model", str(live.stack.model), "--json")
    found = {guard["guard"]: guard for guard in where["guards"]}
    assert (found["b"]["g1_from_start"], found["b"]["held"], found["b"]["tiers"]) == (BLOCKS, 0, ["G1"])
    assert cli(live, "status", "--json")["g1_blocks"]["b"] >= BLOCKS


def g1_blocks(live: Live, router: str) -> float:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return live.stack.metrics(router).get("kvcr_router_g1_blocks", 0.0)
    return 0.0


def cli(live: Live, *words: str) -> Any:
    """What a ``kvcr`` command writes as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcr.cli", *words],
        env=live.stack.environment | {"DYN_NAMESPACE": "dynamo", "KVCR_CACHE": str(live.stack.directory)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- the end, and pins --------------------------------------------------------------------------------------


def test_a_sub_agent_that_is_done_goes_first_under_pressure_and_its_parent_stays(tmp_path: Path) -> None:
    live = Live(tmp_path, nodes="a", slots=100)
    try:
        parent = live.ran("main", prompt_of(20, "parent"), "a")
        child = live.ran("child", prompt_of(20, "parent")[:-8] + "?" * 400, "a", parent="main")
        others = live.ran("other", prompt_of(20, "other"), "a")
        assert all(live.a.has(child))
        reply = live.kv.sub_agent_done("child", wait_s=MAX_WAIT_S)
        assert (reply.decision, reply.result) == ("demote", "done"), reply
        own = len(keys_of(child)) - sum(x == y for x, y in zip(keys_of(child), keys_of(parent), strict=False))
        assert reply.blocks == own > 10
        assert all(live.a.has(child)), "served until then"
        pressure = 0
        while all(live.a.has(child)) and pressure < 20:
            live.press("a", 8, f"pressure {pressure}")
            pressure += 1
        assert not all(live.a.has(child)), "its own blocks went first"
        assert all(live.a.has(parent))
        assert all(live.a.has(others))
    finally:
        live.close()


def test_a_pinned_session_survives_pressure_until_it_is_unpinned(tmp_path: Path) -> None:
    live = Live(tmp_path, nodes="a", slots=100)
    try:
        tokens = live.ran("main", prompt_of(15, "pinned"), "a")
        reply = live.kv.pin("main", ttl_s=120.0, wait_s=MAX_WAIT_S)
        assert (reply.decision, reply.result, reply.blocks) == ("pin", "done", 15), reply
        for n in range(10):
            live.press("a", 10, f"pressure {n}")
        assert all(live.a.has(tokens))
        withdrawn = live.kv.withdraw(reply.signal_id, wait_s=MAX_WAIT_S)
        assert withdrawn is not None
        assert [action.result for action in withdrawn.actions] == ["done", "done"]
        for n in range(10, 20):
            live.press("a", 10, f"pressure {n}")
        assert not all(live.a.has(tokens))
    finally:
        live.close()


# --- several turns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", [True, False])
def test_with_signals_later_turns_run_on_a_copy_made_meanwhile_and_without_they_queue(
    tmp_path: Path, signals: bool
) -> None:
    """t1 to t4 of one prefix; A has it and runs t1 for long; a copy takes longer than A's queue."""
    live = Live(tmp_path, bytes_per_s=4e5, tokens_per_s=60.0)
    try:
        live.ran("main", prompt_of(BLOCKS, "shared"), "a")
        with live.busy("a", blocks=18):
            if signals:
                for n in (2, 3, 4):
                    live.kv.fork(
                        f"t{n}",
                        parent="main",
                        isl=345,
                        starts_in_s=3.0,
                        runs_s=900.0,
                        signal_id=f"t{n}",
                        wait_s=0,
                    )
                until(lambda: live.stack.indexed("b") >= BLOCKS, "the copy is made while t1 runs")
                until(lambda: pulled(live, "b") == BLOCKS, "one copy for all of them")
            where = [live.ask(f"t{n}", prompt_of(BLOCKS, "shared") + f"{n}" * 30)[0].name for n in (2, 3, 4)]
        assert where[0] == ("b" if signals else "a")
        if signals:
            assert where == ["b", "b", "b"]
    finally:
        live.close()


# --- who and what -------------------------------------------------------------------------------------------


def test_a_tenant_cannot_touch_anothers_session(live: Live, prompt: str, main: str) -> None:
    tokens = live.ran(main, prompt, "a", tenant="one")
    thief = live.stack.harness(tenant="two")
    assert thief.session(main) is None
    assert thief.compaction(main, keeps=0).result == "unknown_session"
    assert thief.session_end(main).result == "unknown_session"
    assert live.a.has(tokens, "one") == [True] * BLOCKS
    owner = live.stack.harness(tenant="one")
    assert owner.session(main).blocks == BLOCKS  # type: ignore[union-attr]
    assert owner.compaction(main, keeps=0, wait_s=MAX_WAIT_S).blocks == BLOCKS
    assert live.a.has(tokens, "one") == [False] * BLOCKS


def test_over_nats_a_signal_is_answered_as_over_http(live: Live, prompt: str, main: str) -> None:
    live.ran(main, prompt, "a", tenant="one")

    async def send(body: dict[str, Any], tenant: str) -> dict[str, Any]:
        client = await nats.connect(live.stack.nats.url)
        try:
            raw, header = json.dumps(body).encode(), {"x-tenant-id": tenant}
            answer = await client.request(signals_subject("dynamo"), raw, timeout=20, headers=header)
            found: dict[str, Any] = json.loads(answer.data)
            return found
        finally:
            await client.close()

    pin = {"kind": "pin", "session": main, "ttl_s": 5.0, "signal_id": f"pin of {main}"}
    reply = asyncio.run(send(pin, "one"))
    assert (reply["decision"], reply["guard"], reply["session"]) == ("pin", "a", main)
    assert asyncio.run(send(pin, "two"))["result"] == "unknown_session"
    bad = asyncio.run(send(pin | {"ttl_s": -1}, "one"))
    assert bad["error"]["field"] == "ttl_s"
    known = live.stack.harness(tenant="one").signal(pin["signal_id"])
    assert known is not None
    assert known.plan_id == reply["plan_id"]


def test_sessions_come_with_the_headers_that_dynamo_maps(live: Live, prompt: str, main: str) -> None:
    for name, header in (
        ("claude", {"x-claude-code-session-id": "claude"}),
        ("plain", {"x-session-id": "plain"}),
        ("kid", {"x-session-id": "kid", "x-parent-session-id": "plain"}),
    ):
        assert live.stack.ask(prompt_of(5, name), headers=header)[0] == 200
        info = live.kv.session(name)
        assert info is not None, name
        assert info.tokens > 80
    assert live.kv.session("kid").parent == "plain"  # type: ignore[union-attr]
    final = {"x-dynamo-session-id": "kid", "x-dynamo-session-final": "true"}
    assert live.stack.ask(prompt_of(5, "kid"), headers=final)[0] == 200
    until(lambda: live.kv.session("kid") is None, "the last turn ends the session")


def test_bad_signals_fail_no_request_and_are_counted(live: Live, prompt: str, main: str) -> None:
    bad = {"x-dynamo-meta-kvcr": '{"kind": "fork", "isl": -1}'}
    node, _ = live.ask(main, prompt, headers=bad)
    assert node.name in ("a", "b")
    with pytest.raises(SignalRefused):
        live.kv.fork(f"child of {main}", parent=main, isl=-1)
    metrics = live.stack.metrics()
    assert metrics['kvcr_router_signals_refused_total{field="isl",input="header"}'] == 1
    assert metrics["kvcr_router_sessions"] >= 1


# --- last: its source is not asked again for a while --------------------------------------------------------


def test_a_wake_up_whose_source_dies_keeps_the_session_where_it_was(
    live: Live, prompt: str, main: str
) -> None:
    tokens = live.ran(main, prompt, "a")
    live.trending()
    live.a.guard.process.send_signal(19)  # SIGSTOP: it answers nobody
    try:
        reply = live.kv.wake_up(main, idle_s=2400.0, deadline_s=3.0, wait_s=8.0)
        assert reply.decision == "move"
        assert reply.result in ("failed", "too_slow", "miss", "pending"), reply
    finally:
        live.a.guard.process.send_signal(18)
    assert live.a.has(tokens) == [True] * BLOCKS, "a failure keeps the source"
    assert live.kv.session(main).home == "a"  # type: ignore[union-attr]
