# SPDX-License-Identifier: Apache-2.0
"""Our side of the conversation with another guard: a control endpoint, opened when first needed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from kvcr.config import PeerRecord
from kvcr.errors import ConfigError, ProtocolError
from kvcr.guard.canary import Outcome
from kvcr.guard.channels import Channel, open_unix, open_zmq
from kvcr.guard.choosing import NIXL, TRIAL_TIMEOUT_S, Chooser, PeerContext, Tried
from kvcr.guard.connection import Connection
from kvcr.guard.grants import Grant, grant_of
from kvcr.guard.inventory import TIER
from kvcr.guard.questions import Questions
from kvcr.guard.ways import Way
from kvcr.keys import KEY_BYTES
from kvcr.pool import SPARE_ROWS
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.peer import (
    CANARY_KEY,
    VERSION,
    Discard,
    Discarded,
    Lease,
    Leased,
    PeerHello,
    PeerWelcome,
    Release,
    ToClient,
    ToServer,
    to_client,
    to_server,
)
from kvcr.transfer.base import STEP_BYTES, Transport
from kvcr.transfer.nixl import NixlTransport

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0
"""A peer that has not answered by then counts as lost for the pull; the link is opened anew for the next."""

NIXL_TIMEOUT_S = 15.0
"""Of a hello that wants NIXL: the peer may have to start its NIXL process and to make an agent,
1 s, or ten where engines are being loaded at the same time."""

UNIX_TIMEOUT_S = 0.3
"""After it the conversation stays on ZMQ."""

BACKOFF_S = 0.2

PROBE_S = 10.0
"""A peer that was silent is skipped until it answers a hello. That waits in its queue: a peer that was paused
is used again as soon as it runs. After this long the hello is sent again, on a new connection."""

PROBED_FOR_S = 60.0
"""After the last wish to use it; then a silent peer is only asked again with the next wish."""

_LEASED_BYTES = 150_000
"""Bound of one Leased reply, which over a Unix socket must stay below 200 kB."""

UNIX = "unix://"


class PeerLink:
    """One peer guard. Belongs to the authority thread.

    Opening is: connect, hello, then for each way the canary block is asked for, read and verified, until one
    works. Only then is the link ready.
    """

    def __init__(
        self, context: PeerContext, endpoint: str, record: PeerRecord, *, probing: bool = False
    ) -> None:
        """``probing``: try every way, not only until one works."""
        self.endpoint = endpoint
        self.record = record
        self.transport: Transport | None = None
        """Set while the link is ready."""
        self.way: Way | None = None
        """Of the transport, with the reason."""
        self.outcome: Outcome | None = None
        """Of the canary read that made it ready."""
        self.tried: list[Tried] = []
        """Ways that were tried, with their outcomes."""
        self.probing = probing
        self.rejected: dict[str, str] = {}
        """Ways that are not used, and why."""
        self.rates: dict[str, float] = {}
        """Bytes per second out of the peer's G2, by transport, measured over the steps so far."""
        self.in_place = True
        """Whether the engine may be given the peer's pool to read, where that is reachable at all."""
        self.reason = ""
        """Why the link is not ready."""
        self._context = context
        self._channel: Channel | None = None
        self._welcome: PeerWelcome | None = None
        self._questions = Questions(context.loop, lambda reason: self._lost(reason, silent=True))
        self._waiting: list[Callable[[str], None]] = []
        self._not_before_s = 0.0
        self._told = ""
        """The reason that was logged last."""
        self._silent = False
        """It did not answer in time, and has not since."""
        self._wished_s = 0.0
        self._unix_is_other = False
        self._unix_tried = False
        self._chooser: Chooser | None = None

    @property
    def ready(self) -> bool:
        return self.transport is not None

    @property
    def label(self) -> str:
        """For logs and metrics: its name or, before its hello, its endpoint."""
        return self.name or self.endpoint

    @property
    def name(self) -> str:
        return self._welcome.name if self._welcome else self.record.name

    def when_ready(self, now_s: float, done: Callable[[str], None]) -> None:
        """``done("")`` once leases can be asked for, ``done(reason)`` when that fails. Opens the link.

        Of a peer that was silent, ``done(reason)`` at once: it costs one pull its time, not every pull.
        """
        self._wished_s = now_s
        if self.transport is not None:
            done("")
        elif self._silent:
            if self._channel is None:
                self._open()
            done(self.reason)
        elif self._channel is None and now_s < self._not_before_s:
            done(self.reason)
        else:
            self._waiting.append(done)
            if self._channel is None:
                self._not_before_s = now_s + BACKOFF_S
                self._open()

    def lease(
        self,
        keys: bytes,
        lease_ms: int,
        timeout_s: float,
        done: Callable[[Grant | None, str], None],
        renew: int = 0,
        traceparent: str = "",
    ) -> None:
        """Ask for a lease on up to :meth:`keys_per_lease` keys; ``done(None, reason)`` when there is none.

        ``renew``: a lease on them that is over.
        """
        transport = self.transport
        if transport is None:
            done(None, self.reason)
            return
        request = Lease(
            op=self._questions.op(),
            name=self._context.name,
            incarnation=self._context.incarnation,
            keys=keys,
            lease_ms=lease_ms,
            transport=transport.name,
            renew=renew,
            traceparent=traceparent,
            by_itself=isinstance(transport, NixlTransport) and transport.synchronous,
        )
        asked_s = time.monotonic()

        def answered(reply: ToClient | None, reason: str) -> None:
            if not isinstance(reply, Leased):
                done(None, reason)
                return
            try:
                grant = self._grant(request, reply, asked_s)
            except ProtocolError as error:
                done(None, str(error))
                return
            done(grant, "")

        self._request(request.op, request, min(timeout_s, ANSWER_TIMEOUT_S), answered)

    def keys_per_lease(self) -> int:
        return min(MAX_BLOCKS_PER_MESSAGE, _LEASED_BYTES // (21 + 8 * len(self._context.local.arrays)))

    def release(self, message: Release) -> None:
        """No reply is expected; lost with the link, and then the lease ends by itself."""
        if self._channel is not None:
            self._channel.send(to_server.encode(message))

    def discard(self, keys: bytes, plan_id: str, done: Callable[[int | None, str], None]) -> None:
        """These blocks are committed here: the peer may drop its own. ``done(how many it dropped, "")``, or
        ``done(None, reason)`` when it did not answer. Behind every :meth:`release` sent before."""
        request = Discard(
            op=self._questions.op(),
            name=self._context.name,
            incarnation=self._context.incarnation,
            plan_id=plan_id,
            keys=keys,
        )

        def answered(reply: ToClient | None, reason: str) -> None:
            done(reply.count if isinstance(reply, Discarded) else None, reason)

        self._request(request.op, request, ANSWER_TIMEOUT_S, answered)

    def measured(self, transport: str, nbytes: int, seconds: float) -> float:
        """Take a step into account for :attr:`rates`; returns the new rate.

        A step counts by its size: the fixed cost of a small one says nothing about large ones.
        """
        self._wished_s = time.monotonic()
        known = self.rates.get(transport)
        if nbytes and seconds > 0:
            rate = nbytes / seconds
            weight = 0.3 * min(1.0, nbytes / STEP_BYTES)
            self.rates[transport] = rate if known is None else (1 - weight) * known + weight * rate
        return self.rates.get(transport, 0.0)

    @property
    def bytes_per_s(self) -> float | None:
        """Of the transport in use; None while nothing was measured."""
        return self.rates.get(self.transport.name) if self.transport is not None else None

    def suspect(self, reason: str) -> None:
        """Its bytes do not come: skip it until it answers a hello, which also tells what changed there."""
        if self.transport is not None:
            self._lost(reason, silent=True)

    @property
    def silent(self) -> bool:
        """Skipped, as it did not answer in time and has not since."""
        return self._silent

    def idle(self, now_s: float) -> bool:
        """Whether nobody uses it, or waits for it: without it, the next wish would open another one."""
        if self.transport is None and not self._silent:
            return self._channel is None
        return now_s - self._wished_s >= PROBED_FOR_S

    def heard(self, record: PeerRecord) -> None:
        """News of the peer, as that its engine has attached: what was wrong may be right now."""
        self.record = record
        self._not_before_s = 0.0

    def close(self) -> None:
        self._lost("closed")

    def status(self) -> dict[str, Any]:
        """JSON-ready."""
        way, outcome = self.way, self.outcome
        return {
            "endpoint": self.endpoint,
            "name": self.name,
            "ready": self.ready,
            "transport": way.transport if way else "",
            "via": way.via if way else "",
            "why": way.why if way else "",
            "rejected": self.rejected,
            "canary_bytes_per_s": round(outcome.bytes_per_s) if outcome else 0,
            "reason": "" if self.ready else self.reason or "not ready: opening",
            "silent": self._silent,
            "rates": [
                {"transport": transport, "tier": TIER, "bytes_per_s": round(rate)}
                for transport, rate in self.rates.items()
            ],
        }

    # --- opening ----------------------------------------------------------------------------------

    def _open(self) -> None:
        context, record = self._context, self.record
        path = ""
        if self.endpoint.startswith(UNIX):
            path = self.endpoint.removeprefix(UNIX)
        elif record.unix_socket and record.boot_id == context.boot_id and not self._unix_is_other:
            path = record.unix_socket
        try:
            self._channel = self._open_by(path)
        except OSError as error:
            self._lost(f"nobody answers on {path}: {error.strerror}")
            return
        except (ConfigError, ValueError) as error:  # of a record that anybody may have written
            self._lost(str(error))
            return
        self.hello("", self._welcomed)

    def _open_by(self, path: str) -> Channel:
        if path:
            try:
                return self._open_unix(path)
            except OSError:
                if self.endpoint.startswith(UNIX):
                    raise
        return open_zmq(self._context, self.endpoint, self.record, self._received, self._closed)

    def _open_unix(self, path: str) -> Connection:
        return open_unix(self._context.loop, path, self._received, self._closed)

    def _closed(self, channel: Channel, reason: str) -> None:
        if self._channel is channel:
            self._lost(reason)

    def _hello_message(self, want: str) -> PeerHello:
        return PeerHello(
            version=VERSION,
            op=self._questions.op(),
            name=self._context.name,
            incarnation=self._context.incarnation,
            layout_digest=self._context.layout_digest,
            want_nixl=want == NIXL,
            want_offer="" if want == NIXL else want,
        )

    def _welcomed(self, reply: PeerWelcome | None, reason: str) -> None:
        if reply is None:
            self._lost(reason)
            return
        if reply.layout is None:
            self._lost(f"{reply.name} is not ready: no engine has attached to it yet")
            return
        if reply.layout.digest() != self._context.layout_digest:
            self._lost(f"{reply.name} has another KV block layout")
            return
        if self.record.name and reply.name != self.record.name:
            # Another mount namespace's socket at the path we were told.
            self._unix_is_other = isinstance(self._channel, Connection)
            self._lost(f"{reply.name} answers where {self.record.name} should be")
            return
        self._welcome = reply
        if reply.boot_id == self._context.boot_id and not self._unix_tried:
            self._unix_tried = True
            self._prefer_unix(reply, lambda: self._choose(reply))
        else:
            self._choose(reply)

    def _choose(self, welcome: PeerWelcome) -> None:
        """Find a way that works; with it the link is ready."""
        self._chooser = chooser = Chooser(self._context, self, welcome, every=self.probing)
        chooser.start()

    def chosen(self, chooser: Chooser) -> None:
        """For :class:`Chooser`, when it has looked at all ways."""
        if chooser is not self._chooser:
            return
        self._chooser = None
        self.rejected, self.tried = chooser.rejected, chooser.tried
        best = chooser.best
        if best is None or best.outcome is None:
            reasons = "; ".join(f"{way}: {why}" for way, why in chooser.rejected.items())
            self._lost(f"not ready, no transport works ({reasons})")
            return
        self.transport, self.way, self.outcome = best.transport, best.way, best.outcome
        self.reason = self._told = ""
        self._silent = False
        # What is measured of pulls adjusts it.
        self.rates.setdefault(best.transport.name, best.outcome.bytes_per_s)
        log.info(
            "peer %s at %s: %s, as %s; canary verified, %.0f MB/s",
            self.name,
            self.endpoint,
            best.way,
            best.way.why,
            best.outcome.bytes_per_s / 1e6,
        )
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done("")

    def hello(self, want: str, done: Callable[[PeerWelcome | None, str], None]) -> None:
        """Ask the peer who it is. ``want``: name of the transport whose needs it must tell; empty: none."""
        message = self._hello_message(want)
        self._request(
            message.op,
            message,
            PROBE_S if self._silent else NIXL_TIMEOUT_S if want else ANSWER_TIMEOUT_S,
            lambda reply, reason: done(reply if isinstance(reply, PeerWelcome) else None, reason),
        )

    def canary_lease(self, transport: str, done: Callable[[Leased | None, str], None]) -> None:
        """Ask for the peer's canary block; ``done(None, reason)`` when it has none."""
        request = Lease(
            op=self._questions.op(),
            name=self._context.name,
            incarnation=self._context.incarnation,
            keys=CANARY_KEY,
            lease_ms=int(TRIAL_TIMEOUT_S * 1000),
            transport=transport,
        )

        def answered(reply: ToClient | None, reason: str) -> None:
            if not isinstance(reply, Leased):
                done(None, reason)
                return
            try:
                slot = int(self._grant(request, reply, time.monotonic(), spare=SPARE_ROWS).slots[0])
            except ProtocolError as error:
                done(None, str(error))
                return
            done(*((reply, "") if slot >= 0 else (None, "it has no canary block")))

        self._request(request.op, request, ANSWER_TIMEOUT_S, answered)

    def _prefer_unix(self, welcome: PeerWelcome, go_on: Callable[[], None]) -> None:
        """Move the conversation to the peer's Unix socket, 6 us a round trip instead of 125; then ``go_on``.

        Only if the same guard answers there: in another mount namespace, the path may be somebody else's.
        """
        candidate: Connection | None = None
        if welcome.unix_socket and not isinstance(self._channel, Connection):
            with contextlib.suppress(OSError):
                candidate = self._open_unix(welcome.unix_socket)
        if candidate is None:
            go_on()
            return

        def answered(reply: ToClient | None, _: str) -> None:
            if self._channel is None:
                candidate.close()
                return
            if isinstance(reply, PeerWelcome) and reply.incarnation == welcome.incarnation:
                old, self._channel = self._channel, candidate
                old.close()
            else:
                candidate.close()
            go_on()

        hello = self._hello_message("")
        self._questions.try_for(hello.op, UNIX_TIMEOUT_S, answered)
        candidate.send(to_server.encode(hello))

    # --- talking ----------------------------------------------------------------------------------

    def _request(
        self, op: int, message: ToServer, timeout_s: float, done: Callable[[ToClient | None, str], None]
    ) -> None:
        if self._channel is None:
            done(None, self.reason)
            return
        self._questions.wait(op, timeout_s, done)
        self._channel.send(to_server.encode(message))

    def _received(self, raw: bytes) -> None:
        try:
            reply = to_client.decode(raw)
        except ProtocolError as error:
            self._lost(f"it sent nonsense: {error}")
            return
        self._questions.answered(reply)

    def _grant(self, request: Lease, reply: Leased, asked_s: float, *, spare: int = 0) -> Grant:
        """``spare``: rows behind the peer's slots that may be named too."""
        return grant_of(
            reply,
            keys=len(request.keys) // KEY_BYTES,
            ranks=len(self._context.local.arrays),
            rows=self._welcome.slots + spare if self._welcome else 0,
            lease_ms=request.lease_ms,
            asked_s=asked_s,
        )

    def _lost(self, reason: str, *, silent: bool = False) -> None:
        """Fail what is asked, drop what is mapped; the next :meth:`when_ready` starts again.

        ``silent``: it did not answer. That is found out by a hello of its own, and by nobody's pull.
        """
        self.reason = reason
        self._silent = silent
        self._unix_tried = False
        self.way = self.outcome = None
        chooser, self._chooser = self._chooser, None
        if chooser is not None:
            chooser.cancel()
        channel, self._channel = self._channel, None
        transport, self.transport = self.transport, None
        unanswered = self._questions.take_all()
        waiting, self._waiting = self._waiting, []
        if channel is not None:
            channel.close()
        if transport is not None:
            log.info("peer %s at %s lost: %s", self.name, self.endpoint, reason)
            transport.close()
        elif waiting and reason != self._told:
            # Once for each cause: links to known peers are tried again and again.
            log.info("peer %s at %s cannot be used: %s", self.name, self.endpoint, reason)
        self._told = reason
        for done in unanswered:
            done(None, reason)
        for opened in waiting:
            opened(reason)
        if silent and self._channel is None and time.monotonic() - self._wished_s < PROBED_FOR_S:
            self._open()
