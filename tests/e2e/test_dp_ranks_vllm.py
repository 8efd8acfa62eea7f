# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks of one real vLLM server: sources and targets like workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from demo.client import Answer, ask
from demo.metrics import Page, growth, scrape
from kvcr.harness import Harness, headers
from kvcr.protocol.signals import SessionInfo
from tests.e2e.agg import PROMPT_BLOCKS, Agg, grown, messages, running
from tests.e2e.processes import eventually
from tests.e2e.tiny_model import BLOCK_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

GUARDS = ("guard-0-dp0", "guard-0-dp1")
TRIES = 10


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agg]:
    options = ["--VllmWorker.ServiceArgs.workers=1", "--VllmWorker.data-parallel-size=2"]
    with running(tmp_path_factory.mktemp("ranks"), options) as graph:
        yield graph


def answer(agg: Agg, seed: int) -> Answer:
    """A turn of a session of its own, on the rank that the router chooses."""
    return ask(
        agg.graph.frontend_url, agg.graph.model, messages(seed), max_tokens=8, headers=headers(f"s{seed}")
    )


def session(agg: Agg, seed: int) -> SessionInfo | None:
    return Harness(agg.graph.component("router")["urls"]["signals"]).session(f"s{seed}")


def places(agg: Agg, seed: int) -> set[tuple[str, str]]:
    """Guards and tiers that have the whole prompt, as the router knows it."""
    info = session(agg, seed)
    found = info.places if info is not None else []
    return {(place.guard, place.tier) for place in found if place.leading_blocks >= PROMPT_BLOCKS}


def page(agg: Agg, guard: str) -> Page:
    return scrape(agg.graph.component(guard)["metrics"])


def test_a_rank_copies_from_the_other_through_shared_memory(agg: Agg) -> None:
    for seed in itertools.count(1):
        cold = answer(agg, seed)
        eventually(lambda seed=seed: len(places(agg, seed)) == 2, "one rank has it, in both tiers")
        ((holder, _), _) = places(agg, seed)
        other = GUARDS[1 - GUARDS.index(holder)]
        before = page(agg, holder), page(agg, other)
        # The rank that computed it was at work until now, as far as the router believes; the other was not.
        again = answer(agg, seed)
        assert again.text == cold.text
        assert again.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
        info = session(agg, seed)
        if info is not None and info.home == other:
            break
        assert seed < TRIES, "the other rank never gets a request"
    served = agg.graph.component(holder)["metrics"]
    assert grown(before[0], served, "kvcr_served_blocks_total", PROMPT_BLOCKS) == PROMPT_BLOCKS
    pulled = growth(before[1], page(agg, other)).by_label("kvcr_pulled_blocks_total", "transport")
    assert sum(pulled.values()) == pulled["shm"] == PROMPT_BLOCKS
    both = {(guard, tier) for guard in GUARDS for tier in ("G1", "G2")}
    eventually(lambda: places(agg, seed) == both, "both ranks have it, in both tiers")
