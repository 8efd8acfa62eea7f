# SPDX-License-Identifier: Apache-2.0
"""NIXL READ out of a peer's pool, over RDMA, CMA or TCP, whichever UCX finds.

NIXL runs in a process of its own, which maps the pool and owns all agents
(:mod:`kvcr.transfer.nixl_agents`). This is the guard's end of it. Two things bound how long bytes of a read
that was given up may land: the process destroys the agent, and when it has not done so in time, or does not
answer, the guard ends the process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvcr.errors import ProtocolError
from kvcr.protocol.codec import u64
from kvcr.protocol.engine import BlockStatus
from kvcr.transfer.base import (
    COPY_STEP_BYTES,
    STEP_BYTES,
    LocalRegions,
    Step,
    StepResult,
    failed,
    verified,
)
from kvcr.transfer.nixl_messages import (
    LOCK,
    MAX_BYTES,
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
    Settings,
    ToProcess,
    WarmUp,
    to_guard,
    to_process,
)

log = logging.getLogger(__name__)

MAX_QUARANTINED_FRACTION = 0.125
"""Slots that may wait until nothing writes to them any more, of the pool; above it peers that need an agent
of their own are refused."""

GRACE_S = 1.0
"""A read's deadline is kept by the process; it has this long to say so."""

SILENCE_S = 8.0
"""With reads under way, a process that said nothing for this long hangs. Making an agent takes 0.7 s in a
fresh process, some seconds on a machine that is busy with other things."""

MEET_S = 15.0
"""In which a process, a fresh one too, makes the agent for a peer; one that does not is ended."""

DESTROY_S = 2.0
"""How long destroying an agent may take (measured: 6 to 33 ms) before the process is ended instead."""

RESTART_S = 1.0
"""Between two starts of the process."""

WHEELS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
"""Any of them will do, and needs no package ``nixl`` beside it."""

INSTALL = "pip install --no-deps nixl-cu12==1.5.1"

RESTARTING = "the NIXL process is being started again"

_WATCH_S = 0.2


def import_error() -> str:
    """Why NIXL cannot be used here; empty when it can. NIXL is not loaded for the answer."""
    if any(importlib.util.find_spec(name) is not None for name in WHEELS):
        return ""
    return f"nixl is not installed; {INSTALL}, or use the shm transport"


class Loop(Protocol):
    """What this needs of the authority thread's loop."""

    def register(self, fd: int, events: int, handler: Callable[[int], None]) -> None: ...
    def modify(self, fd: int, events: int) -> None: ...
    def unregister(self, fd: int) -> None: ...
    def later(self, delay_s: float, callback: Callable[[], None]) -> Any: ...


@dataclass(frozen=True, slots=True)
class NixlIdentity:
    """What a peer needs to read from us."""

    agent: str
    metadata: bytes
    addresses: tuple[int, ...]
    """Of each rank's region in the process ``pid``."""
    pid: int


@dataclass(slots=True, eq=False)
class _Flight:
    peer: NixlTransport
    step: Step
    done: Callable[[StepResult], None]
    quiet: Callable[[Step], None]
    started_s: float
    lost_s: float | None = None
    """When it was given up with bytes that may still land."""


@dataclass(slots=True, eq=False)
class _Process:
    """One life of the NIXL process."""

    child: subprocess.Popen[bytes]
    sock: socket.socket
    started_s: float
    backlog: deque[bytes] = field(default_factory=deque)
    known: set[int] = field(default_factory=set)
    """Peers it was told of."""
    ending: bool = False
    """It was sent SIGKILL, or has closed its socket."""


class NixlProcess:
    """The guard's NIXL process, started when first needed. Belongs to the authority thread; never waits."""

    def __init__(
        self,
        name: str,
        pool_dir: Path,
        incarnation: int,
        local: LocalRegions,
        loop: Loop,
        backend: str,
        params: dict[str, str],
    ) -> None:
        """``backend`` of NIXL, with its parameters, for all agents."""
        self.name = name
        self.local = local
        self.restarts = 0
        """Times the process ended by itself or had to be ended."""
        self._pool_dir = pool_dir
        self._incarnation = incarnation
        self._loop = loop
        self._backend = backend
        self._params = params
        self._process: _Process | None = None
        self._not_before_s = 0.0
        self._identity: NixlIdentity | None = None
        self._serving: list[Callable[[NixlIdentity | None], None]] = []
        self._meeting: dict[int, tuple[Callable[[str], None], Any]] = {}
        """peer id -> (whom to tell that its agent is made, timer)"""
        self._flights: dict[int, _Flight] = {}
        self._last = 0
        self._heard_s = 0.0
        self._watching = False
        self._buffer = bytearray(MAX_BYTES)
        self._closed = False

    # --- serving ------------------------------------------------------------------------------------

    def serve(self, done: Callable[[NixlIdentity | None], None]) -> None:
        """Make the serving agent if need be, then ``done``; None when NIXL fails."""
        if self._identity is not None:
            done(self._identity)
            return
        self._serving.append(done)
        if not self._send(Serve()):
            self._served(None)

    def warm_up(self) -> None:
        """Make the agents that any use needs, ahead of it."""
        self._send(WarmUp())

    def hold(self, lease_id: int, until_s: float, *, quick: bool) -> None:
        """Keep the serving agent progressing until ``until_s`` or :meth:`drop`. ``quick``: see Hold."""
        self._send(Hold(lease_id, until_s, quick))

    def drop(self, lease_id: int) -> None:
        if self._process is not None:
            self._send(Drop(lease_id))

    # --- reading ------------------------------------------------------------------------------------

    @property
    def quarantined(self) -> int:
        """Slots of reads that were given up, to which bytes may still land."""
        return sum(len(flight.step) for flight in self._flights.values() if flight.lost_s is not None)

    @property
    def overloaded(self) -> bool:
        """Too many slots are quarantined: peers that need an agent of their own are refused."""
        return self.quarantined > MAX_QUARANTINED_FRACTION * self.local.slots

    def start(self) -> None:
        """Start the process ahead of its use, unless it runs."""
        if self._process is None:
            self._start()

    def meet(self, peer: NixlTransport, done: Callable[[str], None]) -> None:
        """Have a new peer's agent made ahead of its first read; for :class:`NixlTransport`."""
        if not self._introduce(peer):
            self._loop.later(0.0, lambda: done(RESTARTING))
            return
        timer = self._loop.later(MEET_S, lambda: self._kill(f"it made no agent within {MEET_S:.0f} s"))
        self._meeting[peer.peer_id] = (done, timer)

    def read(
        self,
        peer: NixlTransport,
        step: Step,
        done: Callable[[StepResult], None],
        quiet: Callable[[Step], None],
    ) -> None:
        """Begin one read; for :class:`NixlTransport`."""
        self._last += 1
        number, now_s = self._last, time.monotonic()
        message = Read(
            number,
            peer.peer_id,
            step.local_slots.astype("<i4").tobytes(),
            step.remote_slots.astype("<i4").tobytes(),
            step.deadline_s,
        )
        if not self._flights:
            self._heard_s = now_s
        if not (self._introduce(peer) and self._send(message)):
            refused = failed(step, BlockStatus.GONE, RESTARTING, 0.0)
            # Never from within the call.
            self._loop.later(0.0, lambda: done(refused))
            return
        self._flights[number] = _Flight(peer, step, done, quiet, now_s)
        self._watch_later()

    def forget(self, peer: NixlTransport) -> None:
        """End the reads from a peer; for :class:`NixlTransport`."""
        _, timer = self._meeting.pop(peer.peer_id, (None, None))
        if timer is not None:
            timer.cancel()
        process = self._process
        if process is not None and peer.peer_id in process.known:
            process.known.discard(peer.peer_id)
            self._send(Forget(peer.peer_id))

    def status(self) -> dict[str, Any]:
        """JSON-ready."""
        process = self._process
        return {
            "pid": process.child.pid if process is not None else 0,
            "reads": sum(1 for flight in self._flights.values() if flight.lost_s is None),
            "quarantined_slots": self.quarantined,
            "quarantine_limit": int(MAX_QUARANTINED_FRACTION * self.local.slots),
            "restarts": self.restarts,
        }

    def close(self, timeout_s: float, *, unlink: bool = False) -> bool:
        """End the process; True when it is gone in time. ``unlink`` removes its lock file."""
        self._closed = True
        process = self._process
        gone = True
        if process is not None:
            self._kill("the guard is through with it")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.child.wait(timeout_s)
            gone = process.child.poll() is not None
            if gone:
                self._gone(process)
        if unlink:
            (self._pool_dir / LOCK).unlink(missing_ok=True)
        return gone

    # --- the process --------------------------------------------------------------------------------

    def _introduce(self, peer: NixlTransport) -> bool:
        process = self._process
        if process is not None and not process.ending and peer.peer_id in process.known:
            return True
        message = Peer(
            peer.peer_id,
            peer.label,
            peer.metadata,
            tuple(peer.addresses),
            peer.slots,
            peer.own_agent,
            peer.tls,
        )
        if not self._send(message):
            return False
        assert self._process is not None
        self._process.known.add(peer.peer_id)
        return True

    def _send(self, message: ToProcess) -> bool:
        """False when there is no process, and none can be started now."""
        process = self._process
        if process is None:
            process = self._start()
        if process is None or process.ending:
            return False
        raw = to_process.encode(message)
        if not process.backlog:
            try:
                process.sock.send(raw, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return True
            except BlockingIOError:
                self._loop.modify(process.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
            except OSError as error:
                self._kill(f"its socket: {error.strerror}")
                return False
        process.backlog.append(raw)
        return True

    def _start(self) -> _Process | None:
        now_s = time.monotonic()
        if self._closed or now_s < self._not_before_s:
            return None
        self._not_before_s = now_s + RESTART_S
        # Found wherever this package was found from, which need not be the environment's path.
        components = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [components, os.environ.get("PYTHONPATH", "")]))
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(ours.close)
                settings = Settings(
                    self.name,
                    theirs.fileno(),
                    os.getpid(),
                    str(self._pool_dir),
                    self._incarnation,
                    self._backend,
                    self._params,
                )
                with theirs:
                    child = subprocess.Popen(
                        [
                            sys.executable,
                            "-m",
                            "kvcr.transfer.nixl_main",
                            msgspec.json.encode(settings).decode(),
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=2,
                        pass_fds=[theirs.fileno()],
                        env={**os.environ, "PYTHONPATH": path},
                    )
            except OSError as error:
                log.error("the NIXL process cannot be started: %s", error)
                return None
            undo.pop_all()
        ours.setblocking(False)
        process = self._process = _Process(child, ours, now_s)
        self._heard_s = now_s
        self._loop.register(ours.fileno(), select.EPOLLIN, lambda events: self._ready(process, events))
        log.info("NIXL process %d started", child.pid)
        return process

    def _ready(self, process: _Process, events: int) -> None:
        if events & select.EPOLLOUT:
            while process.backlog:
                try:
                    process.sock.send(process.backlog[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    break
                except OSError as error:
                    self._kill(f"its socket: {error.strerror}")
                    return
                process.backlog.popleft()
            else:
                self._loop.modify(process.sock.fileno(), select.EPOLLIN)
        while not process.ending:
            try:
                size = process.sock.recv_into(self._buffer, flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:
                self._kill("it ended")
                return
            try:
                self._heard(memoryview(self._buffer)[:size])
            except ProtocolError as error:
                self._kill(f"it sent nonsense: {error}")

    def _heard(self, raw: memoryview) -> None:
        self._heard_s = time.monotonic()
        match to_guard.decode(raw):
            case Landed() as landed:
                self._landed(landed)
            case Lost() as lost:
                self._lost(lost)
            case Quiet() as quiet:
                for number in quiet.numbers:
                    self._quiet(number)
            case Met() as met:
                self._met(met.peer_id, met.reason)
            case Serving() as serving:
                process = self._process
                self._served(
                    NixlIdentity(serving.agent, serving.metadata, serving.addresses, process.child.pid)
                    if serving.metadata and process is not None
                    else None
                )
            case ServerLost() as broken:
                log.warning("peers cannot read over NIXL until they ask again: %s", broken.reason)
                self._identity = None

    def _met(self, peer_id: int, reason: str) -> None:
        done, timer = self._meeting.pop(peer_id, (None, None))
        if done is not None and timer is not None:
            timer.cancel()
            done(reason)

    def _landed(self, landed: Landed) -> None:
        flight = self._flights.get(landed.number)
        if flight is None:
            return
        step, now_s, found = flight.step, time.monotonic(), u64(landed.checksums)
        if len(found) != step.checksums.size:
            # Its flight stays: what ends the process for this ends it too.
            raise ProtocolError(f"{len(found)} checksums of a read that has {step.checksums.size}")
        del self._flights[landed.number]
        flight.peer.synchronous = landed.synchronous
        found = found.reshape(step.checksums.shape)
        flight.done(verified(step, found, now_s - landed.seconds, now_s))

    def _lost(self, lost: Lost) -> None:
        flight = self._flights.get(lost.number)
        if flight is None or flight.lost_s is not None:
            return
        if lost.in_flight:
            flight.lost_s = time.monotonic()
        else:
            del self._flights[lost.number]
        flight.done(failed(flight.step, lost.status, lost.reason, lost.seconds, in_flight=lost.in_flight))

    def _quiet(self, number: int) -> None:
        flight = self._flights.pop(number, None)
        if flight is not None:
            flight.quiet(flight.step)

    def _served(self, identity: NixlIdentity | None) -> None:
        self._identity = identity
        serving, self._serving = self._serving, []
        for done in serving:
            done(identity)

    # --- when it does not answer, or ends -----------------------------------------------------------

    def _watch_later(self) -> None:
        if not self._watching:
            self._watching = True
            self._loop.later(_WATCH_S, self._watch)

    def _watch(self) -> None:
        """While there are reads: end the process when it keeps no deadline."""
        self._watching = False
        if not self._flights:
            return
        now_s = time.monotonic()
        flights = self._flights.values()
        reason = ""
        if any(flight.lost_s is not None and now_s > flight.lost_s + DESTROY_S for flight in flights):
            reason = f"an agent was not destroyed within {DESTROY_S:.0f} s"
        elif any(flight.lost_s is None and now_s > flight.step.deadline_s + GRACE_S for flight in flights):
            reason = "it does not keep a read's deadline"
        elif now_s - self._heard_s > SILENCE_S and any(flight.lost_s is None for flight in flights):
            reason = f"it said nothing for {SILENCE_S:.0f} s"
        if reason:
            self._kill(reason)
        self._watch_later()

    def _kill(self, reason: str) -> None:
        """End the process. What it was reading is lost now; its slots are free once the kernel ended it."""
        process = self._process
        if process is None or process.ending:
            return
        process.ending = True
        if not self._closed:
            self.restarts += 1
            log.error("ending NIXL process %d: %s", process.child.pid, reason)
        self._loop.unregister(process.sock.fileno())
        process.sock.close()
        process.child.kill()
        self._identity = None
        self._served(None)
        for peer_id in list(self._meeting):
            self._met(peer_id, f"NIXL: {reason}")
        now_s = time.monotonic()
        for flight in [flight for flight in self._flights.values() if flight.lost_s is None]:
            flight.lost_s = now_s
            why = f"NIXL: {reason}"
            seconds = now_s - flight.started_s
            flight.done(failed(flight.step, BlockStatus.GONE, why, seconds, in_flight=True))
        self._reap(process)

    def _reap(self, process: _Process) -> None:
        if process.child.poll() is None:
            self._loop.later(0.002, lambda: self._reap(process))
        else:
            self._gone(process)

    def _gone(self, process: _Process) -> None:
        """The kernel has taken its memory away: nothing lands any more."""
        if self._process is process:
            self._process = None
            for number in list(self._flights):
                self._quiet(number)


class NixlTransport:
    """One peer, read through NIXL. Made by the authority thread from the peer's PeerWelcome."""

    name = "nixl"
    _next_id = 0

    def __init__(
        self,
        process: NixlProcess,
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
        self._process = process

    @property
    def step_bytes(self) -> int:
        """Most bytes of one read."""
        return COPY_STEP_BYTES if self.synchronous else STEP_BYTES

    @property
    def overloaded(self) -> bool:
        """Its reads could leave slots in quarantine, and there are too many of those."""
        return self.own_agent and self._process.overloaded

    def meet(self, done: Callable[[str], None]) -> None:
        """Once, before the first read: ``done("")`` when a read can begin at once, ``done(reason)`` when none
        ever will. Not from within the call, and not after :meth:`close`."""
        self._process.meet(self, done)

    def read(self, step: Step, done: Callable[[StepResult], None], quiet: Callable[[Step], None]) -> None:
        """See :class:`kvcr.transfer.base.Transport`."""
        self._process.read(self, step, done, quiet)

    def close(self) -> None:
        self._process.forget(self)
