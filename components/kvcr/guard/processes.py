# SPDX-License-Identifier: Apache-2.0
"""The engine's processes, by pidfd: told at once when one ends, and able to end it.

A wake-up and a means, never the proof of death: that is the writer locks. A pidfd is lost with the guard.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from kvcr.guard.loop import Loop

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Process:
    pidfd: int
    ours_to_kill: bool


class Processes:
    """Belongs to the authority thread. Processes are known by the pid they gave, of *their* PID namespace."""

    def __init__(self, loop: Loop, on_end: Callable[[int], None]) -> None:
        """``on_end(pid)`` is called when a process is gone, with all it had: locks, mappings, sockets."""
        self._loop = loop
        self._on_end = on_end
        self._known: dict[int, _Process] = {}

    def add(self, pid: int, sock: socket.socket, passed_fd: int) -> None:
        """Watch the process behind ``sock``, by the descriptor it passed (-1: none), which is ours now."""
        peer_pid = _peer_pid(sock)
        watched_pid = _pid_of(passed_fd)
        if passed_fd >= 0 and watched_pid is None:
            log.warning("process %d passed a descriptor that is no pidfd; ignored", pid)
            os.close(passed_fd)
            passed_fd = -1
        if passed_fd < 0 and peer_pid > 0:
            with contextlib.suppress(OSError):
                passed_fd = os.pidfd_open(peer_pid)
                watched_pid = peer_pid
        if passed_fd < 0:
            return
        self._forget(pid)
        # The kernel's word on who is at the other end, so that nobody has us kill a bystander.
        self._known[pid] = _Process(passed_fd, watched_pid == peer_pid and peer_pid > 0)
        self._loop.register(passed_fd, select.EPOLLIN, lambda _: self._ended(pid))

    def clear(self) -> None:
        """Watch nobody any more."""
        for pid in list(self._known):
            self._forget(pid)

    def kill(self) -> tuple[list[int], list[int]]:
        """SIGKILL every process; pids of those it was sent to, and of those that are out of reach."""
        reached, unreachable = [], []
        for pid, process in self._known.items():
            try:
                if not process.ours_to_kill:
                    raise PermissionError
                signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
                reached.append(pid)
            except ProcessLookupError:
                continue
            except OSError:
                unreachable.append(pid)
        return reached, unreachable

    def _ended(self, pid: int) -> None:
        # The event may be of a descriptor that was closed in this round, and whose number this one got.
        poller = select.poll()
        poller.register(self._known[pid].pidfd, select.POLLIN)
        if not poller.poll(0):
            return
        self._forget(pid)
        self._on_end(pid)

    def _forget(self, pid: int) -> None:
        process = self._known.pop(pid, None)
        if process is not None:
            self._loop.unregister(process.pidfd)
            os.close(process.pidfd)


def _peer_pid(sock: socket.socket) -> int:
    """Pid of the process that connected, 0 if it is of a PID namespace that is not ours to see."""
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def _pid_of(pidfd: int) -> int | None:
    """Pid that a pidfd is of: 0 in another PID namespace, -1 when it is gone; None for other descriptors."""
    if pidfd < 0:
        return None
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("Pid:")), None)
    except OSError:
        return None
