# SPDX-License-Identifier: Apache-2.0
"""TCP ports for a graph, kept free until their process starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from kvcr.config import LOOPBACK
from kvcr.errors import ConfigError

_LOWEST = 20_000
_ATTEMPTS = 200


class PortBook:
    """Hands out ports and holds each with a bound, not listening socket until :meth:`release`.

    Free ports come from below the kernel's ephemeral range, so that no outgoing connection and no
    ``bind(0)`` of another program takes one in the seconds a process needs to open it, or between its crash
    and its restart. Owned by one thread.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}
        self._range = _range_below_ephemeral()

    def free(self) -> int:
        """A port nobody uses."""
        for _ in range(_ATTEMPTS):
            port = random.randrange(*self._range)
            if port not in self._held and self._hold(port, LOOPBACK, reuse=False):
                return port
        raise ConfigError(f"no free TCP port found between {self._range[0]} and {self._range[1]}")

    def take(self, port: int, owner: str, host: str = LOOPBACK) -> int:
        """Exactly this port, or ConfigError that names it and who wanted it. 0 means any."""
        if port == 0:
            return self.free()
        if not 0 < port < 65536:
            raise ConfigError(f"{owner} is {port}; expected a TCP port, 1 to 65535, or 0 for a free one")
        # A server that was just stopped leaves connections in TIME_WAIT, which must not count as taken.
        if port in self._held or not self._hold(port, host, reuse=True):
            raise ConfigError(
                f"port {port}, wanted by {owner}, is taken on {host}; stop what uses it, "
                f"give another port, or leave it out for a free one"
            )
        return port

    def release(self, port: int) -> None:
        """Let go of a port, because the process that opens it starts now."""
        held = self._held.pop(port, None)
        if held is not None:
            held.close()

    def close(self) -> None:
        """Release everything."""
        for port in list(self._held):
            self.release(port)

    def _hold(self, port: int, host: str, *, reuse: bool) -> bool:
        probe = socket.socket()
        if reuse:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            probe.close()
            return False
        self._held[port] = probe
        return True


def _range_below_ephemeral() -> tuple[int, int]:
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if low - _LOWEST >= 1000:
        return _LOWEST, low
    return (high + 1, 65536) if high < 64536 else (_LOWEST, 65536)
