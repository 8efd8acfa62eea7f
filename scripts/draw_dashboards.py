# SPDX-License-Identifier: Apache-2.0
"""Draw the dashboards from a run of a graph, as SVG, without Grafana.

``python scripts/draw_dashboards.py --run-dir latest --for 60`` watches a graph that runs, for a minute;
``python scripts/draw_dashboards.py`` plays the failover scene on a graph of its own (ten minutes). A real
Prometheus scrapes the graph; every panel's own queries are evaluated on it and drawn in the dashboard's grid.
What is drawn is the data and the layout, not Grafana's look.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from demo import graph as graphs  # noqa: E402
from demo.prometheus import Prometheus, Series  # noqa: E402
from demo.scenes.failover import QUICK, failover  # noqa: E402
from demo.scenes.share import warm_up  # noqa: E402
from demo.table import say, waiting  # noqa: E402
from kvcr.graph.models import cache_dir  # noqa: E402

DASHBOARDS = ROOT / "deploy/grafana/dashboards"
WIDTH, MARGIN, ROW, GAP = 1200, 10, 28, 8
COLUMNS = 24
PALETTE = ("#3274d9", "#d9622b", "#37872d", "#8f3bb8", "#c4162a", "#0a8f8f", "#b8860b", "#6b6f76")
COLORS = {"green": "#56a64b", "yellow": "#e0b400", "red": "#d0372d", "text": "#9fa7b3"}
LEGEND_ROW = 14
MAX_LEGEND_ROWS = 3
STYLE = """
text { font-family: system-ui, 'DejaVu Sans', sans-serif; fill: #24292e }
.name { font-size: 18px; font-weight: 600 } .row { font-size: 14px; font-weight: 600 }
.title { font-size: 12.5px; font-weight: 600 } .small { font-size: 10.5px; fill: #55606b }
.stat { font-size: 34px; font-weight: 600; fill: #37872d }
.state { font-size: 11px; font-weight: 600; fill: #fff }
.head { font-size: 11px; font-weight: 600 } .cell { font-size: 11.5px }
"""
Box = tuple[float, float, float, float]
"""x, y, width, height."""
Points = Sequence[tuple[float, float]]
"""Unix seconds and values."""


# --- numbers as people read them ------------------------------------------------------------------


def shown(value: float, unit: str) -> str:
    """A value in a unit of Grafana's."""
    if unit in ("hex", "hex0x"):
        return f"{int(value):012x}"
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        if value == 0 or abs(value) >= 1:
            return f"{value:.3g} s"
        return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.3g} µs"
    suffix = {"Bps": "B/s", "decbytes": "B", "ops": "/s", "reqps": "req/s", "tok/s": "tok/s"}.get(unit, "")
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {letter}{suffix}".rstrip()
    return f"{value:.3g} {suffix}".rstrip()


def ticks(top: float, count: int = 5) -> list[float]:
    """Round values from 0 to ``top`` or just above."""
    raw = top / count
    power = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 10.0 ** -(len(f"{1 / raw:.0f}"))
    step = next(factor * power for factor in (1, 2, 5, 10, 20, 50, 100) if factor * power >= raw * 0.999)
    return [number * step for number in range(int(top / step + 0.999) + 1)]


# --- one panel ------------------------------------------------------------------------------------


class Canvas:
    """Elements of one picture, in order."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(self, box: Box, fill: str, stroke: str = "none", title: str = "") -> None:
        x, y, w, h = box
        inside = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.5, w):.1f}" height="{h:.1f}" fill="{fill}" '
            f'stroke="{stroke}">{inside}</rect>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, points: Iterable[tuple[float, float]], color: str, style: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>')

    def area(self, points: Iterable[tuple[float, float]], color: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{color}" fill-opacity="0.25" stroke="none"/>')


class Drawing:
    """The panels of one dashboard over one span of time."""

    def __init__(self, start_s: float, end_s: float, marks: Sequence[tuple[float, str]]) -> None:
        self.canvas = Canvas()
        self._start_s = start_s
        self._end_s = end_s
        self._marks = marks

    def panel(self, panel: Mapping[str, Any], series: Sequence[Series], box: Box) -> None:
        x, y, w, h = box
        self.canvas.rect(box, "#ffffff", "#d8dbe0")
        self.canvas.text(x + 8, y + 17, panel["title"], "title")
        inside = (x + 8, y + 24, w - 16, h - 32)
        kinds: dict[str, Callable[[Mapping[str, Any], Sequence[Series], Box], None]] = {
            "timeseries": self._time,
            "stat": self._stat,
            "state-timeline": self._states,
            "table": self._table,
        }
        if series:
            kinds[panel["type"]](panel, series, inside)
        else:
            self.canvas.text(x + w / 2, y + h / 2, "no data", "small", "middle")

    def _across(self, at_s: float, x: float, w: float) -> float:
        return x + w * (at_s - self._start_s) / (self._end_s - self._start_s)

    def _time(self, panel: Mapping[str, Any], series: Sequence[Series], box: Box) -> None:
        x, y, w, h = box
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        legend = _rows_of_legend(series, w)
        plot = (x + 58, y + 8, w - 64, h - 26 - LEGEND_ROW * len(legend))
        stacked = (
            panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
        )
        levels = _stacked(series) if stacked else [(one.points, None) for one in series]
        scale = ticks(max(max(v for _, v in line) for line, _ in levels) or 1.0)
        top = scale[-1]
        left, upper, wide, high = plot
        for value in scale:
            level = upper + high * (1 - value / top)
            self.canvas.line([(left, level), (left + wide, level)], "#e8eaee")
            self.canvas.text(left - 6, level + 4, shown(value, unit), "small", "end")
        self._time_axis(plot)

        def place(run: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
            return [(self._across(t, left, wide), upper + high * (1 - v / top)) for t, v in run]

        for number, (line, below) in enumerate(levels):
            color = PALETTE[number % len(PALETTE)]
            if below is not None:
                self.canvas.area([*place(line), *reversed(place(below))], color)
            for run in _runs(line):
                self.canvas.line(place(run), color, 'stroke-width="1.6"')
        for row, entries in enumerate(legend):
            at = left
            for number, words in entries:
                level = upper + high + 17 + LEGEND_ROW * (row + 1)
                color = PALETTE[number % len(PALETTE)]
                self.canvas.line([(at, level - 4), (at + 12, level - 4)], color, 'stroke-width="3"')
                self.canvas.text(at + 16, level, words, "small")
                at += _width(words)

    def _time_axis(self, plot: Box) -> None:
        x, y, w, h = plot
        minutes = (self._end_s - self._start_s) / 60
        every = next(each for each in (0.25, 0.5, 1, 2, 5, 10, 30, 60) if minutes / each <= max(3, w / 90))
        number = 0
        while number * every <= minutes:
            at = self._across(self._start_s + 60 * number * every, x, w)
            anchor = "start" if number == 0 else "middle" if at < x + w - 20 else "end"
            minute, part = divmod(number * every, 1)
            self.canvas.text(at, y + h + 14, f"{minute:.0f}:{60 * part:02.0f}", "small", anchor)
            number += 1
        self._mark(plot)

    def _mark(self, plot: Box) -> None:
        x, y, w, h = plot
        for at_s, color in self._marks:
            at = self._across(at_s, x, w)
            self.canvas.line(
                [(at, y), (at, y + h)], COLORS[color], 'stroke-width="1.3" stroke-dasharray="4 3"'
            )

    def _stat(self, panel: Mapping[str, Any], series: Sequence[Series], box: Box) -> None:
        x, y, w, h = box
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        self.canvas.text(x + w / 2, y + h / 2 + 10, shown(series[0].points[-1][1], unit), "stat", "middle")

    def _states(self, panel: Mapping[str, Any], series: Sequence[Series], box: Box) -> None:
        x, y, w, h = box
        names = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
        left, wide = x + 90, w - 96
        high = min(60.0, (h - 20) / len(series))
        for row, one in enumerate(series):
            level = y + 4 + row * high
            self.canvas.text(left - 8, level + high / 2 + 3, one.legend, "small", "end")
            for value, from_s, to_s in _spans(one.points):
                state = names[str(round(value))]
                at, until = (self._across(moment, left, wide) for moment in (from_s, to_s))
                place = (at, level, until - at, high - 6)
                self.canvas.rect(place, COLORS[state["color"]], title=state["text"])
                if until - at > 7 * len(state["text"]):
                    self.canvas.text((at + until) / 2, level + high / 2 + 1, state["text"], "state", "middle")
        self._time_axis((left, y + 4, wide, high * len(series)))

    def _table(self, panel: Mapping[str, Any], series: Sequence[Series], box: Box) -> None:
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        how = panel["transformations"][0]
        if how["id"] == "groupingToMatrix":
            names = how["options"]["rowField"], how["options"]["columnField"]
            cells = {tuple(one.labels.get(name, "") for name in names): one.points[-1][1] for one in series}
            columns = sorted({column for _, column in cells})
            head = [f"{names[0]} \\ {names[1]}", *columns]
            rows = [
                [row, *(shown(cells[row, c], unit) if (row, c) in cells else "" for c in columns)]
                for row in sorted({row for row, _ in cells})
            ]
        else:
            head, rows = _ranks(panel, series, unit)
        x, y, w, h = box
        wanted = [max(len(line[column]) for line in [head, *rows]) + 2 for column in range(len(head))]
        each = [w * one / sum(wanted) for one in wanted]
        left = [x + 4 + sum(each[:column]) for column in range(len(head))]
        for at, words in zip(left, head, strict=True):
            self.canvas.text(at, y + 14, words, "head")
        for number, line in enumerate(rows[: int((h - 20) / 19)]):
            level = y + 36 + 19 * number
            self.canvas.line([(x, level - 14), (x + w, level - 14)], "#e8eaee")
            for at, words in zip(left, line, strict=True):
                self.canvas.text(at, level, words, "cell")


def _ranks(
    panel: Mapping[str, Any], series: Sequence[Series], unit: str
) -> tuple[list[str], list[list[str]]]:
    """A row for each set of labels, a column for each query: what Grafana's *merge* makes of them."""
    now_s = max(one.points[-1][0] for one in series)
    current = [one for one in series if one.points[-1][0] >= now_s - 1]
    letters = [target["refId"] for target in panel["targets"]]
    about = {o["matcher"]["options"]: o["properties"] for o in panel["fieldConfig"]["overrides"]}
    settings = [{p["id"]: p["value"] for p in about[f"Value #{letter}"]} for letter in letters]
    labels = sorted({tuple(sorted(one.labels.items())) for one in current}, key=lambda row: row[::-1])
    values = {(tuple(sorted(one.labels.items())), one.target): one.points[-1][1] for one in current}
    head = [*(name for name, _ in labels[0]), *(setting["displayName"] for setting in settings)]
    rows = [
        [
            *(value for _, value in row),
            *(
                shown(values[row, letter], setting.get("unit", unit)) if (row, letter) in values else ""
                for letter, setting in zip(letters, settings, strict=True)
            ),
        ]
        for row in labels
    ]
    return head, rows


def _width(words: str) -> float:
    return 26 + 5.9 * len(words)


def _rows_of_legend(series: Sequence[Series], width: float) -> list[list[tuple[int, str]]]:
    rows: list[list[tuple[int, str]]] = [[]]
    used = 64.0
    for number, one in enumerate(series):
        if used + _width(one.legend) > width and rows[-1]:
            if len(rows) == MAX_LEGEND_ROWS:
                break
            rows.append([])
            used = 64.0
        rows[-1].append((number, one.legend))
        used += _width(one.legend)
    return rows


def _stacked(series: Sequence[Series]) -> list[tuple[Points, Points]]:
    """Of each line its upper edge, on top of those before it, and its lower one."""
    times = sorted({at_s for one in series for at_s, _ in one.points})
    below = [(at_s, 0.0) for at_s in times]
    edges = []
    for one in series:
        values = dict(one.points)
        above = [(at_s, level + values.get(at_s, 0.0)) for at_s, level in below]
        edges.append((above, below))
        below = above
    return edges


def _runs(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Parts of a line without a gap."""
    step = min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=1.0)
    run = [points[0]]
    for point in points[1:]:
        if point[0] - run[-1][0] > 2.5 * step:
            yield run
            run = []
        run.append(point)
    yield run


def _spans(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float, float]]:
    """Value, beginning and end of each part in which the value stays."""
    begin_s, value = points[0]
    for at_s, other in points[1:]:
        if other != value:
            yield value, begin_s, at_s
            begin_s, value = at_s, other
    yield value, begin_s, points[-1][0]


# --- a dashboard ----------------------------------------------------------------------------------


def draw(document: Mapping[str, Any], prometheus: Prometheus, start_s: float, end_s: float) -> str:
    """A dashboard as one SVG."""
    marks = []
    for event in document["annotations"]["list"]:
        for series in prometheus.query(event["expr"], start_s, end_s):
            times = [float(t) for t, _ in series["values"]]
            # One mark where samples follow each other, as Grafana makes one region of them.
            marks += [(run[0][0], event["iconColor"]) for run in _runs([(t, 0.0) for t in times])]
    drawing = Drawing(start_s, end_s, marks)
    column = (WIDTH - 2 * MARGIN) / COLUMNS
    top = 44.0
    bottom = top
    for panel in document["panels"]:
        at = panel["gridPos"]
        x, y = MARGIN + at["x"] * column, top + at["y"] * ROW
        if panel["type"] == "row":
            drawing.canvas.text(x + 2, y + ROW - 8, panel["title"], "row")
            continue
        box = (x, y, at["w"] * column - GAP, at["h"] * ROW - GAP)
        bottom = max(bottom, y + at["h"] * ROW)
        drawing.panel(panel, prometheus.panel(panel, start_s, end_s), box)
    height = round(bottom + MARGIN)
    legend = " · ".join(f"{event['iconColor']}: {event['name']}" for event in document["annotations"]["list"])
    name, right = escape(document["title"]), WIDTH - MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#f4f5f7"/>',
            f'<text x="{MARGIN + 2}" y="28" class="name">{name}</text>',
            f'<text x="{right}" y="28" class="small" text-anchor="end">dashed lines: {legend}</text>',
            *drawing.canvas.parts,
            "</svg>\n",
        ]
    )


@contextlib.contextmanager
def watched(run_dir: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the graph of a run directory."""
    state = json.loads((run_dir / "graph.json").read_text())
    with tempfile.TemporaryDirectory(prefix="kvcr-prometheus-") as folder:
        server = Prometheus(state, Path(folder))
        try:
            yield server
        finally:
            server.close()


def save(prometheus: Prometheus, begun_s: float, folder: Path) -> None:
    """All dashboards, from ``begun_s`` to now."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(DASHBOARDS.glob("*.json")):
        target = folder / f"dashboard-{path.stem}.svg"
        target.write_text(draw(json.loads(path.read_text()), prometheus, begun_s, time.time()))
        print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", metavar="DIR", help="of a graph that runs; latest: the last one started")
    parser.add_argument(
        "--for", dest="for_s", type=float, default=60.0, metavar="S", help="how long to watch it"
    )
    parser.add_argument("--out", type=Path, default=Path("build/dashboards"), metavar="DIR")
    arguments = parser.parse_args()
    found = subprocess.run(
        ["bash", ROOT / "scripts/prometheus.sh"], stdout=subprocess.PIPE, text=True, check=False
    )
    if found.returncode:
        return 1
    os.environ["PATH"] = f"{found.stdout.strip()}:{os.environ['PATH']}"
    if arguments.run_dir:
        name = arguments.run_dir
        run_dir = cache_dir() / "run" / name if name == "latest" else Path(name)
        with watched(run_dir) as prometheus:
            begun_s = time.time()
            with waiting(f"watching {run_dir}"):
                time.sleep(arguments.for_s)
            save(prometheus, begun_s, arguments.out)
        return 0
    run_dir = graphs.new_run_dir("dashboards")
    with graphs.serving(run_dir) as graph, watched(run_dir) as prometheus:
        begun_s = time.time()
        warm_up(graph, waiting)
        failover(graph, QUICK, say, waiting)
        save(prometheus, begun_s, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
