# SPDX-License-Identifier: Apache-2.0
"""``kvcr ls``: what is in the pools, chain by chain."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from kvcr.cli import deployment
from kvcr.cli.values import whole
from kvcr.errors import ConfigError, KvcrError
from kvcr.tables import size, table

if TYPE_CHECKING:
    from kvcr.dynamo.fleet import Fleet

TIERS = ("G2",)
"""That a guard has today."""
_NAMED = 200
"""Chains whose sessions are asked for: those at the top."""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "ls",
        help="what is in the pools: chains of blocks, by worker, tier, tenant and session",
        description="One line for each chain of blocks, those used last first. Blocks that chains share are "
        "counted for the longest of them. Exit code 1: there is none, or a guard did not answer.",
    )
    deployment.add_options(parser)
    parser.add_argument(
        "--worker", metavar="WORKER", help="only there: name of a guard, or instance id in hex"
    )
    parser.add_argument("--tier", choices=TIERS, help="only in this tier (default: all)")
    parser.add_argument("--limit", type=whole(1), default=40, metavar="N", help="lines (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError, KvcrError."""
    from kvcr.guard.listing import MAX_LISTED

    if arguments.limit > MAX_LISTED:
        raise ConfigError(f"--limit is {arguments.limit}; it must be from 1 to {MAX_LISTED}")
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with deployment.open_fleet(arguments) as fleet:
        records = await fleet.guards()
        answers = await deployment.patiently(
            arguments, fleet.ask_all(records, "control", {"op": "list", "limit": arguments.limit}), "guards"
        )
        workers: list[dict[str, Any]] = []
        troubles: list[KvcrError] = []
        for record, answer in zip(records, answers, strict=True):
            if isinstance(answer, KvcrError):
                troubles.append(answer)
            else:
                workers.append({"guard": record.name, "tier": "G2", **answer})
        chosen = _chosen(workers, troubles, arguments.worker)
        rows = sorted(
            ({**row, "guard": w["guard"], "tier": w["tier"]} for w in chosen for row in w.pop("rows")),
            key=lambda row: row["idle_s"],
        )[: arguments.limit]
        await _name_sessions(fleet, rows)
    if arguments.json:
        print(
            json.dumps({"workers": chosen, "chains": rows, "errors": [str(trouble) for trouble in troubles]})
        )
    else:
        _show(chosen, rows)
    if not records:
        complaints = [deployment.no_guards(fleet)]
    else:
        complaints = [*map(str, troubles)] or ([] if rows else ["there is no block in these pools"])
    deployment.complain(arguments, complaints)
    return 0 if rows and not troubles else 1


def _chosen(
    workers: list[dict[str, Any]], troubles: list[KvcrError], name: str | None
) -> list[dict[str, Any]]:
    if name is None:
        return workers
    found = [w for w in workers if name == w["guard"] or name.lower().removeprefix("0x") == w["worker_id"]]
    if not found and not troubles:
        known = ", ".join(f"{w['guard']} ({w['worker_id']})" for w in workers)
        raise ConfigError(f"no worker {name!r}; there are: {known or 'none'}")
    return found


async def _name_sessions(fleet: Fleet, rows: list[dict[str, Any]]) -> None:
    """Routers know sessions, if there are any routers."""
    chains = [(row["last"], row["tail"]) for row in rows[:_NAMED]]
    known = await fleet.sessions(chains) if chains else {}
    for row in rows:
        row["session"] = known.get(row["tail"], {}).get("session", "")


def _show(workers: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    cells = [
        [
            row["guard"],
            row["tier"],
            row["session"] or "-",
            row["tenant"][:8] or "?",
            row["tail"],
            f"{row['first']}..{row['last']}",
            row["blocks"],
            size(row["bytes"]),
            row["leased"],
            row["pinned"],
            _duration(row["age_s"]),
            _duration(row["idle_s"]),
        ]
        for row in rows
    ]
    header = (
        "GUARD", "TIER", "SESSION", "TENANT", "LAST KEY", "POSITIONS", "BLOCKS", "BYTES", "LEASED", "PINNED",
        "AGE", "IDLE",
    )  # fmt: skip
    if rows:
        print(table(header, cells, right="6789"))
    for worker in workers:
        print(
            f"{worker['guard']}: {worker['blocks']} blocks, {size(worker['bytes'])}, "
            f"in {worker['chains']} chains"
        )


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
