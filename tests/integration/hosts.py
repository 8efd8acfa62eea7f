# SPDX-License-Identifier: Apache-2.0
"""Namespaces that stand in for hosts: own network, mounts, processes, /dev/shm and boot id.

Nothing of one is visible in another but what goes over the two cables between them: ``mgmt0`` and
``data0``. Needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMPONENTS = HERE.parents[1] / "components"
TIMEOUT_S = 60.0

_SETUP = """
mount -t tmpfs -o size=512m tmpfs /dev/shm && mount -t sysfs sysfs /sys &&
mount --bind "$1" /proc/sys/kernel/random/boot_id &&
ip link set lo up && echo up && exec sleep infinity
"""


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def why_not() -> str:
    """Why there can be no such hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces that stand in for hosts need root"
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with two_hosts(Path("/tmp")):
            return ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"namespaces are not permitted here: {error}"


class Host:
    """One stand-in. Its processes end with it."""

    def __init__(self, name: str, directory: Path, number: int, *, same_kernel: bool = False) -> None:
        """``same_kernel`` leaves the boot id as it is: a container beside another on one host."""
        self.name = name
        self.data = f"10.77.0.{number}"
        self.data6 = f"fd77::{number}"
        self.mgmt = f"10.78.0.{number}"
        boot_id = directory / f"boot-{name}-{os.getpid()}"
        boot_id.write_text(_BOOT_ID.read_text() if same_kernel else f"{uuid.uuid4()}\n")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", _SETUP, "sh", str(boot_id)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != b"up":
            assert self._holder.stderr is not None
            self._holder.wait(TIMEOUT_S)
            raise RuntimeError(self._holder.stderr.read().decode().strip() or "unshare failed")
        boot_id.unlink()
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.pid = int(children.split()[0])
        self._enter = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--pid", "--uts", "--"]

    def command(self, *words: str) -> list[str]:
        """The command line that runs ``words`` there."""
        return [*self._enter, *words]

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end. Raises CalledProcessError, with what it said, unless ``check=False``."""
        options = {"check": True, "timeout": TIMEOUT_S, "env": environment(), **options}
        return subprocess.run(self.command(*words), capture_output=True, text=True, **options)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **{"env": environment(), **options},
        )

    def background(self, *words: str) -> Background:
        """A server, ended by ``close``."""
        return Background(self.command(*words))

    def close(self) -> None:
        # The first process of a PID namespace takes all others with it.
        self._holder.kill()
        self._holder.wait()
        for stream in (self._holder.stdout, self._holder.stderr):
            if stream is not None:
                stream.close()


class Background:
    """A process whose output nobody wants."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT_S)


@contextlib.contextmanager
def two_hosts(directory: Path, *, same_kernel: bool = False) -> Iterator[tuple[Host, Host]]:
    """``a`` and ``b``, each with ``data0`` (10.77.0.1 and .2, fd77::1 and ::2) and ``mgmt0`` (10.78.0.x)."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for number, name in enumerate("ab", 1):
            hosts.append(Host(name, directory, number, same_kernel=same_kernel))
            stack.callback(hosts[-1].close)
        a, b = hosts
        for link in ("mgmt0", "data0"):
            a.run("ip", "link", "add", link, "type", "veth", "peer", "name", "far0")
            _move(a, "far0", b, link)
        for host in hosts:
            for link, address in (("mgmt0", host.mgmt), ("data0", host.data)):
                host.run("ip", "address", "add", f"{address}/24", "dev", link)
            host.run("ip", "address", "add", f"{host.data6}/64", "dev", "data0", "nodad")
            for link in ("mgmt0", "data0"):
                host.run("ip", "link", "set", link, "up")
        yield a, b


def _move(a: Host, link: str, b: Host, name: str) -> None:
    """Give one end of a cable to the other host."""
    subprocess.run(
        ["nsenter", "-t", str(a.pid), "--net", "ip", "link", "set", link, "netns", str(b.pid), "name", name],
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    )


class RemoteGuard:
    """A guard on a host, ended with it. ``ready`` is its first line."""

    def __init__(self, host: Host, name: str, *arguments: str, log: Path, slots: int = 400) -> None:
        self.host = host
        self.name = name
        with open(log, "ab") as stream:
            self.process = host.start(
                sys.executable, "-m", "kvcr.guard", "--name", name, "--pool-dir", f"/dev/shm/{name}",
                "--pool-bytes", str(slots * 65536), "--scrub-bytes-per-s", "0", *arguments,
                stderr=stream,
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"guard {name} ended with {self.process.wait()}: {log.read_text()}")
        self.ready: dict[str, Any] = json.loads(line)

    @property
    def endpoint(self) -> str:
        return str(self.ready["control"])

    def __enter__(self) -> RemoteGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(TIMEOUT_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def record(self, **fields: Any) -> dict[str, Any]:
        """As it stands in another guard's peers file."""
        return {
            "endpoint": self.endpoint, "name": self.name, "curve_key": self.ready["public_key"],
            "boot_id": self.ready["boot_id"], "net_namespace": self.ready["net_namespace"], **fields,
        }  # fmt: skip


class RemoteEngine:
    """An engine on a host: :mod:`remote_engine` in a process there, told by lines of JSON."""

    def __init__(self, guard: RemoteGuard) -> None:
        self._process = guard.host.start(
            sys.executable, str(HERE / "remote_engine.py"), str(guard.ready["socket"]), f"engine-{guard.name}"
        )
        self._metrics = guard.ready["metrics"]

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with {self._process.wait()}")
        return json.loads(line)

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self.ask("metrics", url=self._metrics)
        return found

    def __enter__(self) -> RemoteEngine:
        # It answers once it is attached.
        self.metrics()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()


def environment(**more: str) -> dict[str, str]:
    """Of programs on a host."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPONENTS), str(HERE)]), **more}
