# SPDX-License-Identifier: Apache-2.0
"""The router between a stock frontend and Dynamo workers, with real etcd and NATS."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import nats
import pytest

from kvcr.dynamo.etcd import connect
from kvcr.keys import KeySpace, extend_chain
from kvcr.protocol.events import (
    DEMOTE,
    DemotePayload,
    FetchPayload,
    HintNotice,
    Locations,
    actions_subject,
    event,
    hints_subject,
    locations_subject,
    stream_name,
)
from router_hints.inventory import SILENT_S
from tests.integration.router_stack import BLOCK, Part, Stack, Worker, at_once, until
from tests.integration.tiny_tokenizer import tokenize, write_model
from tests.integration.waiting import BUSY_S, PATIENCE_S, eventually

pytestmark = pytest.mark.timeout(240)

PROMPT_BLOCKS = 20
MODEL = "tiny@test+0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


class Scene:
    """Two workers with a guard each, a router and a frontend: most tests need just this."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.frontend = stack.frontend()
        self.router = stack.router("--prefill-tokens-per-s", "2000")
        self.guards: dict[str, Part] = {}
        self.workers: dict[str, Worker] = {}
        for number, (guard, worker) in enumerate(at_once(*(partial(stack.node, n) for n in range(2)))):
            self.guards[f"g{number}"], self.workers[f"w{number}"] = guard, worker
        stack.ready()
        stack.joined(2)

    def ask(self, prompt: str, worker: str = "", **options: Any) -> tuple[int, dict[str, Any]]:
        if worker:
            pin = f"kvcr.worker:{self.workers[worker].worker_id}"
            options["nvext"] = {"annotations": [pin]}
        return self.stack.ask(prompt, **options)

    def seen(self, worker: str) -> dict[str, Any]:
        """The next request that this worker got."""
        return self.workers[worker].expect("request")

    def quiet(self) -> None:
        """Forget what workers said so far."""
        for worker in self.workers.values():
            worker.silent("-")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Scene]:
    stack = Stack(tmp_path_factory.mktemp("stack"), model)
    try:
        yield Scene(stack)
    finally:
        stack.close()


def prompt_of(blocks: int, seed: str) -> str:
    """A prompt whose tokens (one a byte, and two markers) fill ``blocks`` blocks and a little."""
    return (seed + ". ").ljust(blocks * BLOCK + 5, "x")


class Listener:
    """Collects what is published on a subject: until it is ``enough``, and for a moment more."""

    def __init__(self, url: str, subject: str) -> None:
        self._url = url
        self._subject = subject

    def during(self, action: Any, enough: Callable[[list[Any]], bool] = bool) -> list[Any]:
        async def run() -> list[Any]:
            client = await nats.connect(self._url)
            got: list[Any] = []

            async def keep(message: Any) -> None:
                got.append(event.decode(message.data))

            await client.subscribe(self._subject, cb=keep)
            await client.flush()
            await asyncio.to_thread(action)
            await eventually(lambda: enough(got), f"enough is heard on {self._subject}")
            await asyncio.sleep(0.2)
            await client.close()
            return got

        return asyncio.run(run())


# --- the main case ----------------------------------------------------------------------------------------


def test_a_request_for_a_lacking_worker_carries_a_fetch_from_the_holder_and_nats_a_copy(scene: Scene) -> None:
    prompt = prompt_of(PROMPT_BLOCKS, "held by g1")
    tokens = tokenize(scene.stack.model, prompt)
    before = scene.stack.indexed("g1")
    scene.guards["g1"].tell(store=tokens)
    until(lambda: scene.stack.indexed("g1") >= before + PROMPT_BLOCKS, "the inventory is indexed")
    scene.quiet()

    listener = Listener(scene.stack.nats.url, hints_subject("dynamo", "g0"))
    notices = listener.during(lambda: scene.ask(prompt, worker="w0"))
    request = scene.seen("w0")["request"]

    assert request["token_ids"] == tokens
    assert request["routing"]["backend_instance_id"] == scene.workers["w0"].worker_id
    assert request["routing"]["dp_rank"] == 0
    (action,) = request["kv_hint"]["actions"]
    assert (action["action_type"], action["action_version"]) == ("kv.fetch", "2.0")
    payload = msgspec.convert(action["payload"], FetchPayload)
    (source,) = payload.sources
    chain = extend_chain(KeySpace("dynamo", MODEL).root(), tokens, BLOCK)
    assert (source.guard, source.first, source.count) == ("g1", 0, PROMPT_BLOCKS)
    assert source.endpoint.startswith("tcp://127.0.0.1:")
    assert payload.last_key == chain[PROMPT_BLOCKS - 1].hex()
    assert payload.give_up_ms > 0

    (notice,) = notices
    assert isinstance(notice, HintNotice)
    assert json.loads(notice.envelope) == request["kv_hint"]
    assert (notice.plan_id, notice.worker_id) == (payload.plan_id, scene.workers["w0"].worker_id)


def test_an_idle_holder_gets_the_request_and_no_hint(scene: Scene) -> None:
    prompt = prompt_of(PROMPT_BLOCKS, "an idle holder")
    before = scene.stack.indexed("g1")
    scene.guards["g1"].tell(store=tokenize(scene.stack.model, prompt))
    until(lambda: scene.stack.indexed("g1") >= before + PROMPT_BLOCKS, "the inventory is indexed")
    scene.quiet()
    assert scene.ask(prompt)[0] == 200
    assert scene.seen("w1")["request"].get("kv_hint") is None


def test_a_busy_holder_is_copied_from_and_need_not_keep_its_own(scene: Scene) -> None:
    prompt = prompt_of(PROMPT_BLOCKS, "a busy holder")
    tokens = tokenize(scene.stack.model, prompt)
    before = scene.stack.indexed("g1")
    scene.guards["g1"].tell(store=tokens)
    until(lambda: scene.stack.indexed("g1") >= before + PROMPT_BLOCKS, "the inventory is indexed")
    scene.quiet()
    # Its prefill never ends while the client waits: thousands of tokens stay booked on w1.
    hang = {"headers": {"x-dynamo-meta-behaviour": "hang"}, "nvext": _pin(scene.workers["w1"])}
    with Blocked(scene, prompt_of(200, "long"), hang):
        scene.seen("w1")
        listener = Listener(scene.stack.nats.url, actions_subject("dynamo", "g1"))
        acts = listener.during(lambda: scene.ask(prompt))
        hint = scene.seen("w0")["request"]["kv_hint"]
        assert hint["actions"][0]["payload"]["sources"][0]["guard"] == "g1"
    (act,) = acts
    (action,) = json.loads(act.envelope)["actions"]
    assert (act.plan_id, action["action_type"]) == (hint["message_id"], DEMOTE)
    payload = msgspec.convert(action["payload"], DemotePayload)
    chain = extend_chain(KeySpace("dynamo", MODEL).root(), tokens, BLOCK)
    assert (payload.keys, payload.descendants) == (b"".join(chain[:PROMPT_BLOCKS]), False)
    scene.workers["w1"].expect("cancelled")


def test_a_request_queues_behind_a_prompt_it_begins_like(scene: Scene) -> None:
    prompt = prompt_of(200, "computed now")
    hang = {"headers": {"x-dynamo-meta-behaviour": "hang"}, "nvext": {}}
    scene.quiet()
    with Blocked(scene, prompt, hang):
        first = until(lambda: _who_got(scene, prompt), "the first request reaches a worker")
        # For a second of its prefill of 1.6 s it has been computing.
        time.sleep(1.0)
        assert scene.ask(prompt + " and more")[0] == 200
        assert until(lambda: _who_got(scene, prompt + " and more"), "a worker got it") == first
    scene.workers[first].expect("cancelled")


def _who_got(scene: Scene, prompt: str) -> str:
    """The worker that said that it got a request with this prompt."""
    tokens = tokenize(scene.stack.model, prompt)
    for name, worker in scene.workers.items():
        worker.silent("-")
        for said in worker.said:
            if said.get("kind") == "request" and said["request"]["token_ids"] == tokens:
                return name
    return ""


class Blocked:
    """A request that hangs at its worker while the block runs; then its client disconnects."""

    def __init__(self, scene: Scene, prompt: str, options: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", scene.stack.http_port, timeout=30)
        body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "nvext": options["nvext"]}
        headers = {"content-type": "application/json"} | options["headers"]
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _pin(worker: Worker) -> dict[str, Any]:
    return {"annotations": [f"kvcr.worker:{worker.worker_id}"]}


def test_blocks_in_engine_memory_attract_the_request(scene: Scene) -> None:
    prompt = prompt_of(PROMPT_BLOCKS, "in engine memory")
    planned = 'kvcr_router_planned_tokens_total{tier="g1"}'

    def known() -> bool:
        """Whether a plan for the worker that announced the prompt as stored counts on that."""
        before = scene.stack.metrics().get(planned, 0)
        scene.ask(prompt, worker="w1")
        return scene.stack.metrics().get(planned, 0) >= before + PROMPT_BLOCKS * BLOCK

    until(known, "the router heard of its event", every_s=0.2)
    scene.quiet()
    assert scene.ask(prompt)[0] == 200
    assert scene.seen("w1")["request"].get("kv_hint") is None


def test_tenants_do_not_share(scene: Scene) -> None:
    prompt = prompt_of(PROMPT_BLOCKS, "two tenants")
    before = scene.stack.indexed("g1")
    scene.guards["g1"].tell(store=tokenize(scene.stack.model, prompt))
    until(lambda: scene.stack.indexed("g1") >= before + PROMPT_BLOCKS, "the inventory is indexed")
    scene.quiet()
    nvext = _pin(scene.workers["w0"]) | {"cache_salt": "another tenant"}
    assert scene.stack.ask(prompt, nvext=nvext)[0] == 200
    assert scene.seen("w0")["request"].get("kv_hint") is None


# --- pinning ----------------------------------------------------------------------------------------------


def test_the_header_pins_as_the_annotation_does(scene: Scene) -> None:
    for worker in scene.workers.values():
        scene.quiet()
        headers = {"x-dynamo-meta-kvcr-worker": str(worker.worker_id)}
        assert scene.stack.ask("pinned", headers=headers)[0] == 200
        worker.expect("request")


def test_a_pin_to_nobody_and_a_pin_that_is_no_number(scene: Scene) -> None:
    assert scene.stack.ask("x", nvext={"annotations": ["kvcr.worker:12345"]})[0] == 503
    assert scene.stack.ask("x", nvext={"annotations": ["kvcr.worker:w0"]})[0] == 400
    assert scene.stack.ask("still served")[0] == 200


def test_the_frontend_itself_refuses_backend_instance_id(scene: Scene) -> None:
    """Documented in docs/hints.md; should a later Dynamo pass it on, the router already honours it."""
    nvext = {"backend_instance_id": scene.workers["w0"].worker_id}
    assert scene.stack.ask("x", nvext=nvext)[0] == 400


# --- streams and errors -----------------------------------------------------------------------------------


def test_a_stream_passes_through_as_it_comes(scene: Scene) -> None:
    headers = {"x-dynamo-meta-behaviour": "slow"}
    begun = time.monotonic()
    with scene.stack.stream("slowly", headers=headers) as chunks:
        texts = []
        for chunk in chunks:
            texts.append(chunk["choices"][0]["delta"].get("content") or "")
            if len(texts) >= 4:
                break
        # Ten tokens a second: all of them would take twenty.
        assert time.monotonic() - begun < BUSY_S
    assert "".join(texts)


def test_a_client_that_does_not_read_holds_up_nobody_else(scene: Scene) -> None:
    scene.quiet()
    flooding = scene.workers["w0"]
    options = {"headers": {"x-dynamo-meta-behaviour": "flood"}, "nvext": _pin(flooding)}
    with scene.stack.stream("endless", max_tokens=1_048_576, receive_bytes=4096, **options) as chunks:
        next(chunks)
        flooding.expect("flooding", at=1000)

        def waits() -> bool:
            flooding.silent("-")
            time.sleep(1.0)
            return flooding.silent("flooding")

        until(waits, "everything between worker and client is full", 60.0)
        for number in range(10):
            assert scene.ask(f"meanwhile {number}")[0] == 200
        taken = max(said["at"] for said in flooding.said if said["kind"] == "flooding")
        assert taken < 49_000, "all of it was taken: nothing was tested"
    flooding.expect("cancelled")


def test_a_client_that_disconnects_reaches_the_worker_and_frees_the_booking(scene: Scene) -> None:
    scene.quiet()
    options = {"headers": {"x-dynamo-meta-behaviour": "slow"}, "nvext": _pin(scene.workers["w0"])}
    with scene.stack.stream("gone soon", **options) as chunks:
        next(chunks)
    scene.workers["w0"].expect("cancelled")
    name = 'kvcr_router_requests_total{guard="g0",outcome="cancelled"}'
    until(lambda: scene.stack.metrics().get(name, 0) >= 1, "the request is booked off as cancelled")


def test_an_error_of_the_worker_passes_through_once(scene: Scene) -> None:
    scene.quiet()
    status, _ = scene.ask("x", worker="w0", headers={"x-dynamo-meta-behaviour": "error"})
    assert status == 400  # a ValueError in a worker, as a stock deployment answers it
    scene.seen("w0")
    assert scene.workers["w0"].silent("request")
    assert scene.stack.ask("still served")[0] == 200


def test_an_error_after_the_first_output_is_not_planned_again(scene: Scene) -> None:
    scene.quiet()
    status, _ = scene.ask("x", worker="w0", headers={"x-dynamo-meta-behaviour": "late"})
    assert status == 400
    scene.seen("w0")
    assert scene.workers["w0"].silent("request")


# --- events -----------------------------------------------------------------------------------------------


def test_a_lost_event_is_replayed_and_a_removed_block_is_not_offered(scene: Scene) -> None:
    prompt = prompt_of(PROMPT_BLOCKS, "lost and removed")
    tokens = tokenize(scene.stack.model, prompt)
    before = scene.stack.indexed("g1")
    asked = scene.guards["g1"].tell(lose=tokens)["asked"]
    until(lambda: scene.stack.indexed("g1") >= before + PROMPT_BLOCKS, "the heartbeat shows the loss")
    now = scene.guards["g1"].tell()["asked"]
    # Once, unless a busy guard answered late.
    assert now["replay"] > asked["replay"]
    assert now["snapshot"] == asked["snapshot"]
    scene.guards["g1"].tell(remove=tokens)
    until(lambda: scene.stack.indexed("g1") == before, "the removal is indexed")
    scene.quiet()
    scene.ask(prompt, worker="w0")
    assert scene.seen("w0")["request"].get("kv_hint") is None


def test_a_holder_that_the_target_cannot_read_is_no_source_until_it_can(scene: Scene) -> None:
    # One each time, as a worker is taken to have what it was asked.
    first, second = (prompt_of(PROMPT_BLOCKS, f"{n} held where nobody gets it") for n in ("first", "second"))
    before = scene.stack.indexed("g1")
    for prompt in (first, second):
        scene.guards["g1"].tell(store=tokenize(scene.stack.model, prompt))
    until(lambda: scene.stack.indexed("g1") >= before + 2 * PROMPT_BLOCKS, "the inventory is indexed")
    told = 'kvcr_router_unready_sources{guard="g0"}'
    scene.guards["g0"].tell(unready=["g1"])
    until(lambda: scene.stack.metrics().get(told) == 1, "the router heard that g0 cannot read from g1")
    scene.quiet()
    scene.ask(first, worker="w0")
    assert scene.seen("w0")["request"].get("kv_hint") is None
    scene.guards["g0"].tell(unready=[])
    until(lambda: scene.stack.metrics().get(told) == 0, "the router heard that it can")
    scene.quiet()
    scene.ask(second, worker="w0")
    (action,) = scene.seen("w0")["request"]["kv_hint"]["actions"]
    assert [source["guard"] for source in action["payload"]["sources"]] == ["g1"]


def test_locations_are_published_and_kept(scene: Scene) -> None:
    prompt = prompt_of(PROMPT_BLOCKS, "locations")
    tokens = tokenize(scene.stack.model, prompt)

    def act() -> None:
        scene.guards["g1"].tell(store=tokens)
        scene.ask(prompt, worker="w0")

    def enough(got: list[Any]) -> bool:
        return {1, 2} <= {each.tier for each in got if isinstance(each, Locations)}

    got = Listener(scene.stack.nats.url, locations_subject("dynamo")).during(act, enough)
    by_tier = {each.tier: each for each in got if isinstance(each, Locations)}
    assert by_tier[2].guard == "g1"
    assert by_tier[2].worker_id == scene.workers["w1"].worker_id
    assert len(by_tier[2].stored_keys) == 16 * PROMPT_BLOCKS
    assert (by_tier[1].guard, by_tier[1].worker_id) == ("g0", scene.workers["w0"].worker_id)
    assert len(by_tier[1].stored_hashes) >= 8 * PROMPT_BLOCKS

    async def kept() -> int:
        client = await nats.connect(scene.stack.nats.url)
        info = await client.jetstream().stream_info(stream_name("dynamo", "locations"))
        await client.close()
        assert info.config.max_age
        assert info.config.max_bytes
        return info.state.messages

    assert asyncio.run(kept()) >= 2


def test_explain_says_why(scene: Scene) -> None:
    scene.quiet()
    scene.ask("why", worker="w0")
    seen = scene.seen("w0")
    (plan,) = asyncio.run(explain(scene.stack, {"request_id": seen["id"]}))
    assert plan["worker_id"] == scene.workers["w0"].worker_id
    assert (plan["reason"], plan["outcome"]) == ("pinned", "ok")
    assert plan["candidates"][0]["prefill_s"] > 0


def test_explain_asks_the_running_router_and_plans_again(scene: Scene) -> None:
    scene.quiet()
    scene.ask("why again", worker="w1")
    seen = scene.seen("w1")
    told = subprocess.run(
        [sys.executable, "-m", "router_hints", "explain", seen["id"], "--replay"],
        env=scene.stack.environment | {"DYN_REQUEST_PLANE": scene.stack.request_plane},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert f"{scene.workers['w1'].worker_id:x}" in told.stdout
    assert "replay: equal" in told.stdout


async def explain(stack: Stack, query: dict[str, Any]) -> list[dict[str, Any]]:
    script = (
        "import asyncio, json, sys\n"
        "from dynamo.runtime import DistributedRuntime\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    runtime = DistributedRuntime(loop, 'etcd', sys.argv[1], event_plane='nats')\n"
        "    client = await runtime.endpoint('dynamo.router.explain').client()\n"
        "    await client.wait_for_instances()\n"
        "    async for found in await client.round_robin(json.loads(sys.argv[2]), annotated=False):\n"
        "        print(json.dumps({'kind': 'plans', 'plans': found}), flush=True)\n"
        "    runtime.shutdown()\n"
        "asyncio.run(main())\n"
    )
    part = stack.start("explain", ["-c", script, stack.request_plane, json.dumps(query)])
    plans: list[dict[str, Any]] = part.expect("plans", 30.0)["plans"]
    return plans


def test_metrics_are_served(scene: Scene) -> None:
    metrics = scene.stack.metrics()
    assert metrics['kvcr_router_hints_total{action="kv.fetch"}'] >= 1
    assert metrics["kvcr_router_plan_seconds_count"] >= 1
    assert metrics["kvcr_router_first_output_seconds_count"] >= 1
    assert metrics['kvcr_router_workers{state="ready"}'] == 2
    assert metrics["kvcr_router_ranks_without_guard"] == 0


# --- failures: each test brings its own deployment --------------------------------------------------------


@pytest.fixture
def stack(tmp_path: Path, model: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, model)
    try:
        yield stack
    finally:
        stack.close()


def test_without_guards_requests_go_to_workers_with_room(stack: Stack) -> None:
    stack.frontend()
    stack.router()
    workers = [stack.worker(f"w{n}") for n in range(2)]
    stack.ready()
    stack.joined(2)
    for number in range(8):
        assert stack.ask(f"{number} " * 40)[0] == 200
    requests = [w.expect("request") for w in workers]
    assert all(r["request"].get("kv_hint") is None for r in requests)


def test_a_worker_killed_before_its_first_output_costs_a_plan_not_the_request(stack: Stack) -> None:
    stack.frontend()
    stack.router()
    workers = [stack.worker(f"w{n}") for n in range(2)]
    stack.ready()
    stack.joined(2)
    # Dead, but listed until its lease ends: dispatches to it fail to connect.
    workers[0].kill()
    for number in range(6):
        assert stack.ask(f"{number} " * 40)[0] == 200
    # Killed with the request in its hands.
    stack.worker("w2")
    victim = workers[1]
    until(lambda: victim.silent("request"), "w1 has nothing unread")
    headers = {"x-dynamo-meta-behaviour": "hang:w1"}
    answers: list[int] = []
    for number in range(20):
        prompt = f"{number} is in its hands"
        client = threading.Thread(target=lambda p=prompt: answers.append(stack.ask(p, headers=headers)[0]))
        client.start()
        client.join(1.0)
        if client.is_alive():
            victim.expect("request")
            victim.kill()
            client.join(20)
            break
    assert victim.process.poll() is not None
    assert set(answers) == {200}

    def unreachable() -> float:
        return sum(v for k, v in stack.metrics().items() if 'outcome="unreachable"' in k)

    before = unreachable()
    assert before >= 1
    # Stopped, it is connected to and takes no request.
    stopped = stack.worker("w3")
    numbers = itertools.count()

    def answered() -> bool:
        assert stack.ask(f"{next(numbers)} looks for it")[0] == 200
        return True

    until(lambda: answered() and not stopped.silent("request"), "w3 is used")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        until(lambda: answered() and unreachable() > before, "a request finds w3 stopped")
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)


def test_all_workers_gone_is_a_503_and_a_new_worker_is_used(stack: Stack) -> None:
    stack.frontend()
    stack.router()
    worker = stack.worker("w0")
    stack.ready()
    worker.kill()
    assert stack.ask("nobody")[0] == 503
    assert stack.ask("nobody")[0] == 503
    stack.worker("w1")
    stack.ready()


def test_the_router_waits_for_workers_and_stops_when_told(stack: Stack) -> None:
    stack.frontend()
    router = stack.router()
    until(lambda: "waits for workers" in router.log.read_text(), "the router waits", 60)
    time.sleep(1)
    assert router.process.poll() is None
    assert router.stop() == 0
    stack.router()
    stack.worker("w0")
    stack.ready()


def test_a_worker_with_another_block_size_gets_nothing(stack: Stack) -> None:
    stack.frontend()
    stack.router()
    odd = stack.worker("odd", "--block-size", "32")
    stack.worker("w0")
    stack.ready()
    for number in range(6):
        assert stack.ask(f"{number} " * 40)[0] == 200
    assert odd.silent("request")
    until(lambda: stack.metrics()['kvcr_router_workers{state="refused"}'] == 1, "the odd one is refused")
    assert "KV blocks of 32 tokens" in (stack.directory / "router.log").read_text()


def test_routing_goes_on_without_nats_and_hints_come_back_with_it(stack: Stack) -> None:
    scene = Scene(stack)
    stack.nats.pause()
    try:
        for number in range(4):
            assert stack.ask(f"{number} " * 40)[0] == 200
    finally:
        stack.nats.resume()
    prompt = prompt_of(PROMPT_BLOCKS, "after the pause")
    scene.guards["g1"].tell(store=tokenize(stack.model, prompt))
    until(lambda: stack.indexed("g1") == PROMPT_BLOCKS, "the inventory is indexed")


def test_routing_goes_on_without_etcd_and_forgets_nothing(stack: Stack) -> None:
    scene = Scene(stack)
    prompt = prompt_of(PROMPT_BLOCKS, "before the pause")
    scene.guards["g1"].tell(store=tokenize(stack.model, prompt))
    until(lambda: stack.indexed("g1") == PROMPT_BLOCKS, "the inventory is indexed")
    stack.etcd.pause()
    try:
        for number in range(8):
            assert stack.ask(f"{number} " * 40)[0] == 200
            time.sleep(1)
        assert stack.indexed("g1") == PROMPT_BLOCKS
    finally:
        stack.etcd.resume()
    scene.quiet()
    assert scene.ask(prompt, worker="w0")[0] == 200
    assert scene.seen("w0")["request"]["kv_hint"] is not None


def test_a_router_that_starts_late_reads_snapshots(stack: Stack) -> None:
    stack.frontend()
    guard, control = stack.guard("g0")
    other, other_control = stack.guard("g1")
    worker = stack.worker("w0", "--control", control)
    stack.worker("w1", "--control", other_control)
    prompt = prompt_of(PROMPT_BLOCKS, "before the router")
    other.tell(store=tokenize(stack.model, prompt))
    stack.router("--prefill-tokens-per-s", "2000")
    stack.ready()
    until(lambda: stack.indexed("g1") == PROMPT_BLOCKS, "the snapshot is indexed")
    # Once, unless a busy guard answered late.
    assert other.tell()["asked"]["snapshot"] >= 1
    rebuilt = until(lambda: stack.metrics()["kvcr_router_index_rebuild_seconds"], "the index is rebuilt")
    assert 0 < rebuilt < PATIENCE_S
    assert stack.ask(prompt, nvext=_pin(worker))[0] == 200
    until(lambda: not worker.silent("request"), "w0 gets the request")
    # A guard that leaves takes its blocks with it.
    other.stop()
    until(lambda: stack.indexed("g1") == 0, "g1 is forgotten")
    # Under its name comes another incarnation, with other blocks.
    again, _ = stack.guard("g1", "--incarnation", "2", "--control", other_control)
    again.tell(store=tokenize(stack.model, prompt_of(7, "after the restart")))
    until(lambda: stack.indexed("g1") == 7, "the new incarnation is indexed")
    assert guard.process.poll() is None


def test_a_silent_guard_is_no_source_but_keeps_its_blocks(stack: Stack) -> None:
    scene = Scene(stack)
    prompt = prompt_of(PROMPT_BLOCKS, "held by a silent one")
    scene.guards["g1"].tell(store=tokenize(stack.model, prompt), quiet=True)
    until(lambda: stack.indexed("g1") == PROMPT_BLOCKS, "the inventory is indexed")
    time.sleep(SILENT_S + 1)
    scene.quiet()
    assert scene.ask(prompt, worker="w0")[0] == 200
    assert scene.seen("w0")["request"].get("kv_hint") is None
    assert stack.indexed("g1") == PROMPT_BLOCKS


def test_unsigned_guards_are_ignored_in_a_deployment_with_a_secret(stack: Stack) -> None:
    secret = "a secret of this deployment, long enough"
    (stack.directory / "secret").write_text(secret)
    stack.frontend()
    _, control = stack.guard("g0", "--secret", secret)
    stack.guard("g1")
    stack.worker("w0", "--control", control)
    router = stack.router("--secret-file", str(stack.directory / "secret"))
    stack.ready()
    told = "guards/g1 is ignored: record kvcr/v1/dynamo/guards/g1 is not signed"
    until(lambda: told in router.log.read_text(), "the router says whom it does not believe")
    stack.joined(1)


def test_a_worker_lost_in_mid_stream_is_an_error_and_nothing_else(stack: Stack) -> None:
    stack.frontend()
    stack.router()
    worker, other = stack.worker("w0"), stack.worker("w1")
    stack.ready()
    stack.joined(2)
    other.silent("-")
    options = {"headers": {"x-dynamo-meta-behaviour": "slow"}, "nvext": _pin(worker)}
    with stack.stream("cut off", **options) as chunks:
        next(chunks)
        worker.kill()
        assert not any(choice.get("finish_reason") for chunk in chunks for choice in chunk.get("choices", []))
    assert other.silent("request")
    assert stack.ask("still served")[0] == 200


def test_a_stream_whose_worker_is_killed_goes_on_with_another_worker(model: Path, tmp_path: Path) -> None:
    """The frontend migrates it, with the answer so far as part of the prompt; the router plans as always."""
    stack = Stack(tmp_path, model)
    stack.environment["DYN_MIGRATION_LIMIT"] = "3"
    try:
        stack.frontend()
        stack.router()
        workers = [stack.worker("w0"), stack.worker("w1")]
        stack.ready()
        stack.joined(2)
        for worker in workers:
            worker.silent("-")
        with stack.stream("cut off", headers={"x-dynamo-meta-behaviour": "slow"}, max_tokens=50) as chunks:
            seen = [next(chunks), next(chunks), next(chunks)]
            victim = until(lambda: next((w for w in workers if not w.silent("request")), None), "a request")
            other = next(worker for worker in workers if worker is not victim)
            victim.kill()
            seen += list(chunks)
        first = [said["request"] for said in victim.said if said["kind"] == "request"][-1]
        again = other.expect("request")["request"]
        finish = [choice["finish_reason"] for chunk in seen for choice in chunk.get("choices", [])]
        assert finish[-1] in ("stop", "length")
        count = len(again["token_ids"]) - len(first["token_ids"])
        assert count >= 3
        assert again["token_ids"][:-count] == first["token_ids"]
        assert again["stop_conditions"]["max_tokens"] == 50 - count
        # Neither the router nor the worker that is left was taken out of service for it.
        assert [stack.ask(f"still served {number}")[0] for number in range(4)] == [200] * 4
    finally:
        stack.close()


def test_a_router_whose_runtime_ended_starts_over(stack: Stack) -> None:
    """As after an outage of etcd that outlasted the lease: the process stays, the model comes back."""
    stack.frontend()
    router = stack.router()
    stack.worker("w0")
    stack.ready()

    async def revoke() -> None:
        async with await connect(stack.etcd.url) as etcd:
            (entry,) = (await etcd.get_prefix("v1/instances/dynamo/router/generate/")).values
            assert await etcd.revoke(int(entry.key.rpartition("/")[2], 16))

    asyncio.run(revoke())
    until(lambda: router.log.read_text().count("serves tiny") >= 2, "the router serves again", 60)
    stack.ready()
    assert router.process.poll() is None


def test_the_nats_request_plane_works_the_same(tmp_path: Path, model: Path) -> None:
    stack = Stack(tmp_path, model, request_plane="nats")
    try:
        scene = Scene(stack)
        prompt = prompt_of(PROMPT_BLOCKS, "over nats")
        scene.guards["g1"].tell(store=tokenize(model, prompt))
        until(lambda: stack.indexed("g1") == PROMPT_BLOCKS, "the inventory is indexed")
        scene.quiet()
        assert scene.ask(prompt, worker="w0")[0] == 200
        assert scene.seen("w0")["request"]["kv_hint"]["actions"][0]["action_type"] == "kv.fetch"
    finally:
        stack.close()


# --- topology ---------------------------------------------------------------------------------------------


class Racks:
    """``a0`` and ``a1`` are in rack A, ``b`` is in rack B; copies between them are slower than computing."""

    def __init__(self, stack: Stack, *router: str, far_bytes_per_s: float = 1e5) -> None:
        self.stack = stack
        stack.frontend()
        prices = ["--prefill-tokens-per-s", "2000", "--zone-bytes-per-s", f"{far_bytes_per_s}"]
        stack.router(*prices, "--far-bytes-per-s", f"{far_bytes_per_s}", *router)
        self.guards: dict[str, Part] = {}
        self.workers: dict[str, Worker] = {}
        for name, rack in (("a0", "A"), ("a1", "A"), ("b", "B")):
            guard, control = stack.guard(name, "--domain", rack)
            self.guards[name] = guard
            self.workers[name] = stack.worker(f"w{name}", "--control", control)
        stack.ready()
        stack.joined(3)
        for worker in self.workers.values():
            worker.silent("-")

    def hold(self, prompt: str, *guards: str) -> None:
        for guard in guards:
            self.guards[guard].tell(store=tokenize(self.stack.model, prompt))
            until(lambda guard=guard: self.stack.indexed(guard) >= PROMPT_BLOCKS, f"{guard} is indexed")

    def sources(self, prompt: str, worker: str, pinned: bool = True) -> list[str]:
        """Guards that the request's hint names; the request must reach this worker."""
        options = {"nvext": _pin(self.workers[worker])} if pinned else {}
        assert self.stack.ask(prompt, **options)[0] == 200
        while True:
            request = self.workers[worker].expect("request")["request"]
            if request["token_ids"] == tokenize(self.stack.model, prompt):
                break
        hint = request.get("kv_hint")
        return [s["guard"] for s in hint["actions"][0]["payload"]["sources"]] if hint else []


def test_source_and_worker_are_chosen_inside_the_domain(stack: Stack) -> None:
    racks = Racks(stack)
    everywhere, alone = prompt_of(PROMPT_BLOCKS, "in both racks"), prompt_of(PROMPT_BLOCKS, "in one rack")
    racks.hold(everywhere, "a0", "b")
    assert racks.sources(everywhere, "a1") == ["a0"], "of equal sources the near one"
    racks.hold(alone, "a0")
    busy = {"headers": {"x-dynamo-meta-behaviour": "hang"}, "nvext": _pin(racks.workers["a0"])}
    with Blocked(racks, prompt_of(200, "long"), busy):  # type: ignore[arg-type]
        racks.workers["a0"].expect("request")
        assert racks.sources(alone, "a1", pinned=False) == ["a0"], "of idle workers the one beside the holder"


@pytest.mark.parametrize(
    ("topology", "far_bytes_per_s", "expected"),
    [("preferred", 1e9, ["a0"]), ("preferred", 1e5, []), ("required", 1e9, [])],
    ids=["beats computing", "is beaten by computing", "is forbidden"],
)
def test_a_copy_from_another_domain(
    stack: Stack, topology: str, far_bytes_per_s: float, expected: list[str]
) -> None:
    racks = Racks(stack, "--topology", topology, far_bytes_per_s=far_bytes_per_s)
    prompt = prompt_of(PROMPT_BLOCKS, "in rack A")
    racks.hold(prompt, "a0")
    assert racks.sources(prompt, "b") == expected
    assert racks.sources(prompt, "a1") == ["a0"], "inside the domain it is made in any case"


def test_data_parallel_ranks_are_sources_and_targets_like_workers(stack: Stack) -> None:
    stack.frontend()
    stack.router("--prefill-tokens-per-s", "2000")
    guards = [stack.guard(f"rank{number}") for number in range(2)]
    controls = [word for _, control in guards for word in ("--control", control)]
    server = stack.worker("w0", *controls)
    stack.ready()
    stack.joined(1)
    server.silent("-")
    scene, hang = SimpleNamespace(stack=stack), {"x-dynamo-meta-behaviour": "hang"}
    with Blocked(scene, prompt_of(200, "long"), {"headers": hang, "nvext": {}}):  # type: ignore[arg-type]
        busy = server.expect("request")["request"]["routing"]["dp_rank"]
        prompt = prompt_of(PROMPT_BLOCKS, "on a busy rank")
        guards[busy][0].tell(store=tokenize(stack.model, prompt))
        until(lambda: stack.indexed(f"rank{busy}") >= PROMPT_BLOCKS, "the inventory is indexed")
        assert stack.ask(prompt)[0] == 200
        request = server.expect("request")["request"]
        assert request["routing"]["dp_rank"] == 1 - busy
        assert request["kv_hint"]["actions"][0]["payload"]["sources"][0]["guard"] == f"rank{busy}"
