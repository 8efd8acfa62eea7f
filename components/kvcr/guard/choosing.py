# SPDX-License-Identifier: Apache-2.0
"""Choosing how to read from a peer: each way is tried with its canary block until one works."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zmq

from kvcr.errors import ConfigError, KvcrError, ProtocolError
from kvcr.guard.addresses import Place, rdma_devices
from kvcr.guard.canary import Canary, Outcome, Trial
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.ways import Setting, Way, cma_error, ways
from kvcr.pool import SPARE_ROWS
from kvcr.protocol.peer import Leased, PeerWelcome, Release
from kvcr.transfer import nixl
from kvcr.transfer.base import LocalRegions, Transport
from kvcr.transfer.mover import MoverPool
from kvcr.transfer.nixl import NixlProcess, NixlTransport
from kvcr.transfer.plugins import Plugin
from kvcr.transfer.shm import ShmTransport

log = logging.getLogger(__name__)

TRIAL_TIMEOUT_S = 10.0
"""Of one canary read: over NIXL it has to connect first."""

PROBE_READS = 5
"""When measuring is what it is all about."""

PLUGIN_GAIN = 1.1
"""A plugin is used when it measures this many times faster than the way of ours that works."""

SHM, NIXL = "shm", "nixl"

HELD_TO = {"cma": "cma,tcp,self", "tcp": "tcp,self"}
"""``UCX_TLS`` by which NIXL uses this and nothing better."""


@dataclass(slots=True)
class PeerContext:
    """What all links share; filled in by the guard once its pool exists."""

    loop: Loop
    zmq: zmq.Context[Any]
    name: str
    incarnation: int
    place: Place
    secret: bytes | None
    choice: str
    """The ``transport`` setting."""
    local: LocalRegions
    canary: Canary
    layout_digest: str
    movers: MoverPool
    meters: Meters
    nixl_backend: str
    nixl: Callable[[], NixlProcess]
    """Made at the first call."""
    plugins: dict[str, Plugin]
    """Loaded transports of other makers, by name."""

    @property
    def boot_id(self) -> str:
        return self.place.boot_id


class Link(Protocol):
    """What choosing needs of the link to the peer."""

    endpoint: str

    def hello(self, want: str, done: Callable[[PeerWelcome | None, str], None]) -> None: ...
    def canary_lease(self, transport: str, done: Callable[[Leased | None, str], None]) -> None: ...
    def release(self, message: Release) -> None: ...
    def chosen(self, chooser: Chooser) -> None: ...


@dataclass(slots=True)
class Candidate:
    """A way that was tried, or is."""

    way: Way
    transport: Transport
    lease_id: int = 0
    """Under which the trial reads."""
    trial: Trial | None = None
    outcome: Outcome | None = None


class Tried(NamedTuple):
    """A way that was tried. Not its transport, which would keep a dead peer's pool mapped, and its memory."""

    way: Way
    outcome: Outcome


class Chooser:
    """One round of choosing. Belongs to the authority thread; tells the link once it is through."""

    def __init__(
        self, context: PeerContext, link: Link, welcome: PeerWelcome, *, every: bool = False
    ) -> None:
        """``every``: try each way and keep all outcomes in :attr:`tried`, for measuring."""
        self.best: Candidate | None = None
        self.rejected: dict[str, str] = {}
        """Way -> why it is not used."""
        self.tried: list[Tried] = []
        self._context = context
        self._link = link
        self._welcome = welcome
        self._every = every
        self._current: Candidate | None = None
        self._cancelled = False
        self._ways = ways(
            Setting(
                choice=context.choice,
                place=context.place,
                rdma_ports=rdma_devices(),
                ucx_tls=os.environ.get("UCX_TLS", ""),
                nixl_backend=context.nixl_backend,
                nixl_error=nixl.import_error(),
            ),
            welcome,
            {name: plugin.reach for name, plugin in context.plugins.items()},
        )
        self.rejected |= self._ways.rejected
        if every:
            # NIXL takes the best it finds: to measure the others, it is held to each in turn.
            self._ways.built_in[:] = [
                way._replace(tls=HELD_TO.get(way.via, "")) for way in self._ways.built_in
            ]

    def start(self) -> None:
        self._next(told="")

    def cancel(self) -> None:
        """The link is lost: say nothing, close what was opened, release what is leased."""
        self._cancelled = True
        current = self._current
        if current is not None and current.trial is not None:
            current.trial.cancel()
            self._link.release(Release(current.lease_id))
        for candidate in (current, self.best):
            if candidate is not None:
                candidate.transport.close()

    def _next(self, told: str) -> None:
        """Try the next way, or end. ``told``: the transport whose needs the welcome tells."""
        built_in, plugins = self._ways.built_in, self._ways.plugins
        enough = self.best is not None and not self._every
        left = plugins if enough or not built_in else built_in
        if not left:
            self._link.chosen(self)
            return
        way, welcome = left[0], self._welcome
        known = way.transport == SHM or told == way.transport
        if not known and not (way.transport == NIXL and welcome.nixl_metadata):
            if way.transport == NIXL:
                # Ours starts while the peer's does.
                self._context.nixl().start()
            self._link.hello(way.transport, lambda reply, reason: self._told(way, reply, reason))
            return
        del left[0]
        try:
            self._current = Candidate(way, self._open(way))
        except (OSError, KvcrError) as error:
            self._reject(way, str(error))
            return
        current = self._current
        if isinstance(current.transport, NixlTransport):
            current.transport.meet(lambda reason: self._met(current, reason))
        else:
            self._met(current, "")

    def _met(self, candidate: Candidate, reason: str) -> None:
        """Only now the canary block is asked for: its source works for the read while the lease lasts, and
        making an agent may take longer than that."""
        if self._cancelled:
            return
        if reason:
            self._tried(candidate, Outcome(reason, 0.0, 0.0, 0, 0))
            return
        self._link.canary_lease(
            candidate.transport.name, lambda leased, reason: self._leased(candidate, leased, reason)
        )

    def _told(self, way: Way, reply: PeerWelcome | None, reason: str) -> None:
        if self._cancelled:
            return
        if reply is None:
            self._ways.built_in[:] = [other for other in self._ways.built_in if other is not way]
            self._ways.plugins[:] = [other for other in self._ways.plugins if other is not way]
            self._reject(way, reason)
            return
        self._welcome = reply
        self._next(told=way.transport)

    def _open(self, way: Way) -> Transport:
        """Raises OSError or KvcrError when it is not possible."""
        context, welcome = self._context, self._welcome
        if way.transport == SHM:
            return ShmTransport(Path(welcome.pool_dir), welcome.incarnation, context.local, context.movers)
        if way.transport != NIXL:
            return context.plugins[way.transport].open(welcome, welcome.offer)
        if not welcome.nixl_metadata:
            raise ConfigError(f"{welcome.name} does not serve NIXL")
        if len(welcome.region_addresses) != len(context.local.addresses):
            raise ProtocolError(f"{welcome.name} names {len(welcome.region_addresses)} regions")
        if way.via == "cma" and (error := cma_error(welcome)):
            raise ConfigError(error)
        return NixlTransport(
            context.nixl(),
            f"{welcome.name} ({self._link.endpoint})",
            welcome.nixl_metadata,
            welcome.region_addresses,
            welcome.slots + SPARE_ROWS,
            own_agent=bool(way.tls) or way.via not in ("cma", "rdma"),
            tls=way.tls,
        )

    def _leased(self, candidate: Candidate, leased: Leased | None, reason: str) -> None:
        if self._cancelled:
            if leased is not None:
                self._link.release(Release(leased.lease_id))
            return
        if leased is None:
            self._tried(candidate, Outcome(reason, 0.0, 0.0, 0, 0))
            return
        context = self._context

        def done(outcome: Outcome) -> None:
            self._link.release(Release(leased.lease_id))
            self._tried(candidate, outcome)

        candidate.lease_id = leased.lease_id
        candidate.trial = Trial(
            context.canary,
            context.local,
            candidate.transport,
            leased,
            TRIAL_TIMEOUT_S,
            done,
            context.loop.later,
            PROBE_READS if self._every else 1,
        )

    def _tried(self, candidate: Candidate, outcome: Outcome) -> None:
        way, transport = candidate.way, candidate.transport
        self._current = None
        if not outcome.reason and way.via == "cma" and not getattr(transport, "synchronous", False):
            # It works, but over something else, for which a shared agent is not safe.
            outcome = outcome._replace(reason="UCX did not copy between the processes")
        candidate.outcome = outcome
        self.tried.append(Tried(way, outcome))
        self._context.meters.canaries.inc(
            transport=transport.name, result="failed" if outcome.reason else "ok"
        )
        if outcome.reason:
            transport.close()
            self._reject(way, outcome.reason)
            return
        best, self.best = self.best, self._better(self.best, candidate)
        loser = best if self.best is candidate else candidate
        if loser is not None and loser.outcome is not None:
            loser.transport.close()
            self.rejected[str(loser.way)] = f"works, at {loser.outcome.bytes_per_s / 1e6:.0f} MB/s"
        self._next(told="")

    def _better(self, best: Candidate | None, candidate: Candidate) -> Candidate:
        """Of two that work. The order of our own ways stands; a plugin has to be faster."""
        if best is None or best.outcome is None or candidate.outcome is None:
            return candidate
        if candidate.way.transport in (SHM, NIXL):
            return best
        gain = candidate.outcome.bytes_per_s / max(best.outcome.bytes_per_s, 1.0)
        return candidate if gain >= PLUGIN_GAIN else best

    def _reject(self, way: Way, reason: str) -> None:
        log.info("peer at %s: no %s: %s", self._link.endpoint, way, reason)
        self.rejected[str(way)] = reason
        self._next(told="")
