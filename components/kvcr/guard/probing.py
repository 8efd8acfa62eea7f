# SPDX-License-Identifier: Apache-2.0
"""Measuring on request: every way by which this guard might read from another, for ``kvcr doctor --peer``."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import statistics
import time
from collections.abc import Callable

from kvcr.config import PeerRecord
from kvcr.errors import ConfigError
from kvcr.guard.addresses import route_to, split_host
from kvcr.guard.choosing import PeerContext, Tried
from kvcr.guard.link import PeerLink
from kvcr.protocol.peer import PeerWelcome, Probe, Probed, ProbedWay

TIMEOUT_S = 40.0
ROUND_TRIPS = 21


class Prober:
    """One probe at a time. Belongs to the authority thread."""

    def __init__(self, context: Callable[[], PeerContext | None]) -> None:
        self._context = context
        self._busy = False

    def start(self, request: Probe, reply: Callable[[Probed], None]) -> bool:
        """Begin; ``reply`` follows. False when another probe is under way, or there is no pool yet."""
        context = self._context()
        if context is None or self._busy:
            return False
        self._busy = True
        record = PeerRecord(
            request.endpoint,
            name=request.name,
            unix_socket=request.unix_socket,
            boot_id=request.boot_id,
            net_namespace=request.net_namespace,
            curve_key=request.curve_key,
        )
        # Whatever pulls are set to use: it is asked what would be best.
        link = PeerLink(dataclasses.replace(context, choice="auto"), request.endpoint, record, probing=True)
        _Run(context, link, request, lambda probed: self._end(link, probed, reply))
        return True

    def _end(self, link: PeerLink, probed: Probed, reply: Callable[[Probed], None]) -> None:
        self._busy = False
        link.close()
        reply(probed)


class _Run:
    def __init__(
        self, context: PeerContext, link: PeerLink, request: Probe, done: Callable[[Probed], None]
    ) -> None:
        self._link = link
        self._request = request
        self._reader = context.name
        self._done: Callable[[Probed], None] | None = done
        self._round_trips_s: list[float] = []
        self._timer = context.loop.later(TIMEOUT_S, lambda: self._end(f"no end within {TIMEOUT_S:.0f} s"))
        link.when_ready(time.monotonic(), self._opened)

    def _opened(self, reason: str) -> None:
        if reason:
            self._end(reason)
        else:
            self._ask()

    def _ask(self) -> None:
        asked_s = time.monotonic()

        def answered(reply: PeerWelcome | None, reason: str) -> None:
            if reply is None:
                self._end(reason)
                return
            self._round_trips_s.append(time.monotonic() - asked_s)
            if len(self._round_trips_s) < ROUND_TRIPS:
                self._ask()
            else:
                self._end("")

        self._link.hello("", answered)

    def _end(self, error: str) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        link = self._link
        interface, address = _route(link.endpoint)
        done(
            Probed(
                op=self._request.op,
                reader=self._reader,
                source=link.name or link.endpoint,
                error=error,
                interface=interface,
                address=address,
                ucx_devices=os.environ.get("UCX_NET_DEVICES", ""),
                round_trip_s=statistics.median(self._round_trips_s) if self._round_trips_s else 0.0,
                chosen=str(link.way) if link.way else "",
                ways=tuple(_row(tried) for tried in link.tried),
                rejected=tuple(
                    (way, why)
                    for way, why in link.rejected.items()
                    if way not in {str(tried.way) for tried in link.tried}
                ),
            )
        )


def _row(tried: Tried) -> ProbedWay:
    way, outcome = tried
    return ProbedWay(str(way), way.why, outcome.reason, outcome.first_s, outcome.bytes_per_s, outcome.nbytes)


def _route(endpoint: str) -> tuple[str, str]:
    """Of an address only: a name that anybody asks about would be resolved on the authority's thread."""
    try:
        host, _ = split_host(endpoint)
        return route_to(str(ipaddress.ip_address(host)))
    except (ConfigError, ValueError):
        return "", ""
