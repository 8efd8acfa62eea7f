# SPDX-License-Identifier: Apache-2.0
"""Reading over NIXL: threads that copy blocks out of peers' pools and hash them, a chunk at a time.

A read of the guard is cut into chunks, which the threads take in order. Each thread has an agent of its own
for the peers on this host (a CMA copy keeps its thread busy until it is over, so two threads copy twice as
fast), and an agent for each other peer that is its to read from. A chunk is hashed by the thread that got it,
while it is in the cache, and while the next one is on its way.

Python between two chunks takes 30 us, and longer where the other thread has the GIL: that is a tenth of the
time where chunks are of 1 MiB.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.pool import checksum_parts
from kvcr.protocol.codec import i32
from kvcr.protocol.engine import BlockStatus
from kvcr.transfer import nixl_api
from kvcr.transfer.nixl_api import Agent, AgentMaker
from kvcr.transfer.nixl_messages import CONTACT_S, STALL_S, Landed, Lost, Met, Peer, Quiet, Read, ToGuard

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Least, and all that is under way at a time over TCP, where a chunk is hashed while others arrive."""

LARGE_CHUNK_BYTES = 4 << 20
"""Most, on this host: 0.5 to 1 ms of copying over CMA, by which a deadline can be overrun."""

WINDOW = 4
"""Chunks under way at one agent, where NIXL reads in the background (TCP, RDMA)."""

READERS = max(1, min(2, len(os.sched_getaffinity(0))))
"""Threads. 32 blocks of 1 MiB over CMA, with checksums: 0.38 of memcpy with one, 0.60 with two."""

_SPINS = 20
"""Looks at transfers without a pause, some 2 us each, after one ended or began."""

_NAP_S = 0.00005
_SLOW_NAP_S = 0.001
_BUSY_S = 0.02
"""After this long without an end the naps become slow ones."""


@dataclass(slots=True, eq=False)
class _Job:
    """A Read of the guard. Fields that several threads change are changed under the readers' lock."""

    read: Read
    peer: Peer
    local: npt.NDArray[np.int32]
    remote: npt.NDArray[np.int32]
    sums: npt.NDArray[np.uint64]
    """[blocks, ranks], of what has landed."""
    started_s: float
    left: int = 0
    """Chunks that have not landed."""
    flying: int = 0
    """Chunks whose bytes may land now."""
    lost: bool = False
    synchronous: bool = True


@dataclass(slots=True, eq=False)
class _Chunk:
    job: _Job
    blocks: slice


@dataclass(slots=True, eq=False)
class _Flight:
    chunk: _Chunk
    handle: Any
    deadline_s: float
    contact: bool
    """The first read of this agent from this peer: it has to connect, and says nothing about the way."""
    synchronous: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    """An agent of one thread, and what it is to read. ``waiting`` of the shared lanes is one queue."""

    waiting: deque[_Chunk]
    tls: str = ""
    own: bool = False
    """It reads from one peer alone."""
    agent: Agent | None = None
    flights: list[_Flight] = field(default_factory=list)


class Readers:
    """All reader threads of the process. Called by its main thread; ``send`` is called by any."""

    def __init__(self, maker: AgentMaker, send: Callable[[ToGuard], None]) -> None:
        self.maker = maker
        self.send = send
        self.lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._shared: deque[_Chunk] = deque()
        self._readers = [_Reader(self, number, self._shared) for number in range(READERS)]

    def warm_up(self) -> None:
        """Have the shared agents made."""
        for reader in self._readers:
            reader.do(reader.warm_up)

    def meet(self, peer: Peer) -> None:
        """A peer that may be read from; its agents are made ahead. Answered by Met."""
        self._peers[peer.peer_id] = peer
        readers = self._of(peer)
        met: list[str] = []

        def meet(reader: _Reader) -> None:
            reason = reader.meet(peer)
            with self.lock:
                met.append(reason)
                if len(met) == len(readers):
                    self.send(Met(peer.peer_id, next(filter(None, met), "")))

        for reader in readers:
            reader.do(lambda reader=reader: meet(reader))  # type: ignore[misc]

    def forget(self, peer_id: int) -> None:
        """Reads from this peer end as GONE."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            for reader in self._of(peer):
                reader.do(lambda reader=reader: reader.forget(peer))  # type: ignore[misc]

    def read(self, read: Read) -> None:
        """Begin."""
        now_s = time.monotonic()
        peer = self._peers.get(read.peer_id)
        if now_s >= read.deadline_s or peer is None:
            late = "the deadline passed before the read began"
            status = BlockStatus.GONE if peer is None else BlockStatus.TOO_SLOW
            reason = "the peer went away" if peer is None else late
            self.send(Lost(read.number, status, reason, 0.0, in_flight=False))
            return
        local = i32(read.local_slots)
        job = _Job(
            read,
            peer,
            local,
            i32(read.remote_slots),
            np.empty((len(local), len(self.maker.arrays)), np.uint64),
            now_s,
        )
        block_bytes = self.maker.layout.part_bytes * len(self.maker.arrays)
        # A large one for each thread where there is enough for all.
        share = -(-len(local) // READERS) * block_bytes
        most = CHUNK_BYTES if peer.own_agent else max(CHUNK_BYTES, min(LARGE_CHUNK_BYTES, share))
        width = max(1, most // block_bytes)
        chunks = [_Chunk(job, slice(start, start + width)) for start in range(0, len(local), width)]
        job.left = len(chunks)
        if peer.own_agent:
            reader = self._of(peer)[0]
            reader.do(lambda: reader.queue(peer, chunks))
            return
        self._shared.extend(chunks)
        # Those that are busy look again before they wait.
        for reader in [reader for reader in self._readers if reader.idle][: len(chunks)]:
            reader.idle = False
            reader.do(_nothing)

    def close(self) -> None:
        for reader in self._readers:
            reader.do(None)

    def _of(self, peer: Peer) -> list[_Reader]:
        """Threads that may read from it. An agent belongs to one."""
        return [self._readers[peer.peer_id % READERS]] if peer.own_agent else self._readers

    # --- what became of a read; any reader ----------------------------------------------------------

    def landed(self, job: _Job, *, synchronous: bool) -> None:
        """A chunk of it has landed and is hashed."""
        with self.lock:
            job.flying -= 1
            job.left -= 1
            job.synchronous &= synchronous
            if job.lost:
                self._quiet([job])
            elif not job.left:
                seconds = time.monotonic() - job.started_s
                sums = job.sums.astype("<u8").tobytes()
                self.send(Landed(job.read.number, seconds, job.synchronous, sums))

    def lost(self, job: _Job, status: BlockStatus, reason: str) -> None:
        """It will not be completed. What flies may still land: Quiet follows once nothing does."""
        with self.lock:
            if not job.lost:
                job.lost = True
                seconds = time.monotonic() - job.started_s
                self.send(Lost(job.read.number, status, reason, seconds, in_flight=job.flying > 0))

    def fell(self, jobs: Sequence[_Job]) -> None:
        """Nothing lands any more of one chunk of each of these reads; they are lost, or will be."""
        with self.lock:
            for job in jobs:
                job.flying -= 1
            self._quiet([job for job in jobs if job.lost])

    def _quiet(self, lost: Sequence[_Job]) -> None:
        # Sent under the lock, as Lost is: the guard must hear of that first.
        numbers = dict.fromkeys(job.read.number for job in lost if not job.flying)
        if numbers:
            self.send(Quiet(list(numbers)))


def _nothing() -> None:
    """Wakes a reader."""


class _Reader(threading.Thread):
    """Owns its agents. All methods but :meth:`do` run on the thread itself."""

    def __init__(self, readers: Readers, number: int, shared: deque[_Chunk]) -> None:
        super().__init__(name=f"kvcr-nixl-reader-{number}", daemon=True)
        self.idle = False
        """It waits, or is about to look once more and then to."""
        self._readers = readers
        self._maker = readers.maker
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._shared = _Lane(shared)
        self._own: dict[int, _Lane] = {}
        self._spins = 0
        self._moved_s = 0.0
        """When a flight began or ended last."""
        self.start()

    def do(self, work: Callable[[], None] | None) -> None:
        """Have ``work`` done on this thread; None ends it. Any thread, never waits."""
        self._inbox.put(work)

    def run(self) -> None:
        # Without a guard to tell, the process ends.
        with contextlib.suppress(OSError):
            while True:
                for lane in [self._shared, *self._own.values()]:
                    self._turn(lane)
                try:
                    work = self._next()
                except queue.Empty:
                    continue
                if work is None:
                    return
                work()

    def _next(self) -> Callable[[], None] | None:
        """What to do next; raises Empty when that is to look again."""
        own = self._own.values()
        if any(len(lane.flights) < WINDOW and lane.waiting for lane in own):
            return self._inbox.get_nowait()
        if self._shared.flights or any(lane.flights for lane in own):
            if self._spins < _SPINS:
                self._spins += 1
                return self._inbox.get_nowait()
            quick = time.monotonic() - self._moved_s < _BUSY_S
            return self._inbox.get(timeout=_NAP_S if quick else _SLOW_NAP_S)
        # In this order: what is queued from now on wakes this thread.
        self.idle = True
        try:
            return self._inbox.get_nowait() if self._shared.waiting else self._inbox.get()
        finally:
            self.idle = False

    # --- called through do() ------------------------------------------------------------------------

    def warm_up(self) -> None:
        try:
            self._agent(self._shared)
        except nixl_api.failures() as error:
            # Ahead of its use: what fails here is told when it is used.
            log.warning("NIXL cannot read: %s", error)

    def meet(self, peer: Peer) -> str:
        """Why no read from it can begin; empty when one can."""
        try:
            self._maker.meet(self._agent(self._lane(peer)), peer)
        except nixl_api.failures() as error:
            return f"NIXL cannot read from {peer.label}: {error}"
        return ""

    def queue(self, peer: Peer, chunks: list[_Chunk]) -> None:
        self._lane(peer).waiting.extend(chunks)

    def forget(self, peer: Peer) -> None:
        lane = self._own.pop(peer.peer_id, None) if peer.own_agent else self._shared
        if lane is None:
            return
        for chunk in [chunk for chunk in list(lane.waiting) if chunk.job.peer is peer]:
            self._readers.lost(chunk.job, BlockStatus.GONE, "the peer went away")
        if lane.own:
            self._destroy(lane, BlockStatus.GONE, f"{peer.label} went away")
            return
        for flight in [flight for flight in lane.flights if flight.chunk.job.peer is peer]:
            self._failed(lane, flight, ConnectionError("the peer went away"))
        if lane.agent is not None:
            lane.agent.drop(peer.peer_id)

    # --- reading ------------------------------------------------------------------------------------

    def _turn(self, lane: _Lane) -> None:
        """Look at what flies, and begin what may."""
        for flight in list(lane.flights):
            if flight in lane.flights:
                self._look(lane, flight)
        # Until a copy was over when it was posted: the inbox is looked at between those.
        while len(lane.flights) < WINDOW and self._begin(lane):
            pass

    def _begin(self, lane: _Lane) -> bool:
        """Post the next chunk; True when it is under way."""
        try:
            chunk = lane.waiting.popleft()
        except IndexError:
            return False
        job = chunk.job
        if job.lost:
            return True
        now_s = time.monotonic()
        if now_s >= job.read.deadline_s:
            self._readers.lost(
                job, BlockStatus.TOO_SLOW, "the deadline passed before NIXL had read all of it"
            )
            return True
        peer, maker = job.peer, self._maker
        try:
            agent = self._agent(lane)
            remote = maker.meet(agent, peer)
            handle = agent.agent.make_prepped_xfer(
                "READ",
                agent.grid,
                _rows(job.local[chunk.blocks], maker.rows, len(maker.arrays)),
                remote.grid,
                _rows(job.remote[chunk.blocks], peer.slots, len(maker.arrays)),
            )
        except nixl_api.failures() as error:
            reason = f"NIXL cannot read from {peer.label}: {error}"
            self._readers.lost(job, BlockStatus.GONE, reason)
            if nixl_api.is_agents_own(error):
                self._destroy(lane, BlockStatus.GONE, reason)
            return True
        # Counted from here: making an agent, at a first contact, is no sign of a peer that stalls.
        posted_s = time.monotonic()
        stall_s = STALL_S if remote.connected else CONTACT_S
        deadline_s = min(job.read.deadline_s, posted_s + stall_s)
        flight = _Flight(chunk, handle, deadline_s, contact=not remote.connected)
        with self._readers.lock:
            job.flying += 1
        lane.flights.append(flight)
        self._post(lane, flight)
        return flight in lane.flights

    def _post(self, lane: _Lane, flight: _Flight) -> None:
        assert lane.agent is not None
        self._stirred()
        try:
            state = lane.agent.agent.transfer(flight.handle)
        except nixl_api.errors() as error:
            self._failed(lane, flight, error)
            return
        flight.synchronous = state == "DONE"
        if flight.synchronous:
            self._landed(lane, flight)

    def _look(self, lane: _Lane, flight: _Flight) -> None:
        assert lane.agent is not None
        try:
            state = lane.agent.agent.check_xfer_state(flight.handle)
        except nixl_api.errors() as error:
            self._failed(lane, flight, error)
            return
        if state == "DONE":
            self._landed(lane, flight)
        elif state != "PROC":
            self._failed(lane, flight, RuntimeError(f"transfer ended in state {state}"))
        elif time.monotonic() >= flight.deadline_s:
            self._destroy(
                lane, BlockStatus.GONE, "its NIXL agent was destroyed for another read that timed out"
            )

    def _landed(self, lane: _Lane, flight: _Flight) -> None:
        self._stirred()
        chunk = flight.chunk
        job = chunk.job
        if flight.contact:
            # Now that they are connected, once more: whether it is over at once tells how UCX does it.
            flight.contact = False
            assert lane.agent is not None
            if job.peer.peer_id in lane.agent.remotes:
                lane.agent.remotes[job.peer.peer_id].connected = True
            if not flight.synchronous:
                self._post(lane, flight)
                return
        lane.flights.remove(flight)
        nixl_api.release(flight.handle)
        maker = self._maker
        for rank, array in enumerate(maker.arrays):
            slots = job.local[chunk.blocks]
            job.sums[chunk.blocks, rank] = checksum_parts(array, slots, maker.layout.part_bytes)
        self._readers.landed(job, synchronous=flight.synchronous)

    def _failed(self, lane: _Lane, flight: _Flight, error: Exception) -> None:
        """The peer went away in mid-read, or NIXL refuses to go on with it."""
        job = flight.chunk.job
        reason = f"NIXL READ from {job.peer.label}: {error}"
        if lane.own or nixl_api.is_agents_own(error):
            self._destroy(lane, BlockStatus.GONE, reason)
            return
        lane.flights.remove(flight)
        nixl_api.release(flight.handle)
        if lane.agent is not None:
            lane.agent.drop(job.peer.peer_id)
        self._readers.fell([job])
        self._readers.lost(job, BlockStatus.GONE, reason)

    def _stirred(self) -> None:
        self._spins, self._moved_s = 0, time.monotonic()

    # --- agents -------------------------------------------------------------------------------------

    def _lane(self, peer: Peer) -> _Lane:
        if not peer.own_agent:
            return self._shared
        return self._own.setdefault(peer.peer_id, _Lane(deque(), peer.tls, own=True))

    def _agent(self, lane: _Lane) -> Agent:
        if lane.agent is None:
            lane.agent = self._maker.make("read", lane.tls)
        return lane.agent

    def _destroy(self, lane: _Lane, status: BlockStatus, reason: str) -> None:
        """End every read of the lane, and its agent: nothing else stops bytes of a TCP read from landing."""
        flights, lane.flights = lane.flights, []
        agent, lane.agent = lane.agent, None
        now_s = time.monotonic()
        for flight in flights:
            late = now_s >= flight.deadline_s
            self._readers.lost(
                flight.chunk.job,
                BlockStatus.TOO_SLOW if late else status,
                "the deadline passed while NIXL was reading" if late else reason,
            )
        if lane.own:
            # Nothing of this peer comes: what waits behind that need not find out for itself.
            while lane.waiting:
                self._readers.lost(lane.waiting.popleft().job, status, reason)
        if agent is not None:
            # On a thread of its own, which keeps this one going if destroying waits without holding the GIL.
            # Measured, it holds the GIL from begin to end (6 to 13 ms): if it hangs, this process hangs. That
            # is why agents live here and not in the guard, which waits for Quiet and else ends this process.
            threading.Thread(target=self._destroy_now, args=(agent, flights), daemon=True).start()

    def _destroy_now(self, agent: Agent, flights: list[_Flight]) -> None:
        for flight in flights:
            nixl_api.release(flight.handle)
            flight.handle = None
        agent.destroy()
        with contextlib.suppress(OSError):
            self._readers.fell([flight.chunk.job for flight in flights])


def _rows(slots: npt.NDArray[np.int32], slot_count: int, ranks: int) -> npt.NDArray[np.int32]:
    """Rows of a grid with ``slot_count`` rows a rank, for every rank's part of ``slots``."""
    if ranks == 1:
        return np.ascontiguousarray(slots, np.int32)
    firsts = np.arange(ranks, dtype=np.int32)[:, None] * np.int32(slot_count)
    return np.ascontiguousarray((firsts + slots[None, :]).ravel(), np.int32)
