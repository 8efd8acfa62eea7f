# SPDX-License-Identifier: Apache-2.0
"""A client of the router's signal API. It needs nothing but the standard library and msgspec.

Errors::

    HarnessError
    ├── SignalRefused   a field of the signal is wrong: which, what it held, what is allowed
    ├── NotAllowed      the token is missing or unknown, or of another tenant
    └── RouterAway      no answer in time
"""

from __future__ import annotations

import http.client
import json
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from kvcr.errors import ConfigError, KvcrError
from kvcr.protocol.signals import (
    HEADER,
    PARENT_HEADER,
    SESSION_HEADER,
    TENANT_HEADER,
    BadSignal,
    Kind,
    SessionInfo,
    Signal,
    SignalReply,
    check,
)

T = TypeVar("T")

_MAX_IDLE = 8
"""Connections kept open by a client that many threads share."""


class HarnessError(KvcrError):
    """A signal did not reach the router, or was not taken. No request depends on it."""


class SignalRefused(HarnessError):
    """A field of the signal is wrong."""

    def __init__(self, message: str, field: str = "", value: str = "", limit: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit


class NotAllowed(HarnessError):
    """The token is missing or unknown, or belongs to another tenant."""


class RouterAway(HarnessError):
    """The router cannot be reached, or did not answer in time."""


def headers(session: str, *, parent: str = "", signal: Signal | None = None) -> dict[str, str]:
    """Headers for a chat completion of this session, with what is known of the turn."""
    built = {SESSION_HEADER: session}
    if parent:
        built[PARENT_HEADER] = parent
    if signal is not None:
        built[HEADER] = msgspec.json.encode(signal).decode()
    return built


class Harness:
    """Sends signals over HTTP, over connections that stay open between them. Any thread; blocking.

    In an event loop: ``await asyncio.to_thread(kv.next_turn, "main", starts_in_s=2.0)``.
    Every call may raise a :class:`HarnessError`.
    """

    def __init__(self, url: str, *, tenant: str = "", token: str = "", timeout_s: float = 10.0) -> None:
        """``url`` is the router's, such as ``http://127.0.0.1:8490`` (``graph.json`` of ``kvcr serve`` has
        it); anything after the port is ignored. ``tenant`` is the one whose requests carry it as
        ``x-tenant-id``. Raises ConfigError for another kind of URL."""
        try:
            parts = urlsplit(url)
            host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no router URL: {error}; expected http://HOST:PORT") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url!r} is no router URL; expected http://HOST:PORT")
        self._https = parts.scheme == "https"
        self._host = host
        self._headers = {"Content-Type": "application/json"}
        if tenant:
            self._headers[TENANT_HEADER] = tenant
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        # One for each call at a time. A connection for each signal would use up the host's ports: each keeps
        # its port for a minute after it was closed.
        self._idle: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        """Close the connections. A later call opens another."""
        while self._idle:
            self._idle.pop().close()

    # --- what happens to a session -----------------------------------------------------------------

    def fork(
        self,
        session: str,
        *,
        parent: str,
        isl: int | None = None,
        osl: int | None = None,
        starts_in_s: float | None = None,
        runs_s: float | None = None,
        **more: Any,
    ) -> SignalReply:
        """A sub-agent starts from the context of ``parent``."""
        return self.send(
            Kind.FORK,
            session,
            parent=parent,
            isl=isl,
            osl=osl,
            starts_in_s=starts_in_s,
            runs_s=runs_s,
            **more,
        )

    def next_turn(
        self,
        session: str,
        *,
        starts_in_s: float | None = None,
        isl: int | None = None,
        osl: int | None = None,
        **more: Any,
    ) -> SignalReply:
        """The session's next request is on its way."""
        return self.send(Kind.NEXT_TURN, session, starts_in_s=starts_in_s, isl=isl, osl=osl, **more)

    def wake_up(
        self,
        session: str,
        *,
        idle_s: float | None = None,
        isl: int | None = None,
        osl: int | None = None,
        starts_in_s: float | None = None,
        **more: Any,
    ) -> SignalReply:
        """The session comes back after a long pause."""
        return self.send(
            Kind.WAKE_UP, session, idle_s=idle_s, isl=isl, osl=osl, starts_in_s=starts_in_s, **more
        )

    def one_off(
        self, session: str, *, isl: int | None = None, osl: int | None = None, **more: Any
    ) -> SignalReply:
        """The session's next request is its only one."""
        return self.send(Kind.ONE_OFF, session, isl=isl, osl=osl, **more)

    def compaction(
        self,
        session: str,
        *,
        keeps: int | None = None,
        keeps_messages: int | None = None,
        isl_before: int | None = None,
        isl_after: int | None = None,
        next_in_s: float | UnsetType | None = UNSET,
        **more: Any,
    ) -> SignalReply:
        """The context was replaced by a shorter one: what follows the kept head is dead."""
        return self.send(
            Kind.COMPACTION,
            session,
            keeps=keeps,
            keeps_messages=keeps_messages,
            isl_before=isl_before,
            isl_after=isl_after,
            next_in_s=next_in_s,
            **more,
        )

    def sub_agent_done(self, session: str, **more: Any) -> SignalReply:
        """A forked session ended; its parent goes on."""
        return self.send(Kind.SUB_AGENT_DONE, session, **more)

    def session_end(self, session: str, **more: Any) -> SignalReply:
        """The session ended."""
        return self.send(Kind.SESSION_END, session, **more)

    def pin(self, session: str, *, ttl_s: float, **more: Any) -> SignalReply:
        """Keep the session's blocks from eviction; :meth:`withdraw` the signal to unpin them."""
        return self.send(Kind.PIN, session, ttl_s=ttl_s, **more)

    # --- the signals themselves --------------------------------------------------------------------

    def send(self, kind: Kind, session: str, *, wait_s: float = 2.0, **fields: Any) -> SignalReply:
        """Send a signal; the answer waits for the guards, ``wait_s`` at the longest."""
        given = {name: value for name, value in fields.items() if value is not None and value is not UNSET}
        if fields.get("next_in_s", UNSET) is None:
            given["next_in_s"] = None
        try:
            signal = check({"kind": kind.value, "session": session, **given})
        except BadSignal as error:
            raise SignalRefused(str(error), error.field, error.value, error.limit) from error
        body = msgspec.json.encode(signal)
        return self._ask("POST", f"/v1/kv/signals?wait_s={wait_s:g}", SignalReply, body, wait_s)

    def signal(self, signal_id: str) -> SignalReply | None:
        """What became of an earlier signal; None when the router does not know it."""
        return self._find("GET", f"/v1/kv/signals/{quote(signal_id, safe='')}", SignalReply)

    def withdraw(self, signal_id: str, *, wait_s: float = 2.0) -> SignalReply | None:
        """The turn does not come: what was begun for it is stopped. None when the router does not know it."""
        path = f"/v1/kv/signals/{quote(signal_id, safe='')}?wait_s={wait_s:g}"
        return self._find("DELETE", path, SignalReply, wait_s)

    def session(self, session: str) -> SessionInfo | None:
        """Where the session's blocks are and what was decided last; None when the router has not seen it."""
        return self._find("GET", f"/v1/kv/sessions/{quote(session, safe='')}", SessionInfo)

    # --- inside ------------------------------------------------------------------------------------

    def _find(
        self, method: Literal["GET", "DELETE"], path: str, kind: type[T], wait_s: float = 0.0
    ) -> T | None:
        try:
            return self._ask(method, path, kind, None, wait_s)
        except _Unknown:
            return None

    def _ask(self, method: str, path: str, kind: type[T], body: bytes | None, wait_s: float) -> T:
        status, raw = self._exchange(method, path, body, self._timeout_s + wait_s)
        if status == 200:
            try:
                return msgspec.json.decode(raw, type=kind)
            except msgspec.MsgspecError as error:
                raise RouterAway(
                    f"{self._host}:{self._port} answers like no router of this version: {error}"
                ) from error
        raise _error(status, raw)

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        while True:
            connection = self._connection(timeout_s)
            was_open = connection.sock is not None
            try:
                connection.request(method, path, body, self._headers)
                response = connection.getresponse()
                raw = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # The router may have closed it meanwhile. A signal that arrives twice is one signal.
                if was_open and not isinstance(error, TimeoutError):
                    continue
                raise RouterAway(f"no router at {self._host}:{self._port}: {error!r}") from error
            if connection.sock is not None and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()
            return response.status, raw

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        try:
            connection = self._idle.pop()
        except IndexError:
            connect = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
            return connect(self._host, self._port, timeout=timeout_s)
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection


class _Unknown(HarnessError):
    """404."""


def _error(status: int, raw: bytes) -> HarnessError:
    try:
        said = json.loads(raw)["error"]
        message = str(said["message"])
    except (ValueError, KeyError, TypeError):
        said, message = {}, raw[:200].decode(errors="replace")
    if status == 404:
        return _Unknown(message)
    if status in (401, 403):
        return NotAllowed(f"{status}: {message}")
    if status in (400, 413):
        return SignalRefused(message, said.get("field", ""), said.get("value", ""), said.get("limit", ""))
    return RouterAway(f"{status}: {message}")
