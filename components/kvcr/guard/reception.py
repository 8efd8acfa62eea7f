# SPDX-License-Identifier: Apache-2.0
"""Who comes to the guard's Unix socket: a process of its engine, another guard, or a stranger."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvcr.errors import ProtocolError
from kvcr.guard.connection import FIRST_MESSAGE_S, Connection
from kvcr.guard.engines import EngineServer
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.seat import Member
from kvcr.guard.serving import Caller, PeerServer
from kvcr.protocol.engine import Alive, Hello, to_guard
from kvcr.protocol.peer import to_client, to_server


class Reception:
    """Belongs to the authority thread."""

    def __init__(
        self,
        loop: Loop,
        meters: Meters,
        engines: EngineServer,
        server: PeerServer,
        not_idle: Callable[[], None],
        gone: Callable[[], None],
    ) -> None:
        """``not_idle`` hears of each message of the engine that is work, ``gone`` of each connection that
        closed."""
        self._loop = loop
        self._meters = meters
        self._engines = engines
        self._server = server
        self._not_idle = not_idle
        self._gone = gone

    def welcome(self, sock: socket.socket) -> None:
        """Until its first message, a connection may be an engine's or a guard's."""
        speaker: list[Member | Caller] = []

        def received(connection: Connection, raw: memoryview) -> None:
            try:
                if not speaker:
                    self._first_message(connection, raw, speaker)
                elif isinstance(speaker[0], Member):
                    self._engine_message(raw, speaker[0])
                else:
                    self._peer_message(connection, raw, speaker[0])
            except ProtocolError:
                self.refused("malformed")
                raise

        def closed(_: Connection) -> None:
            silent.cancel()
            self._gone()
            for who in speaker:
                if isinstance(who, Member):
                    self._engines.hung_up(who)
                else:
                    self._server.hung_up(who)

        def give_up() -> None:
            if not speaker and not connection.closed:
                self.refused("silent")
                connection.close()

        silent = self._loop.later(FIRST_MESSAGE_S, give_up)
        connection = Connection(self._loop, sock, received, closed)

    def refused(self, code: str) -> None:
        """Count somebody who was turned away."""
        self._meters.peer_refusals.inc(code=code)

    def _first_message(self, connection: Connection, raw: memoryview, speaker: list[Member | Caller]) -> None:
        try:
            hello = to_guard.decode(raw)
        except ProtocolError:
            caller = Caller()
            self._peer_message(connection, raw, caller)
            speaker.append(caller)
            return
        if not isinstance(hello, Hello):
            raise ProtocolError(f"{type(hello).__name__} before Hello")
        member = self._engines.hello(hello, connection)
        if member is not None:
            speaker.append(member)

    def _engine_message(self, raw: memoryview, member: Member) -> None:
        message = to_guard.decode(raw)
        # The message first, as the engine may wait for what it does.
        self._engines.handle(message, member)
        if not isinstance(message, Alive):
            self._not_idle()

    def _peer_message(self, connection: Connection, raw: memoryview, caller: Caller) -> None:
        self._server.handle(
            to_server.decode(raw), caller, lambda message: connection.send(to_client.encode(message))
        )
