# SPDX-License-Identifier: Apache-2.0
"""What the guards of a graph say about themselves on NATS while a scene is played."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import nats
from nats.aio.msg import Msg

from demo.graph import Graph
from kvcr.protocol.events import StateChange, event, state_subject

_START_S = 10.0


@contextmanager
def watching(graph: Graph, on_change: Callable[[StateChange], None]) -> Iterator[None]:
    """Call ``on_change``, in a thread of its own, for each change of state of any guard.

    Does nothing on a graph without guards. Raises TimeoutError when NATS does not answer.
    """
    if not graph.guarded:
        yield
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="states", daemon=True)
    thread.start()

    async def received(message: Msg) -> None:
        change = event.decode(message.data)
        if isinstance(change, StateChange):
            on_change(change)

    async def subscribe() -> nats.NATS:
        connection = await nats.connect(graph.nats_url)
        await connection.subscribe(state_subject(graph.namespace, "*"), cb=received)
        await connection.flush()
        return connection

    connection = asyncio.run_coroutine_threadsafe(subscribe(), loop).result(_START_S)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(connection.close(), loop).result(_START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
