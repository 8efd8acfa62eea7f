# SPDX-License-Identifier: Apache-2.0
"""What this process is not allowed to do, and what is lost without it: told once, and the guard goes on."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from pathlib import Path

log = logging.getLogger(__name__)

_CAP_IPC_LOCK = 14
_CAP_SYS_PTRACE = 19
_INFINIBAND = Path("/sys/class/infiniband")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PROBE = b"kvcr"


def report(pool_bytes: int, transport: str) -> None:
    """Log what is missing for a pool of this size. ``transport`` is the guard's setting."""
    if transport == "shm":
        # Shared memory of one host needs no permission beyond that of its files.
        return
    for loss in (
        memory_lock_loss(
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], may(_CAP_IPC_LOCK), pool_bytes, rdma_cards()
        ),
        memory_access_loss(read_own_memory(), ptrace_scope(), may(_CAP_SYS_PTRACE)),
    ):
        if loss:
            log.warning("%s", loss)


def memory_lock_loss(limit: int, exempt: bool, pool_bytes: int, devices: list[str]) -> str:
    """What is lost with RLIMIT_MEMLOCK at ``limit`` bytes (-1: none); empty when nothing is.

    ``exempt``: CAP_IPC_LOCK is held. Without an RDMA device nobody would lock the pool.
    """
    if exempt or limit == resource.RLIM_INFINITY or limit >= pool_bytes or not devices:
        return ""
    return (
        f"memory locking is limited to {limit} bytes, the pool has {pool_bytes}: {', '.join(devices)} cannot "
        "register it, and pulls between hosts go over TCP; run with 'ulimit -l unlimited' (docker: --ulimit "
        "memlock=-1; Kubernetes: capability IPC_LOCK)"
    )


def memory_access_loss(refusal: int, scope: int, exempt: bool) -> str:
    """What is lost when process_vm_readv ended with ``refusal`` (an errno, 0: it works) or Yama forbids it.

    ``exempt``: CAP_SYS_PTRACE is held. UCX asks Yama for scope 1 itself.
    """
    if refusal:
        why = f"process_vm_readv is refused ({os.strerror(refusal)})"
    elif scope >= 2 and not exempt:
        why = f"kernel.yama.ptrace_scope is {scope}"
    else:
        return ""
    return (
        f"reading memory of other processes (CMA) is not permitted, {why}: guards on one host that cannot "
        "see each other's /dev/shm copy over TCP instead; give the container CAP_SYS_PTRACE and a seccomp "
        "profile that allows process_vm_readv, or share one /dev/shm"
    )


def may(capability: int) -> bool:
    """Whether this process holds a capability now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def rdma_cards() -> list[str]:
    """Cards whatever the state of their ports, by name: ``mlx5_0``."""
    return sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []


def ptrace_scope() -> int:
    """Yama's setting, 0 where there is none."""
    try:
        return int(_PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return 0


def read_own_memory() -> int:
    """errno of process_vm_readv on this process, 0 when it works: what a seccomp profile says to it."""

    class Part(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    source, target = (ctypes.create_string_buffer(text, len(_PROBE)) for text in (_PROBE, bytes(4)))
    local, remote = (Part(ctypes.addressof(buffer), len(_PROBE)) for buffer in (target, source))
    done = libc.process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return 0 if done == len(_PROBE) else ctypes.get_errno()
