# SPDX-License-Identifier: Apache-2.0
"""``kvcr graph render``: a graph file as docker compose or Kubernetes files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcr.errors import ConfigError
from kvcr.graph.config import Graph, load_graph

DEFAULT_IMAGE = "registry.example.com/dynamo-kvcr:0.1.0"


def add_parser(commands: Any) -> None:
    """Declare ``graph render``."""
    graph = commands.add_parser("graph", help="turn a graph into files for docker compose or Kubernetes")
    verbs = graph.add_subparsers(dest="verb", metavar="render", required=True)
    render = verbs.add_parser(
        "render",
        help="write a graph as compose, dgd or prometheus YAML",
        description="Write a graph file as YAML for docker compose, for Dynamo's operator (dgd), or as the "
        "Prometheus configuration that belongs to the compose file.",
    )
    render.add_argument("--to", choices=("compose", "dgd", "prometheus"), required=True)
    render.add_argument("-o", "--output", metavar="FILE", help="write there instead of to stdout")
    render.add_argument("--image", default=DEFAULT_IMAGE, help="container image, for dgd (%(default)s)")
    render.add_argument(
        "graphs",
        nargs="+",
        metavar="[PROFILE=]YAML",
        help="graph file; for compose several, each a profile: cpu=deploy/graphs/agg.yaml cuda=...",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError."""
    from kvcr.graph.render.compose import render_compose, render_prometheus
    from kvcr.graph.render.dgd import render_dgd
    from kvcr.graph.render.text import to_yaml

    graphs = _load(arguments.graphs)
    if arguments.to == "dgd":
        if len(graphs) != 1:
            raise ConfigError(f"--to dgd renders one graph, got {len(graphs)}")
        document = render_dgd(next(iter(graphs.values())), arguments.image)
    elif arguments.to == "prometheus":
        document = render_prometheus(graphs)
    else:
        document = render_compose(graphs)
    text = _header(arguments.to, arguments.graphs) + to_yaml(document)
    if arguments.output:
        Path(arguments.output).write_text(text)
    else:
        print(text, end="")
    return 0


def _load(given: Sequence[str]) -> dict[str, Graph]:
    graphs: dict[str, Graph] = {}
    for word in given:
        profile, equals, path = word.partition("=")
        if not equals:
            profile, path = "default", word
        if profile in graphs:
            raise ConfigError(f"profile {profile!r} is given twice; write PROFILE=FILE with different names")
        graphs[profile] = load_graph(Path(path))[0]
    return graphs


def _header(target: str, graphs: Sequence[str]) -> str:
    command = " ".join(["kvcr graph render --to", target, *graphs])
    return (
        f"# SPDX-License-Identifier: Apache-2.0\n# Made by: {command}\n# Change the graph, not this file.\n"
    )
