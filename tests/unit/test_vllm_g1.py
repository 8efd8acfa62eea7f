# SPDX-License-Identifier: Apache-2.0
"""Dropping blocks in vLLM's own cache, on vLLM's own block pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.vllm.torchvision_ops import declare_missing_operators

declare_missing_operators()
pytest.importorskip("vllm")

# ruff: noqa: E402
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvcr.config import EngineConfig
from kvcr.keys import KeySpace, extend_chain
from kvcr.protocol.engine import DropG1
from kvcr.vllm import g1
from kvcr.vllm.scheduler import ConnectorScheduler
from tests.unit.test_vllm_scheduler import FakeHandle, hint_of

BLOCK = 4
MODEL = "tiny@abc+0"


class G1:
    """vLLM's pool, and requests that hold blocks of it."""

    def __init__(self, blocks: int = 32) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(blocks, True, BLOCK)

    def request(self, request_id: str, tokens: list[int]) -> Request:
        return Request(
            request_id,
            tokens,
            SamplingParams(max_tokens=8),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )

    def hits(self, request: Request) -> int:
        """Blocks from the start that are in the cache."""
        for count, block_hash in enumerate(request.block_hashes):
            if self.pool.get_cached_block(block_hash, [0]) is None:
                return count
        return len(request.block_hashes)

    def run(self, request: Request) -> list[Any]:
        """Take what is cached, compute the rest, and hold all."""
        hits = self.hits(request)
        held = [self.pool.get_cached_block(h, [0])[0] for h in request.block_hashes[:hits]]
        self.pool.touch(held)
        held += self.pool.get_new_blocks(len(request.block_hashes) - hits)
        self.pool.cache_full_blocks(request, held, hits, len(held), BLOCK, 0)
        return held

    def end(self, held: list[Any]) -> None:
        self.pool.free_blocks(reversed(held))


def hashes_of(request: Request, first: int, stop: int) -> np.ndarray:
    return np.array([int.from_bytes(h[-8:], "big") for h in request.block_hashes[first:stop]], np.uint64)


def test_dropped_blocks_are_missed_afterwards_and_their_prefix_is_not() -> None:
    engine = G1()
    request = engine.request("r", list(range(24)))
    engine.end(engine.run(request))
    assert engine.hits(request) == 6
    assert g1.drop(engine.pool, [hashes_of(request, 2, 6)]) == [4]
    assert engine.hits(engine.request("again", list(range(24)))) == 2
    assert engine.pool.get_num_free_blocks() == 31


def test_a_block_in_use_loses_its_hash_at_once_and_is_free_when_released() -> None:
    engine = G1()
    request = engine.request("r", list(range(16)))
    held = engine.run(request)
    assert g1.drop(engine.pool, [hashes_of(request, 0, 4)]) == [4]
    assert engine.hits(request) == 0
    assert engine.pool.get_num_free_blocks() == 27
    engine.end(held)
    assert engine.pool.get_num_free_blocks() == 31
    assert engine.hits(request) == 0


def test_every_copy_of_a_block_is_dropped() -> None:
    engine = G1()
    request = engine.request("r", list(range(8)))
    # Two requests that computed the same prefix at the same time: vLLM keeps both copies.
    for _ in range(2):
        held = engine.pool.get_new_blocks(2)
        engine.pool.cache_full_blocks(request, held, 0, 2, BLOCK, 0)
    assert g1.drop(engine.pool, [hashes_of(request, 0, 1), hashes_of(request, 1, 2)]) == [2, 2]
    assert engine.hits(request) == 0


def test_hashes_that_are_not_there_and_an_empty_cache_are_no_trouble() -> None:
    engine = G1()
    assert g1.drop(engine.pool, [np.array([1, 2], np.uint64)]) == [0]
    engine.run(engine.request("r", list(range(8))))
    assert g1.drop(engine.pool, [np.array([1, 2], np.uint64)]) == [0]
    assert g1.drop(engine.pool, [np.empty(0, np.uint64)]) == [0]


def connector(engine: G1) -> tuple[ConnectorScheduler, FakeHandle]:
    handle = FakeHandle()
    scheduler = ConnectorScheduler(handle, EngineConfig(), model=MODEL, block_size=BLOCK)
    scheduler.bind_block_pool(engine.pool)
    return scheduler, handle


def as_connector_sees(request: Request, **hints: Any) -> Any:
    """The request, with a hint of a KVCR router."""
    request.kv_hints = hint_of(
        SimpleNamespace(all_token_ids=list(request.all_token_ids)), len(request.block_hashes), **hints
    )
    return request


def test_a_one_off_turn_takes_its_own_blocks_along_and_leaves_what_others_use() -> None:
    engine = G1()
    scheduler, _ = connector(engine)
    engine.end(engine.run(engine.request("before", list(range(8)))))
    one_off = as_connector_sees(engine.request("one-off", list(range(24))), no_retain=True)
    scheduler.on_new_request(one_off)
    scheduler.matched_tokens(one_off, 2 * BLOCK)
    held = engine.run(one_off)
    # Somebody else runs on its third block.
    sharer = engine.run(engine.request("sharer", list(range(12))))
    scheduler.finished(one_off, [block.block_id for block in held])
    engine.end(held)
    assert engine.hits(engine.request("again", list(range(24)))) == 3
    engine.end(sharer)
    assert engine.pool.get_num_free_blocks() == 31


def test_a_request_that_runs_on_after_its_context_was_invalidated_leaves_nothing_after_it() -> None:
    engine = G1()
    scheduler, handle = connector(engine)
    running = engine.request("running", list(range(16)))
    scheduler.on_new_request(running)
    scheduler.matched_tokens(running, 0)
    held = engine.run(running)
    handle.drops = [DropG1(1, hashes_of(running, 2, 4).tobytes())]
    scheduler.on_new_request(engine.request("next", [99] * 8))
    assert handle.dropped_counts == [(1, 2)]
    # It goes on decoding: one more block is full and cached.
    for token in range(16, 20):
        running.append_output_token_ids(token)
    held += engine.pool.get_new_blocks(1)
    engine.pool.cache_full_blocks(running, held, 4, 5, BLOCK, 0)
    assert engine.pool.get_cached_block(running.block_hashes[4], [0]) is not None
    scheduler.finished(running, [block.block_id for block in held])
    engine.end(held)
    assert [engine.pool.get_cached_block(h, [0]) is not None for h in running.block_hashes] == [
        True, True, False, False, False,
    ]  # fmt: skip


# --- blocks named by key ----------------------------------------------------------------------------------


def serve(engine: G1, scheduler: ConnectorScheduler, tokens: list[int], request_id: str = "r") -> Any:
    """One request from its beginning to its end; returns the keys of its blocks."""
    request = engine.request(request_id, tokens)
    scheduler.on_new_request(request)
    scheduler.matched_tokens(request, engine.hits(request) * BLOCK)
    held = engine.run(request)
    scheduler.finished(request, [block.block_id for block in held])
    engine.end(held)
    return keys_of(tokens)


def keys_of(tokens: list[int]) -> list[bytes]:
    root = KeySpace("dynamo", MODEL).root()
    return [bytes(key) for key in extend_chain(root, tokens, BLOCK)]


def drop_keys(engine: G1, scheduler: ConnectorScheduler, handle: FakeHandle, keys: list[bytes]) -> int:
    """Blocks that the engine dropped for it, before its next request."""
    handle.drops = [DropG1(1, b"", b"".join(keys))]
    scheduler.on_new_request(engine.request("next", [99]))
    return handle.dropped_counts[-1][1]


def test_blocks_named_by_key_are_dropped() -> None:
    engine = G1()
    scheduler, handle = connector(engine)
    mine, other = serve(engine, scheduler, list(range(24))), serve(engine, scheduler, list(range(50, 62)))
    assert drop_keys(engine, scheduler, handle, [bytes(16), *mine[2:]]) == 4
    assert engine.hits(engine.request("again", list(range(24)))) == 2
    assert engine.hits(engine.request("other", list(range(50, 62)))) == len(other)


def test_blocks_of_a_request_that_runs_are_dropped_by_key_and_it_keeps_nothing_after_them() -> None:
    engine = G1()
    scheduler, handle = connector(engine)
    running = engine.request("running", list(range(16)))
    scheduler.on_new_request(running)
    scheduler.matched_tokens(running, 0)
    held = engine.run(running)
    assert drop_keys(engine, scheduler, handle, keys_of(list(range(16)))[2:]) == 2
    running.append_output_token_ids([16, 17, 18, 19])
    held += engine.pool.get_new_blocks(1)
    engine.pool.cache_full_blocks(running, held, 4, 5, BLOCK, 0)
    scheduler.finished(running, [block.block_id for block in held])
    engine.end(held)
    assert engine.hits(running) == 2
    assert engine.pool.get_cached_block(running.block_hashes[4], [0]) is None


def test_a_block_that_stays_in_g1_is_known_by_key_however_much_came_and_went() -> None:
    engine = G1(blocks=32)
    scheduler, handle = connector(engine)
    hot = list(range(16))
    keys = serve(engine, scheduler, hot)
    for turn in range(40):
        serve(engine, scheduler, [1000 + 20 * turn + i for i in range(20)])
        serve(engine, scheduler, hot)
    assert engine.hits(engine.request("hot", hot)) == 4
    assert drop_keys(engine, scheduler, handle, keys) == 4


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=60))
@settings(deadline=None)
def test_every_block_in_g1_can_be_named_by_its_key(turns: list[tuple[int, int]]) -> None:
    """Sessions that grow, are hit again and are forgotten; the engine remembers whatever G1 has."""
    engine = G1(blocks=16)
    scheduler, handle = connector(engine)
    for session, blocks in turns:
        serve(engine, scheduler, [100 * session + i for i in range(blocks * BLOCK)])
    cached = sum(block.block_hash is not None for block in engine.pool.blocks)
    every = [key for s in range(6) for key in keys_of([100 * s + i for i in range(6 * BLOCK)])]
    assert drop_keys(engine, scheduler, handle, every) == cached


def test_new_weights_forget_the_keys() -> None:
    engine = G1()
    scheduler, handle = connector(engine)
    keys = serve(engine, scheduler, list(range(16)))
    scheduler.reset("other@weights+1")
    assert drop_keys(engine, scheduler, handle, keys) == 0


def test_blocks_that_were_hit_and_have_no_key_are_no_trouble() -> None:
    engine = G1()
    scheduler, handle = connector(engine)
    keys = serve(engine, scheduler, list(range(16)))
    request = engine.request("r2", list(range(20)))
    scheduler.on_new_request(request)
    scheduler.matched_tokens(request, 4 * BLOCK)
    held = engine.run(request)
    # New weights under a request that runs: nothing of it is keyed any more.
    scheduler.reset("other@weights+1")
    scheduler.finished(request, [block.block_id for block in held])
    engine.end(held)
    assert drop_keys(engine, scheduler, handle, keys) == 0
