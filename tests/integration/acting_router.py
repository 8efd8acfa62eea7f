# SPDX-License-Identifier: Apache-2.0
"""The router's end of actions: sends them over JetStream, and hears what became of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import nats
from nats.aio.client import Client

from kvcr.dynamo.actions import ensure_stream
from kvcr.protocol.events import (
    ACTION_VERSION,
    Act,
    ActionResult,
    action,
    actions_subject,
    envelope,
    event,
    results_subject,
)

RESULT_S = 60.0


class ActingRouter:
    """Use as an async context manager."""

    def __init__(self, nats_url: str, namespace: str) -> None:
        self._nats_url = nats_url
        self._namespace = namespace
        self._client: Client | None = None
        self.heard: list[ActionResult] = []
        """Every result, in order."""

    async def __aenter__(self) -> ActingRouter:
        async def take(message: Any) -> None:
            result = event.decode(message.data)
            assert isinstance(result, ActionResult)
            self.heard.append(result)

        self._client = await nats.connect(self._nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        await self._client.subscribe(results_subject(self._namespace), cb=take)
        await self._client.flush()
        await self.ensure_stream()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    async def ensure_stream(self) -> None:
        await ensure_stream(self.client.jetstream(), self._namespace)

    async def send(
        self, guard: str, plan_id: str, hint: dict[str, Any] | bytes, *, expires_s: float = 60.0
    ) -> None:
        """One Act. The stream has it when this returns."""
        raw = hint if isinstance(hint, bytes) else msgspec.json.encode(hint)
        act = Act(plan_id, "test router", raw, time.time() + expires_s)
        subject = actions_subject(self._namespace, guard)
        await self.client.jetstream().publish(subject, event.encode(act))

    async def ask(
        self, guard: str, plan_id: str, kind: str, payload: msgspec.Struct, **options: Any
    ) -> ActionResult:
        """Send one action and wait for its result."""
        await self.send(guard, plan_id, one(plan_id, kind, payload), **options)
        return await self.result(plan_id)

    async def result(
        self, plan_id: str, action_id: str = "0", *, timeout_s: float = RESULT_S
    ) -> ActionResult:
        """The first result of this action."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for result in self.heard:
                if (result.plan_id, result.action_id) == (plan_id, action_id):
                    return result
            assert time.monotonic() < deadline_s, (
                f"not within {timeout_s:g} s: action {action_id} of plan {plan_id}; heard {self.heard}"
            )
            await asyncio.sleep(0.02)


def one(plan_id: str, kind: str, payload: msgspec.Struct, action_id: str = "0") -> dict[str, Any]:
    """An envelope with one action."""
    return envelope(plan_id, [action(action_id, kind, ACTION_VERSION, payload)])
