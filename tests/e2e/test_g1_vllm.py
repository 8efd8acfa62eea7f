# SPDX-License-Identifier: Apache-2.0
"""Engine memory as the router sees it, on real vLLM workers: what a pool no longer has is still known in G1,
and a compaction drops it there."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from demo.client import ask
from kvcr.harness import Harness, headers
from kvcr.pool import PoolReader
from tests.e2e.agg import PROMPT_BLOCKS, Agg, keys_of, messages, running
from tests.e2e.processes import eventually
from tests.e2e.tiny_model import BLOCK_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SESSION = "main"
KEPT = 4


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agg]:
    """Engine memory for 2,000 blocks, and pools that hold a tenth of that."""
    options = ["--Guard.pool-bytes=6MiB", "--VllmWorker.max-num-batched-tokens=256"]
    with running(tmp_path_factory.mktemp("g1"), options) as graph:
        yield graph


def cached_blocks(agg: Agg, seed: int, session: str = "") -> int:
    """One request on the first worker; blocks of its prompt that were not computed."""
    worker = agg.graph.workers[0]
    where = agg.graph.pin(worker)
    extra = headers(session) if session else {}
    answer = ask(
        agg.graph.frontend_url,
        agg.graph.model,
        messages(seed),
        max_tokens=4,
        headers=where["headers"] | extra,
    )
    return answer.cached_tokens // BLOCK_SIZE


def in_pool(agg: Agg, seed: int) -> int:
    reader = PoolReader.open(agg.graph.workers[0].pool_dir)
    try:
        return sum(
            int(reader.lookup(key)[0][0]) >= 0 for key in keys_of(reader, messages(seed), agg.graph.namespace)
        )
    finally:
        reader.close()


def test_a_compaction_drops_blocks_that_only_engine_memory_has(agg: Agg) -> None:
    kv = Harness(agg.graph.component("router")["urls"]["signals"])

    def places(tier: str) -> int:
        info = kv.session(SESSION)
        return max((p.blocks for p in info.places if p.tier == tier), default=0) if info is not None else 0

    assert cached_blocks(agg, 1, SESSION) == 0
    eventually(lambda: in_pool(agg, 1) >= PROMPT_BLOCKS, "the pool has the session's blocks")
    seed, deadline_s = 100, time.monotonic() + 300
    while in_pool(agg, 1):
        assert time.monotonic() < deadline_s, "the pool does not evict the session's blocks"
        cached_blocks(agg, seed := seed + 1)
    eventually(lambda: places("G2") == 0, "the router knows that no pool has them")
    # A lost message of the engine's is made up for within 12 s.
    eventually(lambda: places("G1") >= PROMPT_BLOCKS, "and that the engine's memory does", 30)
    reply = kv.compaction(SESSION, keeps=KEPT * BLOCK_SIZE, wait_s=20.0)
    assert reply.decision == "invalidate", reply
    assert reply.result in ("done", "deferred"), reply
    # The engine drops them at the latest before its next request.
    cached_blocks(agg, 99)
    eventually(lambda: places("G1") <= KEPT, "the engine's own events say that they are gone")
    assert cached_blocks(agg, 1) == KEPT, "a cache miss after the kept head"
