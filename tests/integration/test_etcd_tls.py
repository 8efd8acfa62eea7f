# SPDX-License-Identifier: Apache-2.0
"""etcd with mutual TLS: our client gets in with a certificate; a guard without one goes on serving.

Dynamo's runtime 1.6.1 did not connect to this server with the same files (docs/security.md), so a guard
cannot register there; that is why no test registers one.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_client import EngineClient, GuardProcess, chain

from kvcr.dynamo.etcd import EtcdUnavailable, Tls, connect, tls_from_environment
from kvcr.dynamo.records import record_key
from kvcr.graph.infra import etcd_binary, free_port
from tests.certificates import make_certificates


class SecureEtcd:
    """One that asks clients for a certificate of its CA."""

    def __init__(self, folder: Path) -> None:
        self.certificates = make_certificates(folder)
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{free_port()}"
        self.process = subprocess.Popen(
            [
                str(etcd_binary()), f"--data-dir={folder}/data", "--log-level=error",
                f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}",
                f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                f"--cert-file={self.certificates}/server.pem", f"--key-file={self.certificates}/server.key",
                f"--trusted-ca-file={self.certificates}/ca.pem", "--client-cert-auth",
            ]
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """What Dynamo and KVCR read."""
        return {
            "ETCD_ENDPOINTS": self.url,
            "ETCD_AUTH_CA": f"{self.certificates}/ca.pem",
            "ETCD_AUTH_CLIENT_CERT": f"{self.certificates}/client.pem",
            "ETCD_AUTH_CLIENT_KEY": f"{self.certificates}/client.key",
        }

    @property
    def tls(self) -> Tls:
        folder = self.certificates
        return Tls(folder / "ca.pem", folder / "client.pem", folder / "client.key")


@pytest.fixture(scope="module")
def etcd_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureEtcd]:
    server = SecureEtcd(tmp_path_factory.mktemp("etcd-tls"))
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


async def _record(server: SecureEtcd, namespace: str, within_s: float) -> bytes | None:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(EtcdUnavailable):
            async with await connect(server.url, tls=server.tls) as etcd:
                found = await etcd.get(record_key(namespace, "g0"))
                if found is not None:
                    return found.value
        await asyncio.sleep(0.1)
    return None


def _guard(
    server: SecureEtcd, namespace: str, nats_url: str, folder: Path, **environment: str
) -> GuardProcess:
    return GuardProcess(
        folder,
        "g0",
        "--cluster",
        "--namespace",
        namespace,
        slots=16,
        env={"NATS_SERVER": nats_url, "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_LOG": "error", **environment},
    )


async def test_our_client_gets_in_with_the_variables_that_dynamo_reads(etcd_tls: SecureEtcd) -> None:
    await _record(etcd_tls, "-", 5)
    tls = tls_from_environment(etcd_tls.environment)
    async with await connect(etcd_tls.environment["ETCD_ENDPOINTS"], tls=tls) as etcd:
        await etcd.put("kvcr/test", b"x")
        found = await etcd.get("kvcr/test")
        assert found is not None
        assert found.value == b"x"


async def test_one_without_serves_its_engine_and_is_not_registered(
    etcd_tls: SecureEtcd, namespace: str, nats_server: object, shm_dir: Path
) -> None:
    nats_url = nats_server.url  # type: ignore[attr-defined]
    with _guard(etcd_tls, namespace, nats_url, shm_dir, ETCD_ENDPOINTS=etcd_tls.url) as guard:
        root, keys = chain(2, "no certificate")
        with EngineClient(guard, "engine") as engine:
            engine.deposit(keys, root)
        assert await _record(etcd_tls, namespace, 5) is None
        assert guard.process.poll() is None


async def test_a_stranger_reads_nothing(etcd_tls: SecureEtcd) -> None:
    await _record(etcd_tls, "-", 0.5)
    stranger = Tls(etcd_tls.certificates / "ca.pem")
    async with await connect(etcd_tls.url, tls=stranger) as etcd:
        with pytest.raises(EtcdUnavailable):
            await etcd.get("kvcr")
