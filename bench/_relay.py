# SPDX-License-Identifier: Apache-2.0
"""The least that a Dynamo component in Python between frontend and workers can do: pass everything on.

No plan, no index, no books: what it adds to a request is the price of the place, not of the routing.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo._core import ResponseSender
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import Context, DistributedRuntime


async def main(model: str, block_size: int) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "etcd", "tcp", event_plane="nats")
    loop.add_signal_handler(signal.SIGTERM, runtime.shutdown)
    endpoint = runtime.endpoint("dynamo.router.generate")
    client = await runtime.endpoint("dynamo.backend.generate").client()
    await client.wait_for_instances()

    async def generate(
        request: dict[str, Any], context: Context, response_sender: ResponseSender
    ) -> AsyncIterator[Any]:
        async for output in await client.round_robin(request, annotated=False, context=context):
            response_sender.send(output)
        return
        yield  # what Dynamo wants is a generator

    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model,
        "tiny",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=block_size,
    )
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
