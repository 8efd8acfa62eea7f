# SPDX-License-Identifier: Apache-2.0
"""Dashboards are drawn from their own queries: every kind of panel, in its place, as well-formed SVG."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from demo.prometheus import Prometheus, Series

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
BEGUN_S, ENDED_S = 1000.0, 1600.0


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_dashboards", ROOT / "scripts/draw_dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Answers(Prometheus):
    """Two series for every expression, labelled as it groups them; some values are missing."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def query(self, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
        self.asked.append(expression)
        by = re.search(r"by \(([^)]*)\)", expression)
        names = by[1].split(", ") if by else []
        states = "kvcr_guard_state" in expression and "* 3" in expression
        found = []
        for number in range(2):
            values = []
            for at_s in range(round(start_s), round(end_s) + 1, 3):
                value = float((at_s // 200 + number) % 4) if states else math.sin(at_s / 40) ** 2 * 10**number
                values.append((at_s, "NaN" if 1200 < at_s < 1230 else str(value)))
            found.append({"metric": {name: f"{name}-{number}" for name in names}, "values": values})
        return found


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_is_drawn_where_it_belongs(drawing: ModuleType, path: Path, tmp_path: Path) -> None:
    document = json.loads(path.read_text())
    answers = Answers()
    text = drawing.draw(document, answers, BEGUN_S, ENDED_S)
    (tmp_path / f"{path.stem}.svg").write_text(text)
    picture = ElementTree.fromstring(text)
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in document["panels"] if panel["title"] not in words] == []
    assert "no data" not in words
    assert len(answers.asked) == sum(len(panel["targets"]) for panel in panels) + 2
    width, height = (float(part) for part in picture.attrib["viewBox"].split()[2:])
    svg = "{http://www.w3.org/2000/svg}"
    for line in (*picture.iter(f"{svg}polyline"), *picture.iter(f"{svg}polygon")):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_parts_of_a_whole_stand_on_each_other(drawing: ModuleType) -> None:
    one = Series("a", {}, "A", [(1.0, 2.0), (2.0, 3.0)])
    other = Series("b", {}, "A", [(2.0, 4.0)])
    (above, below), (top, between) = drawing._stacked([one, other])
    assert (above, below) == ([(1.0, 2.0), (2.0, 3.0)], [(1.0, 0.0), (2.0, 0.0)])
    assert (top, between) == ([(1.0, 2.0), (2.0, 7.0)], above)


def test_a_matrix_has_a_row_for_each_reader_and_a_column_for_each_source(drawing: ModuleType) -> None:
    document = json.loads((ROOT / "deploy/grafana/dashboards/fleet.json").read_text())
    text = drawing.draw(document, Answers(), BEGUN_S, ENDED_S)
    for words in ("instance \\ peer", "instance-0", "instance-1", "peer-0", "peer-1"):
        assert f">{words}<" in text


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.0042, "s", "4.2 ms"),
        (12.5, "s", "12.5 s"),
        (3_080_000, "Bps", "3.08 MB/s"),
        (0.25, "percentunit", "25 %"),
        (0x0123456789AB, "hex", "0123456789ab"),
        (7, "short", "7"),
    ],
)
def test_values_are_told_in_their_unit(drawing: ModuleType, value: float, unit: str, words: str) -> None:
    assert drawing.shown(value, unit) == words


@pytest.mark.parametrize("top", [0.00031, 0.04, 0.9, 1.0, 7.0, 99.0, 12_345.0, 9.1e8])
def test_an_axis_has_a_few_round_values_and_reaches_the_top(drawing: ModuleType, top: float) -> None:
    scale = drawing.ticks(top)
    assert 3 <= len(scale) <= 7
    assert scale[0] == 0
    assert top <= scale[-1] * 1.001
    assert scale[-1] <= 2.1 * top
