# SPDX-License-Identifier: Apache-2.0
"""``kvcr drain`` and ``kvcr mode``: a live router obeys, and the command says what came of it.

And ``kvcr top --hot`` and ``kvcr explain``: what it knows of its requests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import command
import pytest
from router_stack import BLOCK, Stack, Worker, until
from tiny_tokenizer import write_model
from tokenizers import Tokenizer

pytestmark = pytest.mark.timeout(240)

BLOCKS = 20


class Scene:
    """A router, and two workers of which the first one's guard holds a prompt."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        stack.frontend()
        stack.router("--prefill-tokens-per-s", "2000")
        self.guard, control = stack.guard("g0")
        _, other = stack.guard("g1")
        self.holder = stack.worker("w0", "--control", control)
        self.other = stack.worker("w1", "--control", other)
        stack.ready()
        stack.joined(2)
        self._prompts = 0

    def held(self) -> str:
        """A prompt that nobody asked for yet and whose blocks the first worker's guard has."""
        self._prompts += 1
        prompt = f"{self._prompts}. prompt, held by the first. ".ljust(BLOCKS * BLOCK + 5, "x")
        encoder = Tokenizer.from_file(str(self.stack.model / "tokenizer.json"))
        before = self.stack.indexed("g0")
        self.guard.tell(store=encoder.encode(f"<|user|>{prompt}<|assistant|>").ids)
        until(lambda: self.stack.indexed("g0") >= before + BLOCKS, "the inventory is indexed")
        return prompt

    def kvcr(self, *words: str, code: int = 0) -> dict[str, Any]:
        return command.kvcr(self.stack.environment, *words, code=code)

    def asked(self, worker: Worker, **options: Any) -> dict[str, Any]:
        """Ask for a held prompt, pinned to a worker; the request as that worker got it."""
        prompt = self.held()
        worker.silent("-")
        pin = {"annotations": [f"kvcr.worker:{worker.worker_id}"]}
        assert self.stack.ask(prompt, nvext=pin, **options)[0] == 200
        request: dict[str, Any] = worker.expect("request")["request"]
        return request


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    stack = Stack(tmp_path_factory.mktemp("stack"), write_model(tmp_path_factory.mktemp("model") / "tiny"))
    try:
        yield Scene(stack)
    finally:
        stack.close()


def test_in_shadow_mode_a_plan_is_made_and_nothing_is_moved(scene: Scene) -> None:
    assert scene.asked(scene.other).get("kv_hint"), "with mode on there is a hint"
    assert set(scene.kvcr("mode", "shadow").values()) == {"shadow"}
    try:
        plans = scene.stack.metrics()['kvcr_router_planned_tokens_total{tier="peer"}']
        assert not scene.asked(scene.other).get("kv_hint")
        after = scene.stack.metrics()['kvcr_router_planned_tokens_total{tier="peer"}']
        assert after > plans, "the plan still counts what it would have copied"
    finally:
        assert set(scene.kvcr("mode", "on").values()) == {"on"}
    assert scene.asked(scene.other).get("kv_hint")


def test_off_plans_as_if_there_were_no_pools(scene: Scene) -> None:
    assert set(scene.kvcr("mode", "off").values()) == {"off"}
    try:
        plans = scene.stack.metrics()['kvcr_router_planned_tokens_total{tier="peer"}']
        assert not scene.asked(scene.other).get("kv_hint")
        assert scene.stack.metrics()['kvcr_router_planned_tokens_total{tier="peer"}'] == plans
    finally:
        assert set(scene.kvcr("mode", "on").values()) == {"on"}
    assert set(scene.kvcr("mode").values()) == {"on"}, "asked without an argument it only tells"


def test_a_drained_worker_gets_nothing_new_and_its_requests_go_on(scene: Scene) -> None:
    holder = scene.holder
    answers: list[int] = []
    hang = {"headers": {"x-dynamo-meta-behaviour": "slow"}}
    pin = {"annotations": [f"kvcr.worker:{holder.worker_id}"]}
    holder.silent("-")
    running = threading.Thread(
        target=lambda: answers.append(
            scene.stack.ask("Takes its time. ".ljust(200, "y"), nvext=pin, timeout_s=60, **hang)[0]
        )
    )
    running.start()
    holder.expect("request")
    report = scene.kvcr("drain", "g0", "--wait-s", "60")
    running.join(60)
    assert answers == [200], "what ran was not disturbed"
    assert report == {"worker": f"{holder.worker_id:x}", "draining": True, "requests": 0}
    holder.silent("-")
    for number in range(4):
        assert scene.stack.ask(f"{number} " + scene.held())[0] == 200
    assert holder.silent("request"), "a drained worker got a request"
    hint = scene.asked(scene.other)["kv_hint"]
    assert hint["actions"][0]["payload"]["sources"][0]["guard"] == "g0", "its pool is still read"
    scene.kvcr("drain", f"{holder.worker_id:x}", "--undo")
    assert scene.asked(holder)


def test_the_prefix_that_many_ask_for_is_the_hottest(scene: Scene) -> None:
    prompt = scene.held()
    for number in range(12):
        assert scene.stack.ask(prompt + f" {number}")[0] == 200
    hottest = scene.kvcr("top", "--hot", "--count", "1")["hot"][0]
    assert hottest["blocks"] == 16, "the longest of 1, 2, 4, ... blocks that all of them share"
    assert "g0" in hottest["guards"]
    assert hottest["per_s"] > 0
    metrics = scene.stack.metrics()
    assert metrics['kvcr_router_hot_prefix_blocks{rank="01"}'] == 16
    assert metrics['kvcr_router_hot_prefix_guards{rank="01"}'] == len(hottest["guards"])
    shown = int(metrics['kvcr_router_hot_prefix_key{rank="01"}'])
    assert f"{shown:012x}" == hottest["key"][:12]
    assert metrics["kvcr_router_bus_connects_total"] == 1
    until(
        lambda: scene.stack.metrics()['kvcr_router_inventory_lag_batches{guard="g0"}'] == 0, "no event waits"
    )


def test_the_last_plan_is_explained(scene: Scene) -> None:
    assert scene.stack.ask(scene.held())[0] == 200
    plan = scene.kvcr("explain")
    assert plan["plan_id"]
    assert scene.kvcr("explain", plan["plan_id"])["request_id"] == plan["request_id"]
    assert "no plan of nobody is known" in scene.kvcr("explain", "nobody", code=1)["error"]


def test_an_unknown_worker_is_refused_with_the_known_ones(scene: Scene) -> None:
    error = scene.kvcr("drain", "g9", code=2)["error"]
    assert "no worker 'g9'" in error
    assert "(g0)" in error


def test_an_etcd_that_is_away_is_an_error_of_one_line(scene: Scene) -> None:
    error = scene.kvcr("mode", "--etcd", "http://127.0.0.1:9", code=1)["error"]
    assert error.startswith("kvcr mode: etcd at http://127.0.0.1:9 does not answer")
    assert len(error.splitlines()) == 1
