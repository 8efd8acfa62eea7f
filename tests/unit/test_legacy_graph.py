# SPDX-License-Identifier: Apache-2.0
"""Graph files of Dynamo 0.3 run as they are, and say what of them has no meaning any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcr.errors import ConfigError
from kvcr.graph import legacy
from kvcr.graph.config import Kind, load_graph
from kvcr.graph.planning import make_plan
from kvcr.graph.ports import PortBook
from kvcr.graph.site import LocalSite, RunPaths

# The settings of examples/llm/configs/agg_router.yaml of Dynamo 0.3, with a model that exists here.
AGG_ROUTER = """
Common:
  model: {model}
  router: kv
  block-size: 64
  max-model-len: 16384
  kv-transfer-config: '{{"kv_connector":"DynamoNixlConnector"}}'
Frontend:
  served_model_name: some/model
  endpoint: dynamo.Processor.chat/completions
  port: 0
Processor:
  common-configs: [model, block-size, max-model-len, router]
Router:
  min-workers: 1
  common-configs: [model, router]
VllmWorker:
  enforce-eager: true
  max-num-batched-tokens: 16384
  enable-prefix-caching: true
  tensor-parallel-size: 1
  ServiceArgs:
    workers: 1
    resources:
      gpu: '1'
  common-configs: [model, block-size, max-model-len, router, kv-transfer-config]
Planner:
  environment: kubernetes
"""


@pytest.fixture
def agg_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kvcr.graph.config.count_gpus", lambda: 0)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = tmp_path / "agg_router.yaml"
    path.write_text(AGG_ROUTER.format(model=model))
    return path


def test_the_file_runs_as_a_graph_of_today(agg_router: Path, tmp_path: Path) -> None:
    graph, _ = load_graph(agg_router)
    ports = PortBook()
    plan = make_plan(graph, LocalSite(RunPaths("old-1", tmp_path / "run"), ports), {})
    ports.close()
    by_name = {process.name: process for process in plan.processes}
    assert set(by_name) == {"guard-0", "worker-0", "router", "frontend"}
    worker = by_name["worker-0"].argv
    assert worker[worker.index("--block-size") + 1] == "64"
    assert worker[worker.index("--max-model-len") + 1] == "16384"
    assert "--enable-prefix-caching" in worker
    transfer = json.loads(worker[worker.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "KvcrConnector"
    router = by_name["router"].argv
    assert router[router.index("--model-name") + 1] == "some/model"
    assert router[router.index("--block-size") + 1] == "64"


def test_each_thing_ignored_is_one_line(agg_router: Path) -> None:
    _, notes = load_graph(agg_router)
    ignored = sorted(
        note.split(":")[0].removeprefix("ignored ") for note in notes if note.startswith("ignored ")
    )
    assert ignored == [
        "Frontend.endpoint",
        "Planner",
        "Processor",
        "Router.min-workers",
        "Router.router",
        "VllmWorker.ServiceArgs.resources.gpu",
        "VllmWorker.kv-transfer-config",
        "VllmWorker.router",
    ]
    assert [note for note in notes if note.startswith("added ")]


def test_gpus_are_kept_where_there_are_some() -> None:
    document: dict[str, Any] = {
        "Processor": {},
        "VllmWorker": {"model": "m", "ServiceArgs": {"workers": 2, "resources": {"gpu": "1"}}},
    }
    translated, _ = legacy.translate(document, gpus=2)
    assert translated[Kind.WORKER]["ServiceArgs"] == {"workers": 2, "resources": {"gpu": 1}}


def test_a_key_that_dynamo_vllm_lost_is_ignored_not_refused() -> None:
    document = {"Processor": {}, "VllmWorker": {"model": "m", "num-scheduler-steps": 8}}
    translated, notes = legacy.translate(document, gpus=0)
    assert "num-scheduler-steps" not in translated[Kind.WORKER]
    assert any("VllmWorker.num-scheduler-steps" in note for note in notes)


def test_settings_that_only_the_processor_had_reach_the_worker() -> None:
    document = {
        "Processor": {"model": "m", "block-size": 128},
        "VllmWorker": {},
        "Frontend": {"endpoint": "x"},
    }
    document["VllmWorker"] = {"enforce-eager": True}
    translated, _ = legacy.translate(document, gpus=0)
    assert translated[Kind.WORKER]["block-size"] == 128
    assert translated[Kind.ROUTER]["block-size"] == 128


def test_separate_prefill_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="PrefillWorker"):
        legacy.translate({"Processor": {}, "VllmWorker": {}, "PrefillWorker": {}}, gpus=0)


def test_a_graph_of_today_is_not_taken_for_an_old_one() -> None:
    assert not legacy.is_legacy({"Frontend": {"http-port": 8000}, "VllmWorker": {"model": "m"}})
    assert legacy.is_legacy({"Frontend": {"served_model_name": "m"}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("VllmWorker: {model: m, ServiceArgs: {workers: two}}", r"workers is 'two'"),
        ("VllmWorker: {model: m, ServiceArgs: {resources: {cpu: all}}}", r"resources\.cpu is 'all'"),
        ("VllmWorker: {model: m, ServiceArgs: {resources: 1}}", r"resources is 1; expected a mapping"),
        ("VllmWorker: {model: m, ServiceArgs: [workers, 1]}", r"ServiceArgs is .*expected a mapping"),
        ("VllmWorker: [model, m]", r"VllmWorker is .*expected a mapping"),
        ("Common: m\nVllmWorker: {}", r"Common is 'm'; expected a mapping"),
        ("Common: {model: m}\nVllmWorker: {common-configs: model}", r"common-configs is 'model'"),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(f"Processor: {{}}\n{text}\n")
    with pytest.raises(ConfigError, match=words):
        load_graph(path)
