# SPDX-License-Identifier: Apache-2.0
"""All NIXL agents of a guard, on one thread of the guard's NIXL process (:mod:`kvcr.transfer.nixl_main`).

Without NIXL's progress thread (it spins: 86 % of a core idle); the thread blocks in its socket while there is
nothing to do. There are three kinds of agents, made when first needed: one that serves our regions to peers,
one that reads from peers on this host, and one per other peer, because a read that timed out over TCP keeps
landing until its agent is destroyed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcr.layout import Layout
from kvcr.protocol.codec import i32
from kvcr.protocol.engine import BlockStatus
from kvcr.transfer.nixl_messages import (
    CONTACT_S,
    MAX_BYTES,
    STALL_S,
    Drop,
    Forget,
    Hold,
    Landed,
    Lost,
    Met,
    Peer,
    Quiet,
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

log = logging.getLogger(__name__)

_NAP_S = 0.00005
"""Between two looks at transfers or leases that made no progress."""

_SLOW_NAP_S = 0.001
_BUSY_S = 0.05
"""A lease younger than this is progressed at the short nap, an older one (its reader is busy elsewhere or
gone) at the slow one."""

_PEERS_OWN = frozenset({"nixlRemoteDisconnectError", "nixlNotFoundError", "nixlMismatchError"})
"""Errors that are about one peer. Any other is the agent's own: it is destroyed, and made anew at need."""


@dataclass(slots=True, eq=False)
class _Agent:
    """A nixl_agent with our regions registered, and the grids over them."""

    agent: Any
    grid: Any
    remotes: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """peer id -> (its agent's name, grid over its regions)"""
    connected: set[int] = field(default_factory=set)
    """Peers from which a read has landed."""


@dataclass(slots=True, eq=False)
class _Flight:
    peer: Peer
    read: Read
    agent: _Agent
    handle: Any
    started_s: float
    deadline_s: float


class NixlAgents:
    """Serves one guard over ``sock``, until that is closed. Belongs to the thread that calls :meth:`run`."""

    def __init__(
        self,
        name: str,
        backend: str,
        params: dict[str, str],
        layout: Layout,
        slots: int,
        addresses: Sequence[int],
        sock: socket.socket,
    ) -> None:
        """``backend`` of NIXL, with its parameters, for all agents. ``slots``: rows of a region.

        ``addresses``: where each rank's region is mapped in this process, writable.
        """
        self._name = name
        self._backend = backend
        self._params = params
        self._layout = layout
        self._slots = slots
        self._addresses = tuple(addresses)
        self._sock = sock
        self._buffer = bytearray(MAX_BYTES)
        self._peers: dict[int, Peer] = {}
        self._server: _Agent | None = None
        self._serving: Serving | None = None
        self._shared: _Agent | None = None
        self._own: dict[int, _Agent] = {}
        self._flights: list[_Flight] = []
        self._holds: dict[int, tuple[float, float]] = {}
        """lease id -> (granted, expires)"""
        self._made = 0

    def run(self) -> None:
        """Carry out what the guard asks, until it closes the socket."""
        # A second on a busy machine, which then is over before the first agent is asked for.
        self._try(_api, "be loaded")
        while True:
            busy = self._poll()
            timeout_s = None
            if self._flights:
                timeout_s = 0.0 if busy else _NAP_S
            elif self._holds:
                youngest_s = max(granted_s for granted_s, _ in self._holds.values())
                timeout_s = _NAP_S if time.monotonic() - youngest_s < _BUSY_S else _SLOW_NAP_S
            if not select.select([self._sock], [], [], timeout_s)[0]:
                continue
            size = self._sock.recv_into(self._buffer)
            if not size:
                return
            self.handle(to_process.decode(memoryview(self._buffer)[:size]))

    def handle(self, message: ToProcess) -> None:
        """Carry out one message."""
        match message:
            case Read():
                self._read(message)
            case Hold():
                self._holds[message.lease_id] = (time.monotonic(), message.until_s)
            case Drop():
                self._holds.pop(message.lease_id, None)
            case Serve():
                self._serve()
            case Peer():
                self._peers[message.peer_id] = message
                self._meet(message)
            case Forget():
                self._forget(message.peer_id)
            case WarmUp():
                self._try(self._warm_up, "read")

    def send(self, message: ToGuard) -> None:
        """Also from the threads that destroy agents: a message is sent whole. Waits for the guard to read."""
        self._sock.sendall(to_guard.encode(message))

    # --- progress -----------------------------------------------------------------------------------

    def _poll(self) -> bool:
        """Progress everything once; True when a transfer ended."""
        now_s = time.monotonic()
        if self._holds:
            self._progress_server()
            for lease_id in [lease_id for lease_id, (_, until_s) in self._holds.items() if now_s >= until_s]:
                del self._holds[lease_id]
        ended = False
        for flight in list(self._flights):
            if flight in self._flights:
                ended |= self._look(flight, now_s)
        return ended

    def _progress_server(self) -> None:
        server = self._server
        if server is None:
            return
        try:
            server.agent.get_new_notifs()
        except _errors() as error:
            log.error("the serving NIXL agent broke, a new one is made when a peer asks: %s", error)
            self._server = self._serving = None
            self._destroy(server, BlockStatus.GONE, "")
            self.send(ServerLost(str(error)))

    def _look(self, flight: _Flight, now_s: float) -> bool:
        try:
            state = flight.agent.agent.check_xfer_state(flight.handle)
        except _errors() as error:
            self._lost(flight, error)
            return True
        if state == "DONE":
            self._landed(flight)
        elif state != "PROC":
            self._lost(flight, RuntimeError(f"transfer ended in state {state}"))
        elif now_s >= flight.deadline_s:
            self._destroy(
                flight.agent, BlockStatus.GONE, "its NIXL agent was destroyed for another read that timed out"
            )
        else:
            return False
        return True

    # --- serving ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if self._serving is None:
            try:
                self._server = self._new_agent("serve")
                self._serving = Serving(
                    self._server.agent.name, self._server.agent.get_agent_metadata(), self._addresses
                )
            except _failures():
                log.exception("NIXL cannot serve")
        self.send(self._serving or Serving("", b"", ()))

    def _warm_up(self) -> None:
        self._serve()
        if self._shared is None:
            self._shared = self._new_agent("read")

    # --- reading ------------------------------------------------------------------------------------

    def _meet(self, peer: Peer) -> None:
        reason = ""
        try:
            self._agent_for(peer)
        except _failures() as error:
            reason = f"NIXL cannot read from {peer.label}: {error}"
        self.send(Met(peer.peer_id, reason))

    def _read(self, read: Read) -> None:
        started_s = time.monotonic()
        if started_s >= read.deadline_s:
            self._refuse(read, BlockStatus.TOO_SLOW, "the deadline passed before the read began")
            return
        peer = self._peers.get(read.peer_id)
        if peer is None:
            self._refuse(read, BlockStatus.GONE, "the peer went away")
            return
        agent: _Agent | None = None
        try:
            agent = self._agent_for(peer)
            _, remote = agent.remotes[peer.peer_id]
            ranks = len(self._addresses)
            handle = agent.agent.make_prepped_xfer(
                "READ",
                agent.grid,
                _rows(i32(read.local_slots), self._slots, ranks),
                remote,
                _rows(i32(read.remote_slots), peer.slots, ranks),
            )
        except _failures() as error:
            reason = f"NIXL cannot read from {peer.label}: {error}"
            self._refuse(read, BlockStatus.GONE, reason)
            broken = agent or self._agent_of(peer)
            if broken is not None and _is_agents_own(error):
                self._destroy(broken, BlockStatus.GONE, reason)
            return
        # Counted from here: making an agent, at a first contact, is no sign of a peer that stalls.
        posted_s = time.monotonic()
        stall_s = STALL_S if peer.peer_id in agent.connected else CONTACT_S
        flight = _Flight(peer, read, agent, handle, posted_s, min(read.deadline_s, posted_s + stall_s))
        self._flights.append(flight)
        try:
            state = agent.agent.transfer(handle)
        except _errors() as error:
            self._lost(flight, error)
            return
        if state == "DONE":
            self._landed(flight, synchronous=True)

    def _refuse(self, read: Read, status: BlockStatus, reason: str) -> None:
        self.send(Lost(read.number, status, reason, 0.0, in_flight=False))

    def _landed(self, flight: _Flight, *, synchronous: bool = False) -> None:
        self._flights.remove(flight)
        flight.agent.connected.add(flight.peer.peer_id)
        _release(flight.handle)
        self.send(Landed(flight.read.number, time.monotonic() - flight.started_s, synchronous))

    def _lost(self, flight: _Flight, error: Exception) -> None:
        """The peer went away in mid-read, or NIXL refuses to go on with it."""
        reason = f"NIXL READ from {flight.peer.label}: {error}"
        if flight.peer.own_agent or _is_agents_own(error):
            self._destroy(flight.agent, BlockStatus.GONE, reason)
            return
        self._flights.remove(flight)
        _release(flight.handle)
        self._drop_remote(flight.agent, flight.peer.peer_id)
        self._report(flight, BlockStatus.GONE, reason, in_flight=False)

    def _report(self, flight: _Flight, status: BlockStatus, reason: str, *, in_flight: bool) -> None:
        seconds = time.monotonic() - flight.started_s
        self.send(Lost(flight.read.number, status, reason, seconds, in_flight=in_flight))

    # --- agents -------------------------------------------------------------------------------------

    def _agent_of(self, peer: Peer) -> _Agent | None:
        return self._own.get(peer.peer_id) if peer.own_agent else self._shared

    def _agent_for(self, peer: Peer) -> _Agent:
        agent = self._agent_of(peer)
        if agent is None:
            agent = self._new_agent("read", peer.tls)
            if peer.own_agent:
                self._own[peer.peer_id] = agent
            else:
                self._shared = agent
        if peer.peer_id not in agent.remotes:
            name = agent.agent.add_remote_agent(peer.metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            agent.remotes[peer.peer_id] = (
                name,
                agent.agent.prep_xfer_dlist(name, self._grid(peer.addresses, peer.slots), "DRAM"),
            )
        return agent

    def _new_agent(self, purpose: str, tls: str = "") -> _Agent:
        nixl_agent, nixl_agent_config = _api()
        self._made += 1
        agent = nixl_agent(
            f"{self._name}-{purpose}-{self._made}",
            nixl_agent_config(
                enable_prog_thread=False, enable_listen_thread=False, num_threads=0, backends=[]
            ),
        )
        with _ucx_tls(tls):
            agent.create_backend(self._backend, self._params)
        nbytes = self._slots * self._layout.slot_part_bytes
        agent.register_memory([(address, nbytes, 0, "") for address in self._addresses], "DRAM")
        grid = agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._grid(self._addresses, self._slots), "DRAM")
        return _Agent(agent, grid)

    def _grid(self, addresses: Sequence[int], slots: int) -> Any:
        layout = self._layout
        return np.array(
            [[address, layout.part_bytes, 0, layout.slot_part_bytes, slots] for address in addresses],
            np.uint64,
        )

    def _destroy(self, agent: _Agent, status: BlockStatus, reason: str) -> None:
        """End every read of ``agent``, and the agent: nothing else stops bytes of a TCP read from landing."""
        victims = [flight for flight in self._flights if flight.agent is agent]
        self._flights = [flight for flight in self._flights if flight.agent is not agent]
        self._own = {peer_id: own for peer_id, own in self._own.items() if own is not agent}
        if self._shared is agent:
            self._shared = None
        now_s = time.monotonic()
        for flight in victims:
            late = now_s >= flight.deadline_s
            self._report(
                flight,
                BlockStatus.TOO_SLOW if late else status,
                "the deadline passed while NIXL was reading" if late else reason,
                in_flight=True,
            )
        # On a thread of its own, which keeps this one going if destroying waits without holding the GIL.
        # Measured, it holds the GIL from begin to end (6 to 13 ms): if it hangs, this process hangs. That is
        # why agents live here and not in the guard, which waits for Quiet and otherwise ends this process.
        threading.Thread(target=self._destroy_now, args=(agent, victims), daemon=True).start()

    def _destroy_now(self, agent: _Agent, victims: list[_Flight]) -> None:
        for flight in victims:
            _release(flight.handle)
            flight.handle = None
        for _, grid in agent.remotes.values():
            _release(grid)
        agent.remotes.clear()
        _release(agent.grid)
        agent.grid = None
        agent.agent = None
        if victims:
            self.send(Quiet([flight.read.number for flight in victims]))

    def _forget(self, peer_id: int) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        own = self._own.get(peer_id)
        if own is not None:
            self._destroy(own, BlockStatus.GONE, f"{peer.label} went away")
        elif self._shared is not None:
            for flight in [flight for flight in self._flights if flight.peer is peer]:
                self._lost(flight, ConnectionError("the peer went away"))
            if self._shared is not None:
                self._drop_remote(self._shared, peer_id)

    def _drop_remote(self, agent: _Agent, peer_id: int) -> None:
        agent.connected.discard(peer_id)
        known = agent.remotes.pop(peer_id, None)
        if known is not None:
            name, grid = known
            _release(grid)
            try:
                agent.agent.remove_remote_agent(name)
            except _errors() as error:
                log.debug("removing NIXL agent %s: %s", name, error)

    def _try(self, make: Any, what: str) -> None:
        """Ahead of its use: what fails here is told when it is used."""
        try:
            make()
        except _failures() as error:
            log.warning("NIXL cannot %s: %s", what, error)


def _is_agents_own(error: Exception) -> bool:
    """Whether an error says that the agent is broken, and not that one peer is."""
    return isinstance(error, _errors()) and type(error).__name__ not in _PEERS_OWN


@functools.cache
def _failures() -> tuple[type[Exception], ...]:
    """What making an agent or meeting a peer may raise, NIXL being absent included."""
    return (ImportError, RuntimeError, *_errors())


@contextlib.contextmanager
def _ucx_tls(tls: str) -> Iterator[None]:
    """UCX reads its environment for each context it makes; all are made by one thread."""
    before = os.environ.get("UCX_TLS")
    if tls:
        os.environ["UCX_TLS"] = tls
    try:
        yield
    finally:
        if tls and before is None:
            del os.environ["UCX_TLS"]
        elif tls and before is not None:
            os.environ["UCX_TLS"] = before


def _rows(slots: Any, slot_count: int, ranks: int) -> Any:
    """Rows of a grid with ``slot_count`` rows a rank, for every rank's part of ``slots``: int32."""
    return (
        (np.arange(ranks, dtype=np.int32)[:, None] * np.int32(slot_count) + slots[None, :])
        .astype(np.int32)
        .ravel()
    )


def _release(handle: Any) -> None:
    try:
        handle.release()
    except _errors() as error:
        log.debug("releasing a NIXL handle: %s", error)


def _wheel(module: str) -> Any:
    """A module of whichever NIXL wheel is installed.

    Not through the ``nixl`` package where that can be helped: it imports torch, where there is one, to choose
    between wheels (3 s and 200 MB), and for DRAM they are all alike.
    """
    for wheel in ("nixl_cu12", "nixl_cu13", "nixl_rocm"):
        if importlib.util.find_spec(wheel) is not None:
            return importlib.import_module(f"{wheel}.{module}")
    return importlib.import_module(f"nixl.{module}")


def _api() -> tuple[Any, Any]:
    # UCX reads its environment when it is loaded. 512 KiB segments: READ over TCP 0.34 -> 0.56 of memcpy.
    os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "512k")
    os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "512k")
    api = _wheel("_api")
    return api.nixl_agent, api.nixl_agent_config


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    """The exceptions NIXL raises; they share no base of their own."""
    try:
        bindings = _wheel("_bindings")
    except ImportError:
        return ()
    return tuple(
        value
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    )


def import_error() -> str:
    """Why NIXL cannot be used here; empty when it can."""
    try:
        _api()
    except ImportError as error:
        return f"nixl cannot be imported ({error}); install nixl with nixl-cu12, or use the shm transport"
    return ""
