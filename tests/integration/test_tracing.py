# SPDX-License-Identifier: Apache-2.0
"""One request, one trace: router, guard and peer send spans to a collector, each below the right one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvcr.tracing import ENABLED_ENV, open_tracer
from kvcr.transfer import nixl
from tests.integration.otlp import Collector, GrpcCollector, HttpCollector, Received
from tests.integration.router_stack import BLOCK, RealGuard, Stack, Worker, at_once, until
from tests.integration.tiny_tokenizer import write_model

pytestmark = pytest.mark.timeout(300)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
BLOCKS = 20
TOKENS_PER_S = 500


@pytest.fixture
def collector() -> Iterator[Collector]:
    with HttpCollector() as collector:
        yield collector


@pytest.fixture(params=[GrpcCollector, HttpCollector], ids=["grpc", "http"])
def either_collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with request.param() as collector:
        yield collector


class Deployment:
    """Two workers beside real guards, behind a frontend and a router; all of them send spans."""

    def __init__(self, stack: Stack, pools: Path, traced: dict[str, str], transport: str) -> None:
        self.stack = stack
        stack.environment |= traced
        stack.frontend()
        stack.router("--prefill-tokens-per-s", str(TOKENS_PER_S))
        self.guards: list[RealGuard] = at_once(
            *(partial(stack.real_guard, f"g{n}", pools / f"g{n}", "--transport", transport) for n in range(2))
        )
        self.workers: list[Worker] = at_once(
            *(
                partial(stack.worker, f"w{n}", "--control", guard.control, "--guard-socket", guard.socket)
                for n, guard in enumerate(self.guards)
            )
        )
        stack.ready()
        until(
            lambda: stack.metrics().get('kvcr_router_guards{state="standby"}') == 2, "the router knows both"
        )
        # The time of a hint is too short for a first contact, and the router hints at no source without one.
        until(lambda: self.guards[1].metrics().get('kvcr_peer_ready{peer="g0"}') == 1, "a link is open")
        unready = 'kvcr_router_unready_sources{guard="g1"}'
        until(lambda: stack.metrics().get(unready) == 0, "the router knows that it is open")

    def ask(self, prompt: str, worker: Worker, traceparent: str = "") -> dict[str, object]:
        """A request for this worker; what came in there."""
        # As slow as the router takes prefills to be, so that it goes on taking a copy to be faster.
        headers = {"x-dynamo-meta-prefill": f"{len(prompt) / TOKENS_PER_S:.2f}"}
        if traceparent:
            headers["traceparent"] = traceparent
        # What it said of earlier requests.
        worker.silent("-")
        pinned = {"annotations": [f"kvcr.worker:{worker.worker_id}"]}
        assert self.stack.ask(prompt, headers=headers, nvext=pinned)[0] == 200
        request = worker.expect("request")
        worker.expect("served")
        return dict(request["request"])


@pytest.fixture
def deployment(
    tmp_path: Path, shm_dir: Path, collector: Collector, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    stack = Stack(tmp_path, write_model(tmp_path / "tiny"))
    try:
        yield Deployment(stack, shm_dir, collector.environment, request.param)
    finally:
        stack.close()


def ancestors(span: Received, spans: list[Received]) -> list[str]:
    """Ids of the spans above this one, as far as they are known."""
    by_id = {one.span_id: one for one in spans}
    above: list[str] = []
    while span.parent_id:
        above.append(span.parent_id)
        if span.parent_id not in by_id:
            break
        span = by_id[span.parent_id]
    return above


def only(spans: list[Received]) -> Received:
    assert len(spans) == 1, spans
    return spans[0]


@pytest.mark.skipif(bool(nixl.import_error()), reason=nixl.import_error())
@pytest.mark.parametrize("deployment", ["nixl"], indirect=True)
def test_a_request_is_followed_through_router_guard_and_peer(
    deployment: Deployment, collector: Collector
) -> None:
    prompt = "a long story. ".ljust(BLOCKS * BLOCK + 5, "x")
    deployment.ask(prompt, deployment.workers[0])
    until(lambda: deployment.stack.indexed("g0") >= BLOCKS, "the router knows of the blocks")
    request = deployment.ask(prompt, deployment.workers[1], f"00-{TRACE}-{CALLER}-01")
    assert request.get("kv_hint"), "nothing was hinted"

    def ours() -> list[Received]:
        return [span for span in collector.spans if span.trace_id == TRACE]

    wanted = {
        "kvcr.plan",
        "kvcr.hint",
        "kvcr.fetch",
        "kvcr.lease",
        "kvcr.serve",
        "kvcr.transfer",
        "kvcr.load",
    }
    until(lambda: {span.name for span in ours()} >= wanted, f"{wanted} of trace {TRACE}")
    by_name = {span.name: span for span in ours()}
    plan, hint, fetch = (by_name[f"kvcr.{name}"] for name in ("plan", "hint", "fetch"))
    lease, serve, transfer, load = (
        by_name[f"kvcr.{name}"] for name in ("lease", "serve", "transfer", "load")
    )
    # Between the caller and us are Dynamo's own spans, of the frontend and of the way to the router.
    until(lambda: CALLER in ancestors(plan, ours()), "the plan is below the caller's span")
    assert hint.parent_id == plan.span_id
    assert fetch.parent_id == load.parent_id == hint.span_id
    assert lease.parent_id == transfer.parent_id == fetch.span_id
    assert serve.parent_id == lease.span_id
    assert plan.service == hint.service == "kvcr-router"
    assert {(s.service, s.instance) for s in (fetch, lease, transfer, load)} == {("kvcr-guard", "g1")}
    assert (serve.service, serve.instance) == ("kvcr-guard", "g0")

    assert plan.attributes["kvcr.copied_blocks"] == fetch.attributes["kvcr.blocks"] >= BLOCKS
    for span in (transfer, serve):
        assert span.attributes["kvcr.blocks"] == fetch.attributes["kvcr.blocks"]
        assert span.attributes["kvcr.bytes"] == fetch.attributes["kvcr.bytes"] > 0
        assert span.attributes["kvcr.transport"] == "nixl"
    assert fetch.attributes["kvcr.result"] == transfer.attributes["kvcr.result"] == "ok"
    assert load.attributes["kvcr.result"] == "ok"
    assert serve.attributes["kvcr.result"] == "released"
    assert fetch.attributes["kvcr.request_id"] == plan.attributes["kvcr.request_id"]
    for span in by_name.values():
        if not span.service.startswith("kvcr-"):
            continue
        assert span.start_ns <= span.end_ns
        # Neither tokens nor keys: no list of numbers, no 16 bytes in hex but ids.
        for name, value in span.attributes.items():
            if name not in ("kvcr.plan_id", "kvcr.request_id"):
                assert not re.search(r"[0-9a-f]{32}|\[", str(value)), (span.name, name, value)


@pytest.mark.parametrize("deployment", ["shm"], indirect=True)
def test_on_one_host_a_fetch_needs_no_lease_and_its_trace_shows_none(
    deployment: Deployment, collector: Collector
) -> None:
    prompt = "a short story. ".ljust(BLOCKS * BLOCK + 5, "x")
    deployment.ask(prompt, deployment.workers[0])
    until(lambda: deployment.stack.indexed("g0") >= BLOCKS, "the router knows of the blocks")
    deployment.ask(prompt, deployment.workers[1], f"00-{TRACE}-{CALLER}-01")

    def names() -> set[str]:
        return {s.name for s in collector.spans if s.trace_id == TRACE and s.service.startswith("kvcr-")}

    wanted = {"kvcr.plan", "kvcr.hint", "kvcr.fetch", "kvcr.transfer", "kvcr.load"}
    until(lambda: names() >= wanted, f"{wanted} of trace {TRACE}")
    assert names() == wanted
    transfer = only([s for s in collector.of("kvcr-guard", "kvcr.transfer") if s.trace_id == TRACE])
    assert transfer.attributes["kvcr.transport"] == "shm"
    assert transfer.attributes["kvcr.blocks"] >= BLOCKS


def test_what_is_recorded_and_what_is_passed_on(
    either_collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = either_collector
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    tracer = open_tracer("kvcr-test", "one")
    assert tracer.start("outside", "").traceparent == ""
    assert tracer.start("malformed", "00-1234-5678-01").traceparent == ""
    unsampled = tracer.start("unsampled", f"00-{TRACE}-{CALLER}-00")
    assert unsampled.traceparent.startswith(f"00-{TRACE}-")
    assert unsampled.traceparent.endswith("-00")
    unsampled.end()
    root = tracer.start("root", "", root=True)
    tracer.start("below", root.traceparent, {"kvcr.blocks": 3}).end()
    root.end()
    tracer.close()
    assert {span.name for span in collector.spans} == {"root", "below"}
    below, above = (only(collector.of("kvcr-test", name)) for name in ("below", "root"))
    assert (below.trace_id, below.parent_id) == (above.trace_id, above.span_id)
    assert below.attributes == {"kvcr.blocks": 3}


def test_grpc_is_the_protocol_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with GrpcCollector() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
        tracer = open_tracer("kvcr-test", "one")
        tracer.start("root", "", root=True).end()
        tracer.close()
        assert [span.name for span in collector.spans] == ["root"]


def test_without_the_switch_no_package_is_loaded_and_the_trace_is_passed_on() -> None:
    program = (
        "import sys; from kvcr.tracing import NOT_TRACING, open_tracer; import kvcr.guard.authority;"
        f"tracer = open_tracer('kvcr-guard', 'g', {{'{ENABLED_ENV}': 'false'}});"
        "span = tracer.start('kvcr.fetch', '00-a-b-01');"
        "loaded = any(name.startswith('opentelemetry') for name in sys.modules);"
        "print(tracer is NOT_TRACING, span.traceparent, loaded)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "00-a-b-01", "False"]
