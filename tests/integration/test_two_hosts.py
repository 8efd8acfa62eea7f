# SPDX-License-Identifier: Apache-2.0
"""Guards on two hosts, for which network, mount and PID namespaces stand in: see :mod:`hosts`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hosts import Host, RemoteEngine, RemoteGuard, two_hosts, why_not
from waiting import until

from kvcr.graph.infra import etcd_binary, nats_binary
from kvcr.protocol.engine import BlockStatus
from kvcr.transfer import nixl

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(bool(nixl.import_error()), reason=nixl.import_error()),
]

BLOCK_BYTES = 64 * 1024 - 512
OK, GONE = BlockStatus.OK, BlockStatus.GONE


class Deployment(NamedTuple):
    a: Host
    b: Host
    directory: Path

    def guard(self, host: Host, name: str, *arguments: str, secret: str = "secret") -> RemoteGuard:
        flags = ["--secret-file", str(self.directory / secret)] if secret else []
        return RemoteGuard(host, name, *flags, *arguments, log=self.directory / f"{name}.log")

    def peers(self, *records: dict[str, Any]) -> list[str]:
        """The flag that tells a guard of others."""
        path = self.directory / "peers.json"
        path.write_text(json.dumps(records))
        return ["--peers", str(path)]

    def doctor(self, host: Host, *arguments: str, check: bool = True) -> str:
        done = host.run(sys.executable, "-m", "kvcr.cli", "doctor", *arguments, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@contextlib.contextmanager
def deployment(directory: Path, **options: Any) -> Iterator[Deployment]:
    (directory / "secret").write_text("what all of the deployment know")
    (directory / "other").write_text("what nobody of the deployment knows")
    with two_hosts(directory, **options) as (a, b):
        yield Deployment(a, b, directory)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Deployment]:
    with deployment(tmp_path) as found:
        yield found


def received(host: Host, interface: str) -> int:
    """Bytes that arrived by this interface so far."""
    return int(host.run("cat", f"/sys/class/net/{interface}/statistics/rx_bytes").stdout)


@pytest.mark.parametrize("address", ["data", "data6"])
def test_blocks_are_pulled_over_tcp_by_the_configured_interface(hosts: Deployment, address: str) -> None:
    with (
        hosts.guard(hosts.a, "a", "--interface", getattr(hosts.a, address)) as a,
        hosts.guard(hosts.b, "b", "--interface", "data0", *hosts.peers(a.record())) as b,
        RemoteEngine(a) as source,
        RemoteEngine(b) as target,
    ):
        assert a.endpoint.startswith("tcp://[fd77::1]:" if address == "data6" else "tcp://10.77.0.1:")
        source.ask("deposit", count=200)
        before = received(hosts.b, "data0"), received(hosts.b, "mgmt0")
        fetched = target.ask("fetch", id="r", count=200, sources=[a.endpoint])
        assert fetched["statuses"] == [OK] * 200, fetched
        assert fetched["transport"] == "nixl"
        assert target.ask("right", count=200) == 200
        assert received(hosts.b, "data0") - before[0] > 200 * BLOCK_BYTES
        assert received(hosts.b, "mgmt0") - before[1] < BLOCK_BYTES
        metrics = target.metrics()
        assert metrics['kvcr_peer_ready{peer="a"}'] == 1
        assert metrics['kvcr_canaries_total{transport="nixl",result="ok"}'] == 1
        way = next(name for name in metrics if name.startswith("kvcr_peer_bytes_per_second"))
        assert 'via="tcp"' in way
        served = 'kvcr_served_blocks_total{transport="nixl"}'
        until(lambda: source.metrics()[served] == 200, "the source counted what it served")


def test_a_stranger_gets_nothing_and_is_counted(hosts: Deployment) -> None:
    with (
        hosts.guard(hosts.a, "a", "--interface", "data0") as a,
        hosts.guard(
            hosts.b, "b", "--interface", "data0", *hosts.peers(a.record()), secret="other"
        ) as stranger,
        RemoteEngine(a) as source,
        RemoteEngine(stranger) as target,
    ):
        source.ask("deposit", count=20)
        fetched = target.ask("fetch", id="r", count=20, sources=[a.endpoint], deadline_ms=3000)
        assert OK not in fetched["statuses"]
        assert target.ask("right", count=20) == 0
        refused = 'kvcr_peer_refusals_total{code="unauthenticated"}'
        until(lambda: source.metrics().get(refused, 0) >= 1, "the stranger is counted")
        # An endpoint that a hint names and no signed record does.
        fetched = target.ask("fetch", id="s", count=20, sources=["tcp://10.77.0.1:9"], deadline_ms=3000)
        assert OK not in fetched["statuses"]
        assert target.metrics()['kvcr_peer_refusals_total{code="unknown"}'] >= 1


def test_loopback_is_no_address_for_another_host(hosts: Deployment) -> None:
    with pytest.raises(RuntimeError, match="peers on other hosts would connect to themselves"):
        hosts.guard(hosts.a, "refused", "--control", "tcp://0.0.0.0:0", "--advertise", "127.0.0.1")
    with pytest.raises(RuntimeError, match="set --advertise or --interface"):
        hosts.guard(hosts.a, "unclear", "--control", "tcp://0.0.0.0:0")
    with (
        hosts.guard(hosts.a, "a") as alone,
        hosts.guard(hosts.b, "b", "--interface", "data0", *hosts.peers(alone.record())) as b,
        RemoteEngine(b) as target,
    ):
        assert alone.endpoint.startswith("tcp://127.0.0.1:")
        fetched = target.ask("fetch", id="r", count=4, sources=[alone.endpoint])
        assert set(fetched["statuses"]) == {GONE}
        assert f"advertises {alone.endpoint}" in (hosts.directory / "b.log").read_text() + fetched["reason"]
        assert target.metrics()['kvcr_peer_refusals_total{code="loopback"}'] >= 1


def test_binding_everything_and_advertising_one_address(hosts: Deployment) -> None:
    everything = ["--control", "tcp://0.0.0.0:7100", "--advertise", hosts.a.data]
    with (
        hosts.guard(hosts.a, "a", *everything) as a,
        hosts.guard(hosts.b, "b", "--interface", "data0", *hosts.peers(a.record())) as b,
        RemoteEngine(a) as source,
        RemoteEngine(b) as target,
    ):
        assert a.endpoint == "tcp://10.77.0.1:7100"
        source.ask("deposit", count=4)
        assert target.ask("fetch", id="r", count=4, sources=[a.endpoint])["statuses"] == [OK] * 4


def test_the_doctor_measures_both_directions_and_names_the_interface(hosts: Deployment) -> None:
    secret = str(hosts.directory / "secret")
    with hosts.guard(hosts.a, "a", "--interface", "data0") as a:
        known = hosts.peers(a.record())
        arguments = ["--peer", hosts.a.data, "--secret-file", secret, "--interface", "data0", *known]
        assert "no engine has attached to it yet" in hosts.doctor(hosts.b, *arguments, check=False)
        with RemoteEngine(a) as engine:
            report = json.loads(hosts.doctor(hosts.b, *arguments, "--json"))
            assert report["healthy"]
            assert [direction["source"] == "a" for direction in report["directions"]] == [True, False]
            for direction, own in zip(report["directions"], (hosts.b.data, hosts.a.data), strict=True):
                assert (direction["interface"], direction["address"]) == ("data0", own)
                assert direction["ucx_devices"] == "data0"
                assert direction["chosen"] == "nixl over tcp"
                (way,) = direction["ways"]
                assert (way["way"], way["error"]) == ("nixl over tcp", "")
                assert way["mb_per_s"] > 1
                assert direction["rejected"]["shm"] == "it is on another host"
            text = hosts.doctor(hosts.b, *arguments)
            assert "would use nixl over tcp" in text
            assert "pulls work in both directions" in text
            # A firewall that lets nobody in on b: their way to us fails, ours to them works.
            rule = ["ip", "route", "add", "blackhole", hosts.b.data]
            hosts.a.run(*rule)
            failed = hosts.doctor(hosts.b, *arguments, check=False)
            assert "pulls do not work in both directions" in failed or "did not answer" in failed
            hosts.a.run("ip", "route", "del", "blackhole", hosts.b.data)
            assert engine.metrics()["kvcr_deposited_blocks_total"] == 0
        wrong = ["--peer", hosts.a.data, "--secret-file", str(hosts.directory / "other"), *known]
        assert "it has another secret" in hosts.doctor(hosts.b, *wrong, check=False)


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="dynamo is not installed")
def test_the_steps_of_the_two_servers_page(hosts: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/two-servers.md: etcd and NATS on a, a guard on each, which find each other; then the doctor."""
    server, data = hosts.a.data, hosts.directory
    etcd = [str(etcd_binary()), "--data-dir", str(data / "etcd"), "--log-level", "error"]
    etcd += [
        "--listen-client-urls",
        f"http://{server}:2379",
        "--advertise-client-urls",
        f"http://{server}:2379",
    ]
    nats = [str(nats_binary()), "-a", server, "-p", "4222", "-js", "-sd", str(data / "nats")]
    with (
        contextlib.closing(hosts.a.background(*etcd)),
        contextlib.closing(hosts.a.background(*nats)),
        monkeypatch.context() as patch,
    ):
        patch.setenv("ETCD_ENDPOINTS", f"http://{server}:2379")
        patch.setenv("NATS_SERVER", f"nats://{server}:4222")
        patch.setenv("DYN_DISCOVERY_BACKEND", "etcd")
        patch.setenv("ETCD_LEASE_TTL", "120")
        joined = ["--interface", "data0", "--cluster"]
        with (
            hosts.guard(hosts.a, "worker-a", *joined) as a,
            hosts.guard(hosts.b, "worker-b", *joined) as b,
            RemoteEngine(a) as source,
            RemoteEngine(b) as target,
        ):
            source.ask("deposit", count=20)
            ready = 'kvcr_peer_ready{peer="worker-a"}'
            until(lambda: target.metrics().get(ready) == 1, "the guards find each other", every_s=0.2)
            fetched = target.ask("fetch", id="r", count=20, sources=[a.endpoint])
            assert (fetched["statuses"], target.ask("right", count=20)) == ([OK] * 20, 20)
            secret = ["--secret-file", str(data / "secret")]
            # By address and by name, its key found in etcd, in the record that the secret signed.
            for peer in (server, "worker-a"):
                report = json.loads(hosts.doctor(hosts.b, "--peer", peer, "--json", *secret))
                assert report["healthy"]
                assert report["peer"] == "worker-a"
            missing = hosts.doctor(hosts.b, "--peer", "10.77.0.9", *secret, check=False)
            assert "no record of a guard at 10.77.0.9" in missing
            assert "worker-b at tcp://10.77.0.2:" in missing
            # With another secret, no record is believed.
            other = ["--secret-file", str(data / "other")]
            assert "known: none" in hosts.doctor(hosts.b, "--peer", server, *other, check=False)


def test_two_containers_of_one_host_find_that_only_the_network_is_shared(tmp_path: Path) -> None:
    with (
        deployment(tmp_path, same_kernel=True) as hosts,
        hosts.guard(hosts.a, "a", "--interface", "data0") as a,
        hosts.guard(hosts.b, "b", "--interface", "data0", *hosts.peers(a.record())) as b,
        RemoteEngine(a) as source,
        RemoteEngine(b) as target,
    ):
        assert a.ready["boot_id"] == b.ready["boot_id"]
        source.ask("deposit", count=40)
        fetched = target.ask("fetch", id="r", count=40, sources=[a.endpoint])
        assert fetched["statuses"] == [OK] * 40, fetched
        assert target.ask("right", count=40) == 40
        log = (hosts.directory / "b.log").read_text()
        assert "no shm: [Errno 2] No such file" in log
        assert "nixl over tcp" in log
