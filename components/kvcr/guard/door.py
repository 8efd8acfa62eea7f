# SPDX-License-Identifier: Apache-2.0
"""The TCP socket that ZMQ accepts control connections from, which can be shut for a while.

ZMQ accepts whoever comes; unbinding cuts off those who are there. So a filter on the listening socket
drops the packets of newcomers instead, in the kernel. Connections that were accepted do not notice.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

from kvcr.errors import ConfigError
from kvcr.guard.addresses import bracketed, split_host

BACKLOG = 128

# linux/filter.h, asm-generic/socket.h
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_RETURN_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)


class Door:
    """Listens from the beginning. Belongs to the authority thread."""

    def __init__(self, bind: str) -> None:
        """``bind``: ``tcp://host:port``, port 0 picks one. Raises ConfigError."""
        host, port = split_host(bind)
        host = "0.0.0.0" if host == "*" else host
        self.shut = False
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except (OSError, ValueError) as error:
            raise ConfigError(f"control endpoint {bind!r} cannot be resolved: {error}") from error
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and host == "::":
                self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._sock.bind(address)
            self._sock.listen(BACKLOG)
        except OSError as error:
            self._sock.close()
            raise ConfigError(
                f"control endpoint {bind!r} cannot be bound: {error.strerror}; choose another"
            ) from error
        name = self._sock.getsockname()
        self.endpoint = f"tcp://{bracketed(str(name[0]))}:{name[1]}"

    def descriptor(self) -> int:
        """A descriptor for somebody who will close it."""
        return os.dup(self._sock.fileno())

    def close_to_newcomers(self) -> None:
        """Let nobody in until :meth:`reopen`; they will try again."""
        program = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
        self._sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program))
        )
        self.shut = True

    def reopen(self) -> None:
        """Let newcomers in again."""
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self.shut = False

    def close(self) -> None:
        """Listen no more, once the other descriptor is closed too."""
        self._sock.close()
