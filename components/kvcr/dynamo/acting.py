# SPDX-License-Identifier: Apache-2.0
"""Send actions to guards from outside a router, and wait for what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence

import msgspec
import nats.errors

from kvcr.dynamo.actions import ensure_stream
from kvcr.dynamo.nats_options import connect_briefly
from kvcr.errors import KvcrError, ProtocolError
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

SENDER = "cli"


class NatsAway(KvcrError):
    """Actions go over NATS, which does not answer."""


async def act(
    nats_url: str,
    namespace: str,
    orders: Sequence[tuple[str, str, msgspec.Struct]],
    plan_id: str,
    timeout_s: float,
) -> list[ActionResult | None]:
    """Carry out ``orders``, each a guard, an action type and its payload; results in the same order.

    None for a guard that did not answer in time: it still acts when it comes back within ``timeout_s``, and
    not later. Raises NatsAway.
    """
    try:
        client = await connect_briefly(nats_url, "kvcr", [])
    except KvcrError as error:
        raise NatsAway(f"actions go over NATS: {error}") from error
    try:
        results = await client.subscribe(results_subject(namespace))
        await ensure_stream(client.jetstream(), namespace)
        waiting: dict[str, int] = {}
        for index, (guard, kind, payload) in enumerate(orders):
            action_id = f"{plan_id}.{index}"
            message = Act(
                plan_id,
                SENDER,
                msgspec.json.encode(envelope(plan_id, [action(action_id, kind, ACTION_VERSION, payload)])),
                time.time() + timeout_s,
            )
            await client.jetstream().publish(actions_subject(namespace, guard), event.encode(message))
            waiting[action_id] = index
        found: list[ActionResult | None] = [None] * len(orders)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while waiting:
                    raw = (await results.next_msg(timeout_s)).data
                    # Others' results come here too, perhaps of a release that this one cannot read.
                    with contextlib.suppress(ProtocolError):
                        result = event.decode(raw)
                        if isinstance(result, ActionResult) and result.action_id in waiting:
                            found[waiting.pop(result.action_id)] = result
        return found
    except nats.errors.Error as error:
        raise NatsAway(f"NATS at {nats_url}: {error or type(error).__name__}") from error
    finally:
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
            await client.close()


def new_plan_id() -> str:
    """As the router's look."""
    return uuid.uuid4().hex
