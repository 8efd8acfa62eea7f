# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alerts are generated, ask for metrics that exist, and alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy/grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
UPSTREAM = re.compile(r"^(dynamo_frontend_|up$|ALERTS$)")
SUFFIXES = ("_bucket", "_sum", "_count", "_total")


def panels(path: Path) -> Iterator[dict[str, Any]]:
    for panel in json.loads(path.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]
    for group in yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def defined_metrics() -> set[str]:
    """Names in quotes in our sources, and the counters that engines publish under a common prefix."""
    # Without importing it, as that needs vLLM.
    engine = (ROOT / "components/kvcr/vllm/stats.py").read_text()
    counters = re.findall(r'^    "([a-z_]+)":', engine, re.MULTILINE)
    text = "\n".join(path.read_text() for path in (ROOT / "components").rglob("*.py"))
    return set(re.findall(r'"(kvcr_[a-z0-9_]+)"', text)) | {f"vllm:kvcr_{name}_total" for name in counters}


def test_the_committed_dashboards_are_the_generated_ones() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gen_dashboards.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + "; run: python scripts/gen_dashboards.py"


def test_there_are_the_three_dashboards_and_the_rows_people_look_for() -> None:
    assert [path.stem for path in DASHBOARDS] == ["failover", "fleet", "transfers"]
    document = json.loads((GRAFANA / "dashboards/transfers.json").read_text())
    rows = [panel["title"] for panel in document["panels"] if panel["type"] == "row"]
    assert {"Offload (G1 to G2)", "Onboard (G2 to G1)"} <= set(rows)


def test_every_metric_that_is_asked_for_exists() -> None:
    known = defined_metrics()
    for where, expression in expressions():
        text = re.sub(r'"[^"]*"|by \([^)]*\)', "", expression)
        for name in re.findall(r"(?:vllm:)?\b(?:kvcr|dynamo)_[a-z0-9_]+", text):
            stems = {name, *(name.removesuffix(suffix) for suffix in SUFFIXES)}
            assert stems & known or UPSTREAM.match(name), f"{where} asks for {name}, which nobody exports"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_says_what_it_shows_and_has_an_id_of_its_own(path: Path) -> None:
    document = json.loads(path.read_text())
    identifiers = [panel["id"] for panel in document["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    for panel in panels(path):
        assert panel["title"]
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (scripts/prometheus.sh gets it)"
)
def test_alerts_fire_when_they_should_and_not_before() -> None:
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            ["promtool", *arguments], cwd=GRAFANA, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test() -> None:
    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"][0]["rules"]
    tested = (GRAFANA / "alerts_test.yml").read_text()
    assert [rule["alert"] for rule in rules if rule["alert"] not in tested] == []
