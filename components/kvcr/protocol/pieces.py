# SPDX-License-Identifier: Apache-2.0
"""An action that names more blocks than one message carries: several actions, and one result again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvcr.keys import KEY_BYTES
from kvcr.protocol.events import (
    CHANGED,
    INVALIDATE,
    ActionCode,
    ActionResult,
    FetchSource,
    InvalidatePayload,
    PrefetchPayload,
)

MAX_KEY_BYTES = 480_000
"""Of keys and hashes in one message: base64 in JSON makes them a third longer, and an event has at most
900,000 bytes."""

_HASH_BYTES = 8


def pieces(payload: msgspec.Struct) -> Iterator[msgspec.Struct]:
    """``payload``, or several that together ask for the same, in the order of its keys."""
    keys: bytes = getattr(payload, "keys", b"")
    if key_bytes(payload) <= MAX_KEY_BYTES:
        yield payload
    elif isinstance(payload, PrefetchPayload):
        step = MAX_KEY_BYTES // (KEY_BYTES + _HASH_BYTES)
        for first in range(0, len(keys) // KEY_BYTES, step):
            yield _part_of_prefetch(payload, first, step)
    else:
        for part in _cut(keys, MAX_KEY_BYTES):
            fields = {"engine_hashes": b""} if isinstance(payload, InvalidatePayload) else {}
            yield msgspec.structs.replace(payload, keys=part, **fields)
        if isinstance(payload, InvalidatePayload):
            # Its hashes stand in no relation to its keys.
            for part in _cut(payload.engine_hashes, MAX_KEY_BYTES):
                yield msgspec.structs.replace(payload, keys=b"", engine_hashes=part)


def key_bytes(payload: msgspec.Struct) -> int:
    """What the blocks that this payload names take of a message."""
    return sum(len(getattr(payload, blob, b"")) for blob in ("keys", "engine_hashes"))


def together(results: Sequence[ActionResult]) -> ActionResult:
    """The result of one action that was sent in pieces."""
    return msgspec.structs.replace(
        results[0],
        code=_code_of([result.code for result in results], results[0].action_type),
        blocks=sum(result.blocks for result in results),
        byte_count=sum(result.byte_count for result in results),
        seconds=max(result.seconds for result in results),
        detail="; ".join(dict.fromkeys(result.detail for result in results if result.detail)),
    )


def _code_of(codes: Sequence[str], action_type: str) -> str:
    if action_type == INVALIDATE and CHANGED.intersection(codes):
        # Blocks that are not there need not be dropped.
        codes = [code for code in codes if code != ActionCode.MISS]
    found = set(codes)
    if len(found) == 1:
        return codes[0]
    if found <= {ActionCode.DONE, ActionCode.DEFERRED}:
        return ActionCode.DEFERRED
    if found & CHANGED:
        return ActionCode.PARTIAL
    return next(code for code in codes if code != ActionCode.MISS)


def _part_of_prefetch(whole: PrefetchPayload, first: int, count: int) -> PrefetchPayload:
    keys = whole.keys[first * KEY_BYTES : (first + count) * KEY_BYTES]
    end = first + len(keys) // KEY_BYTES
    sources = [
        FetchSource(source.endpoint, start - first, stop - start, source.guard)
        for source in whole.sources
        if (start := max(source.first, first)) < (stop := min(source.first + source.count, end))
    ]
    return msgspec.structs.replace(
        whole,
        keys=keys,
        engine_hashes=whole.engine_hashes[first * _HASH_BYTES : end * _HASH_BYTES],
        parent=whole.keys[(first - 1) * KEY_BYTES : first * KEY_BYTES].hex() if first else whole.parent,
        first=whole.first + first,
        sources=sources,
    )


def _cut(blob: bytes, step: int) -> Iterator[bytes]:
    return (blob[at : at + step] for at in range(0, len(blob), step))
