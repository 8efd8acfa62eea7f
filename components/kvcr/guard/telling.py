# SPDX-License-Identifier: Apache-2.0
"""What the engine hears of a Fetch: what its load may count on, and what became of its blocks."""

from __future__ import annotations

import time

from kvcr.guard.active import Active
from kvcr.guard.meters import Meters
from kvcr.protocol.engine import BlockStatus, FetchLease, FetchProgress


class Telling:
    """Belongs to the authority thread."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def answer(self, active: Active) -> None:
        """Say what the load may count on; again when a source that was late made it more."""
        fetch, pull = active.fetch, active.pull
        available = pull.available()
        if available > pull.promised:
            pull.promised = available
            active.answer(FetchLease(fetch.request_id, fetch.first, available, pull.reason()))

    def report(self, active: Active, *, final: bool) -> None:
        """Say what became of its blocks so far; with ``final`` the last word, which is counted."""
        pull, fetch = active.pull, active.fetch
        active.untold = False
        blocks = sum(active.pulled.values())
        seconds = time.monotonic() - pull.started_s
        active.asker.broadcast(
            FetchProgress(
                request_id=fetch.request_id,
                statuses=pull.statuses.tobytes(),
                final=final,
                pulled_blocks=blocks,
                pulled_bytes=blocks * active.block_bytes,
                seconds=seconds,
                transport="+".join(active.pulled),
                first=fetch.first,
                reason=pull.reason() if final else "",
            )
        )
        if final:
            active.reported = True
            tally = pull.tally()
            good = tally.pop(BlockStatus.OK, 0)
            for status, count in tally.items():
                self._meters.failed_blocks.inc(count, status=status.name.lower())
            self._meters.fetches.inc(result="ok" if good == pull.count else "partial" if good else "none")
            if blocks:
                self._meters.pull_seconds.observe(seconds, transport="+".join(sorted(active.pulled)))
