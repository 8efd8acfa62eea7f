# SPDX-License-Identifier: Apache-2.0
"""What our router knows and chooses, on three real vLLM workers: engine memory that pools do not have,
and copies inside and between RDMA domains.

On one machine hosts and domains are what the graph calls them; a copy between domains has the price that the
router is told.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from demo.client import ask, chat_body
from demo.graph import Worker
from demo.metrics import growth, scrape
from kvcr.harness import Harness, headers
from kvcr.pool import PoolReader
from kvcr.protocol.signals import Kind, Signal
from router_hints.inputs import PlanInputs
from tests.e2e.agg import PROMPT_BLOCKS, Agg, grown, keys_of, messages, running
from tests.e2e.processes import eventually
from tests.e2e.tiny_model import BLOCK_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SESSION = "main"
KEPT = 4
ANSWER_TOKENS = 4
TOPOLOGY = "[{host: one, rdma_domain: a}, {host: two, rdma_domain: a}, {host: three, rdma_domain: b}]"


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agg]:
    """Engine memory for 2,000 blocks, pools that hold a tenth of that, and two RDMA domains."""
    options = [
        "--Guard.pool-bytes=6MiB",
        "--VllmWorker.max-num-batched-tokens=256",
        "--VllmWorker.ServiceArgs.workers=3",
        f"--VllmWorker.topology={TOPOLOGY}",
        # 12 blocks take 2 s: less than computing them, as the router sees it.
        "--Router.far-bytes-per-s=200000",
    ]
    with running(tmp_path_factory.mktemp("router"), options) as graph:
        yield graph


def blocks_at(agg: Agg, session: str, tier: str, guard: str = "") -> int:
    """Most blocks of a session that one guard (or this one) has in this tier, as the router knows it."""
    info = Harness(agg.graph.component("router")["urls"]["signals"]).session(session)
    places = info.places if info is not None else []
    return max((p.blocks for p in places if p.tier == tier and guard in ("", p.guard)), default=0)


# --- domains ------------------------------------------------------------------------------------------


def ask_in(agg: Agg, worker: Worker, seed: int, session: str = "") -> int:
    """One request on this worker; blocks of its prompt that were not computed."""
    where = agg.graph.pin(worker)
    extra = headers(session) if session else {}
    answer = ask(
        agg.graph.frontend_url,
        agg.graph.model,
        messages(seed),
        max_tokens=ANSWER_TOKENS,
        headers=where["headers"] | extra,
    )
    return answer.cached_tokens // BLOCK_SIZE


@contextlib.contextmanager
def kept_busy(agg: Agg, worker: Worker, requests: int = 6) -> Iterator[None]:
    """More long answers than fit into the worker's batch, for the time of the block."""
    url = urlsplit(agg.graph.frontend_url)
    plans, url_of_router = "kvcr_router_plans_total", agg.graph.router_metrics_url or ""
    before = scrape(url_of_router)
    connections = []
    try:
        for seed in range(requests):
            connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
            connections.append(connection)
            body = json.dumps(chat_body(agg.graph.model, messages(1000 + seed), 1600))
            where = agg.graph.pin(worker)["headers"]
            connection.request(
                "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"} | where
            )
        eventually(
            lambda: growth(before, scrape(url_of_router)).total(plans) >= requests, "all are planned", 60
        )
        yield
    finally:
        for connection in connections:
            connection.close()


def explained(agg: Agg) -> dict[str, Any]:
    """The last plan, as ``router_hints explain`` tells it."""
    etcd = agg.graph.component("etcd")["urls"]["client"]
    done = subprocess.run(
        [sys.executable, "-m", "router_hints", "explain", "--json"],
        env={**os.environ, "ETCD_ENDPOINTS": etcd, "DYN_NAMESPACE": agg.graph.namespace, "DYN_LOG": "error"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return plan


def fork(agg: Agg, name: str, parent: str, seed: int) -> int:
    """A sub-agent's first turn on its parent's context; blocks of it that were not computed."""
    signal = Signal(kind=Kind.FORK, session=name, parent=parent, runs_s=300, osl=ANSWER_TOKENS)
    answer = ask(
        agg.graph.frontend_url,
        agg.graph.model,
        messages(seed),
        max_tokens=ANSWER_TOKENS,
        headers=headers(name, parent=parent, signal=signal),
    )
    return answer.cached_tokens // BLOCK_SIZE


def test_a_fork_runs_beside_its_busy_holder_in_the_same_domain(agg: Agg) -> None:
    holder, beside, outside = agg.graph.workers
    cold = ask_in(agg, holder, 300, "parent")
    assert cold == 0
    # An answer waits neither for what it leaves in the pool nor for that the router hears of it; and a router
    # that was told that a guard cannot read from another yet names no such source.
    eventually(
        lambda: blocks_at(agg, "parent", "G2", holder.guard) == PROMPT_BLOCKS,
        "the router knows the parent's blocks in the holder's pool",
    )
    eventually(
        lambda: scrape(agg.graph.router_metrics_url or "").total("kvcr_router_unready_sources") == 0,
        "every guard can read from every other",
    )
    before = scrape(beside.guard_metrics_url)
    with kept_busy(agg, holder):
        cached = fork(agg, "child", "parent", 300)
    plan = explained(agg)
    told = {name: value for name, value in plan.items() if name != "inputs"}
    assert plan["worker_id"] == beside.instance_id, told
    assert cached == PROMPT_BLOCKS, told
    pulled = grown(before, beside.guard_metrics_url, "kvcr_pulled_blocks_total", PROMPT_BLOCKS)
    assert pulled == PROMPT_BLOCKS, told
    # Why it went there.
    assert (plan["mode"], plan["reason"]) == ("copy", "copy")
    assert [(run["guard"], run["count"]) for run in plan["sources"]] == [(holder.guard, PROMPT_BLOCKS)]
    terms = {candidate["rank"][0]: candidate for candidate in plan["candidates"]}
    near, far, home = (terms[worker.instance_id] for worker in (beside, outside, holder))
    assert near["copied_blocks"] == far["copied_blocks"] == PROMPT_BLOCKS
    assert far["fetch_s"] > 1.0 > near["fetch_s"]
    assert home["wait_s"] > near["wait_s"]
    # The same moment, were domains walls.
    inputs = PlanInputs.from_text(plan["inputs"])
    walls = msgspec.structs.replace(inputs.topology, required=True)
    strict = msgspec.structs.replace(inputs, topology=walls).plan()
    copied = {candidate.rank[0]: candidate.copied_blocks for candidate in strict.candidates}
    assert strict.rank[0] == beside.instance_id
    assert (copied[beside.instance_id], copied[outside.instance_id]) == (PROMPT_BLOCKS, 0)


# --- engine memory ------------------------------------------------------------------------------------


def in_pool(agg: Agg, seed: int) -> int:
    reader = PoolReader.open(agg.graph.workers[0].pool_dir)
    try:
        return sum(
            int(reader.lookup(key)[0][0]) >= 0 for key in keys_of(reader, messages(seed), agg.graph.namespace)
        )
    finally:
        reader.close()


def invalidate(agg: Agg, what: str) -> dict[str, str]:
    """``kvcr invalidate`` by hand: results by guard."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcr.cli", "invalidate", what, "--run-dir", str(agg.graph.run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {action["guard"]: action["result"] for action in json.loads(done.stdout)["actions"]}


def test_what_only_engine_memory_has_is_dropped_by_a_compaction_and_by_hand(agg: Agg) -> None:
    worker = agg.graph.workers[0]
    kv = Harness(agg.graph.component("router")["urls"]["signals"])

    def places(tier: str) -> int:
        return blocks_at(agg, SESSION, tier)

    # The second one is of no session: nobody but the engine knows which blocks its keys name.
    assert (ask_in(agg, worker, 1, SESSION), ask_in(agg, worker, 2)) == (0, 0)
    for seed in (1, 2):
        eventually(lambda seed=seed: in_pool(agg, seed) >= PROMPT_BLOCKS, "the pool has the blocks")
    seed, deadline_s = 100, time.monotonic() + 300
    while in_pool(agg, 1) or in_pool(agg, 2):
        assert time.monotonic() < deadline_s, "the pool does not evict them"
        ask_in(agg, worker, seed := seed + 1)
        # Evicted slots rest for 2 s, so the pool turns over by the clock: asked as fast as a quick machine
        # can, the engine's memory would be full before, and lose the two as well.
        time.sleep(0.5)
    eventually(lambda: places("G2") == 0, "the router knows that no pool has them")
    # A lost message of the engine's is made up for.
    eventually(lambda: places("G1") >= PROMPT_BLOCKS, "and that the engine's memory does")
    reply = kv.compaction(SESSION, keeps=KEPT * BLOCK_SIZE, wait_s=20.0)
    assert reply.decision == "invalidate", reply
    assert reply.result in ("done", "deferred"), reply
    reader = PoolReader.open(worker.pool_dir)
    keys = keys_of(reader, messages(2), agg.graph.namespace)
    reader.close()
    assert invalidate(agg, ",".join(key.hex() for key in keys[KEPT:]))[worker.guard] in ("done", "deferred")
    # The engine drops them at the latest before its next request.
    ask_in(agg, worker, 99)
    eventually(lambda: places("G1") <= KEPT, "the engine's own events say that they are gone")
    assert (ask_in(agg, worker, 1), ask_in(agg, worker, 2)) == (KEPT, KEPT), "misses after the kept head"
