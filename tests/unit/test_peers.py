# SPDX-License-Identifier: Apache-2.0
"""Which records of other guards are believed, and where the host stands in the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcr.dynamo.environment import prepare_environment
from kvcr.dynamo.etcd import (
    Credentials,
    KeyChanges,
    KeyValue,
    connect,
    credentials_from_environment,
    endpoints_from_environment,
)
from kvcr.dynamo.etcd.base import changes_of, prefix_end
from kvcr.dynamo.peers import PeerDirectory
from kvcr.dynamo.records import InstanceRecord, encode, record_key
from kvcr.dynamo.topology import read_topology
from kvcr.errors import ConfigError
from kvcr.guard.addresses import Place

SECRET = b"0123456789abcdef"


def entry(
    name: str,
    secret: bytes | None = SECRET,
    port: int = 1,
    revision: int = 1,
    host: str = "127.0.0.1",
    boot_id: str = "boot",
    net_namespace: int = 7,
) -> KeyValue:
    record = InstanceRecord(
        name=name,
        namespace="ns",
        incarnation=1,
        pid=1,
        host="h",
        control_endpoint=f"tcp://{host}:{port}",
        boot_id=boot_id,
        net_namespace=net_namespace,
    )
    return KeyValue(record_key("ns", name), encode(record, secret), 0, revision)


@pytest.fixture
def ignored() -> list[str]:
    return []


@pytest.fixture
def directory(ignored: list[str]) -> PeerDirectory:
    return PeerDirectory("ns", "me", SECRET, ignored.append, Place("boot", 7, 8))


def test_peers_come_and_go_and_oneself_is_none(directory: PeerDirectory) -> None:
    assert directory.apply(KeyChanges([entry("me"), entry("a", port=2), entry("b", port=3)], []))
    assert {peer.name for peer in directory.peers().values()} == {"a", "b"}
    assert not directory.apply(KeyChanges([entry("a", port=2, revision=9)], []))
    assert directory.apply(KeyChanges([], [record_key("ns", "a")]))
    assert list(directory.peers()) == ["tcp://127.0.0.1:3"]


def test_what_is_not_believed_is_counted_by_reason(directory: PeerDirectory, ignored: list[str]) -> None:
    junk = KeyValue(record_key("ns", "junk"), b"\xff{", 0, 1)
    assert not directory.apply(KeyChanges([entry("a", None), entry("b", b"another secret!!"), junk], []))
    assert ignored == ["signature", "signature", "format"]
    assert directory.peers() == {}


def test_loopback_of_another_host_or_container_is_nobodys_address(
    directory: PeerDirectory, ignored: list[str]
) -> None:
    abroad = [
        entry("a", boot_id="other"),
        entry("b", net_namespace=9),
        entry("c", host="[::1]", boot_id="other"),
        entry("d", host="localhost", boot_id="other"),
    ]
    assert not directory.apply(KeyChanges(abroad, []))
    assert ignored == ["loopback"] * 4
    assert directory.apply(
        KeyChanges([entry("e", host="[fd00::2]", boot_id="other"), entry("f", port=9)], [])
    )
    assert set(directory.peers()) == {"tcp://[fd00::2]:1", "tcp://127.0.0.1:9"}


def test_a_record_overwritten_by_a_forgery_is_believed_no_more(
    directory: PeerDirectory, ignored: list[str]
) -> None:
    directory.apply(KeyChanges([entry("a")], []))
    assert directory.apply(KeyChanges([entry("a", b"another secret!!")], []))
    assert directory.peers() == {}
    assert ignored == ["signature"]


def test_of_several_events_for_a_key_the_last_counts() -> None:
    old, new, gone = entry("a"), entry("a", port=2), KeyValue("gone", b"", 0, 3)
    assert changes_of([(old, False), (gone, False), (new, False), (gone, True)]) == KeyChanges(
        [new], ["gone"]
    )


@pytest.mark.parametrize(
    ("prefix", "end"), [("a/", b"a0"), ("kvcr/v1/ns/guards/", b"kvcr/v1/ns/guards0"), ("", b"\0")]
)
def test_the_end_of_a_prefix(prefix: str, end: bytes) -> None:
    assert prefix_end(prefix) == end


def test_topology_is_read_where_it_is_enabled(tmp_path: Path) -> None:
    (tmp_path / "rdma_domain").write_text("rackA\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "..data").mkdir()
    mount = {"DYN_TOPOLOGY_MOUNT_PATH": str(tmp_path)}
    assert read_topology({**mount, "DYN_TOPOLOGY_ENABLED": "true"}) == {"rdma_domain": "rackA"}
    assert read_topology({**mount, "DYN_TOPOLOGY_ENABLED": "no"}) == {}
    assert read_topology({"DYN_TOPOLOGY_MOUNT_PATH": "/nowhere", "DYN_TOPOLOGY_ENABLED": "1"}) == {}


def test_etcd_is_found_where_dynamo_finds_it() -> None:
    assert endpoints_from_environment({"ETCD_ENDPOINTS": "http://a:1,http://b:2"}) == "http://a:1,http://b:2"
    assert endpoints_from_environment({}) == "http://127.0.0.1:2379"
    assert credentials_from_environment({}) == Credentials()
    pem = "-----BEGIN CERTIFICATE-----\n"
    tls = {"ETCD_AUTH_CA": pem, "ETCD_AUTH_CLIENT_CERT": pem, "ETCD_AUTH_CLIENT_KEY": pem}
    assert credentials_from_environment(tls) == Credentials(pem, pem, pem)
    user = {"ETCD_AUTH_USERNAME": "kvcr", "ETCD_AUTH_PASSWORD": "x"}
    assert credentials_from_environment(user) == Credentials(user="kvcr", password="x")


@pytest.mark.parametrize(
    ("endpoints", "bound"),
    [
        ("http://127.0.0.1:2379", "127.0.0.1"),
        ("http://localhost:2379,http://[::1]:2379", "127.0.0.1"),
        ("http://127.0.0.1:2379,http://10.0.0.1:2379", None),
        ("https://etcd.example:2379", None),
    ],
)
def test_where_etcd_is_on_loopback_the_runtime_stays_there_too(endpoints: str, bound: str | None) -> None:
    environment = {"ETCD_ENDPOINTS": endpoints}
    prepare_environment(environment)
    assert environment.get("DYN_TCP_RPC_HOST") == bound
    assert environment.get("DYN_TCP_RESPONSE_STREAM_HOST") == bound
    assert environment["DYN_SYSTEM_HOST"] == "127.0.0.1"


def test_what_the_deployment_says_of_the_runtime_stays() -> None:
    said = {"DYN_SYSTEM_HOST": "0.0.0.0", "DYN_TCP_RPC_HOST": "10.0.0.1", "ETCD_LEASE_TTL": "60"}
    environment = dict(said)
    prepare_environment(environment)
    assert {name: environment[name] for name in said} == said


def test_what_dynamo_would_ignore_of_the_credentials_is_refused() -> None:
    pem = "-----BEGIN CERTIFICATE-----\n"
    with pytest.raises(ConfigError, match="ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD only one is set"):
        credentials_from_environment({"ETCD_AUTH_USERNAME": "kvcr"})
    with pytest.raises(ConfigError, match="ETCD_AUTH_USERNAME and ETCD_AUTH_CA are both set"):
        credentials_from_environment(
            {"ETCD_AUTH_USERNAME": "kvcr", "ETCD_AUTH_PASSWORD": "x", "ETCD_AUTH_CA": pem}
        )
    with pytest.raises(ConfigError, match="ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY is not"):
        credentials_from_environment({"ETCD_AUTH_CA": pem})
    files = {"ETCD_AUTH_CA": pem, "ETCD_AUTH_CLIENT_CERT": pem, "ETCD_AUTH_CLIENT_KEY": "c2VjcmV0IGtleQ=="}
    with pytest.raises(ConfigError, match="ETCD_AUTH_CLIENT_KEY is no PEM text") as caught:
        credentials_from_environment(files)
    assert "c2Vj" not in str(caught.value), "it may be a key all the same"


async def test_an_endpoint_with_tls_needs_a_ca() -> None:
    with pytest.raises(ConfigError, match="has TLS and no CA is given"):
        await connect("https://127.0.0.1:2379")
