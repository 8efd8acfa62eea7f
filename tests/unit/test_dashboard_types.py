# SPDX-License-Identifier: Apache-2.0
"""scripts/check_dashboards.sh refuses what Grafana's schema does not know."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAME = "failover.json"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", ROOT / "scripts/check_dashboards.sh", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if "types not checked" in done.stdout:
        pytest.skip(done.stdout.strip())
    return done


def first(document: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(panel for panel in document["panels"] if panel["type"] == kind)
    return found


BREAKS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a key of the dashboard": ("timezones", lambda d: d.update(timezones="browser")),
    "a key of a panel": ("desc", lambda d: first(d, "stat").update(desc="")),
    "a place without a width": ("'w'", lambda d: first(d, "stat")["gridPos"].pop("w")),
    "an option": ("legends", lambda d: first(d, "timeseries")["options"].update(legends={})),
    "the value of an option": (
        '"banner"',
        lambda d: first(d, "timeseries")["options"].update(legend={"displayMode": "banner"}),
    ),
    "a custom field": (
        "lineWidths",
        lambda d: first(d, "timeseries")["fieldConfig"]["defaults"].update(custom={"lineWidths": 1}),
    ),
    "a kind of mapping": (
        '"values"',
        lambda d: first(d, "state-timeline")["fieldConfig"]["defaults"]["mappings"][0].update(type="values"),
    ),
    "a query without an expression": ("'expr'", lambda d: first(d, "stat")["targets"][0].pop("expr")),
    "an annotation": ("color", lambda d: d["annotations"]["list"][0].update(color="red")),
    "a kind of panel": ("no shape", lambda d: first(d, "stat").update(type="stats")),
}


@pytest.mark.skipif(shutil.which("npm") is None, reason="node and npm are not installed")
@pytest.mark.timeout(400)
def test_whatever_the_schema_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    original = (ROOT / "deploy/grafana/dashboards" / NAME).read_text()
    for number, (_, change) in enumerate(BREAKS.values()):
        document = json.loads(original)
        change(document)
        # All but the last in one run: tsc tells of every one, and takes seconds to start.
        folder = tmp_path / ("alone" if number == len(BREAKS) - 1 else "together")
        folder.mkdir(exist_ok=True)
        (folder / f"broken{number}.json").write_text(json.dumps(document))
    together, alone = check(tmp_path / "together"), check(tmp_path / "alone")
    assert together.returncode != 0
    assert alone.returncode != 0
    said = together.stdout + together.stderr + alone.stdout + alone.stderr
    for number, (what, (word, _)) in enumerate(BREAKS.items()):
        about = said if number == len(BREAKS) - 1 else "\n".join(_errors(said, f"broken{number}.ts"))
        assert word in about, f"{what}: {about or 'nothing was said'}"


def _errors(said: str, file: str) -> list[str]:
    """tsc's lines about one file, with the ones that go on from them."""
    mine, lines = False, []
    for line in said.splitlines():
        mine = line.startswith(file) if not line.startswith(" ") else mine
        lines += [line] if mine else []
    return lines
