# SPDX-License-Identifier: Apache-2.0
"""``kvcr drain`` and ``kvcr mode``: orders to the routers of a deployment."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from kvcr.cli import deployment
from kvcr.cli.values import seconds
from kvcr.errors import ConfigError, KvcrError
from kvcr.tables import table

if TYPE_CHECKING:
    from kvcr.dynamo.fleet import Fleet, SilentRouter

COMMANDS = ("drain", "mode")
_SEEN_S = 5.0
"""Routers follow etcd: an order is in force within this, or something is wrong."""


def add_parsers(commands: Any) -> None:
    """Declare the commands."""
    drain = commands.add_parser(
        "drain",
        help="send a worker no new requests, and wait until it has none left",
        description="The routers send the worker no new request; requests that run go on. Waits until none "
        "is left. Its pool stays, and is read by the others. Exit code 1: some were left.",
    )
    deployment.add_options(drain)
    drain.add_argument("worker", metavar="WORKER", help="instance id in hex, or the name of its guard")
    drain.add_argument("--undo", action="store_true", help="let it have requests again")
    drain.add_argument(
        "--wait-s", type=seconds(0), default=300.0, help="seconds; 0: do not wait (%(default)s)"
    )
    mode = commands.add_parser(
        "mode",
        help="on, shadow (plan and log, move nothing) or off (plan as if there were no pools)",
    )
    deployment.add_options(mode)
    mode.add_argument("mode", nargs="?", choices=("on", "shadow", "off"), help="leave out to be told")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError, KvcrError."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with deployment.open_fleet(arguments) as fleet:
        handler = _drain if arguments.command == "drain" else _mode
        return await handler(fleet, arguments)


async def _mode(fleet: Fleet, arguments: argparse.Namespace) -> int:
    from kvcr.dynamo.polling import poll

    if arguments.mode is not None:
        await fleet.order_mode(arguments.mode)
    routers: list[dict[str, Any]] = []
    silent: list[SilentRouter] = []

    async def obeyed() -> bool:
        asked = await fleet.routers()
        routers[:], silent[:] = asked.answers, asked.silent
        return arguments.mode is None or (
            not silent and all(router["mode"] == arguments.mode for router in routers)
        )

    done = await deployment.patiently(arguments, poll(obeyed, _SEEN_S), "routers")
    modes = {router["router"]: router["mode"] for router in routers} | {
        router.router: f"no answer from {router.address}" for router in silent
    }
    if arguments.json:
        print(json.dumps(modes))
    else:
        print(table(("ROUTER", "MODE"), list(modes.items())))
    if not routers:
        stands = "" if arguments.mode is None else "; the order stands, and is obeyed by those that start"
        raise KvcrError(f"no router answers in namespace {fleet.deployment.namespace}{stands}")
    return 0 if done and not silent else 1


async def _drain(fleet: Fleet, arguments: argparse.Namespace) -> int:
    from kvcr.dynamo.polling import poll

    routers = (await fleet.routers()).answers
    if not routers:
        raise KvcrError(f"no router answers in namespace {fleet.deployment.namespace}")
    worker = _find(routers, arguments.worker)
    await fleet.order_drain(int(worker, 16), not arguments.undo)
    silent: list[SilentRouter] = []
    left = said = -1

    async def drained() -> bool:
        nonlocal left, said
        asked = await fleet.routers()
        silent[:] = asked.silent
        states = [router["workers"][worker] for router in asked.answers if worker in router["workers"]]
        left = sum(state["requests"] for state in states)
        obeyed = not silent and all(state["draining"] != arguments.undo for state in states)
        if obeyed and (arguments.undo or arguments.wait_s == 0 or left == 0):
            return True
        if not arguments.json and not arguments.undo and left != said:
            print(f"worker {worker}: {left} requests left", file=sys.stderr, flush=True)
            said = left
        return False

    done = await poll(drained, _SEEN_S if arguments.undo else max(_SEEN_S, arguments.wait_s))
    for router in silent:
        print(f"kvcr drain: {router}; it may not know of the order", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"worker": worker, "draining": not arguments.undo, "requests": left}))
    elif arguments.undo:
        print(f"worker {worker} gets requests again")
    else:
        words = "has no request left: it can be stopped" if left == 0 else f"still has {left} requests"
        print(f"worker {worker} gets no new request, and {words}")
    return 0 if done else 1


def _find(routers: list[dict[str, Any]], name: str) -> str:
    known: dict[str, dict[str, Any]] = {
        worker: state for router in routers for worker, state in router["workers"].items()
    }
    for worker, state in known.items():
        if name.lower().removeprefix("0x") == worker or name == state["guard"]:
            return worker
    listed = ", ".join(f"{worker} ({state['guard'] or 'no guard'})" for worker, state in known.items())
    raise ConfigError(f"no worker {name!r}; there are: {listed or 'none'}")
