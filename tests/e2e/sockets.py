# SPDX-License-Identifier: Apache-2.0
"""TCP sockets of a graph's processes, from /proc, under the names of docs/deploy/ports.md."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvcr.graph.config import Kind
from kvcr.graph.processes import descendants

PAGE = Path(__file__).parents[2] / "docs/deploy/ports.md"
LISTEN, ESTABLISHED = "0A", "01"


class Service(NamedTuple):
    """Something that listens: ``role`` of its process, and its name in the table."""

    role: str
    name: str


class Socket(NamedTuple):
    role: str
    pid: int
    address: str
    port: int
    peer_port: int
    state: str


def documented() -> dict[Service, set[str]]:
    """The table: what listens, and who connects, as words."""
    rows = re.findall(r"^\| \S+ \| (\S+) \| `(\w+)` \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    return {Service(role.lower(), name): set(who.split(", ")) for role, name, who in rows}


def sockets(state: Mapping[str, Any]) -> list[Socket]:
    """Of all processes of a graph, and of their children. ``state`` is its graph.json."""
    role_of: dict[int, str] = {}
    for component in state["components"]:
        role = Kind(component["component"]).role
        for pid in (component["pid"], *(child.pid for child in descendants(component["pid"]))):
            role_of[pid] = role
    owner = {inode: pid for pid in role_of for inode in _inodes(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            columns = line.split()
            if (pid := owner.get(columns[9])) is not None and columns[3] in (LISTEN, ESTABLISHED):
                address, port = _address(columns[1])
                found.append(Socket(role_of[pid], pid, address, port, _address(columns[2])[1], columns[3]))
    return found


def services(state: Mapping[str, Any], found: Iterable[Socket], requests: set[int]) -> dict[int, Service]:
    """What listens, by port. ``requests`` are the ports of Dynamo's request plane, as etcd has them."""
    named = {
        number: Service(Kind(component["component"]).role, name)
        for component in state["components"]
        for name, number in component["ports"].items()
    }
    main = {component["pid"] for component in state["components"]}
    return {
        socket.port: named.get(socket.port) or Service(socket.role, _unnamed(socket, main, requests))
        for socket in found
        if socket.state == LISTEN
    }


def _unnamed(socket: Socket, main: set[int], requests: set[int]) -> str:
    """Ports that are not in graph.json are told by whose they are."""
    if socket.role in ("etcd", "nats"):
        return "peer" if socket.role == "etcd" else "monitor"
    if socket.pid not in main:
        return "engine" if socket.role == "worker" else "bytes"
    return "requests" if socket.port in requests else "answers"


def connections(found: Iterable[Socket], listening: Mapping[int, Service]) -> set[tuple[str, Service]]:
    """Who of the graph is connected to what of it."""
    established = [socket for socket in found if socket.state == ESTABLISHED]
    clients = {(socket.port, socket.peer_port): socket.role for socket in established}
    return {
        (clients[socket.peer_port, socket.port], listening[socket.port])
        for socket in established
        if socket.port in listening and (socket.peer_port, socket.port) in clients
    }


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _inodes(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                    found.append(match[1])
    return found


def _address(text: str) -> tuple[str, int]:
    """From /proc: the address in words of host byte order, the port in hex."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
