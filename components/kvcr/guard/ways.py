# SPDX-License-Identifier: Apache-2.0
"""Which ways lead to a peer, in the order in which they are tried, and why the others do not.

The order is that of measurements: copying out of a mapped pool beats a copy between processes (CMA) by 1.3
to 1.6 times, and that beats TCP by more. RDMA is for other hosts. So the first way that works is taken, and
no other is even prepared. Transports of other makers, of which nothing is known, are measured against it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvcr.guard.addresses import Place
from kvcr.protocol.peer import PeerWelcome

_CMA_TLS = {"all", "cma", "sm", "shm"}
_TCP_TLS = {"all", "tcp"}
_RDMA_TLS = {
    "all",
    "rc",
    "rc_x",
    "rc_v",
    "rc_verbs",
    "rc_mlx5",
    "dc",
    "dc_x",
    "dc_mlx5",
    "ud",
    "ib",
    "ib_mlx5",
}


class Way(NamedTuple):
    """One way to read from a peer."""

    transport: str
    """``shm``, ``nixl``, or the name of a plugin."""
    via: str
    """What is below NIXL: ``cma``, ``rdma``, ``tcp``, or another back-end's name; otherwise empty."""
    why: str
    tls: str = ""
    """``UCX_TLS`` to hold NIXL to, for measuring; empty: it chooses."""

    def __str__(self) -> str:
        return f"{self.transport} over {self.via}" if self.via else self.transport


class Setting(NamedTuple):
    """Our side of the question."""

    choice: str
    """The ``transport`` setting."""
    place: Place
    rdma_ports: Sequence[str]
    ucx_tls: str
    """``UCX_TLS`` of the environment; empty: all."""
    nixl_backend: str
    nixl_error: str
    """Why NIXL cannot be used here; empty when it can."""


class Ways(NamedTuple):
    built_in: list[Way]
    """In order of preference."""
    plugins: list[Way]
    """To be measured against the first of these that works."""
    rejected: dict[str, str]
    """Way -> why not."""


def ways(setting: Setting, peer: PeerWelcome, plugins: Mapping[str, Callable[[PeerWelcome], str]]) -> Ways:
    """What may be tried. Each plugin's function says why it does not reach the peer, "" when it does."""
    found = Ways([], [], {})
    same_host = peer.boot_id == setting.place.boot_id
    if setting.choice in ("auto", "shm"):
        if same_host:
            found.built_in.append(Way("shm", "", "its pool may be mapped on this host"))
        else:
            found.rejected["shm"] = "it is on another host"
    if setting.choice in ("auto", "nixl"):
        _nixl_ways(setting, peer, same_host, found)
    for name, reach in plugins.items():
        if setting.choice not in ("auto", name):
            continue
        error = reach(peer) if name in peer.plugins else f"{peer.name} does not have this plugin"
        if error:
            found.rejected[name] = error
        else:
            found.plugins.append(Way(name, "", "both sides have this plugin"))
    return found


def _nixl_ways(setting: Setting, peer: PeerWelcome, same_host: bool, found: Ways) -> None:
    if setting.nixl_error:
        found.rejected["nixl"] = setting.nixl_error
        return
    if setting.nixl_backend != "UCX":
        why = f"NIXL is set to back-end {setting.nixl_backend}"
        found.built_in.append(Way("nixl", setting.nixl_backend.lower(), why))
        return
    allowed = {name.strip() for name in setting.ucx_tls.split(",") if name.strip()} or {"all"}
    error = _no_cma(setting, peer, same_host, allowed)
    if error:
        found.rejected["nixl over cma"] = error
    else:
        found.built_in.append(Way("nixl", "cma", "processes of this host may read each other's memory"))
    error = _no_rdma(setting, peer, allowed)
    if error:
        found.rejected["nixl over rdma"] = error
    else:
        found.built_in.append(Way("nixl", "rdma", "both hosts have RDMA ports that are up"))
    if allowed & _TCP_TLS:
        found.built_in.append(Way("nixl", "tcp", "TCP reaches whomever control reaches"))
    else:
        found.rejected["nixl over tcp"] = f"UCX_TLS={setting.ucx_tls} leaves it out"


def _no_cma(setting: Setting, peer: PeerWelcome, same_host: bool, allowed: set[str]) -> str:
    if not same_host:
        return "it is on another host"
    if peer.pid_namespace != setting.place.pid_namespace:
        return "it is in another PID namespace"
    return "" if allowed & _CMA_TLS else f"UCX_TLS={setting.ucx_tls} leaves it out"


def _no_rdma(setting: Setting, peer: PeerWelcome, allowed: set[str]) -> str:
    if not setting.rdma_ports:
        return "no RDMA port is up here"
    if not peer.rdma_ports:
        return "no RDMA port is up there"
    return "" if allowed & _RDMA_TLS else f"UCX_TLS={setting.ucx_tls} leaves it out"


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def cma_error(peer: PeerWelcome) -> str:
    """Try to read 8 bytes of the peer's memory, as UCX would; "" when that works, else why it does not.

    The peer must be in our PID namespace, and have told of its NIXL agent. ptrace_scope, capabilities and
    other users forbid it.
    """
    if not peer.pid or not peer.region_addresses:
        return "it has not said where its memory is"
    target = ctypes.create_string_buffer(8)
    local = _Part(ctypes.addressof(target), 8)
    remote = _Part(peer.region_addresses[0], 8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    done = libc.process_vm_readv(peer.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if done == 8:
        return ""
    return f"its memory cannot be read ({os.strerror(ctypes.get_errno())}); see `kvcr doctor`, CMA"
