# SPDX-License-Identifier: Apache-2.0
"""A Docker daemon of our own, with stand-ins under the names that the compose file uses."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

from kvcr.graph.infra import etcd_binary, nats_binary
from kvcr.graph.render import compose
from tests.compose.prepare import root_filesystem

ROOT = Path(__file__).parents[2]
BUILD_IMAGE = "python:3.11-bookworm"
BASE_IMAGE = "python:3.11-slim-bookworm"
SITE_PACKAGES = "opt/kvcr/lib/python3.11/site-packages"
NOT_IN_THE_IMAGES = (
    *("./usr/share/doc", "./usr/share/man", "./usr/share/locale"),
    *("./usr/bin/prometheus", "./usr/bin/promtool"),
)
COMPILERS = (
    *(f"./usr/bin/{name}" for name in ("*g++*", "*gcc*", "*cpp*", "cc", "c++")),
    *("./usr/include", "./usr/lib/gcc", "./usr/lib/x86_64-linux-gnu/*.a"),
)
"""What upstream's slim image does not have."""
START_TIMEOUT_S = 60.0
APPLETS = ("sh", "wget", "ls", "cat", "echo", "sleep", "ps", "kill", "env", "id", "test", "httpd", "mkdir")
PASSWD = "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"


class DaemonError(RuntimeError):
    """dockerd does not run on this machine."""


class Daemon:
    """dockerd on a socket and a data directory of its own. :meth:`stop` leaves nothing behind."""

    def __init__(self, folder: Path, cgroup: str) -> None:
        self.folder = folder
        self.log = folder / "dockerd.log"
        self.environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_CONFIG": str(folder / "config"),
            # Debian has no buildx; the Dockerfile is for the classic builder.
            "DOCKER_BUILDKIT": "0",
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "dockerd",
                    f"--data-root={folder}/data",
                    f"--exec-root={folder}/exec",
                    f"--pidfile={folder}/docker.pid",
                    f"--host=unix://{folder}/docker.sock",
                    f"--cgroup-parent={cgroup}",
                    "--storage-driver=overlay2",
                    "--bridge=none",
                    "--ip-forward=false",
                    "--iptables=false",
                    "--ip6tables=false",
                ],
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.run("docker", "version", check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self._process.kill()
                raise DaemonError(self.log.read_text()[-1000:])
            time.sleep(0.2)

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a docker command; the exception of a failed one has its output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        subprocess.run(["umount", "-R", str(self.folder / "data")], capture_output=True, check=False)


def load_stand_ins(daemon: Daemon) -> None:
    """etcd, NATS and Prometheus are real ones, with the upstream entry points; Grafana and the exporter of
    NATS, which no package index has, answer their health checks and nothing else."""
    etcd = _busybox(daemon.folder / "etcd")
    for program in ("etcd", "etcdctl"):
        shutil.copy2(etcd_binary().parent / program, etcd / "usr/local/bin" / program)
        (etcd / "usr/local/bin" / program).chmod(0o755)
    _import(daemon, etcd, compose.ETCD_IMAGE, 'CMD ["/usr/local/bin/etcd"]')

    nats = _busybox(daemon.folder / "nats")
    shutil.copy2(nats_binary(), nats / "usr/local/bin/nats-server")
    _script(
        nats / "usr/local/bin/docker-entrypoint.sh",
        'if [ "${1#-}" != "$1" ]; then set -- nats-server "$@"; fi\nexec "$@"',
    )
    _import(daemon, nats, compose.NATS_IMAGE, 'ENTRYPOINT ["docker-entrypoint.sh"]')

    prometheus = _busybox(daemon.folder / "prometheus")
    for name in ("usr/bin/prometheus", "lib/x86_64-linux-gnu/libc.so.6", "lib64/ld-linux-x86-64.so.2"):
        target = prometheus / name.removeprefix("usr/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root_filesystem() / name, target)
    (prometheus / "prometheus").mkdir()
    os.chown(prometheus / "prometheus", 65534, 65534)
    _import(
        daemon, prometheus, compose.PROMETHEUS_IMAGE, "USER nobody", 'ENTRYPOINT ["/bin/prometheus"]'
    )  # fmt: skip

    grafana = _busybox(daemon.folder / "grafana")
    for folder in ("www/api", "var/lib/grafana"):
        (grafana / folder).mkdir(parents=True)
    (grafana / "www/api/health").write_text("ok\n")
    (grafana / "var/lib/grafana").chmod(0o777)
    # What the real one does with its mounts, as the user it is given.
    _script(
        grafana / "run.sh",
        'cat "$GF_SECURITY_ADMIN_PASSWORD__FILE" >/var/lib/grafana/password\n'
        "cat /etc/grafana/provisioning/datasources/*.y*ml /etc/grafana/provisioning/dashboards/*.y*ml\n"
        "cat /etc/grafana/kvcr/*.json >/dev/null\n"
        "exec httpd -f -p 3000 -h /www",
    )
    _import(daemon, grafana, compose.GRAFANA_IMAGE, 'ENTRYPOINT ["/run.sh"]')

    exporter = _busybox(daemon.folder / "exporter")
    (exporter / "www").mkdir()
    (exporter / "www/metrics").write_text("gnatsd_varz_connections 1\n")
    _script(exporter / "run.sh", "exec httpd -f -p 7777 -h /www")
    _import(daemon, exporter, compose.NATS_EXPORTER_IMAGE, 'ENTRYPOINT ["/run.sh"]')


def load_bases(daemon: Daemon) -> None:
    """A Debian with Python, under the names that our Dockerfile starts from.

    The one it builds on has the locked packages of this environment, so that ``pip install -r`` finds them
    without a network. They are mounted there in the mount namespace of this stage, and end with it.
    """
    root = root_filesystem()
    packages = root / SITE_PACKAGES
    _import(daemon, root, BASE_IMAGE, exclude=(*NOT_IN_THE_IMAGES, "./opt/*", *COMPILERS))
    packages.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", sysconfig.get_path("purelib"), str(packages)], check=True)
    try:
        unlocked = [f"./{SITE_PACKAGES}/{name}" for name in _not_in_the_lock()]
        _import(daemon, root, BUILD_IMAGE, exclude=(*NOT_IN_THE_IMAGES, *unlocked))
    finally:
        subprocess.run(["umount", str(packages)], check=True)


def _not_in_the_lock() -> set[str]:
    """Files and folders in site-packages of packages that the image's lock does not name, but for pip."""
    locked = {"pip"}
    other: set[str] = set()
    for line in (ROOT / "requirements/lock-cpu.txt").read_text().splitlines():
        locked.add(_normal(line.split("==")[0]))
    kept: set[str] = set()
    for package in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")]):
        parts = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        (kept if _normal(package.metadata["Name"]) in locked else other).update(parts)
    return other - kept


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _busybox(root: Path) -> Path:
    for folder in ("bin", "etc", "tmp", "data", "usr/local/bin", "var", "proc", "sys", "dev"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy2(busybox, root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text("root:x:0:\nnobody:x:65534:\n")
    return root


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\nset -e\n{text}\n")
    path.chmod(0o755)


def _import(daemon: Daemon, root: Path, image: str, *changes: str, exclude: Iterable[str] = ()) -> None:
    path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    options = [word for change in (path, *changes) for word in ("-c", change)]
    leave_out = [f"--exclude={pattern}" for pattern in exclude]
    tar = subprocess.Popen(
        ["tar", "--no-wildcards-match-slash", *leave_out, "-C", str(root), "-c", "."], stdout=subprocess.PIPE
    )
    importing = ["docker", "import", *options, "-", image]
    done = subprocess.run(
        importing,
        stdin=tar.stdout,
        env=daemon.environment,
        stdout=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )
    if tar.wait() or done.returncode:
        raise RuntimeError(f"docker import of {image}: tar {tar.returncode}, docker {done.returncode}")
