# SPDX-License-Identifier: Apache-2.0
"""How NATS is, as a router or the command line would find it: for ``kvcr doctor``."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import nats.errors
import nats.js.errors

from kvcr.dynamo.nats_options import CONNECT_S, connect_briefly
from kvcr.errors import KvcrError
from kvcr.protocol.events import (
    inventory_subject,
    locations_subject,
    results_subject,
    state_subject,
    stream_name,
)

SETTLE_S = 0.3
"""NATS tells of a subscription that it refuses a moment later."""


class Finding(NamedTuple):
    level: str
    """ok, warn or fail"""
    told: str


async def check_nats(server: str, namespace: str) -> Finding:
    """Reachable, what these credentials may hear, JetStream, and what waits in its streams."""
    errors: list[str] = []

    try:
        client = await connect_briefly(server, "kvcr doctor", errors)
    except KvcrError as error:
        return Finding("fail", f"{error}. Without it routers learn nothing new of pools")
    try:
        subjects = (
            inventory_subject(namespace, ">"),
            state_subject(namespace, ">"),
            results_subject(namespace),
            locations_subject(namespace),
        )
        for subject in subjects:
            await client.subscribe(subject)
        await client.flush()
        await asyncio.sleep(SETTLE_S)
        denied = [s for s in subjects if any("permissions" in e.lower() and s in e for e in errors)]
        if denied:
            return Finding(
                "warn",
                f"{server}: this user may not hear {', '.join(denied)}; a router and the command line "
                "need the rights of the role router",
            )
        return await _check_streams(client, server, namespace)
    finally:
        await client.close()


async def _check_streams(client: Any, server: str, namespace: str) -> Finding:
    jetstream = client.jetstream(timeout=CONNECT_S)
    found, waiting = [], []
    for kind in ("actions", "state", "locations"):
        try:
            info = await jetstream.stream_info(stream_name(namespace, kind))
            found.append(f"{kind} {info.state.messages}")
            if kind == "actions":
                consumers = await jetstream.consumers_info(stream_name(namespace, kind))
                waiting = [
                    f"{consumer.name} {left}"
                    for consumer in consumers
                    if (left := (consumer.num_pending or 0) + (consumer.num_ack_pending or 0))
                ]
        except nats.js.errors.NotFoundError:
            continue
        except (nats.errors.Error, TimeoutError) as error:
            return Finding(
                "warn",
                f"{server} answers, and JetStream does not ({type(error).__name__} {error}): start it "
                "with -js. Actions without a request, and the time line of failovers, need it",
            )
    streams = f"{server} answers; messages in streams: {', '.join(found) or 'none yet'}"
    if waiting:
        return Finding(
            "warn",
            f"{streams}; actions that guards have not taken: {', '.join(waiting)}. Guards that are gone "
            "leave theirs, which end by age; of others the log tells why",
        )
    return Finding("ok", streams)
