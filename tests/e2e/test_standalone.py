# SPDX-License-Identifier: Apache-2.0
"""KVCR without Dynamo, etcd and NATS: two stock vLLM servers that share their KV cache.

Dynamo, NATS and the etcd clients cannot be imported in these processes: a directory in front of the path
has packages of those names that refuse. What runs here runs in an environment that lacks them.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from demo.metrics import Page, growth, scrape
from kvcr.graph.infra import free_port
from tests.e2e.agg import grown
from tests.e2e.processes import (
    ENGINE_ENVIRONMENT,
    PATIENCE,
    ROOT,
    SHM,
    Child,
    answers,
    eventually,
    leaked_shared_memory,
    post,
    shared_memory_names,
    start_guard,
)
from tests.e2e.tiny_model import BLOCK_SIZE, tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ABSENT = ("dynamo", "nats", "etcd3", "etcd3aio")
PROMPT_TOKENS = 10 * BLOCK_SIZE + 7
POOL_BYTES = 64 << 20


@dataclass
class Server:
    """One vLLM server, its guard, and where to reach both."""

    engine: Child
    guard: Child
    url: str
    endpoint: str
    metrics_url: str

    def complete(self, tokens: list[int], **fields: Any) -> tuple[list[int], int]:
        """Greedy continuation of a prompt of token ids, and how many prompt tokens were cached."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = post(f"{self.url}/v1/completions", {**body, "return_token_ids": True, **fields})
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def page(self) -> Page:
        return scrape(self.metrics_url)


@pytest.fixture(scope="module")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of processes that cannot import Dynamo, NATS or an etcd client."""
    shim = tmp_path_factory.mktemp("absent")
    for name in ABSENT:
        (shim / name).mkdir()
        (shim / name / "__init__.py").write_text(f"raise ImportError('{name} is not installed here')\n")
    # The last one makes PyPI's torchvision importable beside a torch for CPUs, see its sitecustomize.py.
    path = [shim, ROOT / "components", ROOT / "components/kvcr/vllm/child_site"]
    # Dynamo's own plugins for vLLM would only log that they cannot be imported.
    plugins = {"VLLM_PLUGINS": "kvcr_torchvision"}
    return {**ENGINE_ENVIRONMENT, **plugins, "PYTHONPATH": ":".join(map(str, path))}


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, bare_environment: dict[str, str]
) -> Iterator[tuple[Server, Server]]:
    """Servers ``a`` and ``b``. ``b`` asks ``a`` for what it lacks; ``a`` asks nobody by itself."""
    logs = tmp_path_factory.mktemp("standalone")
    model = tiny_model()
    before = shared_memory_names()
    started: list[Child] = []
    found: list[Server] = []
    pools: list[Path] = []
    try:
        for name in ("a", "b"):
            pool = SHM / f"kvcr-e2e-{logs.name}-{name}"
            guard, ready = start_guard(f"e2e-{name}", pool, POOL_BYTES, logs, bare_environment)
            pools.append(pool)
            started.append(guard)
            extra: dict[str, Any] = {"socket": ready["socket"], **PATIENCE}
            if found:
                extra["peers"] = [found[0].endpoint]
            engine, url = start_engine(name, model, extra, logs, bare_environment)
            started.append(engine)
            found.append(Server(engine, guard, url, ready["control"], ready["metrics"]))
        for server in found:
            server.engine.wait_until(partial(answers, f"{server.url}/health"), 420)
        yield found[0], found[1]
    finally:
        for child in reversed(started):
            child.stop()
        # A killed guard cannot remove its pool; one test kills one.
        killed = [pool for pool in pools if pool.exists()]
        for pool in killed:
            shutil.rmtree(pool)
    assert len(killed) <= 1, f"guards that were stopped left their pools: {killed}"
    eventually(lambda: not leaked_shared_memory(before), "nothing left in /dev/shm")


def start_engine(
    name: str, model: Path, extra: dict[str, Any], logs: Path, environment: dict[str, str]
) -> tuple[Child, str]:
    """vLLM's own OpenAI server with our connector. Its URL answers once the engine is up."""
    port = free_port()
    transfer = {
        "kv_connector": "KvcrConnector",
        "kv_connector_module_path": "kvcr.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    flags = {
        "model": str(model),
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "block-size": str(BLOCK_SIZE),
        "max-model-len": "2048",
        "max-num-seqs": "4",
        "kv-cache-memory-bytes": str(64 << 20),
        "kv-transfer-config": json.dumps(transfer),
    }
    arguments = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--enable-prompt-tokens-details",
    ]
    for flag, value in flags.items():
        arguments += [f"--{flag}", value]
    return Child(
        f"engine {name}", arguments, logs / f"engine-{name}.log", environment
    ), f"http://127.0.0.1:{port}"


def some_prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(6, 100), k=PROMPT_TOKENS)


def wait_for_deposit(server: Server, before: Page, block_count: int) -> None:
    stored = grown(before, server.metrics_url, "kvcr_deposited_blocks_total", block_count)
    assert stored >= block_count, f"{stored:g} of {block_count} blocks in the pool of {server.engine.name}"


def test_the_absent_packages_are_absent(bare_environment: dict[str, str], tmp_path: Path) -> None:
    code = f"""
for name in {ABSENT}:
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(name + " imports")
"""
    child = Child("probe", ["-c", code], tmp_path / "probe.log", bare_environment)
    assert child.process.wait(30) == 0, child.tail()


def test_a_prompt_known_to_a_peer_is_pulled_and_answered_the_same(servers: tuple[Server, Server]) -> None:
    a, b = servers
    prompt = some_prompt(1)
    at_a, at_b = a.page(), b.page()
    cold, cached = a.complete(prompt)
    assert cached == 0
    wait_for_deposit(a, at_a, 10)

    pulled, cached = b.complete(prompt)

    assert pulled == cold
    assert cached == 10 * BLOCK_SIZE
    # Counted a moment later, at the source when it was told.
    assert grown(at_a, a.metrics_url, "kvcr_served_blocks_total", 10) == 10
    source, destination = growth(at_a, a.page()), growth(at_b, b.page())
    assert destination.total("kvcr_pulled_blocks_total") == 10
    assert destination.total("kvcr_pulled_bytes_total") == source.total("kvcr_served_bytes_total") > 0


def test_a_source_named_in_the_request_is_used(servers: tuple[Server, Server]) -> None:
    a, b = servers
    prompt = some_prompt(2)
    at_b = b.page()
    cold, _ = b.complete(prompt)
    wait_for_deposit(b, at_b, 10)
    at_a = a.page()
    hint = {"kvcr": {"sources": [{"endpoint": b.endpoint, "first": 0, "count": 10}]}}

    pulled, cached = a.complete(prompt, kv_transfer_params=hint)

    assert pulled == cold
    assert cached == 10 * BLOCK_SIZE
    assert grown(at_a, a.metrics_url, "kvcr_pulled_blocks_total", 10) == 10


def test_a_prompt_nobody_knows_is_computed_without_waiting_for_peers(servers: tuple[Server, Server]) -> None:
    _, b = servers
    at_b = b.page()
    started_s = time.monotonic()
    tokens, cached = b.complete(some_prompt(3))
    assert len(tokens) == 16
    assert cached == 0
    assert growth(at_b, b.page()).total("kvcr_pulled_blocks_total") == 0
    assert time.monotonic() - started_s < 10


def test_a_dead_peer_costs_no_answer(servers: tuple[Server, Server]) -> None:
    """Runs last: it ends the guard of ``a``."""
    a, b = servers
    a.guard.process.kill()
    a.guard.process.wait(10)
    tokens, cached = b.complete(some_prompt(4))
    assert len(tokens) == 16
    assert cached == 0
    answered, _ = a.complete(some_prompt(5))
    assert len(answered) == 16
