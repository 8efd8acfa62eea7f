# SPDX-License-Identifier: Apache-2.0
"""``kvcr serve`` of a graph that joins an etcd, a NATS and a Prometheus that are there already."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from test_launcher import Serve, serve  # noqa: F401, a fixture

from kvcr.dynamo.records import guards_prefix
from kvcr.graph import bootstrap, infra
from tests.integration.secure_etcd import SecureEtcd, secure_etcd

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def etcd_tls(tmp_path: Path) -> Iterator[SecureEtcd]:
    (tmp_path / "etcd").mkdir()
    with secure_etcd(tmp_path / "etcd", tls=True) as server:
        server.give_least_rights({})
        yield server


@pytest.fixture
def users(tmp_path: Path) -> Iterator[tuple[infra.Server, Path]]:
    """A NATS with a user for each role, and the folder with their credentials."""
    folder = tmp_path / "users"
    bootstrap.make_secrets(folder, "dynamo")
    (folder / "nats.conf").write_text("include nats-users.conf\n")
    server = infra.start_nats(folder / "js", folder / "nats.log", config=folder / "nats.conf")
    yield server, folder
    server.stop()


def _user(folder: Path, role: str) -> dict[str, dict[str, str]]:
    lines = (folder / f"{role}.env").read_text().split()
    return {"env": dict(line.split("=", 1) for line in lines)}


def _guards(etcd: SecureEtcd) -> list[str]:
    return etcd.etcdctl("get", "--prefix", guards_prefix("dynamo"), "--keys-only").stdout.split()


def test_a_graph_joins_with_the_rights_of_its_roles_and_takes_its_dead_out(
    serve: Callable[..., Serve],  # noqa: F811
    etcd_tls: SecureEtcd,
    users: tuple[infra.Server, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nats, folder = users
    for name, value in etcd_tls.environment("kvcr").items():
        monkeypatch.setenv(name, value)
    graph = {
        "Etcd": {"address": etcd_tls.url},
        "Nats": {"address": nats.url},
        "Guard": {"pool-bytes": "64MB", "ServiceArgs": _user(folder, "guard")},
        "Frontend": {"ServiceArgs": _user(folder, "frontend")},
    }
    running = serve(yaml.safe_dump(graph))
    running.wait_until_up()
    running.wait(lambda: len(_guards(etcd_tls)) == 1)
    [guard] = [entry for entry in running.state["components"] if entry["component"] == "Guard"]
    secrets = [etcd_tls.environment("kvcr")["ETCD_AUTH_CLIENT_KEY"], *_user(folder, "guard")["env"].values()]
    shown = running.said + json.dumps(running.state)
    assert not [secret for secret in secrets[:1] + secrets[2:] if secret in shown]

    # The launcher reaps it and revokes its lease, two minutes before that expires.
    os.kill(guard["pid"], signal.SIGKILL)
    running.wait(lambda: _guards(etcd_tls) == [])


def test_a_prometheus_finds_every_process_by_the_file_of_targets(
    serve: Callable[..., Serve],  # noqa: F811
    tmp_path: Path,
) -> None:
    running = serve()
    running.wait_until_up()
    targets = json.loads((running.run_dir / "targets.json").read_text())
    assert {found["labels"]["job"] for found in targets} == {"etcd", "guard", "frontend"}
    for found in targets:
        with urllib.request.urlopen(f"http://{found['targets'][0]}/metrics", timeout=10) as answer:
            assert answer.status == 200
    if shutil.which("prometheus") is not None:
        _scrape(running, tmp_path)
    running.stop()
    assert not (running.run_dir / "targets.json").exists()


def _scrape(running: Serve, folder: Path) -> None:
    """As docs/deploy/joining.md says."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": "kvcr", "file_sd_configs": [{"files": [str(running.run_dir / "targets.json")]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = infra.free_port()
    with (folder / "prometheus.log").open("wb") as log:
        prometheus = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/prometheus-data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    query = urllib.parse.urlencode({"query": "sum by (job) (up)"})

    def up() -> dict[str, str]:
        url = f"http://127.0.0.1:{port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            series = json.load(answer)["data"]["result"]
        return {found["metric"]["job"]: found["value"][1] for found in series}

    try:
        running.wait(lambda: up() == {"etcd": "1", "guard": "1", "frontend": "1"})
    finally:
        prometheus.terminate()
        prometheus.wait(20)
