# SPDX-License-Identifier: Apache-2.0
"""NIXL READ out of a peer's pool, over RDMA, CMA or TCP, whichever UCX finds.

All agents live on one thread, :class:`NixlThread`, without NIXL's progress thread (it spins: 86 % of a
core idle). The thread blocks in its queue while there is nothing to do. There are three kinds of agents,
made when first needed: one that serves our regions to peers, one that reads from peers on this host, and
one per other peer, because a read that timed out over TCP keeps landing until its agent is destroyed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcr.protocol.engine import BlockStatus
from kvcr.transfer.base import LocalRegions, Post, Step, StepResult, failed, verified
from kvcr.transfer.mover import MoverPool

log = logging.getLogger(__name__)

MAX_IN_FLIGHT_FRACTION = 0.125
"""Slots that may wait for a timed-out agent to be destroyed, of the pool; above it peers that need an
agent of their own are refused."""

STALL_S = 1.0
"""A read that takes longer is given up, so that another source can be asked within the deadline. 8 MiB in
1 s is 67 Mbit/s, below which recomputing wins."""

_NAP_S = 0.00005
"""Between two looks at transfers or leases that made no progress."""

_SLOW_NAP_S = 0.001
_BUSY_S = 0.05
"""A lease younger than this is progressed at the short nap, an older one (its reader is busy elsewhere or
gone) at the slow one."""


def import_error() -> str:
    """Why NIXL cannot be used here; empty when it can."""
    try:
        _api()
    except ImportError as error:
        return f"nixl cannot be imported ({error}); install nixl with nixl-cu12, or use the shm transport"
    return ""


@dataclass(frozen=True, slots=True)
class NixlIdentity:
    """What a peer needs to read from us."""

    agent: str
    metadata: bytes
    addresses: tuple[int, ...]
    """Of each rank's region in the process ``pid``."""
    pid: int


@dataclass(slots=True, eq=False)
class _Agent:
    """A nixl_agent with our regions registered, and the grids over them. Belongs to the NIXL thread."""

    agent: Any
    grid: Any
    remotes: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """peer id -> (its agent's name, grid over its regions)"""


@dataclass(slots=True, eq=False)
class _Flight:
    peer: NixlTransport
    step: Step
    done: Callable[[StepResult], None]
    quiet: Callable[[Step], None]
    agent: _Agent
    handle: Any
    started_s: float
    deadline_s: float


class NixlThread:
    """Owner of all NIXL agents. Its methods may be called from the authority thread, and never wait."""

    def __init__(
        self,
        name: str,
        local: LocalRegions,
        movers: MoverPool,
        post: Post,
        backend: str,
        params: dict[str, str],
    ) -> None:
        """``backend`` of NIXL, with its parameters, for all agents."""
        self.name = name
        self._backend = backend
        self._params = params
        self.local = local
        self.slots_in_flight = 0
        """Slots waiting for an agent to be destroyed; written by the authority thread."""
        self._movers = movers
        self._post = post
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._server: _Agent | None = None
        self._identity: NixlIdentity | None = None
        self._shared: _Agent | None = None
        self._own: dict[int, _Agent] = {}
        self._flights: list[_Flight] = []
        self._holds: dict[int, tuple[float, float]] = {}
        """lease id -> (granted, expires)"""
        self._made = 0
        self._thread = threading.Thread(target=self._run, name="kvcr-nixl", daemon=True)
        self._thread.start()

    # --- called by the authority thread -----------------------------------------------------------

    def serve(self, done: Callable[[NixlIdentity | None], None]) -> None:
        """Make the serving agent if need be, then ``done`` on the authority thread; None when NIXL fails."""
        self._queue.put(lambda: self._serve(done))

    def warm_up(self) -> None:
        """Make the agents that any use needs, ahead of it: making one takes 0.5 s and more."""
        self._queue.put(self._warm_up)

    def hold(self, lease_id: int, until_s: float) -> None:
        """Keep the serving agent progressing until ``until_s`` or :meth:`drop`: TCP reads and the first
        contact of any reader need it."""
        now_s = time.monotonic()
        self._queue.put(lambda: self._holds.__setitem__(lease_id, (now_s, until_s)))

    def drop(self, lease_id: int) -> None:
        self._queue.put(lambda: self._forget_hold(lease_id))

    @property
    def overloaded(self) -> bool:
        """Too many slots wait for timed-out agents: peers that need an agent of their own are refused."""
        return self.slots_in_flight > MAX_IN_FLIGHT_FRACTION * self.local.slots

    def close(self, timeout_s: float) -> bool:
        """End the thread; True when it ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            busy = self._poll()
            timeout_s = None
            if self._flights:
                timeout_s = 0.0 if busy else _NAP_S
            elif self._holds:
                youngest_s = max(granted_s for granted_s, _ in self._holds.values())
                timeout_s = _NAP_S if time.monotonic() - youngest_s < _BUSY_S else _SLOW_NAP_S
            try:
                command = self._queue.get(timeout_s != 0.0, timeout_s or None)
            except queue.Empty:
                continue
            if command is None:
                return
            try:
                command()
            except Exception:
                log.exception("a NIXL command failed")

    def _poll(self) -> bool:
        """Progress everything once; True when a transfer ended."""
        now_s = time.monotonic()
        if self._holds and self._server is not None:
            self._server.agent.get_new_notifs()
            for lease_id in [lease_id for lease_id, (_, until_s) in self._holds.items() if now_s >= until_s]:
                del self._holds[lease_id]
        ended = False
        for flight in list(self._flights):
            if flight in self._flights:
                ended |= self._look(flight, now_s)
        return ended

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

    def _serve(self, done: Callable[[NixlIdentity | None], None]) -> None:
        if self._identity is None:
            try:
                self._server = self._new_agent("serve")
                self._identity = NixlIdentity(
                    self._server.agent.name,
                    self._server.agent.get_agent_metadata(),
                    tuple(self.local.addresses),
                    os.getpid(),
                )
            except _failures():
                log.exception("NIXL cannot serve")
        identity = self._identity
        self._post(lambda: done(identity))

    def _forget_hold(self, lease_id: int) -> None:
        self._holds.pop(lease_id, None)

    def start(self, peer: NixlTransport, step: Step, done: Any, quiet: Any) -> None:
        """Queue one read; for :class:`NixlTransport`."""
        self._queue.put(lambda: self._start(peer, step, done, quiet))

    def prepare(self, peer: NixlTransport) -> None:
        """Queue the making of the peer's agent, ahead of its first read; for :class:`NixlTransport`."""
        self._queue.put(lambda: self._prepare(peer))

    def forget(self, peer: NixlTransport) -> None:
        """Queue the removal of a peer; for :class:`NixlTransport`."""
        self._queue.put(lambda: self._forget(peer))

    def _start(
        self,
        peer: NixlTransport,
        step: Step,
        done: Callable[[StepResult], None],
        quiet: Callable[[Step], None],
    ) -> None:
        started_s = time.monotonic()
        if started_s >= step.deadline_s:
            late = failed(step, BlockStatus.TOO_SLOW, "the deadline passed before the read began", 0.0)
            self._post(lambda: done(late))
            return
        try:
            agent = self._agent_for(peer)
            _, remote = agent.remotes[peer.peer_id]
            handle = agent.agent.make_prepped_xfer(
                "READ",
                agent.grid,
                _rows(step.local_slots, self.local.slots, len(self.local.arrays)),
                remote,
                _rows(step.remote_slots, peer.slots, len(self.local.arrays)),
            )
        except _failures() as error:
            gone = failed(step, BlockStatus.GONE, f"NIXL cannot read from {peer.label}: {error}", 0.0)
            self._post(lambda: done(gone))
            return
        # Counted from here: making an agent, at a first contact, is no sign of a peer that stalls.
        posted_s = time.monotonic()
        deadline_s = min(step.deadline_s, posted_s + STALL_S)
        flight = _Flight(peer, step, done, quiet, agent, handle, posted_s, deadline_s)
        try:
            state = agent.agent.transfer(handle)
            peer.synchronous = state == "DONE"
        except _errors() as error:
            self._flights.append(flight)
            self._lost(flight, error)
            return
        self._flights.append(flight)
        if state == "DONE":
            self._landed(flight)

    def _prepare(self, peer: NixlTransport) -> None:
        try:
            self._agent_for(peer)
        except _failures() as error:
            log.warning("NIXL cannot read from %s: %s", peer.label, error)

    def _warm_up(self) -> None:
        self._serve(lambda _: None)
        try:
            if self._shared is None:
                self._shared = self._new_agent("read")
        except _failures() as error:
            log.warning("NIXL cannot read: %s", error)

    def _agent_for(self, peer: NixlTransport) -> _Agent:
        if peer.own_agent:
            agent = self._own.get(peer.peer_id)
            if agent is None:
                agent = self._own[peer.peer_id] = self._new_agent("read", peer.tls)
        else:
            if self._shared is None:
                self._shared = self._new_agent("read")
            agent = self._shared
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
            f"{self.name}-{purpose}-{self._made}",
            nixl_agent_config(
                enable_prog_thread=False, enable_listen_thread=False, num_threads=0, backends=[]
            ),
        )
        with _ucx_tls(tls):
            agent.create_backend(self._backend, self._params)
        nbytes = self.local.slots * self.local.layout.slot_part_bytes
        agent.register_memory([(address, nbytes, 0, "") for address in self.local.addresses], "DRAM")
        grid = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self._grid(self.local.addresses, self.local.slots), "DRAM"
        )
        return _Agent(agent, grid)

    def _grid(self, addresses: Any, slots: int) -> Any:
        layout = self.local.layout
        return np.array(
            [[address, layout.part_bytes, 0, layout.slot_part_bytes, slots] for address in addresses],
            np.uint64,
        )

    def _landed(self, flight: _Flight) -> None:
        """All bytes are there: verify them on a mover, so that this thread goes on reading."""
        self._flights.remove(flight)
        _release(flight.handle)
        step, started_s, local = flight.step, flight.started_s, self.local

        def finished(result: StepResult | None) -> None:
            flight.done(
                result
                or failed(step, BlockStatus.FAILED, "hashing raised an error", time.monotonic() - started_s)
            )

        self._movers.submit(
            lambda: verified(step, local.checksums(step.local_slots), started_s, time.monotonic()), finished
        )

    def _lost(self, flight: _Flight, error: Exception) -> None:
        """The peer went away in mid-read (or NIXL refuses to go on with it)."""
        reason = f"NIXL READ from {flight.peer.label}: {error}"
        if flight.peer.own_agent:
            self._destroy(flight.agent, BlockStatus.GONE, reason)
            return
        self._flights.remove(flight)
        _release(flight.handle)
        self._drop_remote(flight.agent, flight.peer.peer_id)
        self._deliver(
            flight, failed(flight.step, BlockStatus.GONE, reason, time.monotonic() - flight.started_s)
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
            outcome = failed(
                flight.step,
                BlockStatus.TOO_SLOW if late else status,
                "the deadline passed while NIXL was reading" if late else reason,
                now_s - flight.started_s,
                in_flight=True,
            )
            self._deliver(flight, outcome)
        # On a thread of its own: destroying can hang on a peer that does not answer. It is ours until then.
        threading.Thread(
            target=self._destroy_now, args=(agent, victims), name="kvcr-nixl-destroy", daemon=True
        ).start()

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
        for flight in victims:
            self._post(lambda flight=flight: flight.quiet(flight.step))  # type: ignore[misc]

    def _deliver(self, flight: _Flight, result: StepResult) -> None:
        self._post(lambda: flight.done(result))

    def _forget(self, peer: NixlTransport) -> None:
        own = self._own.get(peer.peer_id)
        if own is not None:
            self._destroy(own, BlockStatus.GONE, f"{peer.label} went away")
        elif self._shared is not None:
            for flight in [flight for flight in self._flights if flight.peer is peer]:
                self._lost(flight, ConnectionError("the peer went away"))
            self._drop_remote(self._shared, peer.peer_id)

    def _drop_remote(self, agent: _Agent, peer_id: int) -> None:
        known = agent.remotes.pop(peer_id, None)
        if known is not None:
            name, grid = known
            _release(grid)
            try:
                agent.agent.remove_remote_agent(name)
            except _errors() as error:
                log.debug("removing NIXL agent %s: %s", name, error)


class NixlTransport:
    """One peer, read through NIXL. Made by the authority thread from the peer's PeerWelcome."""

    name = "nixl"
    _next_id = 0

    def __init__(
        self,
        thread: NixlThread,
        label: str,
        metadata: bytes,
        addresses: Sequence[int],
        slots: int,
        *,
        own_agent: bool,
        tls: str = "",
    ) -> None:
        """``tls`` holds an agent of its own to some of UCX's transports, as ``UCX_TLS`` would."""
        NixlTransport._next_id += 1
        self.peer_id = NixlTransport._next_id
        self.label = label
        self.metadata = metadata
        self.addresses = addresses
        self.slots = slots
        self.own_agent = own_agent
        self.tls = tls
        self.synchronous = False
        """The last read was over when it was posted: copied between the processes (CMA)."""
        self._thread = thread
        thread.prepare(self)

    def read(self, step: Step, done: Callable[[StepResult], None], quiet: Callable[[Step], None]) -> None:
        """See :class:`kvcr.transfer.base.Transport`."""
        self._thread.start(self, step, done, quiet)

    def close(self) -> None:
        self._thread.forget(self)


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
