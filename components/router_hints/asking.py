# SPDX-License-Identifier: Apache-2.0
"""``python -m router_hints explain``: why a request went where it went, and whether planning again agrees."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcr.dynamo.environment import COMMAND_PATIENCE, silence_runtime
from router_hints.explain import replay, tell

_WAIT_S = 10.0


def explain(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns its exit code.

    0; 1 when a replay differs, no router answers or nothing is found.
    """
    parser = argparse.ArgumentParser(
        prog="python -m router_hints explain",
        description="Print the candidates of a plan, their cost terms in seconds, and the winner.",
    )
    parser.add_argument(
        "request", nargs="?", default="", help="request id or plan id; without it the last plans"
    )
    parser.add_argument("--last", type=int, default=1, help="without a request: that many (%(default)s)")
    parser.add_argument(
        "--log", help="file of plans, one JSON object a line, as --json writes it; - for stdin"
    )
    parser.add_argument("--json", action="store_true", help="print the plans with their inputs, one a line")
    parser.add_argument("--replay", action="store_true", help="plan again from the inputs and compare")
    parser.add_argument("--namespace", default=environment.get("DYN_NAMESPACE", "dynamo"))
    parser.add_argument("--component", default="router")
    options = parser.parse_args(arguments)
    if options.log:
        entries = _from_log(options.log, options.request, options.last)
    else:
        silence_runtime()
        os.environ.update({**COMMAND_PATIENCE, **os.environ})
        try:
            entries = asyncio.run(_from_routers(options, environment))
        except Exception as error:  # noqa: BLE001, the runtime raises plain ones
            etcd = environment.get("ETCD_ENDPOINTS", "its default address")
            print(
                f"kvcr explain: no router was reached in namespace {options.namespace} of etcd at {etcd}: "
                f"{error or type(error).__name__}; ETCD_ENDPOINTS and DYN_NAMESPACE say where it is",
                file=sys.stderr,
            )
            return 1
    if not entries:
        fix = "; routers keep the newest only, --last 20 lists them" if options.request else " yet"
        print(f"kvcr explain: no plan of {options.request or 'any request'} is known{fix}", file=sys.stderr)
        return 1
    try:
        code = max(_show(entry, options) for entry in entries)
        sys.stdout.flush()
    except OSError as error:
        # A full disk; a reader that goes away ends us by SIGPIPE.
        print(f"kvcr explain: cannot write: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _show(entry: dict[str, Any], options: argparse.Namespace) -> int:
    """Print one plan. Returns 1 when planning again differs or cannot be done."""
    different: list[str] = []
    if options.replay:
        try:
            _, different = replay(entry)
        except ValueError as error:
            different = [str(error)]
    if options.json:
        print(json.dumps(entry | ({"differs": different} if options.replay else {})))
        return int(bool(different))
    print(tell(entry))
    if options.replay:
        print("  replay: equal" if not different else "  replay: DIFFERENT\n    " + "\n    ".join(different))
    return int(bool(different))


def _from_log(path: str, wanted: str, last: int) -> list[dict[str, Any]]:
    text = sys.stdin.read() if path == "-" else Path(path).read_text()
    entries: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if wanted:
        return [e for e in entries if wanted in (e["plan_id"], e.get("request_id"))]
    return entries[-last:]


async def _from_routers(options: argparse.Namespace, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ask every replica: the one that planned knows."""
    from dynamo.runtime import DistributedRuntime

    env = environment.get
    runtime = DistributedRuntime(
        asyncio.get_running_loop(),
        env("DYN_DISCOVERY_BACKEND", "etcd"),
        env("DYN_REQUEST_PLANE", "tcp"),
        # Nothing is published here, so NATS need not be there.
        event_plane="zmq",
    )
    try:
        endpoint = runtime.endpoint(f"{options.namespace}.{options.component}.explain")
        client = await endpoint.client()
        # One deadline for all of it: a router that hangs must not hang who asks.
        deadline_s = asyncio.get_running_loop().time() + _WAIT_S
        async with asyncio.timeout_at(deadline_s):
            await client.wait_for_instances()
        queries: list[dict[str, Any]] = [{"last": options.last}]
        if options.request:
            queries = [{"request_id": options.request}, {"plan_id": options.request}]

        async def ask(instance: int) -> list[dict[str, Any]]:
            plans: list[dict[str, Any]] = []
            try:
                async with asyncio.timeout_at(deadline_s):
                    for query in queries:
                        asked = await client.direct(query | {"inputs": True}, instance, annotated=False)
                        plans += [plan async for found in asked for plan in found]
            except Exception as error:  # noqa: BLE001, the runtime raises plain ones; they are told
                why = str(error) or f"within {_WAIT_S:g} s"
                print(
                    f"kvcr explain: {options.component}-{instance:x} did not answer: {why}", file=sys.stderr
                )
            return plans

        answers = await asyncio.gather(*(ask(instance) for instance in client.instance_ids()))
        found = [plan for plans in answers for plan in plans]
    finally:
        runtime.shutdown()
    return found if options.request else sorted(found, key=lambda e: float(e["planned_s"]))[-options.last :]
