# SPDX-License-Identifier: Apache-2.0
"""A Dynamo worker without an engine: a real component, card and KV events, and an echo for an answer.

Registers a card with no public endpoints, as ``dynamo.vllm --endpoint-types none`` does, and announces
every prompt it serves as stored in G1. What it sees goes to stdout, one JSON object a line. A request
chooses how it is treated with the header ``x-dynamo-meta-behaviour``:

``slow``   a token every 100 ms, ten seconds long
``hang``   no output at all, until the request is cancelled
``error``  an exception before the first output
``late``   one token, then an exception
``many``   300 tokens as fast as they are taken
``flood``  a million tokens and 450 MB as fast as they are taken; ``flooding`` is said every 2 % of it

With ``x-dynamo-meta-prefill`` the first output takes that many seconds, as a prefill would.

With a worker's name behind it (``hang:w1``) it concerns that worker only.

With ``--guard-socket`` it is an engine beside a real guard, too: it loads what its pool has and what its hint
says, checks the bytes, stores the rest, and says ``served`` with the number of blocks of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import Context, DistributedRuntime
from tiny_tokenizer import READY, tokenize
from toy_engine import ToyEngine

from router_hints.names import extend_names


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}, default=repr), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--component", default="backend")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--model-name", default="tiny")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--control",
        action="append",
        default=[],
        help="control endpoint of the guard of each data-parallel rank; none: no KVCR here",
    )
    parser.add_argument("--domain", help="its RDMA domain")
    parser.add_argument("--taint", action="append", default=[])
    parser.add_argument("--surface", choices=["none", "chat"], default="none")
    parser.add_argument("--request-plane", default="tcp")
    parser.add_argument("--guard-socket", default="", help="Unix socket of a real guard to be an engine of")
    return parser.parse_args()


def runtime_config(options: argparse.Namespace) -> ModelRuntimeConfig:
    config = ModelRuntimeConfig()
    config.context_length = 8192
    config.total_kv_blocks = 1000
    config.max_num_seqs = 32
    config.max_num_batched_tokens = 8192
    config.enable_local_indexer = True
    config.kv_event_publishing_enabled = True
    if options.control:
        # The values are JSON text, as the stock worker writes them.
        endpoints = json.dumps({str(rank): control for rank, control in enumerate(options.control)})
        config.set_engine_specific("router_hint_source_control_endpoints", endpoints)
        config.data_parallel_size = len(options.control)
        config.set_engine_specific("router_hint_worker_type", json.dumps("aggregated"))
        config.set_engine_specific("router_hint", json.dumps(True))
    if options.taint:
        config.taints = set(options.taint)
    if options.domain:
        config.topology_domains = {"rdma_domain": options.domain}
        config.kv_transfer_domain = "rdma_domain"
    return config


async def main(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "etcd", options.request_plane, event_plane="nats")
    loop.add_signal_handler(signal.SIGTERM, runtime.shutdown)
    endpoint = runtime.endpoint(f"{options.namespace}.{options.component}.generate")
    size = options.block_size
    events = KvEventPublisher(endpoint=endpoint, kv_block_size=size, dp_rank=0, enable_local_indexer=True)

    engine = await asyncio.to_thread(ToyEngine, options.guard_socket, size) if options.guard_socket else None

    def announce(tokens: list[int]) -> None:
        blocks = len(tokens) // size
        names = np.frombuffer(extend_names(None, np.array(tokens, np.uint32), size, ""), "<i8").tolist()
        # Chained and unique, as an engine's own hashes are.
        hashes = [name ^ 1 for name in names]
        if blocks:
            events.publish_stored(
                token_ids=tokens[: blocks * size],
                num_block_tokens=[size] * blocks,
                block_hashes=hashes[:blocks],
            )

    ready = tokenize(Path(options.model_path), READY)

    async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        behaviour, _, only = (context.metadata.get("behaviour") or "").partition(":")
        if only not in ("", options.name):
            behaviour = ""
        if list(request["token_ids"]) != ready:
            say("request", id=context.id(), metadata=context.metadata.copy(), request=request)
        if behaviour == "error":
            raise ValueError("this worker was asked to fail")
        if behaviour == "hang":
            await context.async_killed_or_stopped()
            say("cancelled", id=context.id())
            return
        prompt = list(request["token_ids"])
        if engine is not None:
            hint = request.get("kv_hint")
            say(
                "served", id=context.id(), **await asyncio.to_thread(engine.serve, context.id(), prompt, hint)
            )
        announce(prompt)
        count = {"slow": 100, "many": 300, "flood": 50_000}.get(behaviour, 3)
        tokens = 20 if behaviour == "flood" else 1
        for index in range(count):
            if context.is_stopped():
                say("cancelled", id=context.id(), at=index)
                return
            out: dict[str, Any] = {"token_ids": [72 + index % 20] * tokens, "index": 0}
            if behaviour == "flood":
                out["log_probs"] = [-0.5] * 1000
                if index % 1000 == 0:
                    say("flooding", id=context.id(), at=index)
            if index == count - 1:
                usage = {"prompt_tokens": len(prompt), "completion_tokens": count * tokens}
                usage["total_tokens"] = sum(usage.values())
                out |= {"finish_reason": "stop", "completion_usage": usage}
            yield out
            if behaviour == "late":
                raise ValueError("this worker was asked to fail late")
            if behaviour == "slow":
                await asyncio.sleep(0.1)

    await register_model(
        ModelInput.Tokens,
        ModelType.Empty if options.surface == "none" else ModelType.Chat | ModelType.Completions,
        endpoint,
        options.model_path,
        options.model_name,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=size,
        runtime_config=runtime_config(options),
    )
    say("up", name=options.name, worker_id=endpoint.connection_id())
    await endpoint.serve_endpoint(generate, metrics_labels=[("model", options.model_name)])


if __name__ == "__main__":
    uvloop.run(main(arguments()))
