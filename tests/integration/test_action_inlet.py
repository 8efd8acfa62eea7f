# SPDX-License-Identifier: Apache-2.0
"""A guard's inbox on real NATS, before a guard that does not get on with its actions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import nats
from waiting import eventually

from kvcr.dynamo.actions import MAX_UNDER_WAY, ActionInlet, ensure_stream
from kvcr.graph.infra import Server
from kvcr.metrics import Registry
from kvcr.protocol.events import Act, actions_subject, event

BEHIND = 44


class BusyGuard:
    """Takes actions, and ends them when it is told to."""

    name = "g0"

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.under_way: list[Callable[[], None]] = []
        self.idle = False

    def act(self, act: Act, done: Callable[[], None]) -> None:
        self.under_way.append(done)
        if self.idle:
            done()

    def subscribe_results(self, callback: Any) -> None:
        """It has none."""


async def test_actions_that_a_guard_has_not_read_are_its_lag(nats_server: Server, namespace: str) -> None:
    guard, waiting = BusyGuard(namespace), Registry().gauge("waiting", ".")
    client = await nats.connect(nats_server.url)
    await ensure_stream(client.jetstream(), namespace)
    raw = event.encode(Act("p", "router", b"{}", time.time() + 60))
    for _ in range(MAX_UNDER_WAY + BEHIND):
        await client.jetstream().publish(actions_subject(namespace, "g0"), raw)
    running = asyncio.create_task(ActionInlet(guard, lambda: client, waiting).run())  # type: ignore[arg-type]
    try:
        await eventually(lambda: len(guard.under_way) == MAX_UNDER_WAY, "it takes as many as it may")
        await eventually(lambda: waiting.value() == BEHIND, "the others wait")
        guard.idle = True
        for done in guard.under_way[:MAX_UNDER_WAY]:
            done()
        await eventually(lambda: waiting.value() == 0, "none waits")
        assert len(guard.under_way) == MAX_UNDER_WAY + BEHIND
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await client.close()
