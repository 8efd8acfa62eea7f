# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes a running graph, and panels of dashboards evaluated on it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvcr.graph.infra import free_port

SCRAPE_S = 1
START_S = 60.0
JOBS = {"Guard": "guard", "VllmWorker": "worker", "Router": "router", "Frontend": "frontend", "Etcd": "etcd"}


def installed() -> bool:
    """On PATH; ``scripts/prometheus.sh`` gets one."""
    return shutil.which("prometheus") is not None


@dataclass(frozen=True)
class Series:
    """One line of a panel, or one cell of a table."""

    legend: str
    labels: Mapping[str, str]
    target: str
    """``A``, ``B``, ...: the query it answers."""
    points: list[tuple[float, float]]
    """Unix seconds and values; numbers only."""


class Prometheus:
    """Scrapes what ``graph.json`` of a run names, by the names it has there. Ended by :meth:`close`."""

    def __init__(self, state: Mapping[str, Any], folder: Path) -> None:
        """Raises TimeoutError when it does not come up or does not reach every process."""
        self._port = free_port()
        jobs: dict[str, list[tuple[str, str]]] = {}
        for component in state["components"]:
            if component["metrics"] and component["component"] in JOBS:
                address = urllib.parse.urlsplit(component["metrics"]).netloc
                jobs.setdefault(JOBS[component["component"]], []).append((component["name"], address))
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [
                        {"targets": [address], "labels": {"instance": name}} for name, address in targets
                    ],
                }
                for job, targets in jobs.items()
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
        self.url = f"http://127.0.0.1:{self._port}"
        # It looks for targets every 5 s; what happens before its first scrape is no increase.
        targets = sum(len(found) for found in jobs.values())
        deadline_s = time.monotonic() + START_S
        while self._reached() < targets:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.close()
                words = (folder / "prometheus.log").read_text()[-2000:]
                raise TimeoutError(f"Prometheus does not run or does not reach every process:\n{words}")
            time.sleep(0.2)
        time.sleep(SCRAPE_S)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def query(self, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """Series of an expression between two times. Fails on one that Prometheus refuses."""
        step = max(SCRAPE_S, (end_s - start_s) / 240)
        words = {"query": expression, "start": start_s, "end": end_s, "step": step}
        url = f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(words)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from error
        return found

    def panel(self, panel: Mapping[str, Any], start_s: float, end_s: float) -> list[Series]:
        """What a panel of a dashboard shows."""
        series = []
        for target in panel["targets"]:
            for found in self.query(expand(target["expr"], end_s - start_s), start_s, end_s):
                points = [(t, float(v)) for t, v in found["values"] if v not in ("NaN", "+Inf", "-Inf")]
                if points:
                    labels = found["metric"]
                    legend = re.sub(
                        r"\{\{\s*(\w+)\s*\}\}",
                        lambda match, labels=labels: labels.get(match[1], ""),
                        target.get("legendFormat") or "",
                    )
                    series.append(Series(legend.strip(), labels, target["refId"], points))
        return series

    def _reached(self) -> int:
        """Processes whose page it has read."""
        with contextlib.suppress(OSError, ValueError):
            now_s = time.time()
            return len(self.query("up == 1", now_s - SCRAPE_S, now_s))
        return -1


def expand(expression: str, range_s: float) -> str:
    """The expression with Grafana's variables filled in."""
    values = {"__rate_interval": f"{10 * SCRAPE_S}s", "__range": f"{max(1, round(range_s))}s"}
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], expression)
