# SPDX-License-Identifier: Apache-2.0
"""``kvcr serve``: from the command line to a running graph."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvcr.errors import ConfigError
from kvcr.graph import models, runs
from kvcr.graph.config import Kind, load_graph
from kvcr.graph.launcher import Launcher
from kvcr.graph.plan import Plan
from kvcr.graph.planning import make_plan
from kvcr.graph.ports import PortBook
from kvcr.graph.site import LocalSite

_FOLDERS = ("deploy/graphs", "graphs", "configs")
_ENTRY = re.compile(r"(?:graphs\.)?([A-Za-z0-9_.-]+):([A-Za-z]+)")


def run(arguments: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Run the graph until it is stopped. Raises ConfigError before anything was started."""
    path = _graph_file(arguments.entry, arguments.file)
    graph, notes = load_graph(path, overrides)
    for note in notes:
        _say(note)
    _check_entry(arguments.entry, {kind.value for kind in graph.components})
    paths = runs.new_run(graph.name, Path(arguments.run_dir) if arguments.run_dir else None)
    with contextlib.closing(PortBook()) as ports:
        plan = make_plan(graph, LocalSite(paths, ports), os.environ)
        if arguments.print_plan:
            _print_plan(plan)
            return 0
        if plan.model is not None:
            models.ensure_model(plan.model, _say)
        for line in runs.sweep_dead_runs():
            _say(line)
        _say(f"graph {graph.name}, run {paths.run_id}; logs in {paths.logs}")
        return Launcher(plan, paths, ports, _say).run()


def _graph_file(entry: str | None, file: str | None) -> Path:
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise ConfigError(f"graph file {path} does not exist")
        return path
    if entry is None:
        raise ConfigError(
            "no graph given; use -f deploy/graphs/agg.yaml, or an entry such as graphs.agg:Frontend"
        )
    stem = _split_entry(entry)[0]
    candidates = [Path(folder) / f"{stem}.yaml" for folder in _FOLDERS]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"no graph file for {entry}; looked for {[str(path) for path in candidates]}; give it with -f"
    )


def _check_entry(entry: str | None, components: set[str]) -> None:
    if entry is not None and (name := _split_entry(entry)[1]) not in components:
        raise ConfigError(f"{entry}: the graph has no component {name}; it has {sorted(components)}")


def _split_entry(entry: str) -> tuple[str, str]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ConfigError(f"{entry!r} is not GRAPH:COMPONENT, e.g. graphs.agg:Frontend")
    return match[1], match[2]


def _print_plan(plan: Plan) -> None:
    """Everything that would be started, as lines a shell understands."""
    print(f"# graph {plan.graph.name}, namespace {plan.namespace}, model {plan.model}")
    for server in plan.servers:
        how = "external" if server.external else "started here"
        print(f"\n# {server.name}: {server.url} ({how})")
    shared = _shared([process.env for process in plan.processes])
    print("\n# environment of every process")
    for name, value in sorted(shared.items()):
        print(f"export {name}={shlex.quote(value)}")
    for process in plan.processes:
        ports = ", ".join(f"{name} {port}" for name, port in process.ports.items())
        print(f"\n# {process.name}: {process.kind.value}, restart {process.restart.value}, ports: {ports}")
        own = [f"{name}={shlex.quote(value)}" for name, value in process.env.items() if name not in shared]
        print(" ".join([*own, shlex.join(process.argv)]))
    if plan.graph.get(Kind.FRONTEND):
        print(f"\n# OpenAI API: {plan.url}")


def _shared(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The variables that all of them have with the same value."""
    if not environments:
        return {}
    common = set(environments[0].items()).intersection(*(env.items() for env in environments[1:]))
    return dict(common)


def _say(line: str) -> None:
    # A log on a full disk or a terminal that is gone must not end the graph.
    with contextlib.suppress(OSError):
        print(line, flush=True)
