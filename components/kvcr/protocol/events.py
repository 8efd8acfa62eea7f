# SPDX-License-Identifier: Apache-2.0
"""Guard and router to everyone, over NATS. Version 1. Also the hint envelope as Dynamo carries it.

Subjects::

    kvcr.v1.{namespace}.inventory.{guard}   guard to routers, core NATS: Inventory, Heartbeat
    kvcr.v1.{namespace}.hints.{guard}       router to guards and onlookers: HintNotice
    kvcr.v1.{namespace}.locations           router to everyone, JetStream: Locations
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcr.protocol.codec import Codec, Message

VERSION = 1
MAX_EVENT_BYTES = 900_000
"""Below the 1 MiB default ``max_payload`` of NATS."""


def inventory_subject(namespace: str, guard: str) -> str:
    return f"kvcr.v1.{namespace}.inventory.{guard}"


def hints_subject(namespace: str, guard: str) -> str:
    return f"kvcr.v1.{namespace}.hints.{guard}"


def locations_subject(namespace: str) -> str:
    return f"kvcr.v1.{namespace}.locations"


class Inventory(Message, frozen=True):
    """Blocks that came and went since the batch before. ``sequence`` counts batches, from 1."""

    guard: str
    incarnation: int
    sequence: int
    tier: int
    """2 for G2, 3 for G3, 4 for G4"""
    stored_keys: bytes
    stored_hashes: bytes
    """uint64 each: the engine's block hash"""
    stored_positions: bytes
    """uint32 each: index in the chain"""
    removed_keys: bytes
    """applied before the stored ones"""


class Heartbeat(Message, frozen=True):
    """Once a second. ``digest``: XOR of the first 8 bytes (little-endian) of every resident key."""

    guard: str
    incarnation: int
    sequence: int
    """of the last Inventory sent"""
    count: int
    digest: int


class Locations(Message, frozen=True):
    """The router's merged view of where blocks are. Output only: no router builds its index from it."""

    router: str
    guard: str
    worker_id: int
    tier: int
    """1 for G1 (from Dynamo's KV events), 2 up from inventory"""
    stored_keys: bytes
    """16 bytes each; empty for G1, which knows only engine hashes"""
    stored_hashes: bytes
    removed_keys: bytes
    removed_hashes: bytes


class HintNotice(Message, frozen=True):
    """Copy of a hint that was attached to a request."""

    plan_id: str
    request_id: str
    router: str
    worker_id: int
    envelope: bytes
    """the JSON of the ``kv_hint`` envelope"""
    reason: str


Event = Inventory | Heartbeat | Locations | HintNotice
event: Codec[Event] = Codec(Event, max_bytes=MAX_EVENT_BYTES)


# --- the hint as it rides on a request ---------------------------------------------------------
# The envelope is Dynamo's (1.6.1): {"protocol_version": "0.1", "message_id": ..., "actions":
# [{"action_id", "action_type", "action_version", "payload"}]}. Version "1.0" of kv.fetch is the stock
# router's: {"block_hashes": [u64...], "source_control_endpoint": "tcp://..."}. Ours is "2.0".

ENVELOPE_VERSION = "0.1"
FETCH = "kv.fetch"
FETCH_VERSION = "2.0"
STOCK_FETCH_VERSION = "1.0"


class FetchSource(msgspec.Struct, frozen=True):
    """``first`` and ``count`` are block positions in the request's own chain."""

    endpoint: str
    first: int
    count: int
    guard: str = ""


class FetchPayload(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of kv.fetch@2.0. The target computes the keys itself; ``last_key`` (hex) is the check."""

    plan_id: str
    sources: list[FetchSource]
    last_key: str
    mode: str = "copy"
    """``copy`` or ``move``"""
    no_retain: bool = False
    give_up_ms: float = 0.0
    deadline_ms: float = 2000.0


class StockFetchPayload(msgspec.Struct, frozen=True):
    """Payload of the stock router's kv.fetch@1.0."""

    block_hashes: list[int]
    source_control_endpoint: str


def envelope(message_id: str, actions: list[dict[str, Any]]) -> dict[str, Any]:
    """A ``kv_hint`` as the request carries it."""
    return {"protocol_version": ENVELOPE_VERSION, "message_id": message_id, "actions": actions}


def fetch_action(action_id: str, payload: FetchPayload) -> dict[str, Any]:
    """One kv.fetch@2.0 action of an envelope."""
    return {
        "action_id": action_id,
        "action_type": FETCH,
        "action_version": FETCH_VERSION,
        "payload": msgspec.to_builtins(payload),
    }
