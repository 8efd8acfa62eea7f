# SPDX-License-Identifier: Apache-2.0
"""What a request says about blocks to fetch: our hint, the stock router's, or explicit sources.

A hint is advice from outside: anything malformed, unknown or contradictory is skipped and counted, and
the request runs as if it had none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcr.keys import KEY_BYTES
from kvcr.protocol.engine import Source
from kvcr.protocol.events import (
    ACTIONS,
    FETCH,
    FETCH_VERSION,
    STOCK_FETCH_VERSION,
    FetchPayload,
    StockFetchPayload,
)

DEFAULT_DEADLINE_MS = 2000.0

MAX_ENVELOPE_BYTES = 190_000
"""Of actions that ride on a request, about 8,900 keys: a message to the guard holds no more."""


class FetchHint(msgspec.Struct, frozen=True, kw_only=True):
    """One wish to fetch, in our terms. ``stock_hashes`` (64-bit engine hashes) instead of positions for
    the stock router's form, whose ``sources`` has one entry without a range."""

    sources: list[Source]
    last_key: bytes = b""
    """Key of the last block named, as the sender computed it; empty: not checked."""
    stock_hashes: list[int] = []
    move: bool = False
    no_retain: bool = False
    give_up_ms: float = 0.0
    deadline_ms: float = DEFAULT_DEADLINE_MS
    plan_id: str = ""
    action_id: str = ""
    traceparent: str = ""


class _Range(msgspec.Struct, frozen=True):
    endpoint: str
    first: int = 0
    count: int = 1 << 30
    guard: str = ""


class _TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_transfer_params["kvcr"]`` of a request to a vLLM without Dynamo."""

    sources: list[_Range] = []
    last_key: str = ""
    no_retain: bool = False
    give_up_ms: float = 0.0
    deadline_ms: float = DEFAULT_DEADLINE_MS


def parse_envelope(envelope: Any, skipped: Counter[str]) -> FetchHint | None:
    """The first usable fetch of a ``kv_hint`` envelope (a mapping, or a struct of that shape).

    Other actions are the guard's, see :func:`other_actions`. A fetch that cannot be used is counted in
    ``skipped`` by reason. Never raises on content.
    """
    if envelope is None:
        return None
    try:
        plain = msgspec.to_builtins(envelope)
        actions = plain["actions"]
        message_id = str(plain.get("message_id", ""))
    except (TypeError, KeyError, AttributeError):
        skipped["malformed envelope"] += 1
        return None
    chosen: FetchHint | None = None
    for action in actions if isinstance(actions, list) else ():
        if isinstance(action, dict) and action.get("action_type") in ACTIONS:
            continue
        hint = _action(action, message_id, skipped)
        if hint is not None and chosen is not None:
            skipped["second fetch of a request"] += 1
        chosen = chosen or hint
    return chosen


def other_actions(envelope: Any, skipped: Counter[str]) -> bytes | None:
    """The envelope without its fetches, as JSON for the guard; None when nothing is left. Never raises.

    What nobody knows is among them: the guard answers that it was skipped.
    """
    try:
        plain = msgspec.to_builtins(envelope)
        actions = [action for action in plain["actions"] if action.get("action_type") != FETCH]
        raw = msgspec.json.encode({**plain, "actions": actions}) if actions else None
    except (TypeError, KeyError, AttributeError, msgspec.MsgspecError):
        # Counted by parse_envelope.
        return None
    if raw is not None and len(raw) > MAX_ENVELOPE_BYTES:
        skipped["actions over the size limit"] += len(actions)
        return None
    return raw


def parse_transfer_params(params: Mapping[str, Any] | None, skipped: Counter[str]) -> FetchHint | None:
    """The hint in ``kv_transfer_params``: ``{"kvcr": {"sources": [{"endpoint", "first", "count"}]}}``."""
    if not isinstance(params, Mapping) or "kvcr" not in params:
        return None
    try:
        given = msgspec.convert(params["kvcr"], _TransferParams)
        return FetchHint(
            sources=[_source(r.endpoint, r.first, r.count, r.guard) for r in given.sources],
            last_key=bytes.fromhex(given.last_key),
            no_retain=given.no_retain,
            give_up_ms=given.give_up_ms,
            deadline_ms=given.deadline_ms,
        )
    except (msgspec.ValidationError, ValueError):
        skipped["malformed kv_transfer_params"] += 1
        return None


def _action(action: Any, message_id: str, skipped: Counter[str]) -> FetchHint | None:
    try:
        kind, version, payload = action["action_type"], action["action_version"], action["payload"]
    except (TypeError, KeyError):
        skipped["malformed action"] += 1
        return None
    try:
        if (kind, version) == (FETCH, FETCH_VERSION):
            ours = msgspec.convert(payload, FetchPayload)
            return FetchHint(
                sources=[_source(s.endpoint, s.first, s.count, s.guard) for s in ours.sources],
                last_key=bytes.fromhex(ours.last_key),
                move=ours.mode == "move",
                no_retain=ours.no_retain,
                give_up_ms=ours.give_up_ms,
                deadline_ms=ours.deadline_ms,
                plan_id=ours.plan_id,
                action_id=str(action.get("action_id", "")),
                traceparent=ours.traceparent,
            )
        if (kind, version) == (FETCH, STOCK_FETCH_VERSION):
            stock = msgspec.convert(payload, StockFetchPayload)
            return FetchHint(
                sources=[Source(stock.source_control_endpoint, 0, 0)],
                stock_hashes=stock.block_hashes,
                plan_id=message_id,
                action_id=str(action.get("action_id", "")),
            )
    except (msgspec.ValidationError, ValueError):
        skipped[f"malformed {kind}@{version}"] += 1
        return None
    # Without its name, which anybody may choose: reasons are labels of a metric.
    skipped["unknown action"] += 1
    return None


def _source(endpoint: str, first: int, count: int, guard: str) -> Source:
    if first < 0 or count < 1:
        raise ValueError(f"a source gives blocks first={first} count={count}")
    return Source(endpoint, first, count, guard)


def sources_for(
    hint: FetchHint, keys: bytes, engine_hashes: npt.NDArray[np.uint64], skipped: Counter[str]
) -> list[Source]:
    """The sources of a hint as ranges of this request's own chain, empty when they do not fit it.

    The stock router names blocks by engine hash: those the request does not have are dropped. For ours,
    ``last_key`` must be the key this engine computed, else router and engine speak of different chains.
    ``keys``: of the request, 16 bytes each.
    """
    count = len(keys) // KEY_BYTES
    if hint.stock_hashes:
        return _stock_sources(hint, engine_hashes, skipped)
    if not hint.sources:
        return []
    last = max(source.first + source.count for source in hint.sources) - 1
    if hint.last_key and (last >= count or keys[KEY_BYTES * last : KEY_BYTES * (last + 1)] != hint.last_key):
        skipped["last key differs from the engine's"] += 1
        return []
    return [
        Source(s.endpoint, s.first, min(s.count, count - s.first), s.guard)
        for s in hint.sources
        if s.first < count
    ]


def _stock_sources(
    hint: FetchHint, engine_hashes: npt.NDArray[np.uint64], skipped: Counter[str]
) -> list[Source]:
    try:
        mine = np.isin(engine_hashes, np.array(hint.stock_hashes, np.uint64))
    except OverflowError:
        skipped["stock hashes are no 64-bit numbers"] += 1
        return []
    if not mine.any():
        skipped["stock hashes match no block of the request"] += 1
        return []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mine, [False])).astype(np.int8)))
    endpoint = hint.sources[0].endpoint
    return [
        Source(endpoint, first, last - first)
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


def missing_run(sources: Sequence[Source], present: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
    """First position and length of the run to fetch: from the first to the last block that some source
    has and that is not ``present`` (bool, one a block of the chain). None when there is nothing to do."""
    offered = np.zeros(len(present), np.bool_)
    for source in sources:
        offered[source.first : source.first + source.count] = True
    wanted = np.flatnonzero(offered & ~present)
    return (int(wanted[0]), int(wanted[-1]) + 1 - int(wanted[0])) if len(wanted) else None
