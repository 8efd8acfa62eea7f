# SPDX-License-Identifier: Apache-2.0
"""A router's, a guard's or a stranger's side of a guard's control socket, blocking."""

from __future__ import annotations

import zmq

from kvcr.protocol.curve import secure_client
from kvcr.protocol.peer import ToClient, ToServer, to_client, to_server


class PeerClient:
    """``secret`` with ``server_key`` speaks CURVE."""

    def __init__(
        self, endpoint: str, timeout_ms: int = 10_000, secret: bytes | None = None, server_key: str = ""
    ) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.rcvtimeo = self.socket.sndtimeo = timeout_ms
        self.socket.ipv6 = "[" in endpoint
        if secret is not None:
            secure_client(self.socket, secret, bytes.fromhex(server_key))
        self.socket.connect(endpoint)

    def send(self, message: ToServer) -> None:
        self.socket.send(to_server.encode(message))

    def receive(self) -> ToClient:
        """Raises zmq.Again when nothing comes in time."""
        return to_client.decode(self.socket.recv())

    def ask(self, message: ToServer) -> ToClient:
        self.send(message)
        return self.receive()

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)
