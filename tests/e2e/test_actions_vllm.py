# SPDX-License-Identifier: Apache-2.0
"""The six primitives, pin and demote on two real vLLM engines, from the action on NATS to the bytes.

What an engine has is told from what it does not compute: ``cached`` tokens of a request count blocks of G1
and blocks restored from its pool. No engine asks a peer by itself here, so that a block that is nowhere is a
miss. An engine is idle between requests, which is when a drop in G1 has to wait for the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from demo.metrics import scrape
from kvcr.graph.infra import Server
from kvcr.keys import BlockKey, KeySpace, extend_chain, pack_keys
from kvcr.pool import PoolReader
from kvcr.pool.meta import META, Meta
from kvcr.protocol.events import (
    DEMOTE,
    INVALIDATE,
    PIN,
    PREFETCH,
    UNPIN,
    ActionResult,
    DemotePayload,
    FetchSource,
    InvalidatePayload,
    PinPayload,
    PrefetchPayload,
    UnpinPayload,
)
from tests.e2e.offline_engine import OfflineEngine
from tests.e2e.processes import SHM, Child, eventually, start_guard
from tests.e2e.tiny_model import BLOCK_SIZE, tiny_model
from tests.integration.acting_router import ActingRouter
from tests.integration.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

POOL_BYTES = 10 << 20
"""About 300 blocks: little enough to be put under pressure."""
HEAD, TAIL = 8, 12
G1_BLOCKS = 256


def tokens(seed: int, blocks: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, 262) for _ in range(blocks * BLOCK_SIZE)]


def prompt(seed: int, blocks: int = HEAD + TAIL) -> list[int]:
    """A prompt of ``blocks`` full blocks and a bit."""
    return tokens(seed, blocks) + [7] * 5


@dataclass
class Side:
    name: str
    engine: OfflineEngine
    guard: Child
    control: str
    metrics_url: str
    pool: Path
    nats_url: str
    namespace: str

    def cached(self, text: list[int], **more: object) -> int:
        """Blocks of a prompt that were not computed."""
        (output,) = self.engine.generate([text], **more)
        return int(output["cached"]) // BLOCK_SIZE

    @property
    def root(self) -> BlockKey:
        reader = PoolReader.open(self.pool)
        try:
            return KeySpace("dynamo", reader.layout.model).root()
        finally:
            reader.close()

    def keys(self, text: Sequence[int]) -> list[BlockKey]:
        return extend_chain(self.root, text, BLOCK_SIZE)

    def here(self, text: Sequence[int]) -> int:
        """Blocks of a prompt that are in the pool."""
        reader = PoolReader.open(self.pool)
        try:
            return int((reader.lookup(pack_keys(self.keys(text))).slots >= 0).sum())
        finally:
            reader.close()

    def stored(self, text: Sequence[int], blocks: int = HEAD + TAIL) -> None:
        """Wait until the engine's copy thread and the guard are through with it."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (here := self.here(text)) < blocks:
            assert time.monotonic() < deadline_s, f"{here} of {blocks} blocks stored"
            time.sleep(0.05)

    def engine_hashes(self, text: Sequence[int]) -> bytes:
        """The engine's own hashes of blocks that are in the pool."""
        meta = Meta.open(self.pool / META, writable=False)
        reader = PoolReader(self.pool, meta)
        try:
            slots = reader.lookup(pack_keys(self.keys(text))).slots
            return bytes(meta.engine_hashes[slots].astype("<u8").tobytes())
        finally:
            reader.close()

    def act(self, kind: str, payload: msgspec.Struct) -> ActionResult:
        """Send one action as a router does, and wait for its result."""

        async def send() -> ActionResult:
            async with ActingRouter(self.nats_url, self.namespace) as router:
                plan_id = str(getattr(payload, "plan_id", ""))
                return await router.ask(self.name, plan_id, kind, payload)

        return asyncio.run(send())

    def metric(self, name: str) -> float:
        return scrape(self.metrics_url).total(name)


@pytest.fixture(scope="module")
def sides(
    tmp_path_factory: pytest.TempPathFactory, etcd: Server, nats_server: Server
) -> Iterator[tuple[Side, Side]]:
    logs = tmp_path_factory.mktemp("actions")
    namespace = f"e2e-{logs.name}"
    environment = {
        "ETCD_ENDPOINTS": etcd.url,
        "NATS_SERVER": nats_server.url,
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_LOG": "error",
        "KVCR_GUARD_CLUSTER": "true",
        "KVCR_GUARD_NAMESPACE": namespace,
    }
    model = tiny_model()
    made: list[Side] = []
    try:
        for name in ("a", "b"):
            pool = SHM / f"kvcr-acts-{logs.name}-{name}"
            guard, ready = start_guard(name, pool, POOL_BYTES, logs, environment)
            extra = {"socket": ready["socket"], "load_deadline_ms": 20_000, "lease_wait_ms": 5000}
            engine = OfflineEngine(
                model, logs / f"{name}.log", extra=extra, num_gpu_blocks_override=G1_BLOCKS, max_num_seqs=8
            )
            side = Side(
                name, engine, guard, ready["control"], ready["metrics"], pool, nats_server.url, namespace
            )
            made.append(side)
        for side in made:
            side.engine.wait_ready()
        yield made[0], made[1]
    finally:
        for side in made:
            side.engine.close()
            side.guard.stop()
            shutil.rmtree(side.pool, ignore_errors=True)


def prefetch(source: Side, text: list[int], plan_id: str, mode: str = "copy") -> PrefetchPayload:
    keys = source.keys(text)
    return PrefetchPayload(
        plan_id=plan_id,
        keys=pack_keys(keys),
        engine_hashes=source.engine_hashes(text),
        parent=source.root.hex(),
        first=0,
        sources=[FetchSource(source.control, 0, len(keys))],
        mode=mode,
    )


def test_invalidate_kills_the_dead_part_in_every_tier_and_spares_what_another_session_shares(
    sides: tuple[Side, Side],
) -> None:
    a, _ = sides
    shared = tokens(1, HEAD)
    ours, theirs = shared + prompt(2, TAIL), shared + prompt(3, TAIL)
    # The answer fills a block and a bit: it dies with the context it follows.
    (answer,) = a.engine.generate([ours], max_tokens=BLOCK_SIZE + 8)
    whole = ours + answer["tokens"]
    assert a.cached(theirs) == HEAD
    a.stored(theirs)
    a.stored(whole, HEAD + TAIL + 1)

    payload = InvalidatePayload(plan_id="compaction", keys=pack_keys(a.keys(ours)[HEAD:]))
    result = a.act(INVALIDATE, payload)
    # Nobody asks the engine for anything: it hears of it when its next request comes.
    assert (result.code, result.blocks) == ("deferred", TAIL + 1)
    assert a.here(whole) == HEAD
    assert a.cached(whole) == HEAD
    eventually(lambda: a.metric("kvcr_g1_dropped_blocks_total") == TAIL + 1, "the engine told its guard")
    assert a.cached(theirs) == HEAD + TAIL
    # Computed by a new request, it is as good as any other block.
    assert a.cached(whole) == HEAD + TAIL + 1
    a.stored(whole, HEAD + TAIL + 1)


def test_prefetch_brings_it_before_the_request_that_then_computes_nothing(sides: tuple[Side, Side]) -> None:
    a, b = sides
    text = prompt(10)
    (cold,) = a.engine.generate([text])
    a.stored(text)
    result = b.act(PREFETCH, prefetch(a, text, "prefetch"))
    assert (result.code, result.blocks) == ("done", HEAD + TAIL)
    assert b.here(text) == HEAD + TAIL
    (warm,) = b.engine.generate([text])
    assert (warm["cached"] // BLOCK_SIZE, warm["tokens"]) == (HEAD + TAIL, cold["tokens"])
    assert a.here(text) == HEAD + TAIL, "a copy leaves the source alone"


def test_move_leaves_one_home(sides: tuple[Side, Side]) -> None:
    a, b = sides
    text = prompt(20)
    (cold,) = a.engine.generate([text])
    a.stored(text)
    result = b.act(PREFETCH, prefetch(a, text, "move", mode="move"))
    assert (result.code, result.blocks) == ("done", HEAD + TAIL)
    assert (a.here(text), b.here(text)) == (0, HEAD + TAIL)
    (moved,) = b.engine.generate([text])
    assert (moved["cached"] // BLOCK_SIZE, moved["tokens"]) == (HEAD + TAIL, cold["tokens"])
    # G1 of the old home let go too.
    assert a.cached(text) == 0


def test_a_one_off_turn_uses_a_copy_and_leaves_nothing_behind(sides: tuple[Side, Side]) -> None:
    a, b = sides
    text = prompt(30)
    (cold,) = a.engine.generate([text])
    a.stored(text)
    once = {"kvcr": {"sources": [{"endpoint": a.control}], "no_retain": True}}
    (turn,) = b.engine.generate([text], max_tokens=BLOCK_SIZE + 8, params=once)
    assert turn["cached"] // BLOCK_SIZE == HEAD + TAIL
    assert turn["tokens"][: len(cold["tokens"])] == cold["tokens"]
    assert b.cached(text) == 0, "neither its pool nor its G1 has a block of it"
    b.stored(text)


def test_a_one_off_turn_leaves_alone_what_was_there_before_it(sides: tuple[Side, Side]) -> None:
    _, b = sides
    shared = tokens(40, HEAD)
    b.cached(shared + [7] * 5)
    once = {"kvcr": {"sources": [{"endpoint": "tcp://127.0.0.1:9"}], "no_retain": True}}
    text = shared + prompt(41, TAIL)
    assert b.cached(text, params=once) == HEAD
    assert b.cached(text) == HEAD


def test_pin_and_demote_decide_who_goes_under_pressure(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    pinned, old, demoted = prompt(50), prompt(51), prompt(52)
    for text in (pinned, old, demoted):
        a.cached(text)
        a.stored(text)
    pin = PinPayload(plan_id="pin", keys=pack_keys(a.keys(pinned)), pin_id="x", ttl_s=600)
    result = a.act(PIN, pin)
    assert (result.code, result.blocks) == ("done", HEAD + TAIL)
    result = a.act(DEMOTE, DemotePayload(plan_id="demote", keys=pack_keys(a.keys(demoted))))
    assert (result.code, result.blocks) == ("done", HEAD + TAIL)
    # Served until then.
    assert a.here(demoted) == HEAD + TAIL

    # The least recently used of all, were it not for the pin and the demotion. Some of what presses on them
    # is not stored: slots cool for 2 s after an eviction, and the engine does not wait for them.
    seeds, deadline_s = itertools.count(60), time.monotonic() + 120
    while a.here(demoted) == HEAD + TAIL:
        a.cached(prompt(next(seeds)))
        assert time.monotonic() < deadline_s, "what was demoted is not evicted"
    assert a.here(old) == HEAD + TAIL
    while a.here(old):
        a.cached(prompt(next(seeds)))
        assert time.monotonic() < deadline_s, "what is old is not evicted"
    assert a.here(pinned) == HEAD + TAIL
    a.engine.reset_g1()
    assert a.cached(pinned) == HEAD + TAIL
    result = a.act(UNPIN, UnpinPayload(plan_id="unpin", pin_id="x"))
    assert (result.code, result.blocks) == ("done", HEAD + TAIL)
