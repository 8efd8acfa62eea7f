# SPDX-License-Identifier: Apache-2.0
"""Where a vLLM request carries its hint."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvcr.client.hints import FetchHint, other_actions, parse_envelope, parse_transfer_params


def request_hint(request: Any, skipped: Counter[str]) -> FetchHint | None:
    """The hint of a ``vllm.v1.request.Request``, or None.

    ``kv_hints`` (the envelope, as ``dynamo.vllm`` passes it on) goes before ``kv_transfer_params["kvcr"]``
    (what a client of a plain vLLM can set). What cannot be used is counted in ``skipped`` by reason.
    """
    return parse_envelope(request.kv_hints, skipped) or parse_transfer_params(
        request.kv_transfer_params, skipped
    )


def request_actions(request: Any, skipped: Counter[str]) -> bytes | None:
    """Actions of the request's hint other than fetches, as JSON for the guard."""
    return other_actions(request.kv_hints, skipped) if request.kv_hints is not None else None


def traceparent(request: Any, hint: FetchHint | None) -> str:
    """Place of the request in its trace: by the router's hint, else as vLLM was given it. Or empty."""
    if hint is not None and hint.traceparent:
        return hint.traceparent
    return str((request.trace_headers or {}).get("traceparent", ""))
