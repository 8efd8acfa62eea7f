# SPDX-License-Identifier: Apache-2.0
"""Children of the launcher and everything they fork: started, followed and ended by process id.

vLLM forks an engine and workers that outlive their parent's SIGTERM by tens of seconds, and a grandchild
whose parent died would be adopted by init and lost. The launcher therefore makes itself the *subreaper* of
its descendants: whatever they do, ``/proc`` shows all of them below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

_SHM = Path("/dev/shm")
# What Python's multiprocessing and vLLM create there and a killed process cannot remove.
_SHM_PREFIXES = ("psm_", "sem.mp-", "sem.loky-", "vllm", "VLLM")
_TRACKER = b"multiprocessing.resource_tracker"


@dataclass(frozen=True)
class Process:
    """One line of ``/proc``."""

    pid: int
    parent: int
    session: int
    zombie: bool


class Child:
    """One started process, in a session of its own."""

    def __init__(self, argv: Iterable[str], env: Mapping[str, str], log: Path) -> None:
        """Start it, with ``env`` over our environment and all output appended to ``log``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.log_start = log.stat().st_size if log.exists() else 0
        self.started_s = time.monotonic()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(argv),
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_launcher,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, -N when signal N ended it. Reaps it."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Signal the process itself, not what it forked."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def output(self, limit: int = 1 << 20) -> str:
        """What this incarnation wrote to its log, the first ``limit`` bytes."""
        with contextlib.suppress(OSError), self.log.open("rb") as stream:
            stream.seek(self.log_start)
            return stream.read(limit).decode(errors="replace")
        return ""


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process, from now on. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _die_with_launcher() -> None:
    """Between fork and exec: a launcher that is killed takes its children along."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def all_processes() -> dict[int, Process]:
    """Every process we may see, by pid."""
    found: dict[int, Process] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name, in parentheses, may contain anything, blanks and parentheses too.
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                pid = int(entry.name)
                found[pid] = Process(pid, int(fields[1]), int(fields[3]), fields[0] in "ZX")
    return found


def descendants(root: int) -> list[Process]:
    """All living processes below ``root``, parents before their children."""
    table = all_processes()
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    level = [root]
    while level:
        below = [process for pid in level for process in children.get(pid, ())]
        found += [process for process in below if not process.zombie]
        level = [process.pid for process in below]
    return found


def reap_orphans(keep: Iterable[int]) -> None:
    """Collect adopted processes that have ended, leaving the pids in ``keep`` to their owners."""
    ours, mine = set(keep), os.getpid()
    for process in all_processes().values():
        if process.parent == mine and process.zombie and process.pid not in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def kill_gently(pids: Iterable[int], tracker_grace_s: float = 0.5) -> None:
    """SIGKILL, but Python's resource trackers last: they remove the shared memory of the others."""
    trackers: list[int] = []
    for pid in pids:
        if _TRACKER in _command_line(pid):
            trackers.append(pid)
        else:
            _kill(pid)
    deadline = time.monotonic() + tracker_grace_s
    while trackers and time.monotonic() < deadline:
        trackers = [pid for pid in trackers if _running(pid)]
        time.sleep(0.02)
    for pid in trackers:
        _kill(pid)


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Files in ``/dev/shm`` that these processes have mapped and would leave behind when killed.

    By inode: a POSIX semaphore is mapped under a temporary name before it gets its own.
    """
    names: dict[int, Path] = {}
    for entry in os.scandir(_SHM):
        if entry.name.startswith(_SHM_PREFIXES):
            names[entry.inode()] = Path(entry.path)
    found: set[Path] = set()
    for pid in pids if names else ():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{_SHM}/") and int(fields[4]) in names:
                    found.add(names[int(fields[4])])
    return found


def processes_with_env(name: str, value: str) -> list[int]:
    """Pids whose initial environment has ``name=value``; others' processes are skipped."""
    wanted = f"{name}={value}".encode()
    found: list[int] = []
    for pid in all_processes():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def start_time(pid: int) -> int:
    """Start of a process in clock ticks since boot: with the pid, its identity. 0 when it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _running(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
