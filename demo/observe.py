# SPDX-License-Identifier: Apache-2.0
"""One request and what it did to the counters of every process.

Nothing here is told by the router or the client about where a request went: it is read from the
Prometheus pages of workers and guards, before and after.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from demo.client import Answer, ask
from demo.graph import Graph, Worker
from demo.metrics import Page, growth, scrape

_SETTLE_S = 30.0
_POLL_S = 0.05


class CountersDisagree(Exception):
    """The counters do not add up to one request; the message says what was seen."""


@dataclass(frozen=True)
class Seen:
    """What one request did."""

    worker: Worker
    """Whose counters show the request."""
    answer: Answer
    own_tokens: int
    """Prompt tokens reused from this worker's own memory (engine or pool)."""
    pulled_tokens: int
    """Prompt tokens reused that came from another worker's pool."""
    pulled_blocks: int
    pulled_bytes: int
    pull_s: float
    transport: str
    source: Worker | None
    """Whose guard served the pulled blocks."""
    served_blocks: int
    """Blocks the source counts as served; equals ``pulled_blocks`` when both sides agree."""
    served_bytes: int
    deposited_blocks: int
    """Blocks this worker put into its own pool."""

    @property
    def computed_tokens(self) -> int:
        return self.answer.prompt_tokens - self.answer.cached_tokens


def observe(
    graph: Graph,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int,
    worker: Worker | None = None,
    session: str = "",
    settle: bool = True,
) -> Seen:
    """Ask through the frontend, on ``worker`` when one is named, as a turn of ``session``, and read what
    happened.

    Waits until the guards' counters have settled, so that a deposit is complete when this returns; without
    ``settle``, until a worker counts the request. Raises :class:`CountersDisagree`, or what
    :func:`demo.client.ask` raises.
    """
    before = _pages(graph)
    answer = ask(
        graph.frontend_url,
        graph.model,
        messages,
        max_tokens=max_tokens,
        **graph.where(worker, session),
    )
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        after = _pages(graph)
        deltas = {url: growth(before[url], page) for url, page in after.items()}
        ran_on = [w for w in graph.workers if _requests(deltas[w.metrics_url])]
        if len(ran_on) == 1:
            seen = read_off(graph, ran_on[0], answer, deltas)
            if not settle or _settled(graph, seen, after):
                return seen
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    if len(ran_on) != 1:
        names = [w.name for w in ran_on]
        raise CountersDisagree(f"one request was sent, and the counters of {names or 'no worker'} moved")
    return seen


def _pages(graph: Graph) -> dict[str, Page]:
    urls = [worker.metrics_url for worker in graph.workers]
    urls += [worker.guard_metrics_url for worker in graph.workers if worker.guard]
    if graph.router_metrics_url:
        urls.append(graph.router_metrics_url)
    return {url: scrape(url) for url in urls}


def _requests(delta: Page) -> int:
    return round(delta.total("dynamo_component_requests_total", dynamo_endpoint="generate"))


def read_off(graph: Graph, worker: Worker, answer: Answer, deltas: Mapping[str, Page]) -> Seen:
    """What a request that ran on ``worker`` did, from the growth of each guard's page."""
    guard = deltas.get(worker.guard_metrics_url, Page())
    pulled_blocks = round(guard.total("kvcr_pulled_blocks_total"))
    pulled_tokens = min(pulled_blocks * graph.block_size, answer.cached_tokens)
    transports = guard.by_label("kvcr_pulled_blocks_total", "transport")
    sources = [
        other
        for other in graph.workers
        if other is not worker
        and deltas.get(other.guard_metrics_url, Page()).total("kvcr_served_blocks_total")
    ]
    served = [deltas[source.guard_metrics_url] for source in sources]
    return Seen(
        worker=worker,
        answer=answer,
        own_tokens=answer.cached_tokens - pulled_tokens,
        pulled_tokens=pulled_tokens,
        pulled_blocks=pulled_blocks,
        pulled_bytes=round(guard.total("kvcr_pulled_bytes_total")),
        pull_s=guard.total("kvcr_pull_seconds_sum"),
        transport=" + ".join(sorted(transports)),
        source=sources[0] if sources else None,
        served_blocks=round(sum(page.total("kvcr_served_blocks_total") for page in served)),
        served_bytes=round(sum(page.total("kvcr_served_bytes_total") for page in served)),
        deposited_blocks=round(guard.total("kvcr_deposited_blocks_total")),
    )


def _settled(graph: Graph, seen: Seen, pages: Mapping[str, Page]) -> bool:
    """Whether source and destination agree, computed blocks are in the pool, and the router knows them."""
    if not graph.guarded:
        return True
    known = -(-seen.answer.cached_tokens // graph.block_size)
    full_blocks = seen.answer.prompt_tokens // graph.block_size
    if seen.served_blocks != seen.pulled_blocks or seen.deposited_blocks < full_blocks - known:
        return False
    if graph.router_metrics_url is None:
        return True
    indexed = pages[graph.router_metrics_url].by_label("kvcr_router_index_blocks", "guard")
    return all(
        indexed.get(worker.guard, 0)
        == pages[worker.guard_metrics_url].total("kvcr_pool_slots", state="ready")
        for worker in graph.workers
    )
