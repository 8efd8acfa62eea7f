# SPDX-License-Identifier: Apache-2.0
"""What the connector costs the engine's scheduler thread, by the length of the prompt.

A real pool of this process, the real connector, requests as vLLM makes them; processor time of the calling
thread. For each length: taking a new request in (its keys), the same with a hint of that many blocks, the
first answer to the scheduler, planning its load, and planning the saves of a step. Keys are hashed once in a
block's life.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench import _common
from kvcr.client import FetchState, Grants
from kvcr.config import EngineConfig
from kvcr.keys import KeySpace, extend_chain, pack_keys
from kvcr.layout import Layout
from kvcr.pool import Pool, PoolReader
from kvcr.protocol.events import FetchPayload, FetchSource, envelope, fetch_action
from kvcr.vllm.torchvision_ops import declare_missing_operators

declare_missing_operators()

# ruff: noqa: E402
from kvcr.vllm.scheduler import ConnectorScheduler

BLOCK_SIZE = 32
MODEL = "bench@0+0"
LENGTHS = (64, 512, 4096)
"""Blocks; 4,096 are a prompt of 131,072 tokens."""
STEP_BLOCKS = 64
"""Saved by one step: 2,048 tokens."""


class Handle:
    """A guard that answers nothing: lookups read the pool, messages go nowhere."""

    connected = True
    own_endpoint = ""
    grants_available = 1 << 20

    def __init__(self, reader: PoolReader) -> None:
        self.reader = reader

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []

    def lookup(self, keys: bytes) -> np.ndarray:
        return self.reader.lookup(keys).slots >= 0

    def take_grants(self, count: int) -> Grants:
        return Grants(np.arange(count, dtype=np.int32), np.ones(count, np.uint64), 1, 1)

    def fetch(self, request_id: str, **asked: Any) -> FetchState:
        return FetchState(request_id, asked["first"], len(asked["keys"]) // 16, 0.0)

    def fetch_state(self, request_id: str) -> None:
        return None


def request(blocks: int) -> Any:
    tokens = blocks * BLOCK_SIZE + 1
    return SimpleNamespace(
        request_id="r",
        all_token_ids=list(range(tokens)),
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        block_hashes=[bytes(24) + (1 + i).to_bytes(8, "big") for i in range(blocks)],
        mm_features=[],
        prompt_embeds=None,
        prompt_is_token_ids=None,
        lora_request=None,
        cache_salt=None,
        kv_hints=None,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
        resumable=False,
    )


def timed(times: dict[str, list[float]], name: str, call: Callable[[], Any]) -> None:
    started_s = time.thread_time()
    call()
    times.setdefault(name, []).append(1e6 * (time.thread_time() - started_s))


def one(reader: PoolReader, blocks: int, hint: Any, times: dict[str, list[float]]) -> None:
    scheduler = ConnectorScheduler(
        Handle(reader),  # type: ignore[arg-type]
        EngineConfig(),
        model=MODEL,
        block_size=BLOCK_SIZE,
    )
    plain, hinted = request(blocks), request(blocks)
    timed(times, "new_request", lambda: scheduler.on_new_request(plain))
    hinted.kv_hints, hinted.request_id = hint, "hinted"
    timed(times, "new_request_with_hint", lambda: scheduler.on_new_request(hinted))
    timed(times, "matched_tokens", lambda: scheduler.matched_tokens(plain, 0))
    table = list(range(blocks + 1))
    count = scheduler.matched_tokens(plain, 0)[0] or 0
    allocated = SimpleNamespace(get_block_ids=lambda: (table,))
    timed(times, "after_alloc", lambda: scheduler.after_alloc(plain, allocated, count))
    fresh = request(blocks)
    fresh.request_id, fresh.all_token_ids = "fresh", [token + 1 for token in fresh.all_token_ids]
    scheduler.on_new_request(fresh)
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="fresh", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={"fresh": STEP_BLOCKS * BLOCK_SIZE},
        preempted_req_ids=set(),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (table,)),
    )
    timed(times, "build_metadata", lambda: scheduler.build_metadata(output))


def measure(quick: bool) -> dict[str, Any]:
    layout = Layout(
        model=MODEL, dtype="float32", block_size=BLOCK_SIZE, layers=1, kv_heads=1, head_size=8, part_bytes=512
    )
    most = max(LENGTHS)
    chain = extend_chain(KeySpace("dynamo", MODEL).root(), list(range(most * BLOCK_SIZE)), BLOCK_SIZE)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        pool = Pool.create(Path(directory), layout, 2 * most * layout.slot_part_bytes, guard_incarnation=1)
        # All blocks but those of the request that saves: the longest loads.
        granted = pool.allocate(most, 0.0)
        keys = pack_keys(chain)
        none = np.zeros(most, np.uint64)
        pool.commit(*granted, keys, keys, none, none.astype(np.uint32), none, 0.0)
        reader = PoolReader.open(Path(directory))
        for blocks in LENGTHS:
            hint = envelope(
                "m",
                [
                    fetch_action(
                        "a",
                        FetchPayload(
                            plan_id="p",
                            sources=[FetchSource("tcp://10.0.0.6:7100", 0, blocks)],
                            last_key=chain[blocks - 1].hex(),
                        ),
                    )
                ],
            )
            times: dict[str, list[float]] = {}
            for _ in range(30 if quick else 200):
                one(reader, blocks, hint, times)
            results[str(blocks)] = {name: round(statistics.median(each), 1) for name, each in times.items()}
            shown = ", ".join(f"{name} {value:.0f}" for name, value in results[str(blocks)].items())
            _common.say(f"{blocks:5} blocks, us: {shown}")
        reader.close()
        pool.close(unlink=True)
    return {"microseconds_by_blocks": results, "step_blocks": STEP_BLOCKS}


if __name__ == "__main__":
    raise SystemExit(_common.run("scheduler", measure, (__doc__ or "").splitlines()[0]))
