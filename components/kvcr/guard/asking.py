# SPDX-License-Identifier: Apache-2.0
"""What sources have of the blocks a pull wants: looked up in a mapped directory, or leased by messages."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvcr.guard.active import Active
from kvcr.guard.grants import LEASE_MARGIN_S, Grant
from kvcr.guard.loop import Loop
from kvcr.guard.pulls import Ask, Indices
from kvcr.guard.tracing import end_lease
from kvcr.protocol.peer import Release
from kvcr.tracing import NO_SPAN, TraceSpan
from kvcr.transfer.nixl import NixlTransport
from kvcr.transfer.shm import OPTIMISTIC_BLOCKS, ShmTransport

OVERLOADED = "too many slots wait in quarantine for reads that timed out"

OPTIMISTIC_S = 1.5
"""How long a lookup without a lease may be used: an evicted slot is not reused for 2 s."""


class Asking:
    """Belongs to the authority thread."""

    def __init__(
        self,
        loop: Loop,
        lease_ms: int,
        changed: Callable[[], None],
        advance: Callable[[Active], None],
    ) -> None:
        """``changed`` is told when our pool has; ``advance`` lets a pull go on that was answered."""
        self._loop = loop
        self._lease_ms = lease_ms
        self._changed = changed
        self._advance = advance

    def ask(self, active: Active, ask: Ask) -> None:
        """Find blocks at a source: in its mapped directory, or by a message."""
        link = active.links[ask.source]
        if (
            isinstance(link.transport, ShmTransport)
            and len(ask.indices) <= OPTIMISTIC_BLOCKS
            and active.handover is None
        ):
            found = link.transport.lookup(active.key_blob(ask.indices))
            active.learn(ask.indices, found.engine_hashes)
            until_s = time.monotonic() + OPTIMISTIC_S
            active.pull.leased(
                ask.source, ask.indices, found.slots, found.generations, found.checksums, until_s
            )
            return
        if link.ready:
            self._lease(active, ask)
            return

        def opened(reason: str) -> None:
            if active.over:
                return
            if reason:
                active.source_failed(ask.source, reason)
            else:
                self.ask(active, ask)
            if not calling:
                self._advance(active)

        # The answer may come within the call, from _advance, which must not be entered twice.
        calling = True
        link.when_ready(time.monotonic(), opened)
        calling = False

    def _lease(self, active: Active, ask: Ask) -> None:
        link = active.links[ask.source]
        transport = link.transport
        if isinstance(transport, NixlTransport) and transport.overloaded:
            active.source_failed(ask.source, OVERLOADED)
            return
        width = link.keys_per_lease()
        left_s = active.pull.deadline_s - time.monotonic()
        lease_ms = int(min(max(left_s, 0.0) * 1000 + 250 + 1000 * LEASE_MARGIN_S, self._lease_ms))
        old = active.lease_of[ask.indices]
        # numpy.unique takes 40 us, and most blocks are asked for the first time.
        for renew in np.unique(old).tolist() if np.count_nonzero(old) else [0]:
            group = ask.indices[old == renew]
            for start in range(0, len(group), width):
                indices = group[start : start + width]
                span = NO_SPAN
                if active.trace is not None:
                    name = transport.name if transport is not None else ""
                    span = active.trace.lease(link.label, name, len(indices))
                link.lease(
                    active.key_blob(indices),
                    lease_ms,
                    max(left_s, 0.001),
                    lambda grant, reason, indices=indices, renew=renew, span=span: self._leased(  # type: ignore[misc]
                        active, ask.source, indices, grant, reason, renew, span
                    ),
                    renew,
                    span.traceparent,
                )

    def _leased(
        self,
        active: Active,
        source: int,
        indices: Indices,
        grant: Grant | None,
        reason: str,
        renewed: int,
        span: TraceSpan,
    ) -> None:
        link = active.links[source]
        if active.trace is not None:
            end_lease(span, grant, reason)
        if grant is not None and active.over:
            link.release(Release(grant.lease_id))
            return
        if grant is None:
            active.source_failed(source, reason)
        else:
            leases = active.account(source).leases
            if renewed in leases:
                leases.remove(renewed)
            if grant.lease_id:
                leases.append(grant.lease_id)
            active.lease_of[indices] = grant.lease_id
            active.learn(indices, grant.engine_hashes)
            active.pull.leased(
                source,
                indices,
                grant.slots,
                grant.generations,
                grant.checksums,
                grant.usable_until_s,
                grant.gone,
            )
            if active.handover is None:
                active.pool.make_room(active.pull.leased_blocks, time.monotonic())
                self._changed()
        # Never from within _advance: requests are answered by messages, or by a link that is lost meanwhile.
        self._loop.defer(lambda: None if active.over else self._advance(active))
