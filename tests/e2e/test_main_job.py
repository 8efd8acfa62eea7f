# SPDX-License-Identifier: Apache-2.0
"""The main job on real processes: a prefix computed on one worker is pulled by another one.

Real Dynamo, real vLLM, real etcd and NATS, started by ``kvcr serve``; a tiny model whose every token is
one character, so that equal texts are equal tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator

import nats
import pytest

from demo.client import ask
from demo.metrics import growth
from demo.observe import observe
from kvcr.dynamo.etcd import connect
from kvcr.protocol import events
from tests.e2e import sockets
from tests.e2e.agg import PROMPT_BLOCKS, Agg, damage, grown, messages, prompt_tokens, running
from tests.e2e.agg import without_our_router as stock_graph
from tests.e2e.processes import eventually
from tests.e2e.sockets import is_loopback
from tests.e2e.tiny_model import BLOCK_SIZE
from tests.integration.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ANSWER_TOKENS = 24


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agg]:
    """Two workers and our router. The last test of this file stops it."""
    with running(tmp_path_factory.mktemp("agg")) as graph:
        yield graph


def test_the_pulled_answer_is_the_computed_one_token_for_token(agg: Agg) -> None:
    a, b = agg.graph.workers
    chat = messages(1)
    cold = observe(agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=a)
    pulled = observe(agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=b)
    assert (cold.worker, pulled.worker) == (a, b)
    assert cold.answer.cached_tokens == 0
    assert len(cold.answer.text) == ANSWER_TOKENS
    assert pulled.answer.text == cold.answer.text


def test_the_pulling_worker_computes_only_the_remainder(agg: Agg) -> None:
    a, b = agg.graph.workers
    chat = messages(2)
    observe(agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=a)
    before = agg.worker_page(b)

    pulled = observe(agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=b)

    assert pulled.answer.prompt_tokens == len(prompt_tokens(chat))
    assert pulled.answer.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
    after = growth(before, agg.worker_page(b))
    computed = after.total("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert computed == pulled.answer.prompt_tokens - PROMPT_BLOCKS * BLOCK_SIZE


def test_source_and_destination_count_the_same_blocks_and_bytes(agg: Agg) -> None:
    a, b = agg.graph.workers
    chat = messages(3)
    observe(agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=a)
    pulled = observe(agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=b)
    assert pulled.pulled_blocks == pulled.served_blocks == PROMPT_BLOCKS
    assert pulled.pulled_bytes == pulled.served_bytes > 0
    assert pulled.source == a


def test_a_block_damaged_in_the_source_is_found_counted_and_computed(agg: Agg) -> None:
    a, b = agg.graph.workers
    chat = messages(4)
    cold = observe(agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=a)
    at_a, at_b = agg.guard_page(a), agg.guard_page(b)
    damage(a, chat, 5, agg.graph.namespace)

    pulled = observe(agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=b, settle=False)

    # Not cached_tokens: vLLM counts those when it plans a load, and not always again when the load fails.
    assert pulled.answer.text == cold.answer.text

    def at_b_since(name: str) -> float:
        return growth(at_b, agg.guard_page(b)).total(name)

    eventually(
        lambda: (
            at_b_since("kvcr_pulled_blocks_total") + at_b_since("kvcr_deposited_blocks_total")
            >= PROMPT_BLOCKS
        ),
        "every block of the prompt in the pool of B",
    )
    assert at_b_since("kvcr_pulled_blocks_total") < PROMPT_BLOCKS
    corrupt = "kvcr_corrupt_blocks_total"
    assert grown(at_b, b.guard_metrics_url, corrupt, 1, where="pull") == 1
    assert grown(at_a, a.guard_metrics_url, corrupt, 1, where="source") == 1


async def test_the_hint_is_seen_on_nats_with_its_plan(agg: Agg) -> None:
    a, b = agg.graph.workers
    chat = messages(5)
    await asyncio.to_thread(observe, agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=a)
    connection = await nats.connect(agg.graph.nats_url)
    try:
        hints = await connection.subscribe(events.hints_subject(agg.graph.namespace, b.guard))
        await connection.flush()
        await asyncio.to_thread(observe, agg.graph, chat, max_tokens=ANSWER_TOKENS, worker=b)
        notice = events.event.decode((await hints.next_msg(PATIENCE_S)).data)
    finally:
        await connection.close()
    assert isinstance(notice, events.HintNotice)
    assert notice.worker_id == b.instance_id
    (action,) = json.loads(notice.envelope)["actions"]
    assert (action["action_type"], action["action_version"]) == (events.FETCH, events.FETCH_VERSION)
    assert action["payload"]["plan_id"] == notice.plan_id != ""
    (source,) = action["payload"]["sources"]
    assert (source["guard"], source["first"], source["count"]) == (a.guard, 0, PROMPT_BLOCKS)


def test_without_a_pin_a_known_prefix_is_reused_wherever_it_runs(agg: Agg) -> None:
    chat = messages(6)
    cold = observe(agg.graph, chat, max_tokens=ANSWER_TOKENS)
    again = observe(agg.graph, chat, max_tokens=ANSWER_TOKENS)
    assert again.answer.text == cold.answer.text
    assert again.answer.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE


def test_a_request_shorter_than_a_block_has_no_hint_and_works(agg: Agg) -> None:
    seen = observe(agg.graph, [{"role": "user", "content": "hi"}], max_tokens=5, settle=False)
    assert len(seen.answer.text) == 5
    assert seen.pulled_blocks == 0


def test_tenants_with_different_salts_share_nothing(agg: Agg) -> None:
    a, b = agg.graph.workers
    chat = messages(7)

    def told(worker_index: int, salt: str) -> tuple[str, int]:
        worker = agg.graph.workers[worker_index]
        answer = ask(
            agg.graph.frontend_url,
            agg.graph.model,
            chat,
            max_tokens=ANSWER_TOKENS,
            extra={"nvext": {"cache_salt": salt}},
            **agg.graph.pin(worker),
        )
        return answer.text, answer.cached_tokens

    at_a, at_b = agg.guard_page(a), agg.guard_page(b)
    first, cached = told(0, "tenant-1")
    assert cached == 0
    assert grown(at_a, a.guard_metrics_url, "kvcr_deposited_blocks_total", PROMPT_BLOCKS) >= PROMPT_BLOCKS
    other, cached = told(1, "tenant-2")
    assert (other, cached) == (first, 0)
    assert growth(at_b, agg.guard_page(b)).total("kvcr_pulled_blocks_total") == 0


async def test_ports_and_connections_are_those_of_the_page(agg: Agg) -> None:
    """docs/deploy/ports.md, both ways; and nothing but loopback."""
    state = json.loads((agg.graph.run_dir / "graph.json").read_text())
    etcd_url = next(one["urls"]["client"] for one in state["components"] if one["name"] == "etcd")
    async with await connect(etcd_url) as etcd:
        listed = (await etcd.get_prefix("v1/instances/")).values
    transports = [json.loads(entry.value)["transport"]["tcp"] for entry in listed]
    requests = {int(transport.split("/")[0].rsplit(":", 1)[1]) for transport in transports}

    ask(agg.graph.frontend_url, agg.graph.model, messages(20), max_tokens=4)
    found = sockets.sockets(state)
    listening = sockets.services(state, found, requests)
    page = sockets.documented()
    beyond = [
        socket for socket in found if socket.state == sockets.LISTEN and not is_loopback(socket.address)
    ]
    assert not beyond
    # On one host blocks travel through shared memory.
    assert set(listening.values()) == set(page) - {sockets.Service("guard", "bytes")}
    connected = sockets.connections(found, listening)
    assert not {(who, what) for who, what in connected if who not in page[what]}
    servers = [sockets.Service("etcd", "client"), sockets.Service("nats", "client")]
    roles = {"frontend", "router", "worker", "guard"}
    expected = {(who, what) for what in servers for who in page[what] & roles}
    assert expected <= connected


def test_the_graph_ends_clean(agg: Agg) -> None:
    """Stops the graph: no later test of this module may use it."""
    assert agg.serving.stop() == 0
    with contextlib.suppress(AssertionError):
        eventually(lambda: not agg.leftovers(), "nothing left")
    assert agg.leftovers() == []


def test_the_same_over_the_nats_request_plane(tmp_path_factory: pytest.TempPathFactory) -> None:
    plane = [
        f"--{name}.ServiceArgs.env.DYN_REQUEST_PLANE=nats" for name in ("Frontend", "Router", "VllmWorker")
    ]
    with running(tmp_path_factory.mktemp("nats"), plane) as agg:
        a, b = agg.graph.workers
        cold = observe(agg.graph, messages(11), max_tokens=ANSWER_TOKENS, worker=a)
        pulled = observe(agg.graph, messages(11), max_tokens=ANSWER_TOKENS, worker=b)
    assert pulled.answer.text == cold.answer.text
    assert pulled.answer.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
    assert pulled.pulled_blocks == pulled.served_blocks == PROMPT_BLOCKS


def test_the_hint_of_the_stock_router_is_honoured(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("stock")
    with running(directory / "run", graph_file=stock_graph(directory)) as agg:
        a, b = agg.graph.workers
        # The stock router learns of G1 blocks by KV events, after the answer, and nothing says when.
        for seed, pause_s in enumerate((0.5, 3.0, 10.0), 21):
            cold = observe(agg.graph, messages(seed), max_tokens=ANSWER_TOKENS, worker=a)
            time.sleep(pause_s)
            pulled = observe(agg.graph, messages(seed), max_tokens=ANSWER_TOKENS, worker=b)
            assert pulled.answer.text == cold.answer.text
            if pulled.pulled_blocks == PROMPT_BLOCKS:
                break
    assert pulled.pulled_blocks == pulled.served_blocks == PROMPT_BLOCKS
    assert pulled.answer.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
