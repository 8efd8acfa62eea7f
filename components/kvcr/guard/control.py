# SPDX-License-Identifier: Apache-2.0
"""ZMQ on the authority thread: the control socket that peers and routers talk to, and our side of theirs."""

from __future__ import annotations

import logging
import resource
import select
import struct
from collections.abc import Callable
from typing import Any

import zmq

from kvcr.errors import ConfigError
from kvcr.guard.addresses import is_loopback, split_host
from kvcr.guard.door import Door
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.rarely import Rarely
from kvcr.protocol.curve import KeyPair, client_pair, new_pair, secure_client, secure_server
from kvcr.protocol.peer import MAX_CONTROL_BYTES

log = logging.getLogger(__name__)

_ZAP_DOMAIN = "kvcr"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_MONITOR_ENDPOINT = "inproc://kvcr-control-events"
_HIGH_WATER_MARK = 64
"""Messages queued in ZMQ for one connection in one direction, of at most 256 KiB each: 16 MiB."""

_FRAMES = 8
_MESSAGES_PER_ROUND = 64

HANDSHAKE_MS = 5000
"""Whoever has not said by then who he is, is cut off."""

MAX_CONNECTIONS = 1024
"""Of peers, routers and strangers; beyond it nobody new is let in until some have gone. ZMQ itself has no
limit, and a process without descriptors left can serve nobody."""

_DESCRIPTORS_SHARE = 4

_UNREACHABLE = "nobody answers there, or the network does not let us through"
_STRANGER = "whoever answers there does not speak as we do, or has another secret"
_LOST = {
    zmq.Event.DISCONNECTED: "it ended the connection",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it refuses our secret",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: _STRANGER,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: _STRANGER,
}
"""Why there is no connection, by what ZMQ says of it."""


class Port:
    """A ZMQ socket in the loop.

    Its descriptor is edge-triggered and also fires for writability, so it is read until empty, after every
    event and after every round in which we sent.
    """

    def __init__(self, loop: Loop, sock: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self._loop = loop
        self._sock = sock
        self._on_frames = on_frames
        self._fd = int(sock.getsockopt(zmq.FD))
        self._closed = False
        loop.register(self._fd, select.EPOLLIN, lambda _: self._drain())
        loop.defer(self._drain)

    def send(self, frames: list[bytes]) -> bool:
        """Send without waiting; False when the queue is full or the other side is unknown."""
        try:
            self._sock.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            log.debug("control message dropped: %s", error)
            return False
        finally:
            self._loop.defer(self._drain)
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.unregister(self._fd)
        self._sock.close(linger=0)

    def _drain(self) -> None:
        for _ in range(_MESSAGES_PER_ROUND):
            if self._closed:
                return
            try:
                frames = self._sock.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                log.warning("control socket: %s", error)
                return
            self._on_frames(frames)
        # More may be waiting, of which the descriptor will not tell again. Others come first.
        self._loop.post(self._drain)


class ControlServer:
    """The bound ROUTER. With a secret it speaks CURVE and admits only clients that have the secret too."""

    def __init__(
        self,
        loop: Loop,
        context: zmq.Context[Any],
        bind: str,
        advertise: str,
        secret: bytes | None,
        on_request: Callable[[bytes, Callable[[bytes], None]], None],
        meters: Meters,
    ) -> None:
        """``on_request(raw, reply)``; ``reply`` may be called once, later, or never. Raises ConfigError."""
        self._meters = meters
        self._rarely = Rarely(log)
        self.public_key = b""
        self._on_request = on_request
        self._zap: Port | None = None
        sock = context.socket(zmq.ROUTER)
        sock.linger = 0
        sock.sndhwm = sock.rcvhwm = _HIGH_WATER_MARK
        sock.maxmsgsize = MAX_CONTROL_BYTES
        sock.ipv6 = "[" in bind
        sock.handshake_ivl = HANDSHAKE_MS
        # Finds out about hosts that went away without a word, after about a minute.
        sock.tcp_keepalive, sock.tcp_keepalive_idle = 1, 30
        sock.tcp_keepalive_cnt, sock.tcp_keepalive_intvl = 3, 10
        if secret is not None:
            pair: KeyPair = new_pair()
            self.public_key = pair.public
            self._admitted = [b"CURVE", client_pair(secret).public]
            secure_server(sock, pair, _ZAP_DOMAIN)
        else:
            _require_loopback(bind)
            # Asked about everybody: only then does ZMQ refuse peers of ZMTP 1.0, as whatever does not speak
            # ZMTP seems to be one, and libzmq 4.3.5 loses some kilobytes for each.
            self._admitted = [b"NULL"]
            sock.zap_domain = _ZAP_DOMAIN.encode()
        self._open_zap(loop, context)
        try:
            self._door = Door(bind)
        except ConfigError:
            sock.close(linger=0)
            raise
        self.bound = self._door.endpoint
        """What is listened on."""
        self.endpoint = _advertised(self.bound, advertise)
        """What peers are told."""
        self._sock = sock
        self._loop = loop
        self._connected: set[int] = set()
        """Descriptors of accepted connections."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = min(MAX_CONNECTIONS, max(16, descriptors // _DESCRIPTORS_SHARE))
        sock.monitor(
            _MONITOR_ENDPOINT,
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        )
        monitor = context.socket(zmq.PAIR)
        # No limit, or events of a rush are lost, and the count is wrong for ever.
        monitor.rcvhwm = monitor.linger = 0
        monitor.connect(_MONITOR_ENDPOINT)
        sock.use_fd = self._door.descriptor()
        sock.bind(self.bound)
        self._port = Port(loop, sock, self._received)
        self._monitor = Port(loop, monitor, self._observed)

    @property
    def connections(self) -> int:
        """Accepted and not gone yet, as far as is known."""
        return len(self._connected)

    def close(self) -> None:
        self._sock.disable_monitor()
        self._monitor.close()
        self._port.close()
        self._door.close()
        if self._zap is not None:
            self._zap.close()

    def _received(self, frames: list[bytes]) -> None:
        # The last frame is the request; what precedes it is the way back (an identity, and for REQ clients
        # an empty frame).
        if not 2 <= len(frames) <= _FRAMES:
            self.refused("malformed", f"a message of {len(frames)} frames")
            return
        way_back = frames[:-1]
        self._on_request(frames[-1], lambda raw: self._reply(way_back, raw))

    def refused(self, code: str, why: str) -> None:
        """Count what was not answered, and log some of it."""
        self._meters.peer_refusals.inc(code=code)
        self._rarely.warning("control: %s refused: %s", code, why)

    def _observed(self, frames: list[bytes]) -> None:
        event, descriptor = _event(frames)
        match event:
            case zmq.Event.ACCEPTED:
                self._connected.add(descriptor)
            case zmq.Event.DISCONNECTED:
                self._connected.discard(descriptor)
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self.refused("handshake", "a connection that does not speak as we do, or not at all")
        if not self._door.shut and len(self._connected) > self._limit:
            self._door.close_to_newcomers()
            self.refused("too_many", f"more than {self._limit} connections")
        elif self._door.shut and len(self._connected) <= self._limit * 3 // 4:
            self._door.reopen()

    def _reply(self, way_back: list[bytes], raw: bytes) -> None:
        self._port.send([*way_back, raw])

    def _open_zap(self, loop: Loop, context: zmq.Context[Any]) -> None:
        sock = context.socket(zmq.ROUTER)
        sock.linger = 0
        sock.bind(_ZAP_ENDPOINT)
        self._zap = Port(loop, sock, self._authenticate)

    def _authenticate(self, frames: list[bytes]) -> None:
        # ZAP 1.0: identity, "", version, request id, domain, address, identity, mechanism, credentials
        if self._zap is None or len(frames) < 8 or frames[2] != b"1.0":
            return
        good = frames[7:] == self._admitted
        if not good:
            host = frames[5].decode("ascii", "replace")
            self.refused("unauthenticated", f"{host} does not have our secret")
        status = [b"200", b"OK"] if good else [b"400", b"unknown client key"]
        self._zap.send([frames[0], b"", b"1.0", frames[3], *status, b"", b""])


class ControlClient:
    """A DEALER to one peer's control socket, with its monitor: a refused or lost connection is told at once,
    which ZMQ alone would hide behind its reconnects."""

    def __init__(
        self,
        loop: Loop,
        context: zmq.Context[Any],
        endpoint: str,
        secret: bytes | None,
        server_key: bytes,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """``on_lost(reason)`` is called at most once. Raises ConfigError on a bad endpoint or key."""
        self._on_lost = on_lost
        self._lost = False
        sock = context.socket(zmq.DEALER)
        sock.linger = 0
        sock.sndhwm = sock.rcvhwm = _HIGH_WATER_MARK
        sock.maxmsgsize = MAX_CONTROL_BYTES
        sock.ipv6 = "[" in endpoint
        try:
            if secret is not None:
                secure_client(sock, secret, server_key)
            monitor = sock.get_monitor_socket(
                zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CONNECT_RETRIED
                | zmq.EVENT_CLOSED
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            )
            sock.connect(endpoint)
        except zmq.ZMQError as error:
            sock.close(linger=0)
            raise ConfigError(f"control endpoint {endpoint!r} cannot be used: {error.strerror}") from error
        except ConfigError:
            sock.close(linger=0)
            raise
        self._sock = sock
        self._port = Port(loop, sock, lambda frames: on_message(frames[-1]))
        self._monitor = Port(loop, monitor, self._observed)

    def send(self, raw: bytes) -> bool:
        return self._port.send([raw])

    def close(self) -> None:
        self._lost = True
        self._sock.disable_monitor()
        self._monitor.close()
        self._port.close()

    def _observed(self, frames: list[bytes]) -> None:
        event, _ = _event(frames)
        if not self._lost and event is not zmq.Event.MONITOR_STOPPED:
            self._lost = True
            self._on_lost(_LOST.get(event, _UNREACHABLE))


def _event(frames: list[bytes]) -> tuple[zmq.Event, int]:
    """What a monitor tells, and of which descriptor. zmq.utils.monitor would import asyncio for it."""
    number, value = struct.unpack_from("=Hi", frames[0])
    return zmq.Event(number), value


def _require_loopback(bind: str) -> None:
    if not is_loopback(split_host(bind)[0]):
        raise ConfigError(
            f"control endpoint {bind!r} is reachable from other hosts, and there is no secret; "
            "set --secret-file, or bind to tcp://127.0.0.1:0"
        )


def _advertised(bound: str, advertise: str) -> str:
    """``advertise`` is a host or host:port, IPv6 addresses in brackets; empty: what was bound."""
    if not advertise:
        return bound
    if ":" in advertise.rpartition("]")[2]:
        return f"tcp://{advertise}"
    return f"tcp://{advertise}:{split_host(bound)[1]}"
