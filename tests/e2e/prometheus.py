# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes a running graph, and the dashboards' panels evaluated on it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvcr.graph.infra import free_port

SCRAPE_S = 1
START_S = 30.0
JOBS = {"Guard": "guard", "VllmWorker": "worker", "Router": "router", "Frontend": "frontend", "Etcd": "etcd"}
VARIABLES = {"__rate_interval": "10s", "__range": "10m", "__interval": "2s", "datasource": "prometheus"}


def installed() -> bool:
    return shutil.which("prometheus") is not None


@dataclass(frozen=True)
class Series:
    """One line of a panel."""

    panel: str
    kind: str
    unit: str
    legend: str
    points: list[tuple[float, float]]


class Prometheus:
    """Scrapes what ``graph.json`` of a run names. Ended by :meth:`close`."""

    def __init__(self, state: Mapping[str, Any], folder: Path) -> None:
        self._port = free_port()
        jobs: dict[str, list[str]] = {}
        for component in state["components"]:
            if component["metrics"] and component["component"] in JOBS:
                target = urllib.parse.urlsplit(component["metrics"]).netloc
                jobs.setdefault(JOBS[component["component"]], []).append(target)
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items()
            ],
        }
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={path}",
                    f"--storage.tsdb.path={folder}/prometheus-data",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + START_S
        while not self._ready():
            assert self._process.poll() is None, (folder / "prometheus.log").read_text()[-2000:]
            assert time.monotonic() < deadline_s, "Prometheus did not start"
            time.sleep(0.2)
        # It looks for targets every 5 s; what happens before its first scrape is no increase.
        targets = sum(len(found) for found in jobs.values())
        while len(self.query_range("up == 1", SCRAPE_S)) < targets:
            assert time.monotonic() < deadline_s, "Prometheus does not reach every target"
            time.sleep(0.2)
        time.sleep(SCRAPE_S)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def query_range(self, expression: str, last_s: float) -> list[dict[str, Any]]:
        """Series of an expression over the last seconds. Fails on one that Prometheus refuses."""
        end = time.time()
        words = {"query": expression, "start": end - last_s, "end": end, "step": max(1.0, last_s / 120)}
        url = f"http://127.0.0.1:{self._port}/api/v1/query_range?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def panel(self, panel: Mapping[str, Any], last_s: float) -> list[Series]:
        """What a panel of a dashboard shows; numbers only."""
        series = []
        for target in panel["targets"]:
            for found in self.query_range(expand(target["expr"]), last_s):
                points = [(t, float(v)) for t, v in found["values"] if v not in ("NaN", "+Inf", "-Inf")]
                if points:
                    legend = re.sub(
                        r"\{\{\s*(\w+)\s*\}\}",
                        lambda match, labels=found["metric"]: labels.get(match[1], ""),
                        target.get("legendFormat") or "",
                    )
                    unit = panel["fieldConfig"]["defaults"].get("unit", "")
                    series.append(Series(panel["title"], panel["type"], unit, legend, points))
        return series

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def expand(expression: str) -> str:
    """The expression with Grafana's variables filled in."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: VARIABLES[match[1]], expression)
