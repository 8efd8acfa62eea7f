# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM engines with our connector, each with a guard of its own; no server, no Dynamo.

``a`` computes and stores; ``b`` asks ``a``'s guard for what it lacks. Everything is float32 and greedy, so
that the same prompt gives the same tokens wherever its KV came from. The tiny model makes restoring no
faster than computing: the tests look at tokens and counters, not at the clock.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.metrics import scrape
from kvcr.keys import KeySpace, extend_chain, pack_keys
from kvcr.pool import PoolReader
from tests.e2e.offline_engine import OfflineEngine
from tests.e2e.processes import SHM, Child, eventually, start_guard
from tests.e2e.tiny_model import BLOCK_SIZE, tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

POOL_BYTES = 64 << 20
PROMPT_BLOCKS = 20
G1_BLOCKS = 256


def prompt(seed: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    """A prompt of ``blocks`` full blocks and a bit, of the tokenizer's ordinary tokens."""
    draw = random.Random(seed)
    return [draw.randrange(6, 262) for _ in range(blocks * BLOCK_SIZE + 7)]


@dataclass
class Side:
    engine: OfflineEngine
    guard: Child
    control: str
    pool: Path
    metrics_url: str

    def tokens(self, *prompts: list[int], **more: object) -> list[list[int]]:
        return [output["tokens"] for output in self.engine.generate(list(prompts), **more)]

    def stored(self, text: list[int], blocks: int = PROMPT_BLOCKS, salt: str = "") -> None:
        """Wait for the blocks of a prompt in the pool: an answer does not wait for what it leaves behind."""
        eventually(lambda: in_pool(self.pool, text, salt) >= blocks, f"{blocks} blocks are stored")

    def counted(self, name: str, **labels: str) -> float:
        return scrape(self.metrics_url).total(name, **labels)

    def cached(self, prompt: list[int], **more: object) -> int:
        return int(self.engine.generate([prompt], **more)[0]["cached"])


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    logs = tmp_path_factory.mktemp("connector")
    model = tiny_model()
    made: list[Side] = []
    try:
        for name in ("a", "b"):
            pool = SHM / f"kvcr-conn-{os.getpid()}-{name}"
            guard, ready = start_guard(f"conn-{name}", pool, POOL_BYTES, logs)
            extra = {
                "socket": ready["socket"],
                "load_deadline_ms": 10_000,
                "lease_wait_ms": 5000,
                # Computing is as fast as pulling for this model, and these tests want to see pulls.
                "local_estimate": False,
            }
            if made:
                extra["peers"] = [made[0].control]
            engine = OfflineEngine(
                model, logs / f"{name}.log", extra=extra, num_gpu_blocks_override=G1_BLOCKS, max_num_seqs=16
            )
            made.append(Side(engine, guard, ready["control"], pool, ready["metrics"]))
        for side in made:
            side.engine.wait_ready()
        yield made[0], made[1]
    finally:
        for side in made:
            side.engine.close()
            side.guard.stop()
            shutil.rmtree(side.pool, ignore_errors=True)


def test_what_one_engine_computed_another_pulls(sides: tuple[Side, Side]) -> None:
    a, b = sides
    text = prompt(1)
    (cold,) = a.engine.generate([text])
    assert cold["cached"] == 0
    a.stored(text)
    (pulled,) = b.engine.generate([text])
    assert pulled["cached"] == PROMPT_BLOCKS * BLOCK_SIZE
    assert pulled["tokens"] == cold["tokens"]


def test_what_left_g1_comes_back_from_the_engines_own_pool(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    text = prompt(2)
    (cold,) = a.engine.generate([text], max_tokens=40)
    a.engine.reset_g1()
    longer = text + cold["tokens"]
    # Decoded blocks are stored too, but for the last token, whose KV was never computed.
    blocks = (len(longer) - 1) // BLOCK_SIZE
    a.stored(longer, blocks)
    (restored,) = a.engine.generate([longer], max_tokens=8)
    assert restored["cached"] == blocks * BLOCK_SIZE


def test_an_explicit_source_of_a_request_is_asked(sides: tuple[Side, Side]) -> None:
    a, b = sides
    text = prompt(3)
    (cold,) = b.engine.generate([text])
    b.stored(text)
    (pulled,) = a.engine.generate([text], params={"kvcr": {"sources": [{"endpoint": b.control}]}})
    assert (pulled["cached"], pulled["tokens"]) == (PROMPT_BLOCKS * BLOCK_SIZE, cold["tokens"])


def test_a_damaged_block_is_computed_again_and_the_answer_is_the_same(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    text = prompt(4)
    (cold,) = a.engine.generate([text])
    a.engine.reset_g1()
    a.stored(text)
    damage(a.pool, text, position=9)
    before = a.counted("kvcr_corrupt_blocks_total", where="load")
    (restored,) = a.engine.generate([text])
    assert restored["tokens"] == cold["tokens"]
    # What was computed in its place takes its place, once the guard has looked at it.
    eventually(lambda: a.counted("kvcr_corrupt_blocks_total", where="load") > before, "the guard was told")
    a.stored(text)
    a.engine.reset_g1()
    (again,) = a.engine.generate([text])
    assert (again["cached"], again["tokens"]) == (PROMPT_BLOCKS * BLOCK_SIZE, cold["tokens"])


def test_tenants_do_not_share(sides: tuple[Side, Side]) -> None:
    a, b = sides
    text = prompt(5)
    (cold,) = a.engine.generate([text], salt="tenant-1")
    a.stored(text, salt="tenant-1")
    assert b.cached(text, salt="tenant-2") == 0
    (same,) = b.engine.generate([text], salt="tenant-1")
    assert (same["cached"], same["tokens"]) == (PROMPT_BLOCKS * BLOCK_SIZE, cold["tokens"])


def test_many_requests_for_one_prefix_and_preemptions_give_the_same_answers(sides: tuple[Side, Side]) -> None:
    a, b = sides
    # 12 requests of 20 blocks that grow by 10: far more than G1 has, so that vLLM preempts.
    texts = [prompt(6) + [6 + number] * BLOCK_SIZE for number in range(6)] + [
        prompt(n) for n in range(60, 66)
    ]
    answers = [a.tokens(text, max_tokens=10 * BLOCK_SIZE)[0] for text in texts]
    assert b.tokens(*texts, max_tokens=10 * BLOCK_SIZE) == answers


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_request_aborted_at_any_moment_leaves_the_engine_well(sides: tuple[Side, Side], steps: int) -> None:
    a, b = sides
    text = prompt(70 + steps, blocks=60)
    (cold,) = a.engine.generate([text])
    b.engine.abort_in_flight(text, steps)
    (after,) = b.engine.generate([text])
    assert after["tokens"] == cold["tokens"]


def test_reset_of_the_connector_forgets_what_was_stored(sides: tuple[Side, Side]) -> None:
    _, b = sides
    text = prompt(8)
    b.cached(text)
    b.stored(text)
    b.engine.reset_g1(connector=True)
    before = b.counted("kvcr_deposited_blocks_total")
    assert b.cached(text) == 0
    b.engine.reset_g1()
    eventually(
        lambda: b.counted("kvcr_deposited_blocks_total") >= before + PROMPT_BLOCKS, "the blocks are stored"
    )
    assert b.cached(text) == PROMPT_BLOCKS * BLOCK_SIZE


def test_without_its_guard_an_engine_answers_all_the_same(sides: tuple[Side, Side]) -> None:
    a, b = sides
    text = prompt(9)
    (cold,) = a.engine.generate([text])
    b.guard.process.kill()
    b.guard.process.wait(5)
    (alone,) = b.engine.generate([text])
    assert alone["tokens"] == cold["tokens"]
    assert b.tokens(prompt(10)) == a.tokens(prompt(10))


def in_pool(pool: Path, tokens: list[int], salt: str = "") -> int:
    """Blocks of a prompt that the pool has."""
    reader = PoolReader.open(pool)
    try:
        keys = extend_chain(KeySpace("dynamo", reader.layout.model, salt=salt).root(), tokens, BLOCK_SIZE)
        return int((reader.lookup(pack_keys(keys)).slots >= 0).sum())
    finally:
        reader.close()


def damage(pool: Path, tokens: list[int], position: int) -> None:
    """Flip bytes of one block in the pool, as bad memory would: nobody is told."""
    reader = PoolReader.open(pool)
    try:
        keys = extend_chain(KeySpace("dynamo", reader.layout.model).root(), tokens, BLOCK_SIZE)
        slots, _ = reader.lookup(keys[position])
        assert slots[0] >= 0
        with (pool / "data").open("r+b") as data:
            data.seek(int(slots[0]) * reader.slot_part_bytes + 1000)
            before = data.read(64)
            data.seek(-64, 1)
            data.write(bytes(byte ^ 0xFF for byte in before))
    finally:
        reader.close()
