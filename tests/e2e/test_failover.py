# SPDX-License-Identifier: Apache-2.0
"""An engine dies while it answers: real vLLM in a graph, killed with SIGKILL, and what users see of it.

One graph, one death, one return; the tests look at what was seen on the way, in this order.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo import graph as graphs
from demo.client import Answer, RequestFailed, ask
from demo.metrics import Page, growth, scrape
from demo.observe import observe
from demo.prometheus import SCRAPE_S, Prometheus, installed
from kvcr.graph.processes import descendants
from tests.e2e.agg import PROMPT_BLOCKS, Agg, grown, messages, prompt_tokens, running
from tests.e2e.processes import eventually
from tests.e2e.tiny_model import BLOCK_SIZE
from tests.integration.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CHATS = (1, 2, 3)
"""Seeds of the chats at home on the worker that dies."""
KNOWN = 4
"""A chat of that worker that nobody asks about while it is dead."""
OTHER = 5
"""A chat at home on the other worker."""
SHORT = 24
LONG = 1500
"""Tokens of an answer that is still running when the engine is killed."""
SILENCE_S = 120.0
WATCHED_S = 600.0
"""How far back the dashboards look: before the death."""
DASHBOARDS = sorted((Path(__file__).parents[2] / "deploy/grafana/dashboards").glob("*.json"))
RETURN_S = 300.0


@dataclass(frozen=True)
class Death:
    """The engine was killed while it answered CHATS; the other one was answering OTHER."""

    known: dict[int, Answer]
    """What the worker had answered to CHATS and KNOWN before."""
    migrated: dict[int, Answer]
    """The answers to CHATS that were under way, from their first token to their last."""
    other: Answer
    whole: dict[int, Answer]
    """The same asked again afterwards, of whoever is left."""
    before: dict[str, Page]
    """Guards' counters by name: at the kill, once the dead worker's guard was ACTIVE, and in the end."""
    active: dict[str, Page]
    after: dict[str, Page]


@dataclass(frozen=True)
class Return:
    """The worker is back and was asked KNOWN."""

    answer: Answer
    computed_tokens: int
    """By the engine's own account."""
    guards: dict[str, Page]
    """What the guards' counters grew by."""


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agg]:
    """Two workers and our router. The last test of this file stops it."""
    # A request goes where its prompt is known, however busy that worker is; elsewhere only if it must.
    where_known = ["--Router.decode-s=0", "--Router.copy-latency-s=1"]
    with running(tmp_path_factory.mktemp("failover"), where_known) as graph:
        yield graph


@pytest.fixture(scope="module")
def prometheus(agg: Agg, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus | None]:
    """Watches from before the death on, where it is installed."""
    if not installed():
        yield None
        return
    state = json.loads((agg.graph.run_dir / "graph.json").read_text())
    server = Prometheus(state, tmp_path_factory.mktemp("prometheus"))
    yield server
    server.close()


def guard_pages(graph: graphs.Graph) -> dict[str, Page]:
    return {worker.guard: scrape(worker.guard_metrics_url) for worker in graph.workers}


@pytest.fixture(scope="module")
def death(agg: Agg, prometheus: Prometheus | None) -> Death:
    graph = agg.graph
    victim, survivor = graph.workers
    known = {
        seed: observe(graph, messages(seed), max_tokens=SHORT, worker=victim).answer
        for seed in (*CHATS, KNOWN)
    }
    with ThreadPoolExecutor(len(CHATS) + 1) as pool:
        other = Stream(pool, graph, OTHER, survivor).under_way()
        # One after the other: the router would spread prompts that are still waiting. Not pinned, for then
        # they would not be migrated; where each runs is the router's estimate, and some may be on the other.
        streams = {seed: Stream(pool, graph, seed).under_way() for seed in CHATS}
        eventually(lambda: working(victim) > 0, "a chat runs on the worker that knows it")
        before = guard_pages(graph)
        kill_engine(graph, victim)
        eventually(
            lambda: scrape(victim.guard_metrics_url).total("kvcr_guard_state", state="active") == 1,
            "the guard ACTIVE",
        )
        active = guard_pages(graph)
        migrated = {seed: stream.future.result(2 * SILENCE_S) for seed, stream in streams.items()}
        after = guard_pages(graph)
        whole = {seed: Stream(pool, graph, seed).future.result(2 * SILENCE_S) for seed in CHATS}
        return Death(known, migrated, other.future.result(SILENCE_S), whole, before, active, after)


class Stream:
    """A long answer, in a thread of ``pool``; of ``worker`` when one is named."""

    def __init__(
        self, pool: ThreadPoolExecutor, graph: graphs.Graph, seed: int, worker: graphs.Worker | None = None
    ) -> None:
        self.tokens = 0

        def count(_text: str) -> None:
            self.tokens += 1

        self.future: Future[Answer] = pool.submit(
            ask,
            graph.frontend_url,
            graph.model,
            messages(seed),
            max_tokens=LONG,
            timeout_s=SILENCE_S,
            on_text=count,
            **(graph.pin(worker) if worker else {}),
        )

    def under_way(self) -> Stream:
        """Itself, once text comes."""
        eventually(lambda: self.tokens > 2, "a stream under way", SILENCE_S)
        return self


def working(worker: graphs.Worker) -> int:
    """Requests its engine works on."""
    return round(scrape(worker.metrics_url).total("vllm:num_requests_running"))


def kill_engine(graph: graphs.Graph, worker: graphs.Worker) -> None:
    """SIGKILL to the engine's processes; the process that forked them, dynamo.vllm, is left to find out."""
    engine = [p.pid for p in descendants(graph.pid) if p.session == worker.pid and p.pid != worker.pid]
    assert engine
    # Stopped first: one that saw another die would leave in good order.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in engine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@pytest.fixture(scope="module")
def back(agg: Agg, death: Death) -> Return:
    old = agg.graph.workers[0]

    def registered() -> bool:
        component = agg.graph.component(old.name)
        return component["state"] == "ready" and component["pid"] != old.pid and bool(component["instance"])

    eventually(registered, "the worker restarted in place", RETURN_S)
    graph = graphs.load(agg.graph.run_dir)
    worker = graph.workers[0]
    assert worker.instance_id != old.instance_id
    engine, guards = scrape(worker.metrics_url), guard_pages(graph)
    answer = _ask_until_served(graph, worker, KNOWN)
    # The guard is told of a load when it is over, which the answer does not wait for.
    grown(guards[worker.guard], worker.guard_metrics_url, "kvcr_loaded_blocks_total", PROMPT_BLOCKS)
    computed = growth(engine, scrape(worker.metrics_url)).total(
        "vllm:prompt_tokens_by_source_total", source="local_compute"
    )
    since = {name: growth(guards[name], page) for name, page in guard_pages(graph).items()}
    return Return(answer, round(computed), since)


def _ask_until_served(graph: graphs.Graph, worker: graphs.Worker, seed: int) -> Answer:
    """The router learns of a worker a moment after the launcher."""
    deadline_s = time.monotonic() + 60.0
    while True:
        try:
            return ask(
                graph.frontend_url,
                graph.model,
                messages(seed),
                max_tokens=SHORT,
                timeout_s=SILENCE_S,
                **graph.pin(worker),
            )
        except RequestFailed as error:
            if "not ready" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def test_streams_of_the_dead_engine_go_on_as_if_nothing_had_been(death: Death) -> None:
    for seed in CHATS:
        assert death.migrated[seed].completion_tokens == LONG
        assert death.migrated[seed].text == death.whole[seed].text
        assert death.migrated[seed].text.startswith(death.known[seed].text)
    assert death.other.completion_tokens == LONG


def test_they_go_on_elsewhere_with_kv_from_the_dead_workers_pool(agg: Agg, death: Death) -> None:
    victim, survivor = agg.graph.workers
    served = growth(death.before[victim.guard], death.after[victim.guard])
    pulled = growth(death.before[survivor.guard], death.after[survivor.guard])
    # The prompt of each stream that was there, and what was decoded as far as it was committed.
    assert served.total("kvcr_served_blocks_total") >= PROMPT_BLOCKS
    assert served.total("kvcr_served_bytes_total") == pulled.total("kvcr_pulled_bytes_total") > 0


def test_the_guard_proved_the_death_once(agg: Agg, death: Death) -> None:
    page = death.active[agg.graph.workers[0].guard]
    assert page.total("kvcr_failovers_total") == 1
    assert page.total("kvcr_pool_slots", state="granted") == 0


def test_it_comes_back_and_computes_only_the_remainder_of_what_it_knew(
    agg: Agg, death: Death, back: Return
) -> None:
    victim, survivor = agg.graph.workers
    assert back.answer.text == death.known[KNOWN].text
    assert back.answer.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
    assert back.computed_tokens == len(prompt_tokens(messages(KNOWN))) - PROMPT_BLOCKS * BLOCK_SIZE
    # By copying from its own pool: no peer was asked.
    assert back.guards[victim.guard].total("kvcr_loaded_blocks_total") == PROMPT_BLOCKS
    assert back.guards[victim.guard].total("kvcr_pulled_blocks_total") == 0
    assert back.guards[survivor.guard].total("kvcr_served_blocks_total") == 0


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_of_the_dashboards_shows_it(
    agg: Agg, prometheus: Prometheus | None, back: Return, path: Path
) -> None:
    if prometheus is None:
        pytest.skip("prometheus is not installed (scripts/prometheus.sh gets it)")
    document = json.loads(path.read_text())
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert panels
    # Rates need a second sample of what happened last, and a busy machine may lose some.
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        time.sleep(3 * SCRAPE_S)
        end_s = time.time()
        empty = [panel["title"] for panel in panels if not prometheus.panel(panel, end_s - WATCHED_S, end_s)]
        if not empty or time.monotonic() > deadline_s:
            break
    assert empty == []
    for event in document["annotations"]["list"]:
        marked = prometheus.query(event["expr"], end_s - WATCHED_S, end_s)
        assert {series["metric"]["instance"] for series in marked} == {agg.graph.workers[0].guard}


def test_nothing_of_either_engine_is_left(agg: Agg, back: Return) -> None:
    """Stops the graph: no later test of this module may use it."""
    assert agg.serving.stop() == 0
    with contextlib.suppress(AssertionError):
        eventually(lambda: not agg.leftovers(), "nothing left")
    assert agg.leftovers() == []
