# SPDX-License-Identifier: Apache-2.0
"""``python -m demo``: start a graph of two workers, share one prefix between them, explain what happened."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from demo import graph as graphs
from demo.client import RequestFailed
from demo.observe import CountersDisagree
from demo.report import curl_line, show
from demo.scenes.share import Shared, share, warm_up
from demo.table import waiting


def main() -> int:
    """0: blocks were pulled and the answers are identical; 1: they were not; 2: the graph did not run."""
    arguments = _parse()
    try:
        if arguments.run_dir is not None:
            # The graph has seen the document as written: this one differs from its first words on.
            return _scenes(graphs.load(arguments.run_dir), variant=int(time.time()))
        return _with_own_graph(arguments)
    except (graphs.GraphNotUp, RequestFailed, CountersDisagree) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--keep",
        action="store_true",
        default=os.environ.get("KEEP", "") not in ("", "0"),
        help="leave the graph running at the end (also: make demo KEEP=1)",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="use the graph that runs there already")
    parser.add_argument(
        "--graph", type=Path, default=graphs.AGG_GRAPH, metavar="YAML", help="graph file with two workers"
    )
    return parser.parse_args()


def _with_own_graph(arguments: argparse.Namespace) -> int:
    run_dir = Path(tempfile.mkdtemp(prefix="kvcr-demo-"))
    print(
        f"Starting etcd, NATS, frontend, router, two workers, two guards; logs in {run_dir}/logs", flush=True
    )
    with waiting("engines take about a minute to start"):
        serving = graphs.serve(run_dir, arguments.graph)
    keep = False
    try:
        graph = graphs.load(run_dir)
        code = _scenes(graph)
        keep = arguments.keep
        if keep:
            _say_kept(graph)
        return code
    finally:
        if not keep:
            with waiting("stopping the graph"):
                serving.stop()


def _scenes(graph: graphs.Graph, variant: int = 0) -> int:
    if len(graph.workers) != 2:
        raise graphs.GraphNotUp(f"the demo needs two workers, the graph has {len(graph.workers)}")
    warm_up(graph, waiting)
    result = share(graph, waiting, variant)
    show(graph, result)
    return 0 if _succeeded(result) else 1


def _succeeded(result: Shared) -> bool:
    return result.pulled.pulled_blocks > 0 and result.identical and result.sides_agree


def _say_kept(graph: graphs.Graph) -> None:
    print(f"\nThe graph is still running. Try:\n\n  {curl_line(graph)}\n")
    print(f"Again the same scene:  .venv/bin/python -m demo --run-dir {graph.run_dir}")
    print(f"Stop it:               kill {graph.pid}")


if __name__ == "__main__":
    sys.exit(main())
