# SPDX-License-Identifier: Apache-2.0
"""What tracing adds to a request: in the router, in the guard that fetches for it, and in its source.

The calls that a request with one source makes are made again and again: without tracing, with it, and with it
for requests that are not sampled. Spans go over gRPC to a collector in another process. Microseconds of the
processor a request, of the thread that serves and of all threads: the difference is the sending.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench import _common
from kvcr.guard.link import Grant
from kvcr.guard.tracing import RequestTraces, end_lease
from kvcr.protocol.engine import Fetch, LoadEnd
from kvcr.tracing import Tracer, open_tracer
from router_hints.costs import CostModel, Settings
from router_hints.index import LocationIndex
from router_hints.ledger import Ledger
from router_hints.planner import Plan, RequestView, Worker, plan
from router_hints.topology import Topology
from router_hints.tracing import hint_attributes, plan_attributes

SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = SAMPLED[:-1] + "0"
BLOCKS = 64
COLLECTOR = """
from tests.integration.otlp import GrpcCollector
with GrpcCollector() as collector:
    print(collector.port, flush=True)
    input()
"""


def made_plan() -> Plan:
    """Of a deployment with two idle workers; attributes are read off it."""
    workers = [Worker((number, 0), max_requests=32, kv_blocks=20_000) for number in (1, 2)]
    view = RequestView("a" * 32, 16 * BLOCKS, 16, b"k" * 16)
    loads, costs = Ledger().loads(0.0), CostModel(Settings())
    return plan(view, workers, LocationIndex().lookup(b""), {}, loads, costs, Topology({}), 0.0)


def router(tracer: Tracer, parent: str) -> Callable[[], None]:
    """As :mod:`router_hints.dispatch` does for a request with a hint."""
    made = made_plan()

    def one() -> None:
        span = tracer.start("kvcr.plan", parent, {"kvcr.request_id": "r", "kvcr.attempt": 0}, root=True)
        tracer.start("kvcr.hint", span.traceparent, hint_attributes(made)).end()
        span.end(plan_attributes(made))

    return one


def guard(tracer: Tracer, parent: str) -> Callable[[], None]:
    """Fetch, lease, transfer in two steps, and the load of one rank."""
    traces = RequestTraces(tracer)
    fetch = Fetch(
        1, "r", 0, b"p" * 16, b"k" * 16 * BLOCKS, b"h" * 8 * BLOCKS, [], 0.0, 1e3, traceparent=parent
    )
    none = np.zeros(BLOCKS, np.uint64)
    grant = Grant(1, np.arange(BLOCKS, dtype=np.int32), none, none[:, None], none, none > 0, 0.0)
    loaded, statuses = LoadEnd("r", BLOCKS, BLOCKS << 16, 0.01), bytes([0]) * BLOCKS

    def one() -> None:
        trace = traces.fetch(fetch, BLOCKS)
        if trace is not None:
            end_lease(trace.lease("g1", "nixl", BLOCKS), grant, "")
            for _ in range(2):
                trace.moved("g1", "nixl", 0.0, BLOCKS // 2, BLOCKS << 15, 0)
            trace.end(statuses, copied=BLOCKS, nbytes=BLOCKS << 16)
        traces.load(loaded, 0)

    return one


def source(tracer: Tracer, parent: str) -> Callable[[], None]:
    """As :mod:`kvcr.guard.serving` does for a lease."""

    def one() -> None:
        span = tracer.start("kvcr.serve", parent, {"kvcr.transport": "nixl", "kvcr.asked_blocks": BLOCKS})
        span.end({"kvcr.leased_blocks": BLOCKS, "kvcr.blocks": BLOCKS, "kvcr.result": "released"})

    return one


def microseconds(one: Callable[[], None], count: int) -> tuple[float, float]:
    """Medians over slices, as a busy machine disturbs some: of this thread, and of all threads."""
    own, everything = [], []
    for _ in range(20):
        begun_s, begun_all_s = time.thread_time(), time.process_time()
        for _ in range(count // 20):
            one()
        own.append(1e6 * 20 * (time.thread_time() - begun_s) / count)
        # At the pace of a busy deployment the sender keeps up; here it is waited for.
        time.sleep(0.15)
        everything.append(1e6 * 20 * (time.process_time() - begun_all_s) / count)
    return statistics.median(own), statistics.median(everything)


@contextmanager
def collector() -> Iterator[dict[str, str]]:
    """What a process needs to send spans to a collector of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", COLLECTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
    finally:
        process.communicate("\n")


def measure(quick: bool) -> Mapping[str, Any]:
    # A slice's spans fit the queue of the sender (2,048), or some would be dropped, and cost nothing.
    count = 2000 if quick else 8000
    figures: dict[str, float] = {}
    with collector() as environment:
        os.environ.update(environment)
        off, on = open_tracer("bench", "b", {}), open_tracer("bench", "b")
        for name, make in (("router", router), ("guard", guard), ("source", source)):
            for how, tracer, parent in (
                ("off", off, SAMPLED),
                ("unsampled", on, UNSAMPLED),
                ("on", on, SAMPLED),
            ):
                own, everything = microseconds(make(tracer, parent), count)
                figures[f"{name}_{how}_us"] = round(own, 2)
                figures[f"{name}_{how}_all_threads_us"] = round(everything, 2)
        on.close()
    return figures


if __name__ == "__main__":
    raise SystemExit(_common.run("tracing", measure, (__doc__ or "").partition("\n")[0]))
