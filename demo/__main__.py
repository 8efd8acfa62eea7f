# SPDX-License-Identifier: Apache-2.0
"""``python -m demo``: start a graph of two workers, play a scene on it, explain what happened.

``share``: one prefix, computed by one worker, pulled by the other. ``failover``: an engine is killed while it
answers, with KVCR and, on a second graph, without. ``agent``: fork, pause and compaction of an agent, and
what the router makes of each.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from demo import agent_report, failover_report
from demo import graph as graphs
from demo.client import RequestFailed
from demo.observe import CountersDisagree
from demo.report import curl_line, show
from demo.scenes.agent import agent
from demo.scenes.failover import Scale, failover, on_and_off
from demo.scenes.share import Shared, share, warm_up
from demo.table import say, waiting
from kvcr.harness import HarnessError

_NEXT = {
    "share": """
Next
  make demo KEEP=1          the same, and the graph stays up for you to try
  make demo SCENE=agent     an agent tells the router what it will do next
  make demo SCENE=failover  an engine killed while it answers (ten minutes)
  docs/quickstart.md        a graph of your own""",
    "agent": """
Next: docs/signals.md tells how your own agent says this.""",
}


def main() -> int:
    """0: the scene showed what it should; 1: it did not; 2: the graph did not run."""
    arguments = _parse()
    # Or the graph would stay: the default action runs no `finally`.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        if arguments.scene == "failover":
            return _failover(arguments)
        if arguments.run_dir is not None:
            # The graph has seen the document as written: this one differs from its first words on.
            return _scenes(graphs.load(arguments.run_dir), arguments.scene, variant=int(time.time()))
        return _with_own_graph(arguments)
    except (graphs.GraphNotUp, RequestFailed, CountersDisagree, HarnessError, TimeoutError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--scene",
        choices=("share", "failover", "agent"),
        default=os.environ.get("SCENE") or "share",
        help="what to show (also: make demo SCENE=failover)",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        default=os.environ.get("KEEP", "") not in ("", "0"),
        help="leave the graph running at the end (also: make demo KEEP=1); not with failover, which runs two",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="use the graph that runs there already")
    parser.add_argument(
        "--graph", type=Path, default=graphs.AGG_GRAPH, metavar="YAML", help="graph file with two workers"
    )
    arguments = parser.parse_args()
    if arguments.scene == "failover" and arguments.keep and arguments.run_dir is None:
        parser.error(
            "failover runs two graphs, one after the other, and keeps neither: leave --keep (KEEP) out, or "
            "keep the graph of another scene and name it with --run-dir"
        )
    return arguments


def _with_own_graph(arguments: argparse.Namespace) -> int:
    run_dir = graphs.new_run_dir("demo")
    print(
        f"Starting etcd, NATS, frontend, router, two workers, two guards; logs in {run_dir}/logs", flush=True
    )
    with waiting("waiting for two engines to start, a minute or two"):
        serving = graphs.serve(run_dir, arguments.graph)
    keep = False
    try:
        graph = graphs.load(run_dir)
        code = _scenes(graph, arguments.scene)
        keep = arguments.keep
        if keep:
            _say_kept(graph)
        elif not code:
            print(_NEXT[arguments.scene])
        return code
    finally:
        if not keep:
            with waiting("stopping the graph"):
                serving.stop()


def _failover(arguments: argparse.Namespace) -> int:
    if arguments.run_dir is not None:
        graph = graphs.load(arguments.run_dir)
        warm_up(graph, waiting)
        one = failover(graph, Scale(), say, waiting)
        seen = {"on" if one.guarded else "off": one}
    else:
        seen = on_and_off(Scale(), say, waiting, arguments.graph)
    reports = {f"KVCR {switch}": failover_report.figures(each) for switch, each in seen.items()}
    failover_report.show(reports)
    on = reports.get("KVCR on")
    if on is None:
        return 0
    return 0 if on["served_from_dead_pool"]["blocks"] and not on["requests"]["hung"] else 1


def _scenes(graph: graphs.Graph, scene: str, variant: int = 0) -> int:
    warm_up(graph, waiting)
    if scene == "agent":
        decisions = agent(graph, say, waiting, variant)
        agent_report.show(decisions)
        return 0 if all(each.expected for each in decisions) else 1
    result = share(graph, waiting, variant)
    show(graph, result)
    return 0 if _succeeded(result) else 1


def _succeeded(result: Shared) -> bool:
    return result.pulled.pulled_blocks > 0 and result.identical and result.sides_agree


def _say_kept(graph: graphs.Graph) -> None:
    print(f"""
The graph is still running. Ask it something:

  {curl_line(graph)}

  source .venv/bin/activate
  kvcr status                                  what is running
  kvcr where "Who keeps a lighthouse?"         which workers have this prompt
  kvcr explain                                 why the last request went where it went
  python -m demo --run-dir {graph.run_dir}     the scene again
  kill {graph.pid}                             stop it""")


if __name__ == "__main__":
    sys.exit(main())
