# SPDX-License-Identifier: Apache-2.0
"""The router follows a failover: real guards, router, frontend, etcd and NATS; engines that compute nothing.

A worker is killed like an engine is, with what it holds; its pool and its guard stay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest

from kvcr.protocol.events import StateChange, event, state_subject, stream_name
from tests.integration.router_stack import BLOCK, RealGuard, Stack, Worker, at_once, until
from tests.integration.tiny_tokenizer import write_model

pytestmark = pytest.mark.timeout(300)

PROMPT_BLOCKS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


class Pair:
    """Two workers, each an engine beside a real guard."""

    def __init__(self, stack: Stack, pools: Path) -> None:
        self.stack = stack
        stack.frontend()
        stack.router("--prefill-tokens-per-s", "2000")
        self.guards: list[RealGuard] = at_once(
            *(partial(stack.real_guard, f"g{number}", pools / f"g{number}") for number in range(2))
        )
        self.workers: list[Worker] = at_once(*(partial(self.worker, number) for number in range(2)))
        stack.ready()
        until(lambda: self.knows(standby=2), "the router knows both guards")

    def worker(self, number: int, name: str = "") -> Worker:
        guard = self.guards[number]
        return self.stack.worker(
            name or f"w{number}", "--control", guard.control, "--guard-socket", guard.socket
        )

    def metric(self, name: str) -> float:
        return self.stack.metrics().get(name, 0.0)

    def knows(self, ready: int | None = None, **guards: int) -> bool:
        """Whether the router knows so many workers as ready, and so many guards in these states."""
        metrics = self.stack.metrics()
        right = ready is None or metrics.get('kvcr_router_workers{state="ready"}') == ready
        return right and all(
            metrics.get(f'kvcr_router_guards{{state="{state}"}}') == count for state, count in guards.items()
        )

    def unreachable(self, guard: str) -> float:
        """Requests that were tried on a worker that was not there, by the guard beside it."""
        return self.metric(f'kvcr_router_requests_total{{guard="{guard}",outcome="unreachable"}}')

    def quiet(self) -> None:
        for worker in self.workers:
            worker.silent("-")

    def first_turn(self, prompt: str, worker: Worker) -> None:
        """A prompt whose blocks are in this worker's pool then, and nowhere else."""
        self.quiet()
        pinned = {"annotations": [f"kvcr.worker:{worker.worker_id}"]}
        assert self.stack.ask(prompt, nvext=pinned)[0] == 200
        served = worker.expect("served")
        assert served["computed"] + served["local"] >= PROMPT_BLOCKS
        assert served["stored"] >= PROMPT_BLOCKS

    def turn(self, prompt: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The next turn of a session, wherever it goes: what came in there, and what became of it."""
        self.quiet()
        assert self.stack.ask(prompt)[0] == 200

        def who() -> Worker | None:
            alive = (worker for worker in self.workers if worker.process.poll() is None)
            return next((worker for worker in alive if not worker.silent("served")), None)

        # What it says takes a moment to get here.
        worker: Worker = until(who, "a worker says that it served it")
        served = worker.said[-1]
        request = next(said for said in reversed(worker.said) if said["kind"] == "request")
        assert request["id"] == served["id"]
        return {"worker": worker.name, **request["request"]}, served


@pytest.fixture
def pair(tmp_path: Path, model: Path, shm_dir: Path) -> Iterator[Pair]:
    stack = Stack(tmp_path, model)
    try:
        yield Pair(stack, shm_dir)
    finally:
        stack.close()


def prompt_of(seed: str, turn: int = 1) -> str:
    """A prompt of a session; each turn begins with the one before."""
    return (seed + ". ").ljust(PROMPT_BLOCKS * BLOCK + 5, "x") + " and then" * (turn - 1)


def told(stack: Stack, guard: str, state: str) -> bool:
    """Whether the last change that NATS has of a guard is this one."""

    async def last() -> StateChange:
        client = await nats.connect(stack.nats.url)
        try:
            raw = await client.jetstream().get_last_msg(
                stream_name("dynamo", "state"), state_subject("dynamo", guard)
            )
        finally:
            await client.close()
        change = event.decode(raw.data or b"")
        assert isinstance(change, StateChange)
        return change

    try:
        return asyncio.run(last()).state == state
    except nats.errors.Error:
        # JetStream of a server that just came back is not there yet.
        return False


def test_a_dead_worker_gets_no_request_and_its_sessions_read_its_pool_until_they_go_home(pair: Pair) -> None:
    stack, (dead, other), (guard, _) = pair.stack, pair.workers, pair.guards
    for session in ("moves", "waits"):
        pair.first_turn(prompt_of(session), dead)
    until(lambda: stack.indexed("g0") >= 2 * PROMPT_BLOCKS, "the pool of g0 is indexed")
    # The guard knows its worker, and what it knew stays of use while etcd says nothing of the death: only the
    # event on NATS can tell the router.
    until(lambda: f"worker {dead.worker_id:x} is beside" in guard.log.read_text(), "g0 knows its worker")
    before = pair.unreachable("g0")
    stack.etcd.pause()
    try:
        dead.kill()
        until(lambda: guard.state == "active", "g0 is ACTIVE")
        until(lambda: pair.metric('kvcr_router_workers{state="dead"}') == 1, "the router was told")
        for number in range(6):
            request, served = pair.turn(f"{number} of somebody new " * 20)
            assert (request["worker"], served["wrong"]) == (other.name, 0)
        request, served = pair.turn(prompt_of("moves", turn=2))
        assert request["worker"] == other.name
        (action,) = request["kv_hint"]["actions"]
        (source,) = action["payload"]["sources"]
        assert (source["guard"], source["endpoint"]) == ("g0", guard.control)
        assert served["fetched"] >= PROMPT_BLOCKS
        assert served["wrong"] == 0
        assert pair.unreachable("g0") == before
    finally:
        stack.etcd.resume()
    until(lambda: pair.metric('kvcr_router_workers{state="dead"}') == 0, "its lease is gone", 40)

    # The engine comes back, under another id, to the same guard.
    back = pair.worker(0, "w0-again")
    pair.workers.append(back)
    assert back.worker_id != dead.worker_id
    until(lambda: told(stack, "g0", "STANDBY"), "the hand-off is told", 40)
    until(lambda: pair.knows(ready=2, standby=2), "the router knows that it is back", 40)
    request, served = pair.turn(prompt_of("waits", turn=2))
    assert request["worker"] == back.name
    assert request.get("kv_hint") is None
    assert (served["local"] >= PROMPT_BLOCKS, served["fetched"], served["wrong"]) == (True, 0, 0)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_sessions_go_on_while_etcd_and_nats_are_away(pair: Pair, how: str) -> None:
    stack, (dead, other), (guard, _) = pair.stack, pair.workers, pair.guards
    for session in ("moves", "waits"):
        pair.first_turn(prompt_of(session), dead)
    until(lambda: stack.indexed("g0") >= 2 * PROMPT_BLOCKS, "the pool of g0 is indexed")
    until(lambda: f"worker {dead.worker_id:x} is beside" in guard.log.read_text(), "g0 knows its worker")
    if how == "stopped":
        stack.etcd.pause()
        stack.nats.pause()
    else:
        stack.kill_servers()
    try:
        dead.kill()
        until(lambda: guard.state == "active", "g0 is ACTIVE")
        # Nobody can tell the router: an attempt or two on the dead worker fail, and the requests do not.
        request, served = pair.turn(prompt_of("moves", turn=2))
        assert (request["worker"], served["wrong"]) == (other.name, 0)
        assert served["fetched"] >= PROMPT_BLOCKS
        for number in range(5):
            assert pair.turn(f"{number} of somebody new " * 20)[0]["worker"] == other.name
            time.sleep(0.5)
    finally:
        if how == "stopped":
            stack.etcd.resume()
            stack.nats.resume()
        else:
            stack.restart_servers()
    until(lambda: told(stack, "g0", "ACTIVE"), "the change of state is told", 40)
    until(lambda: pair.knows(active=1), "the router heard of it", 40)
    back = pair.worker(0, "w0-again")
    pair.workers.append(back)
    until(lambda: told(stack, "g0", "STANDBY"), "the hand-off is told", 60)
    until(lambda: pair.knows(ready=2, standby=2), "the router knows that it is back", 60)
    request, served = pair.turn(prompt_of("waits", turn=2))
    assert request["worker"] == back.name
    assert request.get("kv_hint") is None
    assert (served["local"] >= PROMPT_BLOCKS, served["fetched"], served["wrong"]) == (True, 0, 0)
    assert pair.metric('kvcr_router_workers{state="dead"}') == 0
