# SPDX-License-Identifier: Apache-2.0
"""``--topology required`` with real guards: nothing leaves an RDMA domain, whatever asks for it.

``a`` and ``b`` are in domain A and busy, ``c`` is outside and idle: without the wall all would go there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcr.protocol.engine import BlockStatus
from router_hints.inputs import PlanInputs
from router_hints.planner import Plan
from tests.integration.live import Live
from tests.integration.router_stack import until
from tests.integration.test_router import explain, prompt_of
from tests.integration.test_signals import pulled

pytestmark = pytest.mark.timeout(240)

BLOCKS = 20
PLACES = {
    "a": {"host": "one", "rdma_domain": "A"},
    "b": {"host": "two", "rdma_domain": "A"},
    "c": {"host": "three", "rdma_domain": "B"},
}
KINDS = ("fork", "next_turn", "wake_up")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    # Bytes cost next to nothing wherever they come from: only the wall keeps them in.
    prices = ("--domain-bytes-per-s", "2e8", "--far-bytes-per-s", "2e8")
    made = Live(tmp_path, "--topology", "required", *prices, nodes="abc", places=PLACES)
    try:
        yield made
    finally:
        made.close()


def without_wall(inputs: str) -> Plan:
    """The same plan, were distance only a price."""
    found = PlanInputs.from_text(inputs)
    open_to_all = msgspec.structs.replace(found.topology, required=False)
    return msgspec.structs.replace(found, topology=open_to_all).plan()


def cancelled(live: Live) -> float:
    metrics = live.stack.metrics()
    return sum(
        v for k, v in metrics.items() if k.startswith("kvcr_router_requests_total") and "cancelled" in k
    )


def test_nothing_leaves_a_domain_that_is_required(live: Live) -> None:
    histories = {kind: prompt_of(BLOCKS, kind) for kind in (*KINDS, "request", "many")}
    tokens = {kind: live.ran(f"{kind} of a", prompt, "a") for kind, prompt in histories.items()}
    c = live.nodes["c"].worker
    assert c is not None
    for node in "ab":
        # What is begun counts as done after a while; what is behind it waits.
        live.keep_busy(node, 100, seed="begun")
        live.keep_busy(node, 200, seed="behind")
    with live.busy("a", blocks=800), live.busy("b", blocks=800):
        begun_s = time.monotonic()
        # Copies ahead of a turn.
        child = live.kv.fork("child", parent="fork of a", isl=340, starts_in_s=3.0, runs_s=300.0, wait_s=10.0)
        turn = live.kv.next_turn("next_turn of a", starts_in_s=2.0, isl=400, osl=20, wait_s=10.0)
        # A copy for a request that is here; and copies for many that want one prefix.
        there, hint = live.ask("request of a", histories["request"] + "z" * 40)
        assert (there.name, hint) == ("c", None), "it is computed there"
        for number in range(12):
            there, hint = live.ask(f"one of many {number}", histories["many"] + f"{number}" * 40)
            assert there.name != "c" or hint is None
        # What is less than it was for a while is a trend, once the fast average has followed.
        time.sleep(max(0.0, begun_s + 15.0 - time.monotonic()))
    until(lambda: cancelled(live) == 2, "the router knows that two clients left")
    time.sleep(6.0)
    woken = live.kv.wake_up("wake_up of a", idle_s=2400.0, isl=400, osl=20, wait_s=10.0)
    replies = dict(zip(KINDS, (child, turn, woken), strict=True))
    for kind, reply in replies.items():
        assert (reply.decision, reply.blocks, reply.guard) == ("none", 0, "c"), kind
    assert pulled(live, "c") == 0
    for kind in histories:
        assert live.a.has(tokens[kind]) == [True] * BLOCKS, "nothing was moved away either"

    # All of that would have been copied to c: the plans made again from their inputs.
    plans = {
        plan["plan_id"]: plan for plan in asyncio.run(explain(live.stack, {"last": 100, "inputs": True}))
    }
    for kind, reply in replies.items():
        free = without_wall(plans[reply.plan_id]["inputs"])
        assert (free.rank[0], free.chosen.copied_blocks) == (c.worker_id, BLOCKS), kind
        assert any(run.frees for run in free.sources) is (kind == "wake_up"), "what only it uses, moved"
    to_c = [plan for plan in plans.values() if plan["worker_id"] == c.worker_id and plan["request_id"]]
    copied = [without_wall(plan["inputs"]).chosen.copied_blocks for plan in to_c]
    assert copied.count(BLOCKS) >= 2, "the request's and at least one of the many's"

    # Inside the domain copies are made.
    prompt = histories["request"] + "inside"
    there, hint = live.ask("inside", prompt, nvext=live.pin("b"))
    assert hint is not None
    assert {source["guard"] for source in hint["actions"][0]["payload"]["sources"]} == {"a"}
    assert there.fetch(hint, live.tokens(prompt)) == [BlockStatus.OK] * BLOCKS
    until(lambda: pulled(live, "b") == BLOCKS, "counted, a moment later")
    assert pulled(live, "c") == 0
