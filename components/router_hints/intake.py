# SPDX-License-Identifier: Apache-2.0
"""Where signals enter, whichever way they came: to the router that owns their session's forward plan.

Every replica takes signals. The owner of a session is the replica that its name hashes to, so that no two of
them plan for it; one that does not answer is done without. One event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvcr.errors import KvcrError
from kvcr.protocol.signals import TENANT_HEADER, BadSignal, SessionInfo, Signal, SignalReply, read_signal
from router_hints.metrics import Metrics
from router_hints.sessions import SessionKey
from router_hints.signals import SignalHandler

log = logging.getLogger(__name__)

_ANSWER_S = 2.0
"""How much longer than its own wait another replica may take."""

Request = Callable[[str, bytes, float], Awaitable[bytes]]
"""``request(router, payload, timeout_s)``: another router's answer. Raises :class:`Unavailable`."""


class Unavailable(KvcrError):
    """The router that had to answer does not."""


class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """One router asks another."""

    verb: str
    tenant: str
    name: str = ""
    """of a signal or a session"""
    signal: Signal | None = None
    wait_s: float = 0.0


_asked = msgspec.json.Decoder(Asked)
_replies = msgspec.json.Decoder(SignalReply | None)
_sessions = msgspec.json.Decoder(SessionInfo | None)


@dataclass
class Intake:
    """Takes signals from HTTP, NATS and other replicas."""

    handler: SignalHandler
    metrics: Metrics
    owner: Callable[[SessionKey], str]
    """Router that owns a session; empty for this one."""
    others: Callable[[], Sequence[str]]
    """The other routers that are alive."""
    request: Request

    async def signal(self, signal: Signal, tenant: str, wait_s: float) -> SignalReply:
        owner = self.owner(SessionKey(tenant, signal.session))
        if owner:
            asked = Asked("signal", tenant, signal=signal, wait_s=wait_s)
            try:
                reply = _replies.decode(await self._ask(owner, asked))
                if reply is not None:
                    return reply
            except (Unavailable, msgspec.MsgspecError) as error:
                # Twice is harmless: what guards are asked to do can be done again.
                log.warning(
                    "router %s did not take signal %s (%s); doing it here", owner, signal.signal_id, error
                )
        return await self.handler.handle(signal, tenant, wait_s)

    async def find(self, tenant: str, signal_id: str) -> SignalReply | None:
        """What is known of an earlier signal."""
        found = self.handler.reply(tenant, signal_id)
        return found or await self._any(Asked("find", tenant, signal_id))

    async def withdraw(self, tenant: str, signal_id: str, wait_s: float) -> SignalReply | None:
        found = await self.handler.withdraw(tenant, signal_id, wait_s)
        return found or await self._any(Asked("withdraw", tenant, signal_id, wait_s=wait_s))

    async def session(self, tenant: str, name: str) -> SessionInfo | None:
        """Where a session's blocks are. Every replica knows; the owner knows its last plan."""
        owner = self.owner(SessionKey(tenant, name))
        if owner:
            try:
                found = _sessions.decode(await self._ask(owner, Asked("session", tenant, name)))
                if found is not None:
                    return found
            except (Unavailable, msgspec.MsgspecError):
                pass
        return self.handler.describe(tenant, name)

    async def answer(self, raw: bytes) -> bytes:
        """Another router asks this one."""
        asked = _asked.decode(raw)
        result: object = None
        if asked.verb == "signal" and asked.signal is not None:
            result = await self.handler.handle(asked.signal, asked.tenant, asked.wait_s)
        elif asked.verb == "find":
            result = self.handler.reply(asked.tenant, asked.name)
        elif asked.verb == "withdraw":
            result = await self.handler.withdraw(asked.tenant, asked.name, asked.wait_s)
        elif asked.verb == "session":
            result = self.handler.describe(asked.tenant, asked.name)
        return msgspec.json.encode(result)

    async def message(self, raw: bytes, headers: dict[str, str]) -> bytes:
        """A signal over NATS; the answer goes back when the message asks for one."""
        try:
            signal = read_signal(raw)
        except BadSignal as error:
            self.metrics.refused("nats", error.field)
            return msgspec.json.encode({"error": error.as_json()})
        self.metrics.signals.labels(signal.kind.value, "nats").inc()
        tenant = next((v for k, v in headers.items() if k.lower() == TENANT_HEADER), "")
        return msgspec.json.encode(await self.signal(signal, tenant, 2.0))

    async def _any(self, asked: Asked) -> SignalReply | None:
        for router in self.others():
            try:
                reply = _replies.decode(await self._ask(router, asked))
            except (Unavailable, msgspec.MsgspecError):
                continue
            if reply is not None:
                return reply
        return None

    async def _ask(self, router: str, asked: Asked) -> bytes:
        return await self.request(router, msgspec.json.encode(asked), asked.wait_s + _ANSWER_S)
