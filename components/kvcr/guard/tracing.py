# SPDX-License-Identifier: Apache-2.0
"""Spans of what a guard does for a request: its fetch, each lease and each source's transfer, its loads.

Authority thread only.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from kvcr.guard.grants import Grant
from kvcr.guard.quick import Pulled
from kvcr.protocol.engine import BlockStatus, Fetch, LoadEnd
from kvcr.tracing import NOT_TRACING, Tracer, TraceSpan
from kvcr.transfer.shm import ShmTransport

MAX_REQUESTS = 4096
"""Requests whose place in a trace is remembered for their loads; the oldest are forgotten beyond it."""


class RequestTraces:
    """Where the requests of this guard's engine are in their traces."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._parents: dict[str, str] = {}

    def fetch(self, fetch: Fetch, blocks: int) -> FetchTrace | None:
        """Begin the span of a fetch; None outside of a trace."""
        if not fetch.traceparent or self.tracer is NOT_TRACING:
            return None
        if len(self._parents) >= MAX_REQUESTS:
            del self._parents[next(iter(self._parents))]
        self._parents[fetch.request_id] = fetch.traceparent
        return FetchTrace(
            self.tracer,
            self.tracer.start(
                "kvcr.fetch",
                fetch.traceparent,
                {
                    "kvcr.request_id": fetch.request_id,
                    "kvcr.plan_id": fetch.plan_id,
                    "kvcr.blocks": blocks,
                    "kvcr.sources": len(fetch.sources),
                },
            ),
        )

    def load(self, message: LoadEnd, rank: int) -> None:
        """A rank has copied blocks of a request from the pool to its engine's memory."""
        parent = self._parents.get(message.request_id)
        if parent is None:
            return
        failed = message.failed_blocks
        self.tracer.start(
            "kvcr.load",
            parent,
            {
                "kvcr.request_id": message.request_id,
                "kvcr.rank": rank,
                "kvcr.blocks": message.block_count,
                "kvcr.bytes": message.byte_count,
                "kvcr.failed_blocks": failed,
                "kvcr.result": "ok" if not failed else "partial" if message.block_count else "failed",
            },
            started_s=time.monotonic() - max(0.0, message.seconds),
        ).end()


@dataclass
class _Transfer:
    span: TraceSpan
    blocks: int = 0
    nbytes: int = 0
    failed: int = 0


class FetchTrace:
    """The spans of one fetch, from :meth:`RequestTraces.fetch`."""

    def __init__(self, tracer: Tracer, span: TraceSpan) -> None:
        self._tracer = tracer
        self._span = span
        self._transfers: dict[tuple[str, str], _Transfer] = {}

    def lease(self, peer: str, transport: str, asked: int) -> TraceSpan:
        """A source is asked to hold blocks. The caller ends the span, and sends its place along."""
        return self._tracer.start(
            "kvcr.lease",
            self._span.traceparent,
            {"kvcr.peer": peer, "kvcr.transport": transport, "kvcr.asked_blocks": asked},
        )

    def moved(
        self, peer: str, transport: str, started_s: float, blocks: int, nbytes: int, failed: int
    ) -> None:
        """A step of a source's transfer ended: so many blocks and bytes are here, so many blocks are not."""
        transfer = self._transfers.get((peer, transport))
        if transfer is None:
            transfer = self._transfers[peer, transport] = _Transfer(
                self._tracer.start(
                    "kvcr.transfer",
                    self._span.traceparent,
                    {"kvcr.peer": peer, "kvcr.transport": transport},
                    started_s=started_s,
                )
            )
        transfer.blocks += blocks
        transfer.nbytes += nbytes
        transfer.failed += failed

    def pulled_at_once(self, peer: str, pulled: Pulled, nbytes: int) -> None:
        """The whole fetch was a copy from a pool of this host, with no lease and no message."""
        started_s = time.monotonic() - pulled.seconds
        self.moved(peer, ShmTransport.name, started_s, len(pulled.statuses), nbytes, 0)
        self.end(pulled.statuses.tobytes(), copied=len(pulled.statuses), nbytes=nbytes)

    def end(self, statuses: bytes, *, copied: int, nbytes: int, reason: str = "") -> None:
        """The fetch is over; ``statuses``: a :class:`BlockStatus` for each of its blocks."""
        for transfer in self._transfers.values():
            transfer.span.end(
                {
                    "kvcr.blocks": transfer.blocks,
                    "kvcr.bytes": transfer.nbytes,
                    "kvcr.failed_blocks": transfer.failed,
                    "kvcr.result": _result(transfer.blocks, transfer.failed),
                }
            )
        counts = Counter(statuses)
        good = counts.pop(BlockStatus.OK, 0)
        self._span.end(
            {
                "kvcr.copied_blocks": copied,
                "kvcr.bytes": nbytes,
                "kvcr.result": _result(good, sum(counts.values())),
                "kvcr.reason": reason,
                **{
                    f"kvcr.blocks.{BlockStatus(status).name.lower()}": count
                    for status, count in counts.items()
                },
            }
        )


def end_lease(span: TraceSpan, grant: Grant | None, reason: str) -> None:
    """End the span of :meth:`FetchTrace.lease` with the source's answer."""
    if grant is None:
        span.end({"kvcr.result": "failed", "kvcr.reason": reason})
    else:
        blocks = int((grant.slots >= 0).sum())
        span.end({"kvcr.blocks": blocks, "kvcr.result": _result(blocks, len(grant.slots) - blocks)})


def _result(good: int, bad: int) -> str:
    return "ok" if not bad else "partial" if good else "failed"
