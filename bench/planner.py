# SPDX-License-Identifier: Apache-2.0
"""Time to plan: the planner alone on a large deployment, and the hop that the whole router adds to a request.

The plan is of a prompt of 4,096 blocks over 64 workers: looked up in the index and planned, in three
deployments (nobody has the prompt, ten workers have a part, all have it with holes). What logging its inputs
for a replay takes is part of it, hashing the prompt is not: that is reported beside it, for a prompt seen for
the first time and for the next turn of a session that the router knows.

The hop is what a router adds to a request and to each output token, measured with real etcd, NATS, frontends
and fake workers (:mod:`bench._hop`). ``router_hop_over_stock`` compares ours with the stock KV router, which
runs inside the frontend, ``router_hop_over_relay`` with a component that only passes on.
"""

from __future__ import annotations

import gc
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import _common
from bench._hop import hops
from kvcr.keys import KeySpace, extend_packed
from kvcr.protocol.events import Inventory
from router_hints.chains import Chain
from router_hints.costs import CostModel, Settings
from router_hints.index import LocationIndex
from router_hints.inputs import PlanInputs
from router_hints.ledger import Ledger
from router_hints.planner import Holder, RequestView, Worker, plan
from router_hints.topology import Link, Place, Topology

WORKERS = 64
BLOCKS = 4096
TOKENS_A_BLOCK = 16
GUARDS = [f"g{n}" for n in range(WORKERS)]
RANKS = [(1000 + n, 0) for n in range(WORKERS)]


class Deployment:
    """The state of a router with 64 workers, busy with a few requests each."""

    def __init__(self, keys: bytes, held: Callable[[int], np.ndarray]) -> None:
        """``held(n)`` says which blocks guard ``n`` has, bool ``[4096]``."""
        rng = np.random.default_rng(5)
        self.index = LocationIndex()
        for number, guard in enumerate(GUARDS):
            self.index.admit(guard, 1)
            rows = np.frombuffer(keys, dtype="V16")[held(number)]
            self.index.apply(Inventory(guard, 1, 1, 2, rows.tobytes() + rng.bytes(16 * 5000), b"", b"", b""))
        self.ledger, self.costs = Ledger(), CostModel(Settings())
        for number, rank in enumerate(RANKS):
            for request in range(6):
                self.ledger.book(
                    f"{number}.{request}",
                    rank,
                    prefill_tokens=int(rng.integers(0, 4000)),
                    blocks=300,
                    copies={GUARDS[int(rng.integers(WORKERS))]: 1_000_000},
                )
            self.costs.observe_prefill(rank, 2000, float(rng.random() / 5 + 0.2))
        for _ in range(600):
            source, target = (GUARDS[int(n)] for n in rng.integers(WORKERS, size=2))
            self.costs.observe_copy(source, target, Link.DOMAIN, 10_000_000, float(rng.random() / 50))
        self.holders = {guard: Holder(guard, f"tcp://{guard}:1", "L", 1_000_000) for guard in GUARDS}
        self.workers = [
            Worker(rank, guard=guard, max_requests=32, kv_blocks=20_000)
            for rank, guard in zip(RANKS, GUARDS, strict=True)
        ]
        self.topology = Topology(
            {guard: Place(f"boot{n // 4}", f"rack{n // 16}", "zone") for n, guard in enumerate(GUARDS)}
        )

    def plan(self, keys: bytes) -> tuple[float, float]:
        """Milliseconds from the keys to the plan and its inputs: by the clock, and of the processor."""
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        arguments = (
            RequestView(uuid.uuid4().hex, BLOCKS * TOKENS_A_BLOCK + 5, TOKENS_A_BLOCK, keys[:16]),
            self.workers,
            self.index.lookup(keys),
            self.holders,
            self.ledger.loads(begun),
            self.costs,
            self.topology,
            begun,
        )
        PlanInputs.taken(*arguments)
        plan(*arguments)
        return 1e3 * (time.perf_counter() - begun), 1e3 * (time.thread_time() - begun_cpu)


def plans(keys: bytes, count: int) -> dict[str, list[tuple[float, float]]]:
    rng = np.random.default_rng(6)
    some = set(rng.choice(WORKERS, 10, replace=False).tolist())
    lengths = rng.integers(1, BLOCKS, WORKERS)
    deployments = {
        "cold": Deployment(keys, lambda n: np.zeros(BLOCKS, np.bool_)),
        "prefixes": Deployment(keys, lambda n: np.arange(BLOCKS) < (lengths[n] if n in some else 0)),
        "holes": Deployment(keys, lambda n: rng.random(BLOCKS) < 0.999),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in deployments}
    gc.disable()
    for deployment in deployments.values():
        deployment.plan(keys)
    for _ in range(count):
        for name, deployment in deployments.items():
            taken[name].append(deployment.plan(keys))
    gc.enable()
    return taken


def hashing(count: int) -> dict[str, float]:
    """Milliseconds to compute the keys of the prompt: all of them, and those of a session's next turn."""
    space = KeySpace("bench", "model")
    tokens = np.random.default_rng(7).integers(0, 100_000, BLOCKS * TOKENS_A_BLOCK + 5)
    longer = np.concatenate([tokens, tokens[: 40 * TOKENS_A_BLOCK]])
    first, later = [], []
    for _ in range(count):
        begun = time.perf_counter()
        extend_packed(space.root(), tokens.astype(np.uint32), TOKENS_A_BLOCK)
        first.append(1e3 * (time.perf_counter() - begun))
        known = Chain.of(space, TOKENS_A_BLOCK, tokens)  # type: ignore[arg-type]
        begun = time.perf_counter()
        Chain.of(space, TOKENS_A_BLOCK, longer, known)  # type: ignore[arg-type]
        later.append(1e3 * (time.perf_counter() - begun))
    return {"hash_first_ms": statistics.median(first), "hash_next_turn_ms": statistics.median(later)}


def p99(samples: list[float]) -> float:
    return sorted(samples)[int(0.99 * len(samples))]


def measure(quick: bool) -> dict[str, Any]:
    keys = np.random.default_rng(4).bytes(16 * BLOCKS)
    taken = plans(keys, 200 if quick else 1000)
    figures = {}
    for name, samples in taken.items():
        clock, processor = ([each[kind] for each in samples] for kind in (0, 1))
        figures[name] = {
            "p50_ms": round(statistics.median(clock), 3),
            "p99_ms": round(p99(clock), 3),
            "cpu_p50_ms": round(statistics.median(processor), 3),
            "cpu_p99_ms": round(p99(processor), 3),
        }
        _common.say(f"plan, {name:9} " + "  ".join(f"{k} {v:.2f}" for k, v in figures[name].items()))
    hashed = hashing(5 if quick else 20)
    _common.say(f"hashing {hashed['hash_first_ms']:.2f} ms, next turn {hashed['hash_next_turn_ms']:.2f} ms")
    hop = hops(60 if quick else 300)
    _common.say(
        f"hop {hop['router_hop_ms']:.2f} ms, stock {hop['stock_hop_ms']:.2f} ms, "
        f"relay {hop['relay_hop_ms']:.2f} ms, of {hop['direct_ms']:.2f} ms without a router"
    )
    _common.say(f"a token, us: {hop['token_us']}; processor: {hop['cpu_token_us']}")
    return {
        "plan_p99_ms": max(each["p99_ms"] for each in figures.values()),
        "plan_cpu_p99_ms": max(each["cpu_p99_ms"] for each in figures.values()),
        "plan": figures,
        **{name: round(value, 3) for name, value in hashed.items()},
        **hop,
    }


if __name__ == "__main__":
    raise SystemExit(_common.run("planner", measure, (__doc__ or "").splitlines()[0]))
