# SPDX-License-Identifier: Apache-2.0
"""A deployment that joins an etcd and a NATS that are there, with the rights that the documentation says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcr.dynamo.etcd import Credentials, EtcdClient, EtcdError, connect, credentials_from_environment
from kvcr.graph import bootstrap, infra
from tests.certificates import make_certificates
from tests.integration.router_stack import Part, Stack, until
from tests.integration.secure_etcd import SecureEtcd
from tests.integration.test_router import prompt_of
from tests.integration.tiny_tokenizer import write_model

pytestmark = pytest.mark.timeout(300)

PASSWORDS = {"kvcr": "of-guards-and-routers", "worker": "of-workers"}
ETCD_USER = {"guard": "kvcr", "router": "kvcr", "worker": "worker", "frontend": "worker"}
NAMESPACE = "dynamo"


class Joined(Stack):
    """Every role has its own user of NATS, and the user of etcd that it needs."""

    def __init__(self, directory: Path, *, tls: bool) -> None:
        super().__init__(directory, write_model(directory / "tiny"), lease_s=60)
        self.etcd.stop()
        self.nats.stop()
        (directory / "secure").mkdir()
        self.secure = SecureEtcd(directory / "secure", tls=tls)
        self.secure.give_least_rights(PASSWORDS)
        bootstrap.make_secrets(directory / "users", NAMESPACE)
        config = directory / "users" / "nats.conf"
        pem = self.secure.certificates
        encrypted = f"""tls {{
          cert_file: "{pem}/server.pem", key_file: "{pem}/server.key"
          ca_file: "{pem}/ca.pem", verify: true
        }}"""
        config.write_text("include nats-users.conf\n" + (encrypted if tls else ""))
        self.nats = infra.start_nats(directory / "js", directory / "nats.log", config=config)
        self._common = self.environment

    def be(self, role: str) -> None:
        """What is started from now on has the rights of this role."""
        self.environment = self._common | self.rights(role)

    def rights(self, role: str) -> dict[str, str]:
        user = ETCD_USER[role]
        lines = (self.directory / "users" / f"{role}.env").read_text().split()
        nats_user = dict(line.split("=", 1) for line in lines)
        return {
            **self.secure.environment(user, PASSWORDS[user]),
            **self._nats_server(),
            **nats_user,
            "KVCR_SECRET_FILE": str(self.directory / "users" / "secret"),
        }

    def _nats_server(self) -> dict[str, str]:
        if not self.secure.tls:
            return {"NATS_SERVER": self.nats.url}
        files = {"CA_CERT": "ca.pem", "CLIENT_CERT": "client.pem", "CLIENT_KEY": "client.key"}
        paths = {
            f"NATS_TLS_{name}_PATH": str(self.secure.certificates / file) for name, file in files.items()
        }
        return {"NATS_SERVER": self.nats.url.replace("nats://", "tls://"), **paths}

    def close(self) -> None:
        super().close()
        self.secure.kill()

    def kvcr(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvcr.cli", *words],
            env={**os.environ, **self._common, **self.rights("router"), "DYN_NAMESPACE": NAMESPACE},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(params=[False, True], ids=["users", "mutual TLS"])
def joined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Joined]:
    stack = Joined(tmp_path, tls=request.param)
    yield stack
    stack.close()


async def _cards(joined: Joined) -> list[str]:
    async with await _as(joined, "worker") as etcd:
        return [entry.key for entry in (await etcd.get_prefix(f"v1/mdc/{NAMESPACE}/backend/")).values]


def _start(joined: Joined, pools: Path) -> Part:
    """All of a deployment, each part with its own rights. Returns the worker."""
    secret = ("--secret-file", str(joined.directory / "users" / "secret"))
    joined.be("frontend")
    joined.frontend()
    joined.be("guard")
    guard = joined.real_guard("g0", pools / "g0", *secret)
    joined.be("worker")
    worker = joined.worker("w0", "--control", guard.control, "--guard-socket", guard.socket)
    joined.be("router")
    joined.router(*secret)
    joined.ready()
    return worker


def test_a_deployment_works_with_the_rights_of_its_roles(joined: Joined, shm_dir: Path) -> None:
    worker = _start(joined, shm_dir)
    assert joined.ask(prompt_of(8, "least rights"))[0] == 200
    until(lambda: joined.indexed("g0") >= 8, "the router learns over NATS what the guard has")
    assert "g0" in joined.kvcr("status")
    joined.kvcr("mode", "shadow")
    assert "shadow" in joined.kvcr("mode")
    joined.kvcr("mode", "on")

    # etcd forgets who had logged in.
    joined.secure.kill()
    joined.secure.start()
    joined.be("guard")
    joined.real_guard("g1", shm_dir / "g1", "--secret-file", str(joined.directory / "users" / "secret"))
    until(lambda: "g1" in joined.kvcr("status"), "a guard that comes after the restart is registered")
    assert "g0" in joined.kvcr("status"), "and the one from before still is"
    assert joined.ask(prompt_of(8, "after the restart"))[0] == 200

    # A guard that takes over revokes the lease of its worker, which needs write access to all its keys.
    worker.kill()
    until(lambda: not asyncio.run(_cards(joined)), "the guard takes the dead worker's card out of etcd")


async def test_nobody_has_more_rights_than_its_role(joined: Joined) -> None:
    ours, theirs = f"kvcr/v1/{NAMESPACE}/guards/g0", f"v1/mdc/{NAMESPACE}/backend/generate/1"
    async with await _as(joined, "guard") as guard, await _as(joined, "worker") as worker:
        await guard.put(ours, b"{}")
        await guard.put(theirs, b"{}")
        await worker.put(theirs, b"{}")
        for key in (ours, f"v1/mdc/other{NAMESPACE}/x", "elsewhere"):
            with pytest.raises(EtcdError, match=r"(?i)permission denied"):
                await worker.put(key, b"forged")
        with pytest.raises(EtcdError, match=r"(?i)permission denied"):
            await worker.get_prefix("kvcr/")
        for key in (f"kvcr/v1/other{NAMESPACE}/guards/g0", "elsewhere"):
            with pytest.raises(EtcdError, match=r"(?i)permission denied"):
                await guard.put(key, b"forged")
        found = await guard.get(ours)
        assert found is not None
        assert found.value == b"{}"


async def test_a_stranger_reads_nothing_from_etcd(joined: Joined, tmp_path: Path) -> None:
    (tmp_path / "strangers").mkdir()
    other_ca = make_certificates(tmp_path / "strangers", "kvcr")
    ours = joined.secure.certificates
    if joined.secure.tls:
        forged = [(other_ca / f"kvcr.{kind}").read_text() for kind in ("pem", "key")]
        strangers = [
            Credentials(ca=(ours / "ca.pem").read_text()),
            Credentials((ours / "ca.pem").read_text(), *forged),
        ]
    else:
        strangers = [Credentials(), Credentials(user="kvcr", password="guessed")]
    for stranger in strangers:
        async with await connect(joined.secure.url, credentials=stranger) as etcd:
            with pytest.raises(EtcdError):
                await etcd.get_prefix("kvcr/")
            with pytest.raises(EtcdError):
                await etcd.put(f"kvcr/v1/{NAMESPACE}/guards/g0", b"forged")


async def _as(joined: Joined, role: str) -> EtcdClient:
    rights = joined.rights(role)
    return await connect(rights["ETCD_ENDPOINTS"], credentials=credentials_from_environment(rights))
