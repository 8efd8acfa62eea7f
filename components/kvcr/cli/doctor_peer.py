# SPDX-License-Identifier: Apache-2.0
"""``kvcr doctor --peer HOST[:PORT]``: what moves between this host and a guard on another, and how fast.

A guard of our own is started for the time it takes, with a pool of a few blocks of the peer's layout. Then
each of the two is asked to try every way to the other: what is measured is what pulls would use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvcr.config import GuardConfig, PeerRecord, load, read_peers
from kvcr.errors import ConfigError, GuardUnavailable, KvcrError
from kvcr.guard.addresses import bracketed, is_loopback, route_to, split_host
from kvcr.guard.spawn import announced
from kvcr.layout import Layout
from kvcr.protocol.codec import MAX_MESSAGE_BYTES
from kvcr.protocol.curve import read_key, secure_client
from kvcr.protocol.engine import VERSION as ENGINE_VERSION
from kvcr.protocol.engine import Hello, Rejected, Role, Welcome, to_engine, to_guard
from kvcr.protocol.peer import (
    VERSION,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Probe,
    Probed,
    ToClient,
    ToServer,
    to_client,
    to_server,
)

ANSWER_S = 5.0
PROBE_S = 60.0
START_S = 30.0
ETCD_S = 5.0
SLOTS = 4


class Target(msgspec.Struct, frozen=True):
    """What to examine, and with what."""

    peer: str
    """HOST, HOST:PORT, or the name of a guard."""
    secret_file: str = ""
    peers_file: str = ""
    interface: str = ""
    namespace: str = "dynamo"


class PeerReport(msgspec.Struct, frozen=True):
    """What ``kvcr doctor --peer --json`` prints."""

    peer: str
    endpoint: str
    healthy: bool
    """Pulls work in both directions."""
    directions: list[dict[str, Any]]
    """One for each reader, see :class:`kvcr.protocol.peer.Probed`."""


def run(target: Target, *, as_json: bool) -> int:
    """Print the report; exit code 0 when both directions have a way that works.

    Raises ConfigError for a peer that nobody knows, GuardUnavailable for one that does not answer.
    """
    report = examine(target)
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(report)
    return 0 if report.healthy else 1


def examine(target: Target) -> PeerReport:
    """Measure both directions."""
    secret = _settings(target, "tcp://127.0.0.1:0").secret()
    record = find(target, secret)
    with _Control(record, secret) as peer:
        welcome = peer.ask(PeerHello(VERSION, 1, "doctor", 0, ""), ANSWER_S)
        if not isinstance(welcome, PeerWelcome):
            raise GuardUnavailable(f"{record.endpoint} answered {type(welcome).__name__} to a greeting")
        if welcome.layout is None:
            raise GuardUnavailable(
                f"{welcome.name} at {record.endpoint} answers, but no engine has attached to it yet, so "
                "there is no pool to measure with; start its engine first"
            )
        with _own_guard(target, record, welcome.layout) as own, _Control(own, secret) as mine:
            here = _probe(mine, record)
            there = _probe(peer, own)
    healthy = all(probed.chosen and not probed.error for probed in (here, there))
    return PeerReport(
        welcome.name, record.endpoint, healthy, [msgspec.to_builtins(_named(p)) for p in (here, there)]
    )


def find(target: Target, secret: bytes | None) -> PeerRecord:
    """The peer's record: from the peers file, else from etcd; without a secret, host and port are enough."""
    host, _, port = target.peer.rpartition(":") if _has_port(target.peer) else (target.peer, "", "")
    if port and secret is None and not target.peers_file:
        return PeerRecord(f"tcp://{bracketed(host.strip('[]'))}:{port}")
    known = read_peers(target.peers_file) if target.peers_file else []
    trouble = ""
    if not known:
        try:
            known = asyncio.run(_from_etcd(target.namespace, secret))
        except (KvcrError, ImportError, TimeoutError) as error:
            trouble = f" (etcd: {error})"
    addresses = _resolve(host)
    for record in known:
        there, its_port = split_host(record.endpoint)
        if port and its_port != int(port):
            continue
        if record.name == target.peer or there in {host.strip("[]"), *addresses}:
            return record
    names = ", ".join(f"{record.name or '?'} at {record.endpoint}" for record in known) or "none"
    raise ConfigError(
        f"no record of a guard at {target.peer}{trouble}; known: {names}. Set ETCD_ENDPOINTS and --namespace,"
        " or name a file of peer records with --peers (they carry the public key that a secret asks for)"
    )


async def _from_etcd(namespace: str, secret: bytes | None) -> list[PeerRecord]:
    # Only here: etcd is not needed with a peers file.
    from kvcr.dynamo.etcd import connect, credentials_from_environment, endpoints_from_environment
    from kvcr.dynamo.records import decode, guards_prefix

    records = []
    async with asyncio.timeout(ETCD_S):
        async with await connect(
            endpoints_from_environment(), credentials=credentials_from_environment()
        ) as etcd:
            for entry in (await etcd.get_prefix(guards_prefix(namespace))).values:
                with contextlib.suppress(KvcrError):
                    records.append(decode(entry.key, entry.value, secret).peer())
    return records


class _Control:
    """A guard's control socket, blocking."""

    def __init__(self, record: PeerRecord, secret: bytes | None) -> None:
        self._endpoint = record.endpoint
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = "[" in record.endpoint
        if secret is not None:
            server_key = read_key(record.curve_key, record.name or record.endpoint)
            secure_client(self._socket, secret, server_key)
        self._socket.connect(record.endpoint)

    def ask(self, message: ToServer, timeout_s: float) -> ToClient:
        """Raises GuardUnavailable when there is no answer, or a refusal."""
        self._socket.send(to_server.encode(message))
        if not self._socket.poll(int(timeout_s * 1000)):
            raise GuardUnavailable(
                f"{self._endpoint} did not answer within {timeout_s:g} s: nobody listens there, a firewall"
                " is in the way, or it has another secret"
            )
        reply = to_client.decode(self._socket.recv())
        if isinstance(reply, PeerRefused):
            raise GuardUnavailable(f"{self._endpoint} refused, {reply.code}: {reply.reason}")
        return reply

    def __enter__(self) -> _Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def _own_guard(target: Target, peer: PeerRecord, layout: Layout) -> Iterator[PeerRecord]:
    """A guard here that has a pool of this layout, and its record."""
    directory = tempfile.mkdtemp(prefix="kvcr-doctor-", dir="/dev/shm")
    host, _ = split_host(peer.endpoint)
    control = "tcp://127.0.0.1:0"
    if not target.interface and not is_loopback(host):
        _, own = route_to(host)
        if not own:
            raise ConfigError(f"there is no route to {host}; name an interface with --interface")
        control = f"tcp://{bracketed(own)}:0"
    config = _settings(target, control)
    command = [
        sys.executable, "-m", "kvcr.guard",
        "--name", f"doctor-{socket.gethostname()[:40]}-{os.getpid()}",
        "--pool-dir", directory,
        "--pool-bytes", str(SLOTS * layout.slot_part_bytes * layout.ranks),
        "--control", config.control,
        "--metrics-port", "-1", "--scrub-bytes-per-s", "0", "--remove-pool-on-exit",
    ]  # fmt: skip
    for flag, value in (("--interface", target.interface), ("--secret-file", target.secret_file)):
        command += [flag, value] if value else []
    log_path = Path(directory) / "log"
    try:
        with open(log_path, "wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        try:
            ready = announced(process, START_S)
            if not ready:
                raise GuardUnavailable(
                    f"no guard starts here within {START_S:g} s: {log_path.read_text()[-1000:]}"
                )
            with _attach(ready["socket"], layout):
                yield PeerRecord(
                    ready["control"],
                    name=ready["name"],
                    unix_socket=ready["socket"],
                    boot_id=ready["boot_id"],
                    net_namespace=ready["net_namespace"],
                    curve_key=ready["public_key"],
                )
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ANSWER_S)
            process.kill()
            process.wait()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _attach(path: str, layout: Layout) -> socket.socket:
    """Greet our own guard as an engine would, so that it makes a pool. Raises GuardUnavailable."""
    hello = Hello(ENGINE_VERSION, Role.SCHEDULER, "doctor", 0, os.getpid(), layout, "doctor")
    with contextlib.ExitStack() as on_failure:
        sock = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.settimeout(START_S)
        try:
            sock.connect(path)
            sock.send(to_guard.encode(hello))
            raw = sock.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise GuardUnavailable(f"our own guard does not answer: {error}") from error
        answer = to_engine.decode(raw) if raw else None
        if not isinstance(answer, Welcome):
            why = answer.reason if isinstance(answer, Rejected) else "it closed the connection"
            raise GuardUnavailable(f"our own guard cannot take part: {why}")
        on_failure.pop_all()
    return sock


def _probe(guard: _Control, source: PeerRecord) -> Probed:
    reply = guard.ask(
        Probe(
            op=2,
            endpoint=source.endpoint,
            name=source.name,
            unix_socket=source.unix_socket,
            boot_id=source.boot_id,
            net_namespace=source.net_namespace,
            curve_key=source.curve_key,
        ),
        PROBE_S,
    )
    if not isinstance(reply, Probed):
        raise GuardUnavailable(f"{type(reply).__name__} instead of measurements")
    return reply


def _settings(target: Target, control: str) -> GuardConfig:
    return load(
        GuardConfig,
        {
            "name": "doctor",
            "pool_dir": "/dev/shm",
            "pool_bytes": 1,
            "control": "tcp://127.0.0.1:0" if target.interface else control,
            "interface": target.interface,
            "secret_file": target.secret_file,
        },
        "doctor",
    )


def _has_port(peer: str) -> bool:
    """``fd00::1`` is an address without one, ``[fd00::1]:7100`` has one."""
    head, _, port = peer.rpartition(":")
    return port.isdigit() and bool(head) and (":" not in head or head.endswith("]"))


def _resolve(host: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, ValueError):
        return set()


class _Direction(msgspec.Struct, frozen=True, kw_only=True):
    """:class:`Probed` with names, for JSON."""

    reader: str
    source: str
    error: str
    interface: str
    address: str
    ucx_devices: str
    round_trip_us: float
    chosen: str
    ways: list[dict[str, Any]]
    rejected: dict[str, str]


def _named(probed: Probed) -> _Direction:
    return _Direction(
        reader=probed.reader,
        source=probed.source,
        error=probed.error,
        interface=probed.interface,
        address=probed.address,
        ucx_devices=probed.ucx_devices,
        round_trip_us=round(probed.round_trip_s * 1e6, 1),
        chosen=probed.chosen,
        ways=[
            {
                "way": row.way,
                "why": row.why,
                "error": row.error,
                "first_ms": round(row.first_s * 1e3, 2),
                "mb_per_s": round(row.bytes_per_s / 1e6, 1),
                "read_bytes": row.nbytes,
            }
            for row in probed.ways
        ],
        rejected=dict(probed.rejected),
    )


def _print(report: PeerReport) -> None:
    for direction in report.directions:
        print(f"{direction['reader']} reads from {direction['source']}")
        if direction["error"]:
            print(f"  fail  {direction['error']}")
        route = f"{direction['interface'] or '?'} ({direction['address'] or 'no route'})"
        print(f"  interface {route}, UCX may use {direction['ucx_devices'] or 'any'}")
        if direction["round_trip_us"]:
            print(f"  control round trip {direction['round_trip_us']:.0f} us")
        for row in direction["ways"]:
            if row["error"]:
                print(f"  -     {row['way']:<16} does not work: {row['error']}")
            else:
                mark = "use" if row["way"] == direction["chosen"] else "ok"
                speed = f"{row['mb_per_s']:8.0f} MB/s, first block {row['first_ms']:.1f} ms"
                print(f"  {mark:<5} {row['way']:<16} {speed}")
        for way, why in direction["rejected"].items():
            print(f"  -     {way:<16} {why}")
        if direction["chosen"]:
            why = next(row["why"] for row in direction["ways"] if row["way"] == direction["chosen"])
            print(f"  would use {direction['chosen']}: first of the ways that work; {why}")
        print()
    print("pulls work in both directions" if report.healthy else "pulls do not work in both directions")
