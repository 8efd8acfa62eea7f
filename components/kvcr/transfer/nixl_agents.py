# SPDX-License-Identifier: Apache-2.0
"""The guard's NIXL process (:mod:`kvcr.transfer.nixl_main`): serves our regions, has readers read peers'.

Without NIXL's progress thread (it spins: 86 % of a core idle); threads block while there is nothing to do.
There are three kinds of agents, made when first needed: one that serves our regions to peers, one for each
reader thread for peers on this host, and one per other peer, because a read that timed out over TCP keeps
landing until its agent is destroyed.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time

from kvcr.transfer import nixl_api
from kvcr.transfer.nixl_api import Agent, AgentMaker
from kvcr.transfer.nixl_messages import (
    MAX_BYTES,
    Drop,
    Forget,
    Hold,
    Peer,
    Read,
    Serve,
    ServerLost,
    Serving,
    ToGuard,
    ToProcess,
    WarmUp,
    to_guard,
    to_process,
)
from kvcr.transfer.nixl_reader import Readers

log = logging.getLogger(__name__)

_NAP_S = 0.00005
"""Between two looks at what readers ask of us, while one is waited for."""

_SLOW_NAP_S = 0.001
_BUSY_S = 0.05
"""A lease younger than this is progressed at the short nap, an older one (its reader is busy elsewhere or
gone), and one whose reader copies by itself, at the slow one."""


class NixlAgents:
    """Serves one guard over ``sock``, until that is closed. Belongs to the thread that calls :meth:`run`."""

    def __init__(self, maker: AgentMaker, sock: socket.socket) -> None:
        self._maker = maker
        self._sock = sock
        self._buffer = bytearray(MAX_BYTES)
        self._server: Agent | None = None
        self._serving: Serving | None = None
        self._holds: dict[int, tuple[float, float]] = {}
        """lease id -> (granted, expires), of leases that are progressed; granted 0: never in a hurry"""
        self._readers = Readers(maker, self.send)

    def run(self) -> None:
        """Carry out what the guard asks, until it closes the socket."""
        # A second on a busy machine, which then is over before the first agent is asked for. What fails is
        # told when it is used.
        with contextlib.suppress(ImportError):
            nixl_api.api()
        try:
            while True:
                timeout_s = None
                if self._holds:
                    self._progress()
                    youngest_s = max((granted_s for granted_s, _ in self._holds.values()), default=0.0)
                    timeout_s = _NAP_S if time.monotonic() - youngest_s < _BUSY_S else _SLOW_NAP_S
                if not select.select([self._sock], [], [], timeout_s)[0]:
                    continue
                size = self._sock.recv_into(self._buffer)
                if not size:
                    return
                self.handle(to_process.decode(memoryview(self._buffer)[:size]))
        finally:
            self._readers.close()

    def handle(self, message: ToProcess) -> None:
        """Carry out one message."""
        match message:
            case Read():
                self._readers.read(message)
            case Hold():
                self._holds[message.lease_id] = (time.monotonic() if message.quick else 0.0, message.until_s)
            case Drop():
                self._holds.pop(message.lease_id, None)
            case Serve():
                self._serve()
            case Peer():
                self._readers.meet(message)
            case Forget():
                self._readers.forget(message.peer_id)
            case WarmUp():
                self._serve()
                self._readers.warm_up()

    def send(self, message: ToGuard) -> None:
        """From any thread: a message is sent whole. Waits for the guard to read."""
        self._sock.sendall(to_guard.encode(message))

    def _progress(self) -> None:
        """Progress what readers ask of us once."""
        now_s = time.monotonic()
        for lease_id in [lease_id for lease_id, (_, until_s) in self._holds.items() if now_s >= until_s]:
            del self._holds[lease_id]
        server = self._server
        if server is None:
            return
        try:
            server.agent.get_new_notifs()
        except nixl_api.errors() as error:
            log.error("the serving NIXL agent broke, a new one is made when a peer asks: %s", error)
            self._server = self._serving = None
            # Elsewhere, as destroying may hang.
            threading.Thread(target=server.destroy, daemon=True).start()
            self.send(ServerLost(str(error)))

    def _serve(self) -> None:
        if self._serving is None:
            try:
                self._server = self._maker.make("serve")
                agent = self._server.agent
                self._serving = Serving(agent.name, agent.get_agent_metadata(), self._maker.addresses)
            except nixl_api.failures():
                log.exception("NIXL cannot serve")
        self.send(self._serving or Serving("", b"", ()))
