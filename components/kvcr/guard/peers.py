# SPDX-License-Identifier: Apache-2.0
"""The guards that are known, and a link to each that is needed."""

from __future__ import annotations

from typing import Any

from kvcr.config import PeerRecord
from kvcr.guard.choosing import PeerContext
from kvcr.guard.link import PeerLink

MAX_LINKS = 1024
"""Hints name endpoints; the link opened first makes room."""


class Peers:
    """All links, and what is known of where guards are. Belongs to the authority thread."""

    def __init__(self, static: list[PeerRecord]) -> None:
        self._static = {record.endpoint: record for record in static}
        self._found: dict[str, PeerRecord] = {}
        self._links: dict[str, PeerLink] = {}

    def records(self) -> dict[str, PeerRecord]:
        """By endpoint; what discovery says wins over the configuration."""
        return {**self._static, **self._found}

    def set_found(self, records: dict[str, PeerRecord]) -> None:
        """Replace what discovery knows. Links to a guard that was restarted, or has another pool, end."""
        for endpoint, record in records.items():
            link = self._links.get(endpoint)
            if link is not None and (
                link.record.incarnation not in (0, record.incarnation)
                or link.record.layout_digest not in ("", record.layout_digest)
            ):
                link.close()
        self._found = records
        known = self.records()
        for endpoint, link in self._links.items():
            record = known.get(endpoint, link.record)
            if record != link.record:
                link.heard(record)

    def link(self, context: PeerContext, endpoint: str) -> PeerLink:
        link = self._links.get(endpoint)
        if link is None:
            if len(self._links) >= MAX_LINKS:
                self._links.pop(next(iter(self._links))).close()
            record = self.records().get(endpoint, PeerRecord(endpoint))
            link = self._links[endpoint] = PeerLink(context, endpoint, record)
        return link

    def open_ahead(self, context: PeerContext, own_endpoint: str, now_s: float) -> None:
        """Open the links that a pull may need, so that it starts with a lease and not with a handshake.

        A handshake takes longer than an engine waits for the lease reply: 100 ms on a busy machine.
        Links to guards that nobody knows any more are dropped here.
        """
        known = self.records()
        for endpoint in [e for e, link in self._links.items() if e not in known and link.idle(now_s)]:
            self._links.pop(endpoint).close()
        for endpoint, record in known.items():
            if endpoint == own_endpoint or record.layout_digest not in ("", context.layout_digest):
                continue
            link = self.link(context, endpoint)
            if not link.ready:
                link.when_ready(now_s, _nobody_waits)

    def status(self) -> list[dict[str, Any]]:
        """JSON-ready: what each link uses and why, or why it is not ready."""
        return [link.status() for link in list(self._links.values())]

    def unready(self, own_endpoint: str) -> tuple[str, ...]:
        """Names of the guards that are known and cannot be read from, as they are told to routers."""
        return tuple(
            sorted(
                record.name
                for endpoint, record in self.records().items()
                if record.name
                and endpoint != own_endpoint
                and not ((link := self._links.get(endpoint)) is not None and link.ready)
            )[:MAX_LINKS]
        )

    def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            link.close()


def _nobody_waits(reason: str) -> None:
    """Of a link opened ahead: whoever needs it asks again."""
