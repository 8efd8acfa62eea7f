# SPDX-License-Identifier: Apache-2.0
"""What workers hold in G1 and how busy they say they are: Dynamo's own knowledge, through its interfaces."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any

import msgspec
from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import Endpoint

from kvcr.errors import ProtocolError
from router_hints.costs import Rank
from router_hints.kv_events import G1Change, decode_dump
from router_hints.requests import Prompt

log = logging.getLogger(__name__)


def kv_metrics_subject(namespace: str, component: str, endpoint: str) -> str:
    """Where workers publish their load (dynamo 1.6.1)."""
    return f"namespace.{namespace}.component.{component}.endpoint.{endpoint}.kv_metrics"


class G1Overlap:
    """Leading blocks of a prompt in each engine's memory, from Dynamo's KV events. One event loop."""

    def __init__(self, workers: Endpoint, block_size: int) -> None:
        # Only its index is used: the ledger is ours, and the router's own choice is never asked for.
        self._router = KvRouter(
            endpoint=workers,
            block_size=block_size,
            kv_router_config=KvRouterConfig(
                router_track_active_blocks=False, router_track_prefill_tokens=False
            ),
        )
        self._complained = False

    async def dump(self) -> tuple[G1Change, ...]:
        """All it knows of engine memory. Raises ProtocolError."""
        try:
            text: str = await self._router.dump_events()
        except Exception as error:
            # The binding raises bare Exception.
            raise ProtocolError(f"KvRouter gives no dump: {error}") from error
        return decode_dump(text)

    def blocks(self, prompt: Prompt) -> Awaitable[dict[Rank, int]]:
        """Blocks from the first one on, by rank; empty when it cannot be known.

        Asked at once: Dynamo finds them in its own threads while the caller does something else.
        """
        asked = None
        # Equal placeholder tokens do not make equal images.
        if prompt.unkeyed_reason != "multimodal":
            try:
                asked = self._router.get_overlap_scores(
                    prompt.tokens,
                    lora_name=prompt.lora_name or None,
                    include_shared=False,
                    cache_namespace=prompt.salt or None,
                )
            except Exception as error:  # noqa: BLE001 - the binding raises bare Exception
                self._complain(error)
        return self._read(asked)

    async def _read(self, asked: Awaitable[Any] | None) -> dict[Rank, int]:
        if asked is None:
            return {}
        try:
            scores = await asked
        except Exception as error:  # noqa: BLE001 - the binding raises bare Exception
            self._complain(error)
            return {}
        self._complained = False
        return {
            (int(row["worker_id"]), int(row.get("dp_rank") or 0)): int(row["device_blocks"])
            for row in scores["workers"]
        }

    def _complain(self, error: Exception) -> None:
        """Routing goes on without; it is said once."""
        if not self._complained:
            log.warning("no G1 overlap from KvRouter: %s", error)
        self._complained = True


class WorkerReport(msgspec.Struct, frozen=True):
    """What a worker says about its own load."""

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None


class _Envelope(msgspec.Struct):
    payload: bytes


_envelopes = msgspec.msgpack.Decoder(_Envelope)
_reports: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(WorkerReport | list[WorkerReport])


def decode_reports(raw: bytes) -> list[WorkerReport]:
    """The reports in one message on :func:`kv_metrics_subject`. Raises ProtocolError."""
    try:
        found = _reports.decode(_envelopes.decode(raw).payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"load report of {len(raw)} bytes does not decode: {error}") from error
    return found if isinstance(found, list) else [found]
