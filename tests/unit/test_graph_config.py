# SPDX-License-Identifier: Apache-2.0
"""Graph files: what they may say, what is refused and how, and the commands that come out."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcr.dynamo.topology import read_topology
from kvcr.errors import ConfigError
from kvcr.graph.config import Kind, Restart, load_graph, parse_graph, render_flags
from kvcr.graph.plan import Plan, ProcessPlan
from kvcr.graph.planning import make_plan
from kvcr.graph.ports import PortBook
from kvcr.graph.site import LocalSite, RunPaths

AGG = Path(__file__).resolve().parents[2] / "deploy" / "graphs" / "agg.yaml"


@pytest.fixture
def ports() -> Iterator[PortBook]:
    book = PortBook()
    yield book
    book.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "some-model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def plan_of(document: dict[str, Any], ports: PortBook, tmp_path: Path, **environ: str) -> Plan:
    graph = parse_graph(document, name="test", source="test.yaml")
    return make_plan(graph, LocalSite(RunPaths("test-1", tmp_path / "run"), ports), environ)


def named(plan: Plan, name: str) -> ProcessPlan:
    return next(process for process in plan.processes if process.name == name)


def flag(process: ProcessPlan, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


def flags(process: ProcessPlan) -> set[str]:
    return {word for word in process.argv if word.startswith("--")}


def refused(document: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_graph(document, name="test", source="test.yaml")
    return str(error.value)


# -- reading ---------------------------------------------------------------------------------------------


def test_the_shipped_graph_has_everything_a_deployment_needs() -> None:
    graph, notes = load_graph(AGG)
    assert notes == []
    assert set(graph.components) == set(Kind)
    assert graph.count(Kind.WORKER) == graph.count(Kind.GUARD) == 2
    assert all(component.service.restart is Restart.ON_FAILURE for component in graph.components.values())


@pytest.mark.parametrize("path", sorted(AGG.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_graph_can_be_planned(
    path: Path, ports: PortBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcr.graph.site.count_gpus", lambda: 2)
    monkeypatch.setattr("kvcr.graph.site.shm_free_bytes", lambda: 64 << 30)
    graph, notes = load_graph(path)
    assert notes == []
    plan = make_plan(graph, LocalSite(RunPaths("test-1", tmp_path / "run"), ports), {})
    assert {process.kind for process in plan.processes} >= {
        Kind.GUARD,
        Kind.WORKER,
        Kind.ROUTER,
        Kind.FRONTEND,
    }


def test_an_unknown_component_is_refused_with_the_nearest_name() -> None:
    message = refused({"Fronted": {}})
    assert "'Fronted'" in message
    assert "did you mean 'Frontend'?" in message


@pytest.mark.parametrize(
    ("component", "key", "nearest"),
    [
        ("Frontend", "http-prot", "http-port"),
        ("VllmWorker", "max-modell-len", "max-model-len"),
        ("Guard", "pool-byte", "pool-bytes"),
        ("Etcd", "adress", "address"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(component: str, key: str, nearest: str) -> None:
    message = refused({component: {key: 1}})
    assert f"{component}.{key}" in message
    assert f"did you mean '{nearest}'?" in message


def test_an_unknown_key_of_service_args_is_refused() -> None:
    message = refused({"Frontend": {"ServiceArgs": {"worker": 1}}})
    assert "Frontend.ServiceArgs.worker" in message
    assert "'workers'" in message


def test_a_flag_that_is_the_launchers_is_refused_with_the_reason() -> None:
    assert "cannot be set here" in refused({"Guard": {"pool-dir": "/dev/shm/x"}})


def test_common_values_are_taken_by_those_that_name_them() -> None:
    graph = parse_graph(
        {
            "Common": {"model": "m", "block-size": 64},
            "VllmWorker": {"common-configs": ["model", "block-size"], "block-size": 32},
            "Router": {"common-configs": ["model"]},
        },
        name="test",
        source="test.yaml",
    )
    assert graph.components[Kind.WORKER].params == {"model": "m", "block-size": 32}
    assert graph.components[Kind.ROUTER].params == {"model": "m"}


def test_a_common_value_that_nobody_takes_is_refused() -> None:
    assert "Common.block-sizes is taken by no component" in refused(
        {"Common": {"block-sizes": 32}, "Etcd": {}}
    )


def test_a_missing_common_value_is_refused_with_the_nearest_name() -> None:
    message = refused({"Common": {"modle": "m"}, "Router": {"common-configs": ["model"]}})
    assert "did you mean 'modle'?" in message


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ({"workers": 0}, "expected 1 to 64"),
        ({"workers": "two"}, "expected 1 to 64"),
        ({"restart": "sometimes"}, "expected one of"),
        ({"resources": {"tpu": 1}}, "known: gpu, cpu"),
        ({"resources": {"gpu": "1"}}, "expected a whole number"),
        ({"start-timeout-s": -1}, "expected seconds"),
        ({"workers": 2, "env": {"A": ["x"]}}, "1 values for 2 processes"),
    ],
)
def test_service_args_out_of_range_are_refused(service: dict[str, Any], words: str) -> None:
    assert words in refused({"VllmWorker": {"ServiceArgs": service}})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"Frontend": {"ServiceArgs": {"args": "--help"}}}, "Frontend.ServiceArgs.args is '--help'"),
        ({"Frontend": {"ServiceArgs": {"args": 5}}}, "Frontend.ServiceArgs.args is 5"),
        ({"Frontend": {"common-configs": "model"}}, "Frontend.common-configs is 'model'"),
        ({8000: {}}, "unknown component 8000"),
        ({"Frontend": {8000: 1}}, "unknown key Frontend.8000"),
    ],
)
def test_yaml_of_another_kind_than_expected_is_refused_by_place(document: dict[Any, Any], words: str) -> None:
    assert words in refused(document)


def test_what_is_no_yaml_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_bytes(b"Frontend: \xff\xfe")
    with pytest.raises(ConfigError, match=r"graph\.yaml is not YAML"):
        load_graph(path)
    with pytest.raises(ConfigError, match=r"--Frontend\.http-port: '\[' is not YAML"):
        load_graph(AGG, [("Frontend.http-port", "[")])


def test_each_worker_has_exactly_one_guard() -> None:
    message = refused(
        {"VllmWorker": {"ServiceArgs": {"workers": 2}}, "Guard": {"ServiceArgs": {"workers": 3}}}
    )
    assert "exactly one guard" in message


def test_a_bare_no_in_yaml_means_no_restart(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("Frontend: {ServiceArgs: {restart: no}}")
    graph, _ = load_graph(path)
    assert graph.components[Kind.FRONTEND].service.restart is Restart.NO


def test_the_command_line_wins_over_the_file() -> None:
    graph, _ = load_graph(AGG, [("VllmWorker.ServiceArgs.workers", "1"), ("Frontend.http-port", "0")])
    assert graph.count(Kind.WORKER) == graph.count(Kind.GUARD) == 1
    assert graph.components[Kind.FRONTEND].params["http-port"] == 0


def test_switches_lists_and_mappings_become_flags() -> None:
    params = {
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "enable-log-requests": None,
        "served-model-name": ["a", "b"],
        "kv-events-config": {"publisher": "zmq"},
        "max-model-len": 100,
    }
    assert render_flags(params, "vllm_worker") == [
        "--enforce-eager", "--no-enable-prefix-caching", "--served-model-name", "a", "b",
        "--kv-events-config", '{"publisher": "zmq"}', "--max-model-len", "100",
    ]  # fmt: skip


# -- planning --------------------------------------------------------------------------------------------


def test_worker_and_guard_find_each_other(ports: PortBook, model: Path, tmp_path: Path) -> None:
    plan = plan_of(
        {
            "Etcd": {},
            "Nats": {},
            "Guard": {},
            "VllmWorker": {"model": str(model), "ServiceArgs": {"workers": 2}},
            "Router": {"model": str(model)},
            "Frontend": {},
        },
        ports,
        tmp_path,
    )
    for index in (0, 1):
        guard, worker = named(plan, f"guard-{index}"), named(plan, f"worker-{index}")
        transfer = json.loads(flag(worker, "--kv-transfer-config"))
        assert transfer["kv_load_failure_policy"] == "recompute"
        engine = transfer["kv_connector_extra_config"]
        assert engine["socket"] == flag(guard, "--socket")
        tier = engine["secondary_tiers"][0]
        assert f"tcp://127.0.0.1:{tier['control_ports'][0]}" == flag(guard, "--control") == worker.control
        assert flag(worker, "--endpoint-types") == "none"
        assert "--cluster" in guard.argv
    router = named(plan, "router")
    assert flag(router, "--model-name") == "some-model"
    signals = f"http://127.0.0.1:{flag(router, '--signals-port')}/v1/kv/signals"
    assert router.urls["signals"] == signals
    every_port = [port for process in plan.processes for port in process.ports.values()]
    assert len(every_port) == len(set(every_port))


def test_each_data_parallel_rank_has_a_guard_where_its_engine_looks_for_it(
    ports: PortBook, model: Path, tmp_path: Path
) -> None:
    workers = {"model": str(model), "data-parallel-size": 2, "ServiceArgs": {"workers": 2}}
    workers["topology"] = [{"rdma_domain": "a"}, {"rdma_domain": "b"}]
    plan = plan_of({"Etcd": {}, "Nats": {}, "Guard": {}, "VllmWorker": workers}, ports, tmp_path)
    for index, domain in ((0, "a"), (1, "b")):
        worker = named(plan, f"worker-{index}")
        engine = json.loads(flag(worker, "--kv-transfer-config"))["kv_connector_extra_config"]
        tier = engine["secondary_tiers"][0]
        for rank in (0, 1):
            guard = named(plan, f"guard-{index}-dp{rank}")
            assert engine["socket"].replace("{dp_rank}", str(rank)) == flag(guard, "--socket")
            assert guard.control == f"tcp://127.0.0.1:{tier['control_ports'][rank]}"
            assert list(guard.files.values()) == [f"{domain}\n"]
        # What vLLM takes for another address for each rank.
        assert "inproc" in json.loads(flag(worker, "--kv-events-config"))["endpoint"]


def test_every_process_is_told_where_the_cluster_is(ports: PortBook, model: Path, tmp_path: Path) -> None:
    plan = plan_of({"Etcd": {}, "Nats": {}, "Guard": {}, "Frontend": {}}, ports, tmp_path)
    for process in plan.processes:
        assert process.env["ETCD_ENDPOINTS"] == plan.etcd
        assert process.env["NATS_SERVER"] == plan.nats
        assert process.env["ETCD_LEASE_TTL"] == "120"
        assert process.env["KVCR_SECRET_FILE"] == str(tmp_path / "run" / "secret")


def test_a_worker_without_a_guard_lets_the_connector_start_one(
    ports: PortBook, model: Path, tmp_path: Path
) -> None:
    plan = plan_of({"Etcd": {}, "Nats": {}, "VllmWorker": {"model": str(model)}}, ports, tmp_path)
    engine = json.loads(flag(named(plan, "worker-0"), "--kv-transfer-config"))["kv_connector_extra_config"]
    assert "socket" not in engine
    assert "--endpoint-types" not in named(plan, "worker-0").argv


def test_settings_of_the_connector_are_merged_with_ours(ports: PortBook, model: Path, tmp_path: Path) -> None:
    worker = {
        "model": str(model),
        "kv-transfer-config": {"kv_connector_extra_config": {"verify_loads": False}},
    }
    plan = plan_of({"Etcd": {}, "Nats": {}, "Guard": {}, "VllmWorker": worker}, ports, tmp_path)
    engine = json.loads(flag(named(plan, "worker-0"), "--kv-transfer-config"))["kv_connector_extra_config"]
    assert engine["verify_loads"] is False
    assert engine["socket"]


@pytest.mark.parametrize("given", [True, "5", [1]])
def test_settings_of_the_connector_that_are_none_are_refused(
    given: Any, ports: PortBook, model: Path, tmp_path: Path
) -> None:
    worker = {"model": str(model), "kv-transfer-config": given}
    with pytest.raises(ConfigError, match="is no mapping"):
        plan_of({"Etcd": {}, "Nats": {}, "VllmWorker": worker}, ports, tmp_path)


def test_the_connector_can_be_switched_off(ports: PortBook, model: Path, tmp_path: Path) -> None:
    worker = {"model": str(model), "kv-transfer-config": False}
    plan = plan_of({"Etcd": {}, "Nats": {}, "VllmWorker": worker}, ports, tmp_path)
    assert "--kv-transfer-config" not in named(plan, "worker-0").argv


def test_kvcr_off_leaves_out_guards_and_connector_and_changes_nothing_else(
    ports: PortBook, tmp_path: Path
) -> None:
    on, off = (
        make_plan(
            load_graph(AGG, [("kvcr", switch)])[0], LocalSite(RunPaths("t", tmp_path / "run"), ports), {}
        )
        for switch in ("on", "off")
    )
    assert {process.name for process in on.processes} - {process.name for process in off.processes} == {
        "guard-0",
        "guard-1",
    }
    assert "--kv-transfer-config" not in named(off, "worker-0").argv
    assert named(off, "worker-0").control is None
    for name in ("router", "worker-0"):
        assert flags(named(on, name)) - {"--kv-transfer-config"} == flags(named(off, name))


def test_kvcr_is_on_or_off() -> None:
    assert "kvcr is 'sometimes'; expected on or off" in refused({"kvcr": "sometimes", "Etcd": {}})


def test_a_list_in_env_gives_each_process_its_own(ports: PortBook, model: Path, tmp_path: Path) -> None:
    service = {"workers": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": [0, 1], "SAME": "x"}}
    plan = plan_of(
        {"Etcd": {}, "Nats": {}, "VllmWorker": {"model": str(model), "ServiceArgs": service}}, ports, tmp_path
    )
    assert [process.env["VLLM_CPU_OMP_THREADS_BIND"] for process in plan.processes] == ["0", "1"]
    assert [process.env["SAME"] for process in plan.processes] == ["x", "x"]


def test_a_missing_model_is_refused_by_name(ports: PortBook, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'/no/such/model' is not a directory"):
        plan_of({"Etcd": {}, "Nats": {}, "VllmWorker": {"model": "/no/such/model"}}, ports, tmp_path)


def test_pools_that_do_not_fit_are_refused_before_anything_starts(
    ports: PortBook, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcr.graph.site.shm_free_bytes", lambda: 64 << 20)
    document: dict[str, Any] = {
        "Etcd": {},
        "Nats": {},
        "Guard": {"pool-bytes": "48MiB"},
        "VllmWorker": {"model": str(model), "ServiceArgs": {"workers": 1}},
    }
    plan_of(document, ports, tmp_path)
    document["VllmWorker"]["ServiceArgs"]["workers"] = 2
    with pytest.raises(ConfigError, match=r"Guard\.pool-bytes.*2 x 0\.0469 GiB.*0\.0625 GiB free"):
        plan_of(document, ports, tmp_path)
    document["Guard"]["pool-bytes"] = "lots"
    with pytest.raises(ConfigError, match=r"Guard\.pool-bytes is 'lots'"):
        plan_of(document, ports, tmp_path)


def test_components_must_agree_on_the_model(ports: PortBook, model: Path, tmp_path: Path) -> None:
    document = {"VllmWorker": {"model": str(model)}, "Router": {"model": "smollm2-135m-instruct"}}
    with pytest.raises(ConfigError, match="differ"):
        plan_of(document, ports, tmp_path)


def test_a_taken_port_is_refused_by_number_and_owner(ports: PortBook, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}, wanted by Frontend\.http-port, is taken"):
            plan_of({"Etcd": {}, "Nats": {}, "Frontend": {"http-port": port}}, ports, tmp_path)


def test_two_components_cannot_have_one_port(ports: PortBook, tmp_path: Path) -> None:
    port = ports.free()
    ports.release(port)
    with pytest.raises(ConfigError, match=f"port {port}"):
        plan_of({"Etcd": {"port": port}, "Nats": {"port": port}}, ports, tmp_path)


def test_servers_of_somebody_else_are_used_at_their_address(ports: PortBook, tmp_path: Path) -> None:
    plan = plan_of(
        {
            "Etcd": {"address": "http://10.0.0.1:2379"},
            "Nats": {"address": "nats://10.0.0.1:4222"},
            "Frontend": {},
        },
        ports,
        tmp_path,
    )
    assert named(plan, "frontend").env["ETCD_ENDPOINTS"] == "http://10.0.0.1:2379"
    assert all(server.external for server in plan.servers)


def test_an_address_without_a_port_is_refused(ports: PortBook, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected host and port"):
        plan_of({"Etcd": {"address": "http://10.0.0.1"}}, ports, tmp_path)


def test_dynamo_components_need_a_cluster(ports: PortBook, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Frontend needs Etcd"):
        plan_of({"Frontend": {}}, ports, tmp_path)
    environ = {"ETCD_ENDPOINTS": "http://10.0.0.1:2379", "NATS_SERVER": "nats://10.0.0.1:4222"}
    assert plan_of({"Frontend": {}}, ports, tmp_path, **environ).etcd == "http://10.0.0.1:2379"


def test_more_gpus_than_the_machine_has_are_refused(
    ports: PortBook, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcr.graph.site.count_gpus", lambda: 2)
    document: dict[str, Any] = {
        "Etcd": {},
        "Nats": {},
        "VllmWorker": {"model": str(model), "ServiceArgs": {"workers": 2, "resources": {"gpu": 1}}},
    }
    plan = plan_of(document, ports, tmp_path)
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in plan.processes] == ["0", "1"]
    document["VllmWorker"]["ServiceArgs"]["resources"]["gpu"] = 2
    with pytest.raises(ConfigError, match="asks for 4 GPUs"):
        plan_of(document, ports, tmp_path)


def test_topology_domains_are_files_for_each_worker_and_its_guard(
    ports: PortBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcr.graph.site.shm_free_bytes", lambda: 64 << 30)
    graph, _ = load_graph(Path(__file__).parents[2] / "deploy/graphs/agg_topology.yaml")
    plan = make_plan(graph, LocalSite(RunPaths("test-1", tmp_path / "run"), ports), {})
    for process in plan.processes:
        if process.kind not in (Kind.GUARD, Kind.WORKER):
            assert not process.files
            continue
        expected = "rack-a" if process.name[-1] in "01" else "rack-b"
        folder = Path(process.env["DYN_TOPOLOGY_MOUNT_PATH"])
        assert process.env["DYN_KV_TRANSFER_DOMAIN"] == "rdma_domain"
        assert process.files[str(folder / "rdma_domain")].strip() == expected
        for name, text in process.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        host = ("one", "two", "three", "four")[int(process.name[-1])]
        assert read_topology(process.env) == {"host": host, "rdma_domain": expected, "zone": "east"}


@pytest.mark.parametrize("given", ["[{rdma_domain: a}]", "{rdma_domain: a}", "[{a/b: c}, {}]"])
def test_topology_that_does_not_fit_the_workers_is_refused(
    given: str, ports: PortBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcr.graph.site.shm_free_bytes", lambda: 64 << 30)
    agg = Path(__file__).parents[2] / "deploy/graphs/agg.yaml"
    graph, _ = load_graph(agg, [("VllmWorker.topology", given)])
    with pytest.raises(ConfigError, match=r"VllmWorker\.topology"):
        make_plan(graph, LocalSite(RunPaths("test-1", tmp_path / "run"), ports), {})
