# SPDX-License-Identifier: Apache-2.0
"""etcd and NATS of somebody else: their addresses, and whether anybody is there."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from kvcr.errors import ConfigError
from kvcr.graph.config import Kind
from kvcr.graph.plan import ServerPlan


def check_reachable(server: ServerPlan, timeout_s: float = 3.0) -> None:
    """Raise ConfigError when nobody listens at an external server's address."""
    for address in server.url.split(","):
        parts = urlsplit(address if "//" in address else f"//{address}")
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 0), timeout_s):
                return
        except (OSError, ValueError) as error:
            problem = error
    raise ConfigError(f"{server.kind.value}.address {server.url} does not answer: {problem}")


def checked_address(address: str, kind: Kind) -> str:
    """The same address. Raises ConfigError unless each of its parts has a host and a port."""
    for part in address.split(","):
        parts = urlsplit(part if "//" in part else f"//{part}")
        try:
            complete = parts.hostname and parts.port
        except ValueError:
            complete = False
        if not complete:
            example = "http://10.0.0.1:2379" if kind is Kind.ETCD else "nats://10.0.0.1:4222"
            raise ConfigError(f"{kind.value}.address is {address!r}; expected host and port, e.g. {example}")
    return address
