# SPDX-License-Identifier: Apache-2.0
"""An action too long for a message: its pieces ask for the same, each fits, and their results are one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvcr.protocol.events import (
    ACTION_VERSION,
    DEMOTE,
    INVALIDATE,
    Act,
    ActionResult,
    DemotePayload,
    FetchSource,
    InvalidatePayload,
    PinPayload,
    PrefetchPayload,
    action,
    envelope,
    event,
)
from kvcr.protocol.pieces import pieces, together

BLOCKS = 100_000
KEYS = np.arange(2 * BLOCKS, dtype=np.uint64).tobytes()
HASHES = np.arange(BLOCKS, dtype=np.uint64).tobytes()
SOURCES = [FetchSource("tcp://a:1", 0, 45_000, "a"), FetchSource("tcp://b:1", 45_000, 55_000, "b")]
PAYLOADS = [
    PinPayload(plan_id="p", keys=KEYS, pin_id="p", ttl_s=60.0),
    DemotePayload(plan_id="p", keys=KEYS, descendants=False),
    InvalidatePayload(plan_id="p", keys=KEYS, engine_hashes=HASHES),
    PrefetchPayload(plan_id="p", keys=KEYS, engine_hashes=HASHES, parent="ab" * 16, first=7, sources=SOURCES),
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: type(payload).__name__)
def test_each_piece_fits_and_together_they_name_every_block_once(payload: msgspec.Struct) -> None:
    split = list(pieces(payload))
    assert len(split) > 1
    for number, piece in enumerate(split):
        message = envelope("p", [action(f"p.{number}", "kv.any", ACTION_VERSION, piece)])
        event.encode(Act("p", "cli", msgspec.json.encode(message), 0.0))
    assert b"".join(piece.keys for piece in split) == KEYS  # type: ignore[attr-defined]
    if hasattr(payload, "engine_hashes"):
        assert b"".join(piece.engine_hashes for piece in split) == HASHES  # type: ignore[attr-defined]


def test_pieces_of_a_prefetch_keep_place_and_source_of_every_block() -> None:
    sources: dict[int, str] = {}
    for piece in pieces(PAYLOADS[3]):
        assert isinstance(piece, PrefetchPayload)
        start = piece.first - 7
        assert piece.parent == (KEYS[(start - 1) * 16 : start * 16].hex() if start else "ab" * 16)
        assert piece.engine_hashes == HASHES[8 * start :][: len(piece.keys) // 2]
        for source in piece.sources:
            assert 0 <= source.first < source.first + source.count <= len(piece.keys) // 16
            for position in range(source.first, source.first + source.count):
                sources[start + position] = source.guard
    assert [sources[block] for block in (0, 44_999, 45_000, 99_999)] == ["a", "a", "b", "b"]
    assert len(sources) == BLOCKS


def test_what_fits_stays_whole() -> None:
    payload = DemotePayload(plan_id="p", keys=KEYS[:480_000])
    assert list(pieces(payload)) == [payload]


@pytest.mark.parametrize(
    ("action_type", "codes", "code"),
    [
        (DEMOTE, ("done", "done"), "done"),
        (DEMOTE, ("done", "miss"), "partial"),
        (INVALIDATE, ("done", "miss"), "done"),
        (INVALIDATE, ("miss", "deferred", "done"), "deferred"),
        (INVALIDATE, ("miss", "miss"), "miss"),
        (DEMOTE, ("done", "refused"), "partial"),
        (DEMOTE, ("miss", "refused"), "refused"),
    ],
)
def test_results_become_one(action_type: str, codes: tuple[str, ...], code: str) -> None:
    results = [
        ActionResult("g0", 1, "p", f"p.{i}", action_type, each, 3, 30, 0.5 + i, each)
        for i, each in enumerate(codes)
    ]
    one = together(results)
    assert (one.code, one.blocks, one.byte_count) == (code, 3 * len(codes), 30 * len(codes))
    assert one.seconds == len(codes) - 0.5
    assert one.detail == "; ".join(dict.fromkeys(codes))
