# SPDX-License-Identifier: Apache-2.0
"""etcd servers that want to know who asks: by mutual TLS, or by user and password; roles of least rights."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from kvcr.graph.infra import etcd_binary, free_port
from tests.certificates import make_certificates

ROOT = Path(__file__).parents[2]
ADMIN, ADMIN_PASSWORD = "root", "of-the-test"
START_S = 30.0


class SecureEtcd:
    """With ``tls``, one that asks clients for a certificate of its CA; its users are common names then."""

    def __init__(self, folder: Path, *, tls: bool) -> None:
        self.folder = folder
        self.tls = tls
        self.port = free_port()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.certificates = make_certificates(folder, "root", "kvcr", "worker") if tls else folder
        self._authenticates = False
        self._peer = f"http://127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        """Also after :meth:`kill`: on the same port, with what it had stored."""
        command = [
            str(etcd_binary()), f"--data-dir={self.folder}/data", "--log-level=error",
            f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={self._peer}", f"--initial-advertise-peer-urls={self._peer}",
            f"--initial-cluster=default={self._peer}",
        ]  # fmt: skip
        if self.tls:
            command += [
                f"--cert-file={self.certificates}/server.pem", f"--key-file={self.certificates}/server.key",
                f"--trusted-ca-file={self.certificates}/ca.pem", "--client-cert-auth",
            ]  # fmt: skip
        self.process = subprocess.Popen(command)
        deadline_s = time.monotonic() + START_S
        while self.etcdctl("endpoint", "health", check=False).returncode:
            assert self.process.poll() is None, "etcd ended"
            assert time.monotonic() < deadline_s, "etcd does not answer"
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def environment(self, user: str, password: str = "") -> dict[str, str]:
        """What Dynamo and KVCR read."""
        if not self.tls:
            who = {"ETCD_AUTH_USERNAME": user, "ETCD_AUTH_PASSWORD": password} if user else {}
            return {"ETCD_ENDPOINTS": self.url, **who}
        pem = {
            "ETCD_AUTH_CA": "ca.pem",
            "ETCD_AUTH_CLIENT_CERT": f"{user}.pem",
            "ETCD_AUTH_CLIENT_KEY": f"{user}.key",
        }
        return {
            "ETCD_ENDPOINTS": self.url,
            **{name: (self.certificates / file).read_text() for name, file in pem.items()},
        }

    def give_least_rights(self, passwords: dict[str, str]) -> None:
        """The commands of the documentation, then authentication on. ``passwords``: of users, without TLS."""
        page = (ROOT / "docs/deploy/joining.md").read_text()
        commands = re.search(r"```bash\n(etcdctl role add.*?)```", page, re.DOTALL)
        assert commands, "docs/deploy/joining.md has no etcdctl commands"
        for line in commands[1].split("\n"):
            words = line.split()[1:]
            if words[:2] == ["user", "add"] and not self.tls:
                words = ["user", "add", f"{words[2]}:{passwords[words[2]]}"]
            if words:
                self.etcdctl(*words)
        self.etcdctl(
            "user", "add", ADMIN, "--no-password" if self.tls else f"--new-user-password={ADMIN_PASSWORD}"
        )
        self.etcdctl("user", "grant-role", ADMIN, "root")
        self.etcdctl("auth", "enable")
        self._authenticates = True

    def etcdctl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """As the administrator."""
        options = [f"--endpoints={self.url}"]
        if self.tls:
            names = {"cacert": "ca.pem", "cert": f"{ADMIN}.pem", "key": f"{ADMIN}.key"}
            options += [f"--{option}={self.certificates}/{name}" for option, name in names.items()]
        elif self._authenticates:
            options.append(f"--user={ADMIN}:{ADMIN_PASSWORD}")
        binary = etcd_binary().with_name("etcdctl")
        binary.chmod(0o755)
        done = subprocess.run(
            [str(binary), *options, *words],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not (check and done.returncode), f"etcdctl {' '.join(words)}: {done.stderr}"
        return done


@contextlib.contextmanager
def secure_etcd(folder: Path, *, tls: bool) -> Iterator[SecureEtcd]:
    server = SecureEtcd(folder, tls=tls)
    try:
        yield server
    finally:
        server.kill()
