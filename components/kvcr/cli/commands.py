# SPDX-License-Identifier: Apache-2.0
"""The commands of ``kvcr`` and their flags. Each imports what it needs only when it runs."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcr.cli import acts, deployment, explain, fleet, graph, ls, orders, settings
from kvcr.config import GUARD_ENV_PREFIX
from kvcr.errors import ConfigError

if TYPE_CHECKING:
    from kvcr.cli.doctor import Check

_OVERRIDE = re.compile(r"--(?P<name>kvcr|[A-Z]\w*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)


def run(argv: Sequence[str]) -> int:
    """Run one sub-command; returns the exit code. Raises ConfigError for a setting that is wrong, KvcrError,
    OSError with the name of the file."""
    words, overrides = _split_overrides(argv) if argv[:1] == ["serve"] else (argv, [])
    arguments = parser().parse_args(words)
    match arguments.command:
        case None:
            parser().print_help()
            return 2
        case "serve":
            from kvcr.cli import serve

            return serve.run(arguments, overrides)
        case "version":
            from kvcr.cli import doctor

            return doctor.print_version()
        case "doctor":
            return _doctor(arguments)
        case command:
            return _RUNS[command](arguments)


_RUNS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    **dict.fromkeys(("status", "where", "top"), fleet.run),
    **dict.fromkeys(acts.COMMANDS, acts.run),
    **dict.fromkeys(orders.COMMANDS, orders.run),
    "ls": ls.run,
    "explain": explain.run,
    "config": settings.run,
    "graph": graph.run,
}


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.peer:
        from kvcr.cli import doctor_peer

        return doctor_peer.run(
            doctor_peer.Target(
                arguments.peer,
                arguments.secret_file or os.environ.get(f"{GUARD_ENV_PREFIX}SECRET_FILE", ""),
                arguments.peers,
                arguments.interface,
                arguments.namespace or os.environ.get("DYN_NAMESPACE") or "dynamo",
            ),
            as_json=arguments.json,
        )
    from kvcr.cli import doctor

    return doctor.run(as_json=arguments.json, deployment=_deployment_checks(arguments))


def parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    top = argparse.ArgumentParser(
        prog="kvcr", description="KVCR: a KV cache shared by all workers of a Dynamo deployment."
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="run a graph file on this machine",
        description="Run a graph file as processes on this machine until Ctrl-C or SIGTERM.",
        epilog="Any key of the graph can be given as --Component.key=value, "
        "e.g. --VllmWorker.ServiceArgs.workers=1 --Frontend.http-port=8000",
        allow_abbrev=False,
    )
    serve.add_argument(
        "entry",
        nargs="?",
        metavar="GRAPH:COMPONENT",
        help="as for dynamo serve, e.g. graphs.agg:Frontend; without -f the file is found from it",
    )
    serve.add_argument("-f", "--file", metavar="YAML", help="graph file, e.g. deploy/graphs/agg.yaml")
    serve.add_argument(
        "--run-dir", metavar="DIR", help="logs and graph.json (default: below ~/.cache/kvcr/run)"
    )
    serve.add_argument("--print-plan", action="store_true", help="show commands and ports, start nothing")

    graph.add_parser(commands)
    fleet.add_parsers(commands)
    ls.add_parser(commands)
    explain.add_parser(commands)
    acts.add_parsers(commands)
    orders.add_parsers(commands)
    settings.add_parser(commands)

    doctor = commands.add_parser(
        "doctor",
        help="check what this machine and environment can do, and the deployment if there is one",
        description="Checks this machine; and the deployment that the flags, ETCD_ENDPOINTS or a running "
        "`kvcr serve` name: etcd, NATS, guards, clocks, releases, block keys, streams, tenants. Each finding "
        "says what to do. Exit code 1: something will not work.",
    )
    deployment.add_options(doctor)
    peer = doctor.add_argument_group("another host", "measure every transport to a guard there, and back")
    peer.add_argument("--peer", default="", metavar="HOST[:PORT]", help="host or name of a running guard")
    peer.add_argument("--interface", default="", help="network interface to use here, by name or address")
    peer.add_argument(
        "--peers", default="", metavar="FILE", help="JSON file of peer records, instead of etcd"
    )

    commands.add_parser("version", help="versions of KVCR and of what it works with")

    return top


def _deployment_checks(arguments: argparse.Namespace) -> Callable[[], list[Check]] | None:
    """Those of the deployment that is named; None when there is none, or this is no place to see it from."""
    try:
        from kvcr.cli import doctor_deployment

        place = deployment.find(arguments)
    except ImportError:
        return None
    except ConfigError:
        if arguments.etcd or arguments.run_dir or arguments.secret_file:
            raise
        return None
    return lambda: doctor_deployment.run_all(place)


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take ``--Component.key=value``, ``--Component.key value`` and ``--kvcr=off`` out of the command line.

    Before argparse sees them: a value with blanks would look like a positional argument to it.
    """
    words: list[str] = []
    pairs: list[tuple[str, str]] = []
    remaining = iter(argv)
    for word in remaining:
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            words.append(word)
            continue
        value = match["value"] if match["value"] is not None else next(remaining, None)
        if value is None:
            raise SystemExit(f"kvcr serve: {word} has no value; write {word}=VALUE")
        pairs.append((match["name"], value))
    return words, pairs
