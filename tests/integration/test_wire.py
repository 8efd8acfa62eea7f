# SPDX-License-Identifier: Apache-2.0
"""What a guard's ports take, from the side of those who connect: friends with much to ask, and strangers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from engine_client import COMPONENTS, LAYOUT, EngineClient, GuardProcess, chain, guards
from peer_client import PeerClient
from waiting import until

from kvcr.guard.connection import MAX_CONNECTIONS as MAX_UNIX_CONNECTIONS
from kvcr.keys import BlockKey, pack_keys
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.engine import BlockStatus, Fetch, FetchProgress, Source
from kvcr.protocol.peer import (
    MAX_CONTROL_BYTES,
    VERSION,
    Lease,
    Leased,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Snapshot,
    to_server,
)
from kvcr.transfer import nixl

SECRET = b"what all of the deployment know"


@pytest.fixture
def guard(directory: Path) -> Iterator[GuardProcess]:
    with GuardProcess(directory, "a") as guard, EngineClient(guard, "engine-a"):
        yield guard


@pytest.fixture
def secured(directory: Path) -> Iterator[GuardProcess]:
    (directory / "secret").write_bytes(SECRET)
    with (
        GuardProcess(directory, "a", "--secret-file", str(directory / "secret")) as guard,
        EngineClient(guard, "engine-a"),
    ):
        yield guard


def refusals(guard: GuardProcess, code: str) -> float:
    return guard.metrics().get(f'kvcr_peer_refusals_total{{code="{code}"}}', 0.0)


def wait_refusals(guard: GuardProcess, code: str, count: int = 1) -> None:
    until(lambda: refusals(guard, code) >= count, f"{count} refusals as {code}")


def answers(guard: GuardProcess, **secret: object) -> bool:
    """Whether a new connection is served."""
    with PeerClient(guard.endpoint, **secret) as client, contextlib.suppress(zmq.Again):  # type: ignore[arg-type]
        return isinstance(client.ask(PeerHello(VERSION, 1, "router", 0, "")), PeerWelcome)
    return False


# --- much to ask -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transport",
    ["shm", pytest.param("nixl", marks=pytest.mark.skipif(bool(nixl.import_error()), reason="nixl"))],
)
def test_a_request_for_a_hundred_thousand_blocks_travels_in_pieces(directory: Path, transport: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, part_bytes=4096)
    held, asked = 4000, 100_000
    arguments = ["--transport", transport]
    with (
        guards(directory, "a", "b", arguments=arguments, slots=3 * held, layout=layout) as (a, b),
        EngineClient(a, "engine-a", layout) as source,
        EngineClient(b, "engine-b", layout) as target,
    ):
        root, keys = chain(held, "tenant")
        unknown = [BlockKey(os.urandom(16)) for _ in range(asked - held)]
        for start in range(0, held, 500):
            source.deposit(keys[start : start + 500], keys[start - 1] if start else root, first=start)
        everything = [*keys, *unknown]
        fetch_all(target, everything, root, [Source(a.endpoint, 0, asked)])
        found = finals(target, len(everything))
        assert (found[:held] == BlockStatus.OK).all()
        assert (found[held:] == BlockStatus.MISS).all()
        assert all(target.right(keys))
        for guard in (a, b):
            assert not any(name.startswith("kvcr_peer_refusals_total") for name in guard.metrics())


def fetch_all(target: EngineClient, keys: list[BlockKey], root: bytes, sources: list[Source]) -> None:
    """As an engine does it: no message has more blocks than its limit."""
    for first in range(0, len(keys), MAX_BLOCKS_PER_MESSAGE):
        part = keys[first : first + MAX_BLOCKS_PER_MESSAGE]
        target.send(
            target.scheduler,
            Fetch(
                epoch=target.welcome.epoch,
                request_id="much",
                first=first,
                parent=keys[first - 1] if first else root,
                keys=pack_keys(part),
                engine_hashes=bytes(8 * len(part)),
                sources=sources,
                give_up_ms=0.0,
                deadline_ms=50_000,
            ),
        )


def finals(target: EngineClient, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """BlockStatus of each block, once all pieces are through."""
    found = np.full(count, 255, np.uint8)
    target.scheduler.settimeout(60)
    while (found == 255).any():
        progress = target.receive(target.scheduler, FetchProgress)
        if progress.final:
            found[progress.first : progress.first + len(progress.statuses)] = list(progress.statuses)
    return found


def test_a_lease_for_more_than_the_limit_is_refused_and_asking_in_pieces_works(guard: GuardProcess) -> None:
    with PeerClient(guard.endpoint) as client:
        keys = os.urandom(16 * (MAX_BLOCKS_PER_MESSAGE + 1))
        refused = client.ask(Lease(1, "peer", 1, keys, 1000, "shm"))
        assert isinstance(refused, PeerRefused)
        assert refused.code == "too_large"
        wait_refusals(guard, "too_large")
        for start in range(0, 100_000, MAX_BLOCKS_PER_MESSAGE):
            leased = client.ask(Lease(start, "peer", 1, keys[: 16 * MAX_BLOCKS_PER_MESSAGE], 1000, "shm"))
            assert isinstance(leased, Leased)
            assert len(leased.statuses) == MAX_BLOCKS_PER_MESSAGE


# --- strangers -------------------------------------------------------------------------------------


def test_without_the_secret_nobody_is_heard_and_each_kind_is_counted(secured: GuardProcess) -> None:
    plain = PeerClient(secured.endpoint, timeout_ms=500)
    with plain, pytest.raises(zmq.Again):
        plain.ask(PeerHello(VERSION, 1, "stranger", 0, ""))
    wait_refusals(secured, "handshake")
    key = secured.ready["public_key"]
    other = PeerClient(secured.endpoint, timeout_ms=500, secret=b"what others know", server_key=key)
    with other, pytest.raises(zmq.Again):
        other.ask(PeerHello(VERSION, 1, "stranger", 0, ""))
    wait_refusals(secured, "unauthenticated")
    # The right secret and another server's key: the server is not who it should be.
    fooled = PeerClient(secured.endpoint, timeout_ms=500, secret=SECRET, server_key=bytes(32).hex())
    with fooled, pytest.raises(zmq.Again):
        fooled.ask(PeerHello(VERSION, 1, "peer", 0, ""))
    assert answers(secured, secret=SECRET, server_key=key)


def test_messages_too_large_too_deep_or_of_no_known_type_are_not_answered(guard: GuardProcess) -> None:
    with PeerClient(guard.endpoint, timeout_ms=300) as client:
        for raw in (b"\x91" * 100_000, b"\xde\xff\xff" + b"\x01" * 3000, b"\x92\xa4Nope\x01", b"", b"\x80"):
            client.socket.send(raw)
        client.socket.send_multipart([b""] * 20)
        with pytest.raises(zmq.Again):
            client.socket.recv()
    wait_refusals(guard, "malformed", 6)
    with PeerClient(guard.endpoint, timeout_ms=300) as client:
        # ZMQ itself cuts such a connection off, before it has read it.
        client.socket.send(bytes(MAX_CONTROL_BYTES + 1))
        with pytest.raises(zmq.Again):
            client.socket.recv()
    assert answers(guard)


def test_a_hundred_thousand_nested_arrays_in_a_good_message_are_skipped_or_refused(
    guard: GuardProcess,
) -> None:
    # Fields that are not known are skipped, however deep: by the decoder, without its stack overflowing.
    good = to_server.encode(Snapshot(1))
    deep = bytes([good[0] + 1]) + good[1:] + b"\x91" * 100_000 + b"\x01"
    with PeerClient(guard.endpoint, timeout_ms=500) as client, contextlib.suppress(zmq.Again):
        client.socket.send(deep)
        client.socket.recv()
    assert answers(guard)


def test_who_connects_and_says_nothing_is_cut_off(secured: GuardProcess) -> None:
    host, port = secured.endpoint.removeprefix("tcp://").split(":")
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(50)
        ]
        slow = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        slow.sendall(b"\xff\x00\x00")
        assert answers(secured, secret=SECRET, server_key=secured.ready["public_key"])
        # The server greets, waits for 5 s, and hangs up.
        for sock in (*silent, slow):
            with contextlib.suppress(ConnectionError):
                while sock.recv(1000):
                    pass
    wait_refusals(secured, "handshake", 51)


def test_more_connections_than_a_guard_takes_do_not_stop_it(guard: GuardProcess) -> None:
    host, port = guard.endpoint.removeprefix("tcp://").split(":")
    opened: list[socket.socket] = []
    try:
        for _ in range(1300):
            try:
                opened.append(socket.create_connection((host, int(port)), timeout=2))
            except OSError:
                break
        wait_refusals(guard, "too_many")
        assert len(os.listdir(f"/proc/{guard.pid}/fd")) < 1300
        with connected(guard) as unix:
            unix.send(to_server.encode(PeerHello(VERSION, 1, "guard", 0, "")))
            assert unix.recv(1 << 18)
    finally:
        for sock in opened:
            sock.close()
    until(lambda: answers(guard), "the guard answers")


def test_the_unix_socket_takes_so_many_and_waits_for_none(guard: GuardProcess) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UNIX_CONNECTIONS + 40):
            stack.enter_context(connected(guard))
        wait_refusals(guard, "too_many")
        # After 10 s without a word they are gone, and there is room.
        wait_refusals(guard, "silent", MAX_UNIX_CONNECTIONS // 2)
        with connected(guard) as sock:
            sock.send(to_server.encode(PeerHello(VERSION, 1, "guard", 0, "")))
            assert sock.recv(1 << 18)


def test_who_asks_and_never_reads_is_cut_off_and_costs_little(guard: GuardProcess) -> None:
    before = resident_bytes(guard)
    question = to_server.encode(PeerHello(VERSION, 1, "deaf", 0, ""))
    with connected(guard) as sock:
        sock.settimeout(10)
        with contextlib.suppress(OSError):
            for _ in range(200_000):
                sock.send(question)
    with PeerClient(guard.endpoint) as client:
        client.socket.sndtimeo = 100
        with contextlib.suppress(zmq.Again):
            for _ in range(20_000):
                client.socket.send(question)
        assert answers(guard)
    assert resident_bytes(guard) - before < 100 << 20


def connected(guard: GuardProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    while True:
        try:
            sock.connect(guard.ready["socket"])
        except BlockingIOError:  # its backlog is full for a moment
            time.sleep(0.01)
        else:
            return sock


def resident_bytes(guard: GuardProcess) -> int:
    pages = int(Path(f"/proc/{guard.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- the doctor on one host -------------------------------------------------------------------------


@pytest.mark.skipif(bool(nixl.import_error()), reason=nixl.import_error())
def test_the_doctor_measures_every_transport_of_one_host_beside_each_other(guard: GuardProcess) -> None:
    peer = guard.endpoint.removeprefix("tcp://")
    command = [sys.executable, "-m", "kvcr.cli", "doctor", "--peer", peer]
    env = {**os.environ, "PYTHONPATH": str(COMPONENTS), "ETCD_ENDPOINTS": "http://127.0.0.1:1"}
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=env, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"]
    for direction in report["directions"]:
        assert direction["interface"] == "lo"
        assert direction["chosen"] == "shm"
        measured = {row["way"]: row for row in direction["ways"]}
        assert list(measured) == ["shm", "nixl over cma", "nixl over tcp"]
        assert all(row["mb_per_s"] > 1 and not row["error"] for row in measured.values()), measured
        assert "nixl over rdma" in direction["rejected"]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("kvcr-doctor-")]
    nobody = subprocess.run(
        [*command[:-1], "127.0.0.1:1"], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert nobody.returncode == 1
    assert "tcp://127.0.0.1:1 did not answer" in nobody.stderr


# --- other addresses -------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6")
def test_control_over_ipv6(directory: Path) -> None:
    root, keys = chain(20, "tenant")
    with (
        guards(directory, "a", "b", arguments=["--control", "tcp://[::1]:0"]) as (a, b),
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        assert a.endpoint.startswith("tcp://[::1]:")
        source.deposit(keys, root)
        _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 20)])
        assert set(progress.statuses) == {BlockStatus.OK}
        assert answers(a)


def test_of_two_addresses_the_configured_one_is_bound(directory: Path) -> None:
    with GuardProcess(directory, "a", "--interface", "127.0.0.3") as guard:
        assert guard.endpoint.startswith("tcp://127.0.0.3:")
        _, port = guard.endpoint.removeprefix("tcp://").split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), timeout=2)
