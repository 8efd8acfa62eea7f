# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``dynamo.vllm`` in a graph: takes its flags, is a real Dynamo worker, and computes nothing.

It writes as many tokens as it is asked for, one every :data:`TOKEN_S`. Prompt blocks that neither its pool
nor a peer has take :data:`BLOCK_S` each, so that reuse can be told from its time to first token, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import Context, DistributedRuntime
from toy_engine import ToyEngine

TOKEN_S = 0.03
BLOCK_S = 0.05


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    return parser.parse_known_args()[0]


def runtime_config(engine: dict[str, Any]) -> ModelRuntimeConfig:
    config = ModelRuntimeConfig()
    config.context_length = 8192
    config.total_kv_blocks = 1000
    config.max_num_seqs = 32
    config.max_num_batched_tokens = 8192
    if engine:
        (tier,) = engine["secondary_tiers"]
        control = f"tcp://{tier['control_advertise_host']}:{tier['control_ports'][0]}"
        config.set_engine_specific("router_hint_source_control_endpoints", json.dumps({"0": control}))
        config.set_engine_specific("router_hint_worker_type", json.dumps("aggregated"))
        config.set_engine_specific("router_hint", json.dumps(True))
    return config


async def main(options: argparse.Namespace) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="nats")
    component = f"{os.environ['DYN_NAMESPACE']}.backend"
    endpoint = runtime.endpoint(f"{component}.generate")
    size = options.block_size
    settings = (options.kv_transfer_config or {}).get("kv_connector_extra_config", {})
    engine = await asyncio.to_thread(ToyEngine, settings["socket"], size) if settings else None
    running = 0

    async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        nonlocal running
        prompt = list(request["token_ids"])
        reusable = max(0, len(prompt) - 1) // size
        seen = {"computed": reusable, "wrong": 0}
        running += 1
        try:
            if engine is not None:
                seen = await asyncio.to_thread(engine.serve, context.id(), prompt, request.get("kv_hint"))
            assert not seen["wrong"], seen
            await asyncio.sleep(BLOCK_S * seen["computed"])
            count = request["stop_conditions"]["max_tokens"]
            for index in range(count):
                # The position in the whole answer decides the token, also when others wrote its beginning.
                out: dict[str, Any] = {"token_ids": [72 + (len(prompt) + index) % 20], "index": 0}
                if index == count - 1:
                    usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
                    usage |= {"total_tokens": sum(usage.values())}
                    cached = (reusable - seen["computed"]) * size
                    out |= {
                        "finish_reason": "length",
                        "completion_usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}},
                    }
                yield out
                await asyncio.sleep(TOKEN_S)
        finally:
            running -= 1

    async def ping(_request: Any) -> AsyncIterator[dict[str, bool]]:
        yield {"up": True}

    endpoint.metrics.register_prometheus_expfmt_callback(lambda: f"vllm:num_requests_running {running}\n")
    await register_model(
        ModelInput.Tokens,
        ModelType.Empty,
        endpoint,
        options.model,
        options.served_model_name,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=size,
        runtime_config=runtime_config(settings),
    )
    await asyncio.gather(
        endpoint.serve_endpoint(generate, metrics_labels=[("model", options.served_model_name)]),
        # Makes /health turn ready once we serve.
        runtime.endpoint(f"{component}.ping").serve_endpoint(ping, health_check_payload={"ping": 1}),
    )


if __name__ == "__main__":
    uvloop.run(main(arguments()))
