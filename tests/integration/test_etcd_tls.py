# SPDX-License-Identifier: Apache-2.0
"""A guard that etcd does not let in goes on serving its engine, and says why. With the right ones it is in:
test_least_rights.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import eventually
from engine_client import EngineClient, GuardProcess, chain

from kvcr.graph.infra import Server
from tests.integration.secure_etcd import SecureEtcd, secure_etcd


@pytest.fixture(scope="module")
def etcd_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureEtcd]:
    with secure_etcd(tmp_path_factory.mktemp("etcd-tls"), tls=True) as server:
        yield server


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "has TLS and no CA is given"),
        ({"ETCD_AUTH_CA": "ca.pem"}, "ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY is not"),
        (
            {
                "ETCD_AUTH_CA": "ca.pem",
                "ETCD_AUTH_CLIENT_CERT": "client.pem",
                "ETCD_AUTH_CLIENT_KEY": "client.key",
            },
            "ETCD_AUTH_CA is no PEM text",
        ),
    ],
    ids=["nothing", "half", "paths"],
)
async def test_a_guard_that_cannot_join_serves_its_engine_and_says_why(
    etcd_tls: SecureEtcd,
    namespace: str,
    nats_server: Server,
    shm_dir: Path,
    given: dict[str, str],
    said: str,
) -> None:
    environment = {
        "ETCD_ENDPOINTS": etcd_tls.url,
        "NATS_SERVER": nats_server.url,
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_LOG": "error",
        **{name: str(etcd_tls.certificates / file) for name, file in given.items()},
    }
    with GuardProcess(
        shm_dir, "g0", "--cluster", "--namespace", namespace, slots=16, env=environment
    ) as guard:
        root, keys = chain(2, "no certificate")
        with EngineClient(guard, "engine") as engine:
            engine.deposit(keys, root)
        await eventually(lambda: said in guard.log_path.read_text(), f"the guard says {said!r}")
        assert guard.process.poll() is None
    assert etcd_tls.etcdctl("get", "--from-key", " ", "--keys-only").stdout.strip() == ""
