# SPDX-License-Identifier: Apache-2.0
"""Ways to talk to a peer guard: its Unix socket, or ZMQ with CURVE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvcr.config import PeerRecord
from kvcr.errors import ConfigError
from kvcr.guard.addresses import is_loopback, split_host
from kvcr.guard.choosing import PeerContext
from kvcr.guard.connection import Connection, connect_unix
from kvcr.guard.control import ControlClient
from kvcr.guard.loop import Loop
from kvcr.protocol.curve import read_key


class Channel(Protocol):
    """An open way."""

    def send(self, raw: bytes) -> Any: ...
    def close(self) -> None: ...


Closed = Callable[[Channel, str], None]
"""Called with a channel that the peer closed, or that failed, and why."""


def open_unix(loop: Loop, path: str, received: Callable[[bytes], None], closed: Closed) -> Connection:
    """Raises OSError when nobody listens."""
    return Connection(
        loop,
        connect_unix(path),
        lambda _, raw: received(bytes(raw)),
        lambda connection: closed(connection, "the peer closed the connection"),
    )


def open_zmq(
    context: PeerContext,
    endpoint: str,
    record: PeerRecord,
    received: Callable[[bytes], None],
    closed: Closed,
) -> ControlClient:
    """Raises ConfigError for an address or a key that cannot be the peer's, ValueError for no address."""
    host, _ = split_host(endpoint)
    if is_loopback(host) and not context.place.same_loopback(record.boot_id, record.net_namespace):
        context.meters.peer_refusals.inc(code="loopback")
        raise ConfigError(
            f"{record.name} advertises {endpoint}, which is this host and not its own; "
            "start it with --advertise or --interface"
        )
    if context.secret is not None and not record.curve_key:
        context.meters.peer_refusals.inc(code="unknown")
        raise ConfigError(f"no signed record names {endpoint}, and the deployment has a secret")
    server_key = read_key(record.curve_key, record.name or endpoint)
    client: ControlClient
    client = ControlClient(
        context.loop,
        context.zmq,
        endpoint,
        context.secret,
        server_key,
        received,
        lambda reason: closed(client, reason),
    )
    return client
