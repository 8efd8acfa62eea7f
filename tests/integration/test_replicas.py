# SPDX-License-Identifier: Apache-2.0
"""Two router replicas behind one frontend behave as one: real etcd and NATS, fake workers and guards."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcr.harness import Harness, headers
from tests.integration.router_stack import Part, Stack, Worker, at_once, until
from tests.integration.test_router import prompt_of
from tests.integration.tiny_tokenizer import READY, tokenize, write_model

pytestmark = pytest.mark.timeout(240)

ROUTERS = ("router", "router-2")
BLOCKS = 20


class Pair:
    """Two routers, two workers with a guard each, and the frontend that spreads requests over the routers."""

    def __init__(self, directory: Path) -> None:
        self.stack = Stack(directory, write_model(directory / "tiny"))
        stack = self.stack
        stack.frontend()
        self.routers = {name: self.start(name) for name in ROUTERS}
        self.guards: dict[str, Part] = {}
        self.workers: dict[str, Worker] = {}
        for number, (guard, worker) in enumerate(at_once(*(partial(stack.node, n) for n in range(2)))):
            self.guards[f"g{number}"], self.workers[f"w{number}"] = guard, worker
        stack.ready()
        until(lambda: all(self.heard(name) == 2 for name in ROUTERS), "the routers find each other")
        for name in ROUTERS:
            stack.joined(2, name)
        # The frontend hears of each of them in its own time.
        until(lambda: stack.ask(READY) and all(self.served(name) for name in ROUTERS), "it asks both")

    def start(self, name: str) -> Part:
        return self.stack.router("--prefill-tokens-per-s", "2000", "--host-bytes-per-s", "1e9", name=name)

    def heard(self, router: str) -> float:
        return self.stack.metrics(router).get("kvcr_router_replicas", 0.0)

    def pin(self, worker: str) -> dict[str, Any]:
        return {"annotations": [f"kvcr.worker:{self.workers[worker].worker_id}"]}

    def turn(self, session: str, prompt: str, worker: str = "", **options: Any) -> str:
        """One request of a session; returns the worker that got it."""
        for each in self.workers.values():
            each.silent("-")
        if worker:
            options["nvext"] = self.pin(worker)
        extra = options.pop("headers", {})
        status, answer = self.stack.ask(prompt, headers=headers(session) | extra, **options)
        assert status == 200, answer
        got: str = until(
            lambda: next((name for name, each in self.workers.items() if not each.silent("request")), ""),
            "a worker says that it got the request",
        )
        return got

    def served(self, router: str) -> float:
        counts = self.stack.metrics(router)
        return sum(v for k, v in counts.items() if k.startswith("kvcr_router_requests_total"))

    @contextlib.contextmanager
    def busy(self, worker: str) -> Iterator[None]:
        """A prompt that this worker does not get done with, whichever router sends it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.stack.http_port, timeout=60)
        messages = [{"role": "user", "content": prompt_of(300, "long")}]
        body = {"model": "tiny", "messages": messages, "nvext": self.pin(worker)}
        header = {"content-type": "application/json", "x-dynamo-meta-behaviour": "hang"}
        booked = "kvcr_router_plan_seconds_count"
        before = sum(self.stack.metrics(name).get(booked, 0.0) for name in ROUTERS)
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), header)
        until(
            lambda: sum(self.stack.metrics(name).get(booked, 0.0) for name in ROUTERS) > before,
            "the long request is booked",
        )
        # The other router is told of the booking, and load that lasts is more than a spike.
        time.sleep(1.0)
        yield
        connection.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made: Pair | None = None
    try:
        made = Pair(tmp_path)
        yield made
    finally:
        if made is not None:
            made.stack.close()


def test_two_routers_are_one(pair: Pair) -> None:
    stack = pair.stack
    one, two = (stack.harness(name) for name in ROUTERS)

    # The frontend spreads requests, and each router knows the sessions of both.
    before = {router: pair.served(router) for router in ROUTERS}
    sessions = [f"s{n}" for n in range(6)]
    for name in sessions:
        pair.turn(name, prompt_of(BLOCKS, name), "w0")
    until(lambda: all(pair.served(router) >= before[router] + 2 for router in ROUTERS), "both served")

    def known(kv: Harness, session: str) -> bool:
        info = kv.session(session)
        return info is not None and (info.blocks, info.home) == (BLOCKS, "g0")

    for name in sessions:
        for kv in (one, two):
            until(lambda kv=kv, name=name: known(kv, name), f"{name} is known at both, with its home")

    # Both indexes are built from the guards.
    prompt = prompt_of(BLOCKS, "s0")
    pair.guards["g0"].tell(store=tokenize(stack.model, prompt))
    for router in ROUTERS:
        until(lambda router=router: stack.indexed("g0", router) >= BLOCKS, "both index the block")

    # A turn that is announced at one router runs as planned at whichever the frontend chooses.
    with pair.busy("w0"):
        reply = one.next_turn("s0", starts_in_s=8.0, signal_id="t1", wait_s=0)
        assert (reply.guard, reply.decision) == ("g1", "prefetch")
        until(lambda: two.session("s0").announced, "the other router knows of the turn")
        assert two.signal("t1").plan_id == reply.plan_id
        assert pair.turn("s0", prompt) == "w1"
        for kv in (one, two):
            until(lambda kv=kv: not kv.session("s0").announced, "it came, for both")

        # Bookings of one are load at the other: nobody is sent to the busy worker, by neither router.
        for n in range(6):
            assert pair.turn(f"new{n}", prompt_of(3, f"new{n}")) == "w1"

    # A signal that is withdrawn at the other router.
    one.next_turn("s1", starts_in_s=50.0, signal_id="t2")
    assert two.withdraw("t2").result == "withdrawn"
    for kv in (one, two):
        until(lambda kv=kv: not kv.session("s1").announced, "withdrawn for both")


def test_a_router_that_is_killed_leaves_its_sessions_and_its_plans_to_the_other(pair: Pair) -> None:
    stack = pair.stack
    kv = {name: stack.harness(name) for name in ROUTERS}
    prompt = prompt_of(BLOCKS, "kept")
    for n in range(4):
        pair.turn(f"kept{n}", prompt, "w0")
        for harness in kv.values():
            until(lambda harness=harness, n=n: harness.session(f"kept{n}"), "both know the session")
        kv["router"].next_turn(f"kept{n}", starts_in_s=300.0, signal_id=f"k{n}")
    for n in range(4):
        # What is said is on its way for a moment; what a dead router did not get out is lost.
        until(lambda n=n: kv["router-2"].session(f"kept{n}").announced, "the other was told of the turn")
    pair.routers["router"].kill()
    until(lambda: pair.heard("router-2") == 1, "the survivor notices")
    # The frontend still lists the dead one for a while, and tries it; the other half is served.
    served = 0
    for n in range(8):
        with contextlib.suppress(OSError):
            served += stack.ask(f"{n}", headers=headers("another"))[0] == 200
    assert served >= 3
    for n in range(1, 4):
        info = kv["router-2"].session(f"kept{n}")
        assert info is not None
        assert info.blocks >= 1
    announced = [turn.signal_id for n in range(1, 4) for turn in kv["router-2"].session(f"kept{n}").announced]
    assert announced == ["k1", "k2", "k3"]

    # It comes back with nothing, and is told.
    pair.routers["router"] = pair.start("router")
    until(lambda: pair.heard("router-2") == 2, "they find each other again")
    until(lambda: kv["router"].session("kept1"), "the new one is told of sessions")
