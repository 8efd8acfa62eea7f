# SPDX-License-Identifier: Apache-2.0
"""Console script ``kvcr``. Sub-commands import what they need only when they run."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcr.cli import acts, deployment, explain, fleet, graph, ls, orders, settings
from kvcr.config import GUARD_ENV_PREFIX
from kvcr.errors import ConfigError, KvcrError

if TYPE_CHECKING:
    from kvcr.cli.doctor import Check

_OVERRIDE = re.compile(r"--(?P<name>kvcr|[A-Z]\w*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""What a shell reports for Ctrl-C; only before a graph starts, which ends with 0 on Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit code: 0 done, 1 failed, 2 a setting is wrong."""
    given = sys.argv[1:] if argv is None else list(argv)
    words, overrides = _split_overrides(given) if given[:1] == ["serve"] else (given, [])
    arguments = parser().parse_args(words)
    try:
        if arguments.command == "serve":
            from kvcr.cli import serve

            return serve.run(arguments, overrides)
        if arguments.command in ("status", "where", "top"):
            return fleet.run(arguments)
        if arguments.command == "ls":
            return ls.run(arguments)
        if arguments.command in acts.COMMANDS:
            return acts.run(arguments)
        if arguments.command == "explain":
            return explain.run(arguments)
        if arguments.command in orders.COMMANDS:
            return orders.run(arguments)
        if arguments.command == "config":
            return settings.run(arguments)
        if arguments.command == "graph":
            return graph.run(arguments)
        if arguments.command == "doctor":
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
        if arguments.command == "version":
            from kvcr.cli import doctor

            return doctor.print_version()
    except ConfigError as error:
        print(f"kvcr {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KvcrError as error:
        print(f"kvcr {arguments.command}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # Whoever reads has seen enough, as `kvcr ls | head` has. Nothing may be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        # Of a file that was named, the network, or a full disk. Others are faults of ours, to be seen whole.
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"kvcr {arguments.command}: {where}{error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    parser().print_help()
    return EXIT_USAGE


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


def _split_overrides(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
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


if __name__ == "__main__":
    raise SystemExit(main())
