# SPDX-License-Identifier: Apache-2.0
"""What an invalidation costs those who do it: the guard's main thread, and the engine's scheduler.

CPU time of the thread, as both threads have other work to do and the clock tells more of the machine's load.
The guard finds what comes after a block in a pool of 200,000 (``through_cpu_ms``); the connector drops 100
blocks of a G1 of 100,000 (``g1_drop_cpu_ms``), through vLLM's own block pool.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench._common import run, summary
from kvcr.layout import Layout
from kvcr.pool import Pool

POOL_BLOCKS = 200_000
CHAIN = 1000
G1_BLOCKS = 100_000
G1_BLOCK_TOKENS = 4
_BATCH = 10_000


def main() -> int:
    return run("actions", measure, __doc__ or "")


def measure(quick: bool) -> dict[str, Any]:
    times = 5 if quick else 25
    return {
        "pool_blocks": POOL_BLOCKS,
        "chain_blocks": CHAIN,
        "through_cpu_ms": summary(_through(times)),
        "g1_blocks": G1_BLOCKS,
        "g1_drop_cpu_ms": summary(_g1(times)),
    }


def _through(times: int) -> list[float]:
    """The second half of one chain of many, of which the first tenth is named."""
    layout = Layout("bench", "float32", 16, 1, 1, 16, 512, engine="bench")
    draw = np.random.default_rng(0)
    keys = np.frombuffer(draw.bytes(16 * POOL_BLOCKS), "V16")
    parents = np.roll(keys, 1)
    parents[::CHAIN] = np.frombuffer(draw.bytes(16 * (POOL_BLOCKS // CHAIN)), "V16")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvcr-bench-") as directory:
        slots = POOL_BLOCKS + POOL_BLOCKS // 8
        pool = Pool.create(
            Path(directory), layout, slots * layout.slot_part_bytes, guard_incarnation=1, preallocate=False
        )
        try:
            for start in range(0, POOL_BLOCKS, _BATCH):
                part = slice(start, start + _BATCH)
                granted = pool.allocate(_BATCH, 0.0)
                pool.commit(
                    granted.slots,
                    granted.generations,
                    keys[part].tobytes(),
                    parents[part].tobytes(),
                    np.arange(_BATCH, dtype=np.uint64),
                    (np.arange(start, start + _BATCH) % CHAIN).astype(np.uint32),
                    np.zeros((_BATCH, 1), np.uint64),
                    0.0,
                )
            assert pool.ready_count == POOL_BLOCKS
            samples = []
            for turn in range(times):
                first = turn * CHAIN + CHAIN // 2
                named = keys[first : first + CHAIN // 10].tobytes()
                found, spent_ms = _cpu_ms(lambda named=named: pool.through(named))  # type: ignore[misc]
                assert len(found) == CHAIN // 2
                samples.append(spent_ms)
            return samples
        finally:
            pool.close(unlink=True)


def _g1(times: int) -> list[float]:
    from kvcr.vllm.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvcr.vllm import g1

    init_none_hash(sha256)
    pool = BlockPool(G1_BLOCKS + 1, True, G1_BLOCK_TOKENS)
    request = Request(
        "r",
        list(range(G1_BLOCKS * G1_BLOCK_TOKENS)),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(G1_BLOCK_TOKENS, sha256),
    )
    blocks = pool.get_new_blocks(G1_BLOCKS)
    pool.cache_full_blocks(request, blocks, 0, G1_BLOCKS, G1_BLOCK_TOKENS, 0)
    samples = []
    for turn in range(times):
        named = request.block_hashes[100 * turn : 100 * (turn + 1)]
        hashes = np.array([int.from_bytes(each[-8:], "big") for each in named], np.uint64)
        counts, spent_ms = _cpu_ms(lambda hashes=hashes: g1.drop(pool, [hashes]))  # type: ignore[misc]
        assert counts == [100]
        samples.append(spent_ms)
    return samples


def _cpu_ms(work: Callable[[], Any]) -> tuple[Any, float]:
    started_s = time.thread_time()
    result = work()
    return result, 1e3 * (time.thread_time() - started_s)


if __name__ == "__main__":
    raise SystemExit(main())
