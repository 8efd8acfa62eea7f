# SPDX-License-Identifier: Apache-2.0
"""The failover scene on a whole graph whose engines compute nothing: everything else in it is real."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from demo.failover_report import figures
from demo.graph import load, serve
from demo.scenes.failover import Failover, Scale, failover
from demo.scenes.share import warm_up
from tests.integration.tiny_tokenizer import write_model

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
BLOCK = 32
SCALE = Scale(sessions=4, turns=2, words=100, max_tokens=30)


def quiet(_what: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("graph")
    package = directory / "path/dynamo/vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text((HERE / "toy_worker.py").read_text())
    paths = f"{directory / 'path'}:{HERE}:{HERE.parents[1] / 'components'}"
    model = write_model(directory / "tiny")
    file = directory / "toys.yaml"
    file.write_text(
        f"""
Common: {{model: {model}, block-size: {BLOCK}}}
Etcd: {{}}
Nats: {{}}
Frontend: {{migration-limit: 3, ServiceArgs: {{restart: on-failure}}}}
Router: # a copy costs enough that noise in what was measured of the workers does not outweigh it
  common-configs: [model, block-size]
  prefill-tokens-per-s: 640
  copy-latency-s: 0.2
VllmWorker:
  common-configs: [model, block-size]
  ServiceArgs: {{workers: 2, restart: on-failure, env: {json.dumps({"PYTHONPATH": paths})}}}
Guard: {{pool-bytes: 8MiB, ServiceArgs: {{restart: on-failure}}}}
"""
    )
    return file


@contextlib.contextmanager
def played(graph_file: Path, run_dir: Path, switch: str, lines: list[str]) -> Iterator[Failover]:
    running = serve(run_dir, graph_file, [f"--kvcr={switch}"], quiet=True)
    try:
        graph = load(run_dir)
        warm_up(graph, quiet)
        yield failover(graph, SCALE, lines.append, quiet)
    finally:
        running.stop()


def test_sessions_go_on_from_the_dead_workers_pool_and_one_that_slept_goes_home(
    graph_file: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    with played(graph_file, tmp_path / "on", "on", lines) as seen:
        report = figures(seen)
    page = "\n".join(lines)
    assert report["kvcr"] == "on"
    assert report["requests"]["failed"] == report["requests"]["hung"] == 0, page
    assert report["stall_s"]["requests"] > 0, "no stream was under way"
    assert report["served_from_dead_pool"]["blocks"] > 0
    assert report["served_from_dead_pool"]["bytes"] > 0
    assert report["served_from_dead_pool"]["transfers"] > 0
    assert 0 < report["active_s"] < report["serves_again_s"]
    assert report["returned"]["computed_tokens"] <= BLOCK
    assert report["returned"]["pulled_blocks"] == 0
    assert report["home"]["went_home"], page
    assert report["home"]["pulled_tokens"] == 0
    for words in ("kill -9 of worker A", "STANDBY to CHECKING", "CHECKING to ACTIVE", "answers through the"):
        assert words in page


def test_without_kvcr_the_same_death_loses_what_the_engine_knew(graph_file: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    with played(graph_file, tmp_path / "off", "off", lines) as seen:
        report = figures(seen)
    assert (report["kvcr"], report["active_s"]) == ("off", None)
    assert report["requests"]["hung"] == 0
    assert report["served_from_dead_pool"] == {"bytes": 0, "blocks": 0, "transfers": 0}
    assert report["returned"]["computed_tokens"] == report["returned"]["prompt_tokens"]
    assert report["serves_again_s"] > 0
