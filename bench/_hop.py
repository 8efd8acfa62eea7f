# SPDX-License-Identifier: Apache-2.0
"""What a router adds to a request and to each output token, in four deployments side by side.

Real etcd, NATS, frontends and fake workers: a frontend that routes round robin to the workers (``direct``),
the stock frontend's KV router (``stock``), a component in Python that passes everything on and does nothing
else (``relay``, the price of a component of one's own), and our router (``ours``).
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import _common
from tests.integration.router_stack import BLOCK, ROOT, Stack
from tests.integration.tiny_tokenizer import write_model

KINDS = ("direct", "stock", "relay", "ours")
FEW, MANY = 3, 300
"""Output tokens of a fake worker's answers."""
_WARM_UP = 10


def hops(rounds: int) -> dict[str, Any]:
    """Milliseconds, and processor time of the process between frontend and workers.

    Times are the tenth percentile of each deployment's, which a busy machine disturbs least; a hop is what
    is above ``direct``.
    """
    with tempfile.TemporaryDirectory(prefix="kvcr-bench-") as scratch, _started(Path(scratch)) as stacks:
        few, few_cpu = _asked(stacks, rounds, FEW)
        many, many_cpu = _asked(stacks, rounds // 2, MANY)
        metrics = stacks["ours"].metrics()
    request = {kind: _low(samples) for kind, samples in few.items()}
    token = {kind: (_low(many[kind]) - request[kind]) / (MANY - FEW) for kind in KINDS}
    hop = {kind: request[kind] - request["direct"] for kind in KINDS}
    count = metrics["kvcr_router_plan_seconds_count"]
    return {
        "router_hop_over_stock": _ratio(hop["ours"], hop["stock"]),
        "router_hop_over_relay": _ratio(hop["ours"], hop["relay"]),
        "router_hop_ms": round(hop["ours"], 3),
        "stock_hop_ms": round(hop["stock"], 3),
        "relay_hop_ms": round(hop["relay"], 3),
        "direct_ms": round(request["direct"], 3),
        "token_us": {kind: round(1e3 * each, 1) for kind, each in token.items()},
        "cpu_request_ms": {kind: round(1e3 * few_cpu[kind], 3) for kind in few_cpu},
        "cpu_token_us": {
            kind: round(1e6 * (many_cpu[kind] - few_cpu[kind]) / (MANY - FEW), 1) for kind in few_cpu
        },
        "router_plan_mean_ms": round(1e3 * metrics["kvcr_router_plan_seconds_sum"] / count, 3),
        "request_ms": {kind: _common.summary(samples) for kind, samples in few.items()},
        "long_request_ms": {kind: _common.summary(samples) for kind, samples in many.items()},
    }


@contextmanager
def _started(scratch: Path) -> Iterator[dict[str, Stack]]:
    model = write_model(scratch / "tiny")
    stacks: dict[str, Stack] = {}
    try:
        for kind in KINDS:
            _common.say(f"starting: {kind}")
            stacks[kind] = _start(scratch / kind, model, kind)
        for stack in stacks.values():
            stack.ready()
        yield stacks
    finally:
        for stack in stacks.values():
            stack.close()


def _start(directory: Path, model: Path, kind: str) -> Stack:
    """One deployment: two workers behind whatever ``kind`` says."""
    directory.mkdir()
    stack = Stack(directory, model)
    surface = ["--surface", "chat" if kind in ("direct", "stock") else "none"]
    for name in ("w0", "w1"):
        if kind == "ours":
            _, control = stack.guard(f"guard-{name}")
            stack.worker(name, *surface, "--control", control)
        else:
            stack.worker(name, *surface)
    if kind == "ours":
        stack.router()
    if kind == "relay":
        path = f"{ROOT}:{stack.environment['PYTHONPATH']}"
        stack.start("router", ["-m", "bench._relay", str(model), str(BLOCK)], PYTHONPATH=path)
    if kind != "stock":
        stack.frontend()
    else:
        listen = ["--http-host", "127.0.0.1", "--http-port", str(stack.http_port)]
        routes = ["--router-mode", "kv", "--kv-cache-block-size", str(BLOCK)]
        stack.start("frontend", ["-m", "dynamo.frontend", *listen, *routes])
    return stack


def _asked(
    stacks: dict[str, Stack], rounds: int, tokens: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of each request, and seconds of the router's processor time for one, by deployment."""
    rng = random.Random(tokens)
    taken: dict[str, list[float]] = {kind: [] for kind in stacks}
    begun_cpu: dict[str, float] = {}
    headers = {"x-dynamo-meta-behaviour": "many"} if tokens == MANY else {}
    for number in range(rounds + _WARM_UP):
        if number == _WARM_UP:
            begun_cpu = _cpu(stacks)
        # One token a byte: about a thousand, most of them new.
        prompt = "the same beginning " * 10 + rng.randbytes(400).hex()
        for kind, stack in stacks.items():
            begun = time.perf_counter()
            status, answer = stack.ask(prompt, headers=headers, max_tokens=MANY + 1)
            seconds = time.perf_counter() - begun
            if status != 200 or answer["usage"]["completion_tokens"] != tokens:
                raise SystemExit(f"{kind} answers {status}: {answer}; logs in {stack.directory}")
            if number >= _WARM_UP:
                taken[kind].append(1e3 * seconds)
    return taken, {kind: (used - begun_cpu[kind]) / rounds for kind, used in _cpu(stacks).items()}


def _cpu(stacks: dict[str, Stack]) -> dict[str, float]:
    """Processor seconds that the processes between frontend and workers have used."""
    used = {}
    for kind, stack in stacks.items():
        for part in stack.parts:
            if part.name == "router":
                threads = Path(f"/proc/{part.process.pid}/task").glob("*/schedstat")
                used[kind] = sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    return used


def _low(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 10]


def _ratio(ours: float, theirs: float) -> float | None:
    return round(ours / theirs, 2) if theirs > 0 else None
