# SPDX-License-Identifier: Apache-2.0
"""The NIXL process's agents, on a NIXL that fails as it is told: what is made anew, and what is kept."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pools
import pytest

from kvcr.errors import ProtocolError
from kvcr.pool import checksum_parts
from kvcr.protocol.codec import u64
from kvcr.protocol.engine import BlockStatus
from kvcr.transfer import nixl as nixl_end
from kvcr.transfer import nixl_agents, nixl_api, nixl_reader
from kvcr.transfer.nixl import NixlProcess, NixlTransport, _Flight
from kvcr.transfer.nixl_agents import NixlAgents
from kvcr.transfer.nixl_api import AgentMaker
from kvcr.transfer.nixl_messages import (
    Drop,
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
    to_guard,
    to_process,
)

ROOT = Path(__file__).resolve().parents[2]


class nixlBackendError(Exception):
    pass


class nixlRemoteDisconnectError(Exception):
    pass


class FakeAgent:
    """A nixl_agent; ``world.say`` is what the next looks at a transfer, or at notifications, bring."""

    def __init__(self, name: str, world: FakeNixl) -> None:
        self.name = name
        self.world = world
        world.made.append(name)

    def create_backend(self, backend: str, params: dict[str, str]) -> None: ...
    def register_memory(self, regions: Any, kind: str) -> None: ...

    def prep_xfer_dlist(self, name: str, grid: Any, kind: str) -> Any:
        return SimpleNamespace(release=lambda: None)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata in self.world.strangers:
            raise nixlBackendError("metadata of another version")
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.world.removed.append(name)

    def get_agent_metadata(self) -> bytes:
        return b"metadata of " + self.name.encode()

    def make_prepped_xfer(self, *_: Any) -> Any:
        return SimpleNamespace(release=lambda: None)

    def transfer(self, handle: Any) -> str:
        with self.world.lock:
            self.world.posted += 1
        return "DONE" if self.world.copies else "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return self.world.next("PROC")

    def get_new_notifs(self) -> None:
        self.world.progressed += 1
        self.world.next("")


class FakeNixl:
    def __init__(self) -> None:
        self.made: list[str] = []
        self.removed: list[str] = []
        self.say: list[str | Exception] = []
        self.strangers: set[bytes] = set()
        self.copies = False
        """Reads are over when they are posted, as over CMA."""
        self.posted = 0
        self.progressed = 0
        self.lock = threading.Lock()

    def next(self, otherwise: str) -> str:
        said = self.say.pop(0) if self.say else otherwise
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    world = FakeNixl()
    errors = (nixlBackendError, nixlRemoteDisconnectError)
    monkeypatch.setattr(nixl_api, "api", lambda: (lambda name, _: FakeAgent(name, world), lambda **_: None))
    monkeypatch.setattr(nixl_api, "errors", lambda: errors)
    monkeypatch.setattr(nixl_api, "failures", lambda: (ImportError, RuntimeError, *errors))
    # One thread, and so one shared agent, unless a test is about several.
    monkeypatch.setattr(nixl_reader, "READERS", 1)
    return world


class Guard:
    """The other end of the socket."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        layout = pools.layout()
        self.blocks = np.zeros((16, layout.slot_part_bytes), np.uint8)
        self.blocks[:] = np.arange(16)[:, None]
        self.part_bytes = layout.part_bytes
        agents = NixlAgents(AgentMaker("test", "UCX", {}, layout, [self.blocks]), theirs)
        self.thread = threading.Thread(target=self._run, args=(agents, theirs))
        self.thread.start()

    @staticmethod
    def _run(agents: NixlAgents, sock: socket.socket) -> None:
        with sock:
            agents.run()

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.sock.send(to_process.encode(message))

    def meet(self, *peers: Peer) -> None:
        self.send(*peers)
        assert [self.receive() for _ in peers] == [Met(peer.peer_id, "") for peer in peers]

    def receive(self) -> ToGuard:
        return to_guard.decode(self.sock.recv(1 << 18))

    def close(self) -> None:
        self.sock.close()
        self.thread.join(10)


@pytest.fixture
def guard(nixl: FakeNixl) -> Iterator[Guard]:
    made = Guard()
    yield made
    made.close()


def peer(number: int, *, own_agent: bool) -> Peer:
    return Peer(number, f"peer-{number}", b"remote-%d" % number, (0x2000,), 16, own_agent, "")


def read(number: int, peer_id: int, seconds: float = 30.0, slots: tuple[int, ...] = (1, 2)) -> Read:
    blob = np.array(slots, "<i4").tobytes()
    return Read(number, peer_id, blob, blob, time.monotonic() + seconds)


def test_an_agent_that_breaks_is_destroyed_and_made_anew_for_the_next_read(
    guard: Guard, nixl: FakeNixl
) -> None:
    nixl.say = [nixlBackendError("worker is broken")]
    guard.meet(peer(1, own_agent=False))
    guard.send(read(1, 1))
    lost = guard.receive()
    assert isinstance(lost, Lost)
    assert (lost.number, lost.status, lost.in_flight) == (1, BlockStatus.GONE, True)
    assert guard.receive() == Quiet([1])
    nixl.say = ["DONE", "DONE"]
    guard.send(read(2, 1))
    landed = guard.receive()
    assert isinstance(landed, Landed)
    assert landed.number == 2
    assert len(nixl.made) == 2


def test_a_peer_that_goes_away_costs_the_shared_agent_nothing(guard: Guard, nixl: FakeNixl) -> None:
    nixl.say = [nixlRemoteDisconnectError("gone")]
    guard.meet(peer(1, own_agent=False), peer(2, own_agent=False))
    guard.send(read(1, 1))
    lost = guard.receive()
    assert isinstance(lost, Lost)
    assert (lost.status, lost.in_flight) == (BlockStatus.GONE, False)
    assert nixl.removed == ["remote-1"]
    nixl.say = ["DONE", "DONE"]
    guard.send(read(2, 2))
    assert isinstance(guard.receive(), Landed)
    assert len(nixl.made) == 1


def test_a_peer_that_cannot_be_met_is_told_with_the_reason(guard: Guard, nixl: FakeNixl) -> None:
    nixl.strangers = {b"remote-1"}
    guard.send(peer(1, own_agent=True))
    assert guard.receive() == Met(1, "NIXL cannot read from peer-1: metadata of another version")
    guard.meet(peer(2, own_agent=True))


def test_the_first_read_from_a_peer_may_take_longer_as_it_connects(
    guard: Guard, nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "STALL_S", 0.05)
    guard.meet(peer(1, own_agent=True))
    guard.send(read(1, 1))
    time.sleep(0.2)
    nixl.say = ["DONE", "DONE"]
    landed = guard.receive()
    assert isinstance(landed, Landed)
    guard.send(read(2, 1))
    lost = guard.receive()
    assert isinstance(lost, Lost)
    assert (lost.number, lost.status) == (2, BlockStatus.TOO_SLOW)
    assert guard.receive() == Quiet([2])


def test_a_read_that_is_late_ends_its_own_agent_and_no_other(guard: Guard, nixl: FakeNixl) -> None:
    guard.meet(peer(1, own_agent=True), peer(2, own_agent=True))
    guard.send(read(1, 1, seconds=0.3), read(2, 1))
    lost = [guard.receive(), guard.receive()]
    assert [(one.number, one.status) for one in lost if isinstance(one, Lost)] == [
        (1, BlockStatus.TOO_SLOW),
        (2, BlockStatus.GONE),
    ]
    assert all(isinstance(one, Lost) and one.in_flight for one in lost)
    assert guard.receive() == Quiet([1, 2])
    nixl.say = ["DONE", "DONE"]
    guard.send(read(3, 2))
    assert isinstance(guard.receive(), Landed)
    assert len(nixl.made) == 2


def test_a_read_is_cut_into_chunks_that_several_threads_copy_and_hash(
    nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "READERS", 2)
    monkeypatch.setattr(nixl_reader, "CHUNK_BYTES", 1)
    monkeypatch.setattr(nixl_reader, "LARGE_CHUNK_BYTES", 1)
    nixl.copies = True
    guard = Guard()
    try:
        guard.meet(peer(1, own_agent=False))
        for number in range(20):
            slots = (3, 1, 4, 15, 9, 2, 6)
            guard.send(read(number, 1, slots=slots))
            landed = guard.receive()
            assert isinstance(landed, Landed)
            assert (landed.number, landed.synchronous) == (number, True)
            found = checksum_parts(guard.blocks, np.array(slots, np.int32), guard.part_bytes)
            assert u64(landed.checksums).tolist() == found.tolist()
        assert nixl.posted == 20 * 7
        assert len(nixl.made) == 2
    finally:
        guard.close()


def test_the_first_read_is_repeated_to_see_whether_it_is_over_when_it_is_posted(
    guard: Guard, nixl: FakeNixl
) -> None:
    nixl.say = ["DONE", "DONE"]
    guard.meet(peer(1, own_agent=False))
    guard.send(read(1, 1))
    first = guard.receive()
    assert isinstance(first, Landed)
    assert (first.synchronous, nixl.posted) == (False, 2)
    nixl.copies = True
    guard.send(read(2, 1))
    second = guard.receive()
    assert isinstance(second, Landed)
    assert (second.synchronous, nixl.posted) == (True, 3)


def test_a_small_read_on_this_host_has_a_chunk_for_each_thread_and_one_over_tcp_small_ones(
    nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "READERS", 2)
    monkeypatch.setattr(nixl_reader, "CHUNK_BYTES", 1)
    nixl.copies = True
    guard = Guard()
    try:
        for peer_id, own_agent, chunks in ((1, False, 2), (2, True, 7)):
            guard.meet(peer(peer_id, own_agent=own_agent))
            # The first of an agent is repeated, as it connects.
            for number in range(3):
                posted = nixl.posted
                guard.send(read(10 * peer_id + number, peer_id, slots=(3, 1, 4, 15, 9, 2, 6)))
                assert isinstance(guard.receive(), Landed)
            assert nixl.posted - posted == chunks
    finally:
        guard.close()


def test_chunks_that_wait_behind_a_peer_that_stalls_are_lost_with_it(
    guard: Guard, nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "CHUNK_BYTES", 1)
    # Six chunks, of which four may be under way; then a read of which none is.
    guard.meet(peer(1, own_agent=True))
    guard.send(read(1, 1, seconds=0.3, slots=(1, 2, 3, 4, 5, 6)), read(2, 1))
    lost = [guard.receive(), guard.receive()]
    assert [(one.number, one.status, one.in_flight) for one in lost if isinstance(one, Lost)] == [
        (1, BlockStatus.TOO_SLOW, True),
        (2, BlockStatus.GONE, False),
    ]
    assert guard.receive() == Quiet([1])
    assert nixl.posted == nixl_reader.WINDOW


def test_a_reader_that_copies_by_itself_is_worked_for_at_leisure_and_nobody_without_a_lease(
    guard: Guard, nixl: FakeNixl
) -> None:
    guard.send(Serve())
    guard.receive()
    guard.send(Hold(1, time.monotonic() + 60, quick=False))
    give_up_s = time.monotonic() + 60
    while nixl.progressed <= 3 and time.monotonic() < give_up_s:
        time.sleep(0.01)
    # It may have to connect.
    assert nixl.progressed > 3
    started_s, before = time.monotonic(), nixl.progressed
    time.sleep(0.2)
    turns = nixl.progressed - before
    assert turns <= (time.monotonic() - started_s) / nixl_agents._SLOW_NAP_S + 1
    guard.send(Drop(1), Serve())
    guard.receive()
    before = nixl.progressed
    time.sleep(0.1)
    assert nixl.progressed <= before + 1


def test_a_serving_agent_that_breaks_is_told_and_made_anew(guard: Guard, nixl: FakeNixl) -> None:
    guard.send(Serve())
    first = guard.receive()
    assert isinstance(first, Serving)
    nixl.say = [nixlBackendError("worker is broken")]
    guard.send(Hold(1, time.monotonic() + 30, quick=True))
    assert isinstance(guard.receive(), ServerLost)
    guard.send(Serve())
    second = guard.receive()
    assert isinstance(second, Serving)
    assert second.metadata not in (b"", first.metadata)


def test_peers_that_need_their_own_agent_are_refused_while_too_much_is_in_quarantine() -> None:
    local: Any = SimpleNamespace(slots=80)
    process = NixlProcess("x", None, 1, local, None, "UCX", {})  # type: ignore[arg-type]
    tcp = NixlTransport.__new__(NixlTransport)
    tcp.own_agent, tcp._process = True, process
    shared = NixlTransport.__new__(NixlTransport)
    shared.own_agent, shared._process = False, process
    step: Any = np.zeros(5)
    for number in range(2):
        process._flights[number] = _Flight(tcp, step, print, print, 0.0, lost_s=0.0)
    # Ten of eighty slots are the limit.
    assert (process.quarantined, tcp.overloaded, process.status()["quarantine_limit"]) == (10, False, 10)
    process._flights[2] = _Flight(tcp, step, print, print, 0.0, lost_s=0.0)
    assert (process.quarantined, tcp.overloaded, shared.overloaded) == (15, True, False)


def test_a_process_that_cannot_be_started_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", fails)
    process = NixlProcess("x", tmp_path, 1, None, None, "UCX", {})  # type: ignore[arg-type]
    before = os.listdir("/proc/self/fd")
    served: list[Any] = []
    process.serve(served.append)
    assert served == [None], "whoever waits for it is told"
    assert os.listdir("/proc/self/fd") == before


def test_checksums_of_another_read_are_nonsense_and_its_slots_wait_for_the_end_of_the_process() -> None:
    local: Any = SimpleNamespace(slots=80)
    process = NixlProcess("x", None, 1, local, None, "UCX", {})  # type: ignore[arg-type]
    step: Any = SimpleNamespace(checksums=np.zeros((2, 1), np.uint64))
    peer: Any = SimpleNamespace(synchronous=False)
    process._flights[1] = _Flight(peer, step, pytest.fail, pytest.fail, 0.0)
    with pytest.raises(ProtocolError, match="3 checksums of a read that has 2"):
        process._heard(memoryview(to_guard.encode(Landed(1, 0.1, True, bytes(24)))))
    assert list(process._flights) == [1]
    unknown = msgspec.msgpack.encode(["Lost", 1, 99, "", 0.0, False])
    with pytest.raises(ProtocolError, match="Invalid enum value 99"):
        process._heard(memoryview(unknown))
    assert list(process._flights) == [1]


def test_any_wheel_of_nixl_will_do_and_the_one_that_is_advised_is_the_one_of_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_end.importlib.util, "find_spec", lambda name: None)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wheel,) = extras["nixl"]
    assert nixl_end.import_error().startswith(f"nixl is not installed; pip install --no-deps {wheel}, or")
    monkeypatch.setattr(nixl_end.importlib.util, "find_spec", lambda name: name == "nixl_cu13" or None)
    assert nixl_end.import_error() == ""
