# SPDX-License-Identifier: Apache-2.0
"""Dynamo's KV events (1.6.1): what engines say of their own memory, and ``KvRouter``'s dump of the same."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from kvcr.errors import ProtocolError
from router_hints.costs import Rank

_DEVICE = "device"


def kv_events_subject(namespace: str, component: str, endpoint: str) -> str:
    """Where the workers of one endpoint publish them."""
    return f"namespace.{namespace}.component.{component}.endpoint.{endpoint}.kv-events"


class G1Change(NamedTuple):
    """What one KV event says about one engine's memory. ``cleared``: nothing is left there."""

    rank: Rank
    stored: tuple[tuple[int, int], ...] = ()
    """(the engine's hash, hash of its own tokens) of blocks that follow each other, unsigned 64 bits"""
    parent: int | None = None
    """the engine's hash of the block before them; None: they begin a prompt"""
    removed: tuple[int, ...] = ()
    cleared: bool = False


class G1Batch(NamedTuple):
    """One message. A publisher (an engine, since it started) numbers its messages from 0."""

    publisher: int
    sequence: int
    changes: tuple[G1Change, ...]

    @property
    def blocks(self) -> int:
        """Blocks that it names."""
        return sum(len(change.stored) + len(change.removed) for change in self.changes)


class _Envelope(msgspec.Struct):
    publisher_id: int
    sequence: int
    payload: bytes


class _Block(msgspec.Struct):
    block_hash: int
    tokens_hash: int


class _Stored(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: int | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[int]


class _Change(msgspec.Struct):
    stored: _Stored | None = None
    removed: _Removed | None = None


class _Data(msgspec.Struct):
    data: _Change | Literal["cleared"]
    dp_rank: int = 0


class _RouterEvent(msgspec.Struct):
    worker_id: int
    event: _Data
    storage_tier: str = _DEVICE


_envelopes = msgspec.msgpack.Decoder(_Envelope)
_router_events = msgspec.msgpack.Decoder(list[_RouterEvent])
_dumps = msgspec.json.Decoder(list[_RouterEvent])


def decode_kv_events(raw: bytes) -> G1Batch:
    """The G1 part of one message on :func:`kv_events_subject`. Raises ProtocolError."""
    try:
        envelope = _envelopes.decode(raw)
        events = _router_events.decode(envelope.payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"KV event of {len(raw)} bytes does not decode: {error}") from error
    return G1Batch(envelope.publisher_id, envelope.sequence, _changes(events))


def decode_dump(text: str) -> tuple[G1Change, ...]:
    """The G1 part of ``KvRouter.dump_events()``, parents before what follows them. Raises ProtocolError."""
    try:
        return _changes(_dumps.decode(text))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"dump of {len(text)} characters does not decode: {error}") from error


def _changes(events: list[_RouterEvent]) -> tuple[G1Change, ...]:
    changes = []
    for each in events:
        if each.storage_tier != _DEVICE:
            continue
        rank, data = (each.worker_id, each.event.dp_rank), each.event.data
        if isinstance(data, str):
            changes.append(G1Change(rank, cleared=True))
            continue
        if data.stored is not None:
            stored = tuple((block.block_hash, block.tokens_hash) for block in data.stored.blocks)
            changes.append(G1Change(rank, stored, data.stored.parent_hash))
        if data.removed is not None:
            changes.append(G1Change(rank, removed=tuple(data.removed.block_hashes)))
    return tuple(changes)
