# SPDX-License-Identifier: Apache-2.0
"""Hints are advice from outside: what fits is used, what does not is skipped and counted."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcr.client.hints import FetchHint, missing_run, parse_envelope, parse_transfer_params, sources_for
from kvcr.keys import KeySpace, extend_chain, pack_keys
from kvcr.protocol.engine import Source
from kvcr.protocol.events import FetchPayload, FetchSource, envelope, fetch_action
from kvcr.vllm.hints import traceparent

KEYS = extend_chain(KeySpace("ns", "m@1+0").root(), list(range(40)), 4)
BLOB = pack_keys(KEYS)
HASHES = np.arange(100, 110, dtype=np.uint64)
PEER = "tcp://10.0.0.6:7100"


class Action(msgspec.Struct):
    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(msgspec.Struct):
    protocol_version: str
    message_id: str
    actions: list[Action]


def ours(**changes: Any) -> dict[str, Any]:
    payload = FetchPayload(
        plan_id="p1",
        sources=[FetchSource(PEER, 0, 6, "g1")],
        last_key=KEYS[5].hex(),
        give_up_ms=80.0,
        deadline_ms=900.0,
    )
    return envelope("m1", [fetch_action("a1", msgspec.structs.replace(payload, **changes))])


def stock(hashes: list[int]) -> dict[str, Any]:
    payload = {"block_hashes": hashes, "source_control_endpoint": PEER}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return envelope("m2", [action])


def test_our_fetch_is_read_whole() -> None:
    skipped: Counter[str] = Counter()
    hint = parse_envelope(ours(no_retain=True, mode="move"), skipped)
    assert hint == FetchHint(
        sources=[Source(PEER, 0, 6, "g1")],
        last_key=KEYS[5],
        move=True,
        no_retain=True,
        give_up_ms=80.0,
        deadline_ms=900.0,
        plan_id="p1",
        action_id="a1",
    )
    assert not skipped
    assert sources_for(hint, BLOB, HASHES, skipped) == [Source(PEER, 0, 6, "g1")]


def test_an_envelope_may_be_a_struct_as_vllm_passes_it() -> None:
    hint = parse_envelope(msgspec.convert(ours(), Envelope), Counter())
    assert hint is not None
    assert hint.plan_id == "p1"


def test_a_last_key_of_another_chain_means_no_sources() -> None:
    skipped: Counter[str] = Counter()
    hint = parse_envelope(ours(last_key=KEYS[4].hex()), skipped)
    assert hint is not None
    assert sources_for(hint, BLOB, HASHES, skipped) == []
    assert skipped == {"last key differs from the engine's": 1}


def test_a_hint_longer_than_the_prompt_means_no_sources() -> None:
    skipped: Counter[str] = Counter()
    hint = parse_envelope(ours(sources=[FetchSource(PEER, 0, 99)]), skipped)
    assert hint is not None
    assert sources_for(hint, BLOB, HASHES, skipped) == []


def test_stock_hashes_become_runs_of_the_requests_own_chain() -> None:
    skipped: Counter[str] = Counter()
    hint = parse_envelope(stock([100, 101, 104, 105, 106, 999]), skipped)
    assert hint is not None
    assert sources_for(hint, BLOB, HASHES, skipped) == [Source(PEER, 0, 2), Source(PEER, 4, 3)]


def test_stock_hashes_of_another_request_mean_no_sources() -> None:
    skipped: Counter[str] = Counter()
    hint = parse_envelope(stock([1, 2]), skipped)
    assert hint is not None
    assert sources_for(hint, BLOB, HASHES, skipped) == []
    assert skipped == {"stock hashes match no block of the request": 1}


def test_stock_hashes_that_are_no_hashes_mean_no_sources() -> None:
    skipped: Counter[str] = Counter()
    hint = FetchHint(sources=[Source(PEER, 0, 0)], stock_hashes=[1 << 70])
    assert sources_for(hint, BLOB, HASHES, skipped) == []
    assert skipped == {"stock hashes are no 64-bit numbers": 1}


def test_a_hint_may_ask_for_nothing_but_that_nothing_is_kept() -> None:
    skipped: Counter[str] = Counter()
    for hint in (
        parse_envelope(ours(sources=[], last_key="", no_retain=True), skipped),
        parse_transfer_params({"kvcr": {"no_retain": True}}, skipped),
    ):
        assert hint is not None
        assert hint.no_retain
        assert sources_for(hint, BLOB, HASHES, skipped) == []
    assert not skipped


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (17, "malformed envelope"),
        ({"actions": [3]}, "malformed action"),
        (
            envelope("m", [{"action_type": "kv.dance", "action_version": "9", "payload": {}}]),
            "unknown action",
        ),
        (
            envelope("m", [{"action_type": "kv.fetch", "action_version": "2.0", "payload": {}}]),
            "malformed kv.fetch",
        ),
        (ours(last_key="not hex"), "malformed kv.fetch@2.0"),
        (ours(sources=[FetchSource(PEER, -1, 3)]), "malformed kv.fetch@2.0"),
    ],
)
def test_what_cannot_be_used_is_counted_and_never_raises(given: Any, reason: str) -> None:
    skipped: Counter[str] = Counter()
    assert parse_envelope(given, skipped) is None
    (counted,) = skipped
    assert counted.startswith(reason)


def test_no_hint_is_not_counted() -> None:
    skipped: Counter[str] = Counter()
    assert parse_envelope(None, skipped) is None
    assert parse_transfer_params(None, skipped) is None
    assert parse_transfer_params({"do_remote_prefill": True}, skipped) is None
    assert not skipped


def test_transfer_params_name_sources_for_a_vllm_without_dynamo() -> None:
    skipped: Counter[str] = Counter()
    hint = parse_transfer_params({"kvcr": {"sources": [{"endpoint": PEER}]}}, skipped)
    assert hint is not None
    assert sources_for(hint, BLOB, HASHES, skipped) == [Source(PEER, 0, len(KEYS))]
    assert parse_transfer_params({"kvcr": {"sources": "x"}}, skipped) is None
    assert skipped == {"malformed kv_transfer_params": 1}


@pytest.mark.parametrize(
    ("ranges", "present", "run"),
    [
        ([(0, 10)], [], (0, 10)),
        ([(0, 6)], [0, 1], (2, 4)),
        ([(0, 3), (6, 2)], [6], (0, 8)),
        ([(0, 3)], [0, 1, 2], None),
        ([(4, 100)], [0, 9], (4, 5)),
    ],
)
def test_the_run_to_fetch_spans_what_is_offered_and_missing(ranges, present, run) -> None:
    here = np.zeros(10, np.bool_)
    here[present] = True
    assert missing_run([Source(PEER, first, count) for first, count in ranges], here) == run


def test_a_request_goes_on_in_the_trace_of_its_hint_else_in_that_of_vllm() -> None:
    of_router, of_vllm = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'c' * 16}-01"
    hint = parse_envelope(ours(traceparent=of_router), Counter())
    request = SimpleNamespace(trace_headers={"traceparent": of_vllm})
    assert traceparent(request, hint) == of_router
    assert traceparent(request, None) == of_vllm
    assert traceparent(request, parse_envelope(stock([1]), Counter())) == of_vllm
    assert traceparent(SimpleNamespace(trace_headers=None), None) == ""
