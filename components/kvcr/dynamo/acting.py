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
from kvcr.protocol.pieces import pieces, together

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

    What names more blocks than a message carries goes in several, and has one result all the same. None for a
    guard that did not answer to all of it in time: it still acts when it comes back within ``timeout_s``, and
    not later. Raises NatsAway.
    """
    try:
        client = await connect_briefly(nats_url, "kvcr", [])
    except KvcrError as error:
        raise NatsAway(f"actions go over NATS: {error}") from error
    try:
        results = await client.subscribe(results_subject(namespace))
        await ensure_stream(client.jetstream(), namespace)
        split = [
            (index, guard, kind, piece)
            for index, (guard, kind, payload) in enumerate(orders)
            for piece in pieces(payload)
        ]
        waiting: dict[str, int] = {}
        for number, (index, guard, kind, payload) in enumerate(split):
            action_id = f"{plan_id}.{number}"
            message = Act(
                plan_id,
                SENDER,
                msgspec.json.encode(envelope(plan_id, [action(action_id, kind, ACTION_VERSION, payload)])),
                time.time() + timeout_s,
            )
            await client.jetstream().publish(actions_subject(namespace, guard), event.encode(message))
            waiting[action_id] = index
        found: list[list[ActionResult]] = [[] for _ in orders]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while waiting:
                    raw = (await results.next_msg(timeout_s)).data
                    # Others' results come here too, perhaps of a release that this one cannot read.
                    with contextlib.suppress(ProtocolError):
                        result = event.decode(raw)
                        if isinstance(result, ActionResult) and result.action_id in waiting:
                            found[waiting.pop(result.action_id)].append(result)
        unanswered = set(waiting.values())
        return [None if index in unanswered else together(results) for index, results in enumerate(found)]
    except nats.errors.Error as error:
        raise NatsAway(f"NATS at {nats_url}: {error or type(error).__name__}") from error
    finally:
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
            await client.close()


def new_plan_id() -> str:
    """As the router's look."""
    return uuid.uuid4().hex
