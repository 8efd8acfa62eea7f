# SPDX-License-Identifier: Apache-2.0
"""Every port of a guard is fed for a minute with what nobody should send it.

``KVCR_FUZZ_S`` sets how long, ``KVCR_FUZZ_SEED`` repeats a run. Afterwards the guard must be the same
process, no larger, with no descriptor more, must have run nothing, and must serve a pull.
"""

from __future__ import annotations

import array
import contextlib
import enum
import os
import pickle
import random
import socket
import threading
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_client import LAYOUT, EngineClient, GuardProcess, chain
from peer_client import PeerClient

from kvcr.layout import Layout
from kvcr.pool.meta import boot_id
from kvcr.protocol import engine
from kvcr.protocol.engine import BlockStatus, Source, to_guard
from kvcr.protocol.peer import (
    CANARY_KEY,
    VERSION,
    Discard,
    Lease,
    PeerHello,
    PeerWelcome,
    Probe,
    Release,
    Replay,
    Snapshot,
    ToServer,
    to_server,
)

DURATION_S = float(os.environ.get("KVCR_FUZZ_S", "60"))
SEED = int(os.environ.get("KVCR_FUZZ_SEED", str(random.randrange(1 << 32))))
WARM_UP_S = min(8.0, DURATION_S / 4)
MAX_GROWTH_BYTES = 64 << 20
SECRET = b"what all of the deployment know"

pytestmark = pytest.mark.timeout(DURATION_S + 180)


class Junk:
    """What to send: noise, good messages with something wrong, and messages that are good and hostile."""

    def __init__(self, seed: int, trap: Path) -> None:
        self.random = random.Random(seed)
        self.pickle = pickle.dumps(_Trap(str(trap)))
        self.good = [to_server.encode(message) for message in _peer_messages()]
        self.good += [to_server.encode(message) for message in _of_every_type(ToServer, self.random)]
        self.typed = [to_guard.encode(message) for message in _of_every_type(engine.ToGuard, self.random)]
        self.good += self.typed

    def next(self) -> bytes:
        draw = self.random
        match draw.randrange(8):
            case 0:
                return draw.randbytes(draw.choice((0, 1, 7, 100, 3000, 150_000)))
            case 1:
                return self.pickle
            case 2:
                return draw.choice((b"\x91", b"\x81\x01", b"\xdd\xff\xff\xff\xff")) * draw.randrange(
                    1, 40_000
                )
            case 3:
                return msgspec.msgpack.encode(self._nested(draw.randrange(6)))
            case _:
                return self._bent(draw.choice(self.good))

    def _nested(self, depth: int) -> object:
        draw = self.random
        if not depth:
            return draw.choice((None, -1, 2**63, 1e300, "x" * 1000, b"y" * 1000, True, [], {}))
        if draw.random() < 0.5:
            return [
                draw.choice(("Lease", "Hello", "Fetch", depth)),
                *(self._nested(depth - 1) for _ in "abc"),
            ]
        return {str(key): self._nested(depth - 1) for key in range(3)}

    def _bent(self, raw: bytes) -> bytes:
        draw, bent = self.random, bytearray(raw)
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(bent) + 1)
            match draw.randrange(4):
                case 0:
                    bent[at : at + 1] = bytes([draw.randrange(256)])
                case 1:
                    del bent[at : at + draw.randrange(1, 20)]
                case 2:
                    bent[at:at] = draw.randbytes(draw.randrange(1, 20))
                case 3:
                    other = draw.choice(self.good)
                    bent[at:] = other[draw.randrange(len(other)) :]
        return bytes(bent)


class _Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (self._path,)


def _peer_messages() -> list[object]:
    keys = os.urandom(16 * 50)
    return [
        PeerHello(VERSION, 1, "fuzz", 1, LAYOUT.digest()),
        PeerHello(99, 1, "fuzz", 1, "x" * 5000, want_offer="nothing"),
        Lease(2, "fuzz", 1, keys, 1 << 40, "shm"),
        Lease(2, "fuzz", 1, keys, -5, "nixl"),
        Lease(2, "fuzz", 1, CANARY_KEY, 60_000, "shm"),
        Lease(2, "fuzz", 1, keys[:-3], 100, "shm"),
        Lease(2, "fuzz", 1, b"", 100, "carrier pigeon"),
        Release(1, 1 << 60, -1, "shm", b"\xff" * 400, bytes(800)),
        Release(-1, 5, 5, "shm", bytes(8), bytes(3)),
        Release(0, 5, 5, "shm", b"", b"", b"\xff" * 40, bytes(80)),
        Release(0, 5, 5, "shm", b"", b"", bytes(8), bytes(3)),
        Snapshot(3, -(1 << 62)),
        Snapshot(3, 1 << 62),
        Replay(4, -5, 1 << 62),
        Discard(5, "fuzz", 1, "plan", keys),
        Probe(6, "tcp://127.0.0.1:1"),
        Probe(6, "unix:///nowhere", curve_key="zz"),
        Probe(6, "junk"),
        Probe(6, f"tcp://{'x' * 64}:1"),
        Probe(6, f"tcp://{'x' * 64}:1", curve_key="zz"),
        Probe(6, "tcp://no.such.host.invalid:1"),
        Probe(6, "tcp://a\0b:1"),
        Probe(6, "tcp://127.0.0.1:1", unix_socket="/nowhere", boot_id=boot_id(), curve_key="zz"),
        Probe(6, "tcp://127.0.0.1:1", unix_socket="a\0b", boot_id=boot_id()),
    ]


def _of_every_type(union: Any, draw: random.Random) -> list[object]:
    """Some messages of each type, with values of the right types, few of them sensible."""
    return [
        kind(*(_value(hint, draw) for hint in typing.get_type_hints(kind).values()))
        for kind in typing.get_args(union)
        for _ in range(12)
    ]


def _value(hint: Any, draw: random.Random) -> Any:
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        return [] if draw.random() < 0.3 else [_value(arguments[0], draw)]
    if origin is dict:
        return {}
    if arguments:
        return _value(draw.choice(arguments), draw)
    if hint is Layout:
        return LAYOUT
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return draw.choice(list(hint))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint(*(_value(inner, draw) for inner in typing.get_type_hints(hint).values()))
    simple: dict[Any, Any] = {
        int: draw.choice((0, 1, 1, 7, -1, 1 << 31, 1 << 40, -(1 << 62))),
        float: draw.choice((0.0, 1.0, -1.0, 1e300, float("nan"))),
        str: draw.choice(("", "r", "tcp://127.0.0.1:1", "../x", "x" * 3000)),
        bytes: draw.randbytes(draw.choice((0, 3, 16, 16, 32, 4 * 16, 50 * 16))),
        bool: draw.random() < 0.5,
        type(None): None,
    }
    return simple.get(hint)


def _until(end_s: float, feed: Callable[[], None]) -> None:
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError, zmq.ZMQError):
            feed()


def feed_unix(guard: GuardProcess, junk: Junk) -> Callable[[], None]:
    """Some messages on a connection, the first of them with descriptors, as an engine's may be."""

    def feed() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(1)
            sock.connect(guard.ready["socket"])
            fds = array.array("i", [sock.fileno()] * junk.random.randrange(4))
            sock.sendmsg([junk.next()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])
            for _ in range(junk.random.randrange(30)):
                sock.send(junk.next(), socket.MSG_DONTWAIT)

    return feed


def feed_engine(guard: GuardProcess, junk: Junk, engine_id: str) -> Callable[[], None]:
    """An engine that has attached as it should, and then loses its mind."""

    def feed() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(1)
            sock.connect(guard.ready["socket"])
            role = junk.random.choice(list(engine.Role))
            hello = engine.Hello(engine.VERSION, role, engine_id, 0, os.getpid(), LAYOUT, "test")
            sock.send(to_guard.encode(hello))
            sock.recv(1 << 18)
            for _ in range(junk.random.randrange(60)):
                raw = junk.next() if junk.random.random() < 0.05 else junk.random.choice(junk.typed)
                sock.send(raw, socket.MSG_DONTWAIT)

    return feed


def feed_zmq(guard: GuardProcess, junk: Junk, secret: bytes | None) -> Callable[[], None]:
    """Frames by the hundred on a connection, not reading half of the answers."""

    def feed() -> None:
        key = guard.ready["public_key"]
        with PeerClient(guard.endpoint, 500, secret, key) as client:
            for _ in range(200):
                frames = [junk.next() for _ in range(junk.random.choice((1, 1, 1, 1, 2, 9, 30)))]
                client.socket.send_multipart(frames)
                if junk.random.random() < 0.5:
                    with contextlib.suppress(zmq.Again):
                        client.socket.recv(zmq.DONTWAIT)

    return feed


def feed_tcp(endpoint: str, junk: Junk) -> Callable[[], None]:
    """Noise, and the beginnings of a greeting of ZMQ, from connections that also just stay."""
    host, port = endpoint.split("//")[1].split("/")[0].split(":")
    staying: list[socket.socket] = []

    def feed() -> None:
        sock = socket.create_connection((host, int(port)), timeout=1)
        greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
        cut = greeting[: junk.random.randrange(len(greeting))]
        sock.sendall(junk.random.choice((cut, greeting, b"GET / HTTP/1.1\r\n" * 300, b"")) + junk.next())
        staying.append(sock)
        if len(staying) > 100:
            staying.pop(junk.random.randrange(100)).close()

    return feed


def test_a_minute_of_junk_on_every_port(directory: Path) -> None:
    print(f"KVCR_FUZZ_SEED={SEED}")
    trap = directory / "trap"
    (directory / "secret").write_bytes(SECRET)
    with (
        GuardProcess(directory, "open", env={"KVCR_LOG_LEVEL": "WARNING"}) as open_guard,
        GuardProcess(
            directory,
            "closed",
            "--secret-file",
            str(directory / "secret"),
            env={"KVCR_LOG_LEVEL": "WARNING"},
        ) as closed_guard,
        EngineClient(open_guard, "engine-open") as source,
        EngineClient(closed_guard, "engine-closed"),
    ):
        root, keys = chain(20, "tenant")
        source.deposit(keys, root)
        end_s = time.monotonic() + DURATION_S
        junk = [Junk(SEED + number, trap) for number in range(10)]
        feeds = [
            feed_unix(open_guard, junk[0]),
            feed_unix(closed_guard, junk[1]),
            feed_zmq(open_guard, junk[2], None),
            feed_zmq(closed_guard, junk[3], SECRET),
            feed_zmq(closed_guard, junk[4], b"what others know"),
            feed_zmq(closed_guard, junk[5], None),
            feed_engine(closed_guard, junk[9], "engine-closed"),
            feed_tcp(open_guard.endpoint, junk[6]),
            feed_tcp(closed_guard.endpoint, junk[7]),
            feed_tcp(open_guard.ready["metrics"], junk[8]),
        ]
        threads = [threading.Thread(target=_until, args=(end_s, feed)) for feed in feeds]
        for thread in threads:
            thread.start()
        time.sleep(WARM_UP_S)
        before = [resident_bytes(guard) for guard in (open_guard, closed_guard)]
        for thread in threads:
            thread.join()
        feeds.clear()
        for guard, then in zip((open_guard, closed_guard), before, strict=True):
            assert guard.process.poll() is None, guard.log_path.read_text()[-3000:]
            grown = resident_bytes(guard) - then
            assert grown < MAX_GROWTH_BYTES, f"{guard.name} grew by {grown >> 20} MiB after the warm-up"
            assert guard.metrics()['kvcr_peer_refusals_total{code="malformed"}'] > 100
            # Once a second for each place that warns.
            assert guard.log_path.stat().st_size < 4000 * (DURATION_S + 10)
            assert descriptors(guard) < 250
            log = guard.log_path.read_text()
            assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
        assert not trap.exists()
        assert closed_guard.metrics()['kvcr_peer_refusals_total{code="unauthenticated"}'] > 0
        assert closed_guard.metrics()['kvcr_peer_refusals_total{code="handshake"}'] > 0
        still_serves(directory, open_guard, root)


def still_serves(directory: Path, guard: GuardProcess, root: bytes) -> None:
    """Blocks deposited before are still there, and can be pulled."""
    _, keys = chain(20, "tenant")
    with GuardProcess(directory, "b") as b, EngineClient(b, "engine-b") as target:
        _, progress = target.fetch("r", keys, root, [Source(guard.endpoint, 0, 20)])
        assert set(progress.statuses) == {BlockStatus.OK}
        assert all(target.right(keys))
    with PeerClient(guard.endpoint) as client:
        assert isinstance(client.ask(PeerHello(VERSION, 1, "router", 0, "")), PeerWelcome)


def resident_bytes(guard: GuardProcess) -> int:
    """Without the pool, which is shared memory."""
    pages = Path(f"/proc/{guard.pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def descriptors(guard: GuardProcess) -> int:
    """Open ones, once those of closed connections have gone."""
    deadline_s = time.monotonic() + 20
    while (count := len(os.listdir(f"/proc/{guard.pid}/fd"))) >= 250 and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return count
