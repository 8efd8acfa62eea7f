# SPDX-License-Identifier: Apache-2.0
"""Guard and router to everyone, over NATS. Version 1. Also the hint envelope as Dynamo carries it.

Subjects::

    kvcr.v1.{namespace}.inventory.{guard}   guard to routers, core NATS: Inventory, Heartbeat
    kvcr.v1.{namespace}.hints.{guard}       router to guards and onlookers: HintNotice
    kvcr.v1.{namespace}.locations           router to everyone, JetStream: Locations
    kvcr.v1.{namespace}.actions.{guard}     router to one guard, JetStream: Act
    kvcr.v1.{namespace}.results             guard to routers, core NATS: ActionResult
    kvcr.v1.{namespace}.state.{guard}       guard to everyone, JetStream: StateChange
"""

from __future__ import annotations

import enum
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


def actions_subject(namespace: str, guard: str) -> str:
    return f"kvcr.v1.{namespace}.actions.{guard}"


def results_subject(namespace: str) -> str:
    return f"kvcr.v1.{namespace}.results"


def state_subject(namespace: str, guard: str) -> str:
    return f"kvcr.v1.{namespace}.state.{guard}"


def stream_name(namespace: str, kind: str) -> str:
    """JetStream stream of ``actions``, ``state`` or ``locations``. A name of a stream has no dots."""
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in namespace)
    return f"kvcr-v1-{plain}-{kind}"


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
    unready: tuple[str, ...] = ()
    """guards that it knows and cannot read from: their canary has not verified yet, or they are silent"""


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


class Act(Message, frozen=True):
    """Actions for a guard that ride on no request. A guard that reads it after ``expires_unix_s`` answers
    ``expired`` and does nothing."""

    plan_id: str
    router: str
    envelope: bytes
    """the JSON of a ``kv_hint`` envelope"""
    expires_unix_s: float


class ActionResult(Message, frozen=True):
    """What became of one action. ``code`` is an :class:`ActionCode`."""

    guard: str
    incarnation: int
    plan_id: str
    action_id: str
    action_type: str
    code: str
    blocks: int = 0
    """that the action changed: copied, dropped, pinned"""
    byte_count: int = 0
    seconds: float = 0.0
    detail: str = ""


class StateChange(Message, frozen=True):
    """A guard changed state: the time line of a failover."""

    guard: str
    incarnation: int
    epoch: int
    previous: str
    state: str
    """name of a :class:`kvcr.guard.view.GuardState`"""
    worker_id: int
    """Dynamo instance of the engine that holds, or held, the pool; 0 without one"""
    unix_s: float
    seconds: float
    """since the change before"""


class ActionCode(enum.StrEnum):
    """How an action ended. Everything but DONE and PARTIAL changed nothing that had to be kept."""

    DONE = "done"
    PARTIAL = "partial"
    """some blocks; the counts say how many"""
    MISS = "miss"
    """none of the blocks is here (or, for a copy, at a source)"""
    DEFERRED = "deferred"
    """done in G2 and lower; the engine is idle and drops its G1 blocks before its next request"""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    TOO_SLOW = "too_slow"
    FAILED = "failed"
    REFUSED = "refused"
    """malformed, of another key space, or over a limit; ``detail`` says which"""


CHANGED = frozenset({ActionCode.DONE, ActionCode.PARTIAL, ActionCode.DEFERRED})
"""Something was done. Of several guards, or parts of one action, a MISS of others does not spoil it."""

Event = Inventory | Heartbeat | Locations | HintNotice | Act | ActionResult | StateChange
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
    traceparent: str = ""
    """Place of the hint in the trace of its request, see :mod:`kvcr.tracing`; empty: in none."""


PREFETCH = "kv.prefetch"
INVALIDATE = "kv.invalidate"
PIN = "kv.pin"
UNPIN = "kv.unpin"
DEMOTE = "kv.demote"
CANCEL = "kv.cancel"
ACTION_VERSION = "1.0"
"""of each of the actions that name blocks by key"""
ACTIONS = frozenset({PREFETCH, INVALIDATE, PIN, UNPIN, DEMOTE, CANCEL})
"""What a guard carries out by itself; a fetch belongs to a request."""

# Blocks are named by their keys (a blob, 16 bytes each, base64 in JSON), in chain order. Walking parents
# from the last key of a chain would be shorter, and fails once a guard has evicted the tail.


class PrefetchPayload(msgspec.Struct, frozen=True, kw_only=True):
    """Copy (or move) these blocks into the target's G2 ahead of a request. ``sources`` count positions
    from the first key below."""

    plan_id: str
    keys: bytes
    engine_hashes: bytes
    """uint64 each; 0: take it from the source"""
    parent: str
    """hex of the key before the first one"""
    first: int
    """position of the first key in its chain"""
    sources: list[FetchSource]
    mode: str = "copy"
    give_up_ms: float = 0.0
    deadline_ms: float = 10_000.0


class InvalidatePayload(msgspec.Struct, frozen=True, kw_only=True):
    """Drop these blocks from every tier of this guard and from its engine's G1."""

    plan_id: str
    keys: bytes
    descendants: bool = True
    """also what was decoded or appended after them: resident blocks whose chain goes through one of them"""
    engine_hashes: bytes = b""
    """uint64 each, in any order: of blocks that are to leave G1 and may not be in a lower tier here, where a
    guard finds the engine's hashes by itself"""


class PinPayload(msgspec.Struct, frozen=True, kw_only=True):
    """Keep these blocks from eviction for ``ttl_s`` seconds from receipt. Unpinned by ``pin_id``."""

    plan_id: str
    keys: bytes
    pin_id: str
    ttl_s: float


class UnpinPayload(msgspec.Struct, frozen=True, kw_only=True):
    plan_id: str
    pin_id: str


class DemotePayload(msgspec.Struct, frozen=True, kw_only=True):
    """These blocks are safe to evict: first to go under pressure, still served until then."""

    plan_id: str
    keys: bytes
    descendants: bool = True


class CancelPayload(msgspec.Struct, frozen=True, kw_only=True):
    """Stop the prefetch of this plan; what arrived stays."""

    plan_id: str


class StockFetchPayload(msgspec.Struct, frozen=True):
    """Payload of the stock router's kv.fetch@1.0."""

    block_hashes: list[int]
    source_control_endpoint: str


def envelope(message_id: str, actions: list[dict[str, Any]]) -> dict[str, Any]:
    """A ``kv_hint`` as the request carries it."""
    return {"protocol_version": ENVELOPE_VERSION, "message_id": message_id, "actions": actions}


def fetch_action(action_id: str, payload: FetchPayload) -> dict[str, Any]:
    """One kv.fetch@2.0 action of an envelope."""
    return action(action_id, FETCH, FETCH_VERSION, payload)


def action(action_id: str, kind: str, version: str, payload: msgspec.Struct) -> dict[str, Any]:
    """One action of an envelope; bytes in the payload become base64."""
    return {
        "action_id": action_id,
        "action_type": kind,
        "action_version": version,
        "payload": msgspec.to_builtins(payload),
    }
