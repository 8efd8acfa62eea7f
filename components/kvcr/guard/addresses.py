# SPDX-License-Identifier: Apache-2.0
"""Where a guard binds, what it tells peers to connect to, and which network card carries the bytes.

Binding and advertising are two settings. What is advertised to other hosts is never a loopback address:
a peer there would connect to itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from kvcr.config import DEFAULT_CONTROL, GuardConfig
from kvcr.errors import ConfigError

# linux/rtnetlink.h, linux/if_addr.h
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SCOPE_LINK = 253

_WILDCARDS = ("0.0.0.0", "::", "*")
_PROBE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses: connecting a UDP socket to one sends nothing, and tells the default route."""


class Place(NamedTuple):
    """Where a process stands: what it shares with another decides how they can reach each other."""

    boot_id: str
    """Equal: one kernel, so that files and Unix sockets may be shared."""
    net_namespace: int
    """Equal as well: one loopback interface. 0 when not known."""
    pid_namespace: int
    """Equal as well: processes see each other, which copies between them (CMA) need. 0 when not known."""

    def same_loopback(self, boot_id: str, net_namespace: int) -> bool:
        """Whether 127.0.0.1 means the same there and here. A place that says nothing is taken for ours."""
        if boot_id and boot_id != self.boot_id:
            return False
        return not net_namespace or net_namespace == self.net_namespace


class Addresses(NamedTuple):
    """What :func:`plan` decides."""

    bind: str
    """ZMQ endpoint to bind; the port may be 0."""
    advertise: str
    """Host or host:port that peers connect to; empty: what was bound."""
    interface: str
    """Network interface of control and bytes, e.g. ``eth1``; empty: whichever the kernel routes by."""


def here(boot_id: str) -> Place:
    """The place of this process."""
    return Place(boot_id, _namespace("net"), _namespace("pid"))


def plan(config: GuardConfig) -> Addresses:
    """Decide from ``control``, ``advertise`` and ``interface``.

    Raises ConfigError when they contradict each other, name nothing that exists, or would have a loopback
    address advertised to other hosts.
    """
    host, port = split_host(config.control)
    advertise = _with_brackets(config.advertise)
    if not config.interface:
        if host in _WILDCARDS:
            interface, advertise = "", advertise or bracketed(_default_address(host))
        else:
            # Behind a proxy, control is on loopback and bytes are not: then UCX finds its own way.
            interface = "" if is_loopback(host) and advertise else interface_of(host)
    else:
        interface, address = _interface(config.interface)
        if host in _WILDCARDS:
            # Peers of every interface may connect; they are told the address of the configured one.
            advertise = advertise or bracketed(address)
        elif config.control == DEFAULT_CONTROL:
            host = address
        elif host not in interface_addresses(interface):
            raise ConfigError(
                f"control binds {host}, which is not an address of interface {config.interface!r} "
                f"({', '.join(interface_addresses(interface))}); leave --control out, or bind one of these"
            )
    told, _ = split_host(f"tcp://{advertise or 'elsewhere'}", any_port=True)
    if is_loopback(told) and not is_loopback(host):
        raise ConfigError(
            f"advertise is {advertise!r} while control binds {host}: peers on other hosts would connect to "
            "themselves; advertise an address they can reach, or bind to loopback"
        )
    return Addresses(f"tcp://{bracketed(host)}:{port}", advertise, interface)


def split_host(endpoint: str, *, any_port: bool = False) -> tuple[str, int]:
    """Host (without brackets) and port of ``tcp://host:port``; ``any_port`` allows none, which is 0.

    Raises ConfigError.
    """
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"endpoint {endpoint!r}: {error}; write tcp://host:port") from error
    if parts.scheme != "tcp" or not host or (port is None and not any_port):
        raise ConfigError(f"endpoint {endpoint!r} is not tcp://host:port, or tcp://[address]:port for IPv6")
    return host, port or 0


def bracketed(host: str) -> str:
    """``host`` as it stands in an endpoint: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address, brackets allowed) means the machine it is used on."""
    host = host.strip("[]")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def interface_addresses(name: str) -> list[str]:
    """Addresses of a network interface, IPv4 first; those of link scope are left out."""
    return [address for device, address in _all_addresses() if device == name]


def interface_of(host: str) -> str:
    """Name of the interface that has this address; empty when none has."""
    if is_loopback(host):
        return "lo"
    return next((device for device, address in _all_addresses() if address == host), "")


def route_to(host: str) -> tuple[str, str]:
    """Interface and own address by which packets to ``host`` leave; empty when there is no route.

    A name is resolved, which may take seconds.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(target)
            own = str(sock.getsockname()[0])
    except (OSError, ValueError):  # ValueError: no name at all, such as one with a label of 64 letters
        return "", ""
    return interface_of(own), own


def rdma_devices(sysfs: Path = Path("/sys/class/infiniband")) -> list[str]:
    """RDMA ports that are up, as UCX names them: ``mlx5_0:1``."""
    if not sysfs.is_dir():
        return []
    up = []
    for state in sysfs.glob("*/ports/*/state"):
        # A card may go while it is looked at: its driver is reloaded, its function moved to a container.
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                up.append(f"{state.parents[2].name}:{state.parent.name}")
    return sorted(up)


def set_ucx_devices(interface: str, environment: MutableMapping[str, str]) -> None:
    """Have UCX use this interface, and the RDMA ports of the same card, unless ``UCX_NET_DEVICES`` is set.

    For the guard's own process, whose NIXL process inherits it. An interface without IPv4 has UCX speak IPv6.
    """
    if not interface:
        return
    card = Path(f"/sys/class/net/{interface}/device/infiniband")
    own = {path.name for path in card.iterdir()} if card.is_dir() else set()
    ports = [port for port in rdma_devices() if port.partition(":")[0] in own]
    environment.setdefault("UCX_NET_DEVICES", ",".join([*ports, interface]))
    addresses = interface_addresses(interface)
    if addresses and all(":" in address for address in addresses):
        environment.setdefault("UCX_TCP_AF_PRIO", "inet6,inet")


def _interface(setting: str) -> tuple[str, str]:
    """Name and address for the ``interface`` setting, which may be either."""
    try:
        address = str(ipaddress.ip_address(setting.strip("[]")))
    except ValueError:
        names = [name for _, name in socket.if_nameindex()]
        if setting not in names:
            raise ConfigError(
                f"interface {setting!r} does not exist; there are: {', '.join(names)}"
            ) from None
        addresses = interface_addresses(setting)
        if not addresses:
            raise ConfigError(f"interface {setting!r} has no address; configure one") from None
        return setting, addresses[0]
    name = interface_of(address)
    if not name:
        raise ConfigError(f"no interface has the address {setting!r}; see `ip address`")
    return name, address


def _default_address(wildcard: str) -> str:
    """What to advertise after binding every interface: the address of the default route."""
    families = [socket.AF_INET6, socket.AF_INET] if wildcard == "::" else [socket.AF_INET]
    for family in families:
        _, own = route_to(_PROBE[family])
        if own and not is_loopback(own):
            return own
    every = [address for _, name in socket.if_nameindex() for address in interface_addresses(name)]
    usable = [a for a in every if not is_loopback(a) and (wildcard == "::" or ":" not in a)]
    if len(usable) == 1:
        return usable[0]
    raise ConfigError(
        f"control binds every interface and it is not clear what to advertise (no default route; addresses: "
        f"{', '.join(usable) or 'only loopback'}); set --advertise or --interface"
    )


def _with_brackets(advertise: str) -> str:
    try:
        return bracketed(str(ipaddress.ip_address(advertise.strip("[]"))))
    except ValueError:
        return advertise


def _all_addresses() -> list[tuple[str, str]]:
    """(interface, address) of this network namespace, IPv4 first, without those of link scope.

    Asked of the kernel by netlink (RTM_GETADDR), which alone knows secondary addresses too.
    """
    request = struct.pack("=IHHIIBBBBI", 24, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0, 0, 0, 0, 0, 0)
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.bind((0, 0))
        sock.send(request)
        while True:
            raw = sock.recv(1 << 16)
            at = 0
            while at < len(raw):
                length, kind = struct.unpack_from("=IH", raw, at)
                if kind != _RTM_NEWADDR:
                    return sorted(found, key=lambda entry: ":" in entry[1])
                found += _address_of(raw[at + 16 : at + length])
                at += -(-length // 4) * 4


def _address_of(body: bytes) -> list[tuple[str, str]]:
    """One RTM_NEWADDR message: the interface and its address, or nothing for one of link scope."""
    _, _, _, scope, index = struct.unpack_from("=BBBBI", body)
    if scope == _SCOPE_LINK:
        return []
    values: dict[int, bytes] = {}
    at = 8
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        values[kind] = body[at + 4 : at + length]
        at += max(4, -(-length // 4) * 4)
    # On a point-to-point link IFA_ADDRESS is the other end's.
    address = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS))
    return [] if address is None else [(socket.if_indextoname(index), str(ipaddress.ip_address(address)))]


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0
