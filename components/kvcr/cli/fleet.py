# SPDX-License-Identifier: Apache-2.0
"""``kvcr status``, ``kvcr where``, ``kvcr top``: looking at a running deployment."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcr.cli import deployment
from kvcr.cli.values import seconds, text_of, whole
from kvcr.errors import ConfigError, KvcrError
from kvcr.tables import size, table

if TYPE_CHECKING:
    from kvcr.dynamo.fleet import Fleet, Routers
    from kvcr.dynamo.records import InstanceRecord

EXIT_OK = 0
EXIT_FAILED = 1
_KEY = re.compile(r"[0-9a-f]{32}")


def add_parsers(commands: Any) -> None:
    """Declare the commands."""
    status = commands.add_parser("status", help="guards of a deployment: states, pools, domains, links")
    deployment.add_options(status)
    where = commands.add_parser(
        "where",
        help="which guards hold a prompt, or a block",
        description="Which guards hold the blocks of a prompt, or one block by its key. Exit code 1: nobody.",
    )
    deployment.add_options(where)
    where.add_argument("what", metavar="PROMPT|KEY", help="text, @FILE with text, or a key of 32 hex digits")
    where.add_argument("--model", metavar="DIR", help="model whose tokenizer to use (default: the graph's)")
    where.add_argument("--raw", action="store_true", help="the text is a prompt as it is, not a chat message")
    where.add_argument("--salt", default="", help="tenant salt of the request")
    top = commands.add_parser("top", help="what every guard is doing, live")
    deployment.add_options(top)
    top.add_argument("--every", type=seconds(0.2), default=2.0, metavar="S", help="seconds (%(default)s)")
    top.add_argument("--count", type=whole(0), default=0, metavar="N", help="end after N tables; 0: never")
    top.add_argument("--hot", action="store_true", help="the prefixes asked for most, instead of the guards")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError, KvcrError."""
    opened = deployment.open_fleet(arguments)
    if arguments.command == "where":
        # Before there is an event loop: Ctrl-C must not wait until the tokenizer is loaded.
        tokens = None if _KEY.fullmatch(arguments.what) else _tokenize(arguments, opened.deployment.model)
        return asyncio.run(_with_fleet(opened, functools.partial(_where, tokens=tokens), arguments))
    return asyncio.run(_with_fleet(opened, _status if arguments.command == "status" else _top, arguments))


async def _with_fleet(opened: Fleet, handler: Any, arguments: argparse.Namespace) -> int:
    async with opened as fleet:
        return int(await handler(fleet, arguments))


# --- status ---------------------------------------------------------------------------------------


async def _status(fleet: Fleet, arguments: argparse.Namespace) -> int:
    records = await fleet.guards()
    answers, routers = await deployment.patiently(
        arguments,
        asyncio.gather(fleet.ask_all(records, "status"), fleet.routers()),
        "guards and routers",
    )
    g1 = _g1_blocks(routers.answers)
    draining = {
        worker: state["guard"]
        for router in routers.answers
        for worker, state in router["workers"].items()
        if state["draining"]
    }
    if arguments.json:
        guards = [
            {"record": _plain(record), "status": answer}
            if isinstance(answer, dict)
            else {"record": _plain(record), "error": str(answer)}
            for record, answer in zip(records, answers, strict=True)
        ]
        _print_json(
            {
                "namespace": fleet.deployment.namespace,
                "guards": guards,
                "routers": [
                    {"router": router["router"], "mode": router["mode"]} for router in routers.answers
                ],
                "silent_routers": [_plain(router) for router in routers.silent],
                "g1_blocks": g1,
                "draining": draining,
                "ignored": fleet.ignored,
            }
        )
    else:
        print(f"{fleet.deployment.source}, namespace {fleet.deployment.namespace}")
        if records:
            print(_status_table(records, answers, g1))
        if routers.answers or routers.silent:
            print(_router_table(routers))
        for worker, guard in draining.items():
            print(f"worker {worker} is drained; for requests again: kvcr drain {guard or worker} --undo")
    troubles = [
        *(str(answer) for answer in answers if isinstance(answer, KvcrError)),
        *map(str, routers.silent),
    ]
    if records:
        # Whoever can write to etcd can make a record that nobody believes: no reason to fail.
        deployment.complain(arguments, (f"not believed: {reason}" for reason in fleet.ignored))
    else:
        troubles.append(deployment.no_guards(fleet))
    deployment.complain(arguments, troubles)
    return EXIT_FAILED if troubles else EXIT_OK


def _g1_blocks(routers: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Blocks in the memory of the engine beside each guard, as the first router that answers sees it."""
    workers = routers[0]["workers"].values() if routers else []
    return {worker["guard"]: worker["g1_blocks"] for worker in workers if worker["guard"]}


def _status_table(
    records: Sequence[InstanceRecord], answers: Sequence[dict[str, Any] | KvcrError], g1: dict[str, int]
) -> str:
    rows = []
    for record, answer in zip(records, answers, strict=True):
        domains = ", ".join(f"{name} {value}" for name, value in sorted(record.topology_domains.items()))
        if not isinstance(answer, dict):
            rows.append([record.name, "no answer", record.epoch, "", "", "", "", "", domains or "-"])
            continue
        pool = answer["pool"]
        peers = answer["peers"]
        rows.append(
            [
                record.name,
                answer["state"],
                pool["epoch"] if pool else "-",
                ", ".join(str(pid) for pid in answer["engine"]["pids"]) or "-",
                _filled(pool),
                g1.get(record.name, "-"),
                len(answer["pulls"]),
                f"{sum(bool(peer['ready']) for peer in peers)}/{len(peers)}",
                domains or "-",
            ]
        )
    header = ["GUARD", "STATE", "EPOCH", "ENGINE", "POOL", "G1", "PULLS", "PEERS", "DOMAINS"]
    if not any(record.topology_domains for record in records):
        header.pop()
        rows = [row[:-1] for row in rows]
    return table(header, rows, right="2567")


def _router_table(routers: Routers) -> str:
    rows = [(router["router"], router["mode"], str(len(router["workers"]))) for router in routers.answers]
    rows += [(router.router, f"no answer from {router.address}", "") for router in routers.silent]
    return table(("ROUTER", "MODE", "WORKERS"), rows, right="2")


def _filled(pool: dict[str, Any] | None) -> str:
    if pool is None:
        return "none yet"
    ready = pool["counts"].get("READY", 0)
    bytes_each = pool["slot_part_bytes"] * pool.get("ranks", 1)
    return f"{ready}/{pool['slots']} blocks, {size(ready * bytes_each)}"


# --- where ----------------------------------------------------------------------------------------


async def _where(fleet: Fleet, arguments: argparse.Namespace, tokens: list[int] | None) -> int:
    records = await fleet.guards()
    if tokens is None:
        wanted = {record.name: [arguments.what] for record in records}
    else:
        wanted = {record.name: _keys(record, tokens, arguments.salt) for record in records}
    answers = await asyncio.gather(
        *(fleet.inspect(record, wanted[record.name]) for record in records), return_exceptions=True
    )
    found: list[dict[str, Any]] = []
    troubles = [] if records else [deployment.no_guards(fleet)]
    for record, blocks in zip(records, answers, strict=True):
        keys = wanted[record.name]
        if isinstance(blocks, KvcrError):
            troubles.append(str(blocks))
            continue
        if isinstance(blocks, BaseException):
            raise blocks
        held = [block["tier"] for block in blocks]
        found.append(
            {
                "guard": record.name,
                "state": record.state,
                "blocks": len(keys),
                "from_start": _leading(held),
                "held": sum(tier is not None for tier in held),
                "tiers": sorted({f"G{tier}" for tier in held if tier is not None}),
                "g1_held": 0,
                "g1_from_start": 0,
                "domains": record.topology_domains,
            }
        )
    if tokens is not None:
        _add_engine_memory(found, await fleet.engine_memory(tokens, arguments.salt))
    somebody = any(entry["held"] or entry["g1_held"] for entry in found)
    if arguments.json:
        _print_json({"tokens": None if tokens is None else len(tokens), "guards": found})
    else:
        if tokens is not None:
            print(f"{len(tokens)} tokens")
        rows = [
            [
                e["guard"] or f"none, beside worker {e['worker_id']:x}",
                e["blocks"],
                e["from_start"],
                e["held"],
                e["g1_held"],
                ", ".join(e["tiers"]) or "-",
                e["state"],
            ]
            for e in found
        ]
        header = ("GUARD", "BLOCKS", "FROM THE START", "HELD", "IN G1", "TIERS", "STATE")
        if rows:
            print(table(header, rows, right="1234"))
    if not somebody and not troubles:
        troubles.append(_why_nobody(records, tokens))
    deployment.complain(arguments, troubles)
    return EXIT_OK if somebody and not troubles else EXIT_FAILED


def _why_nobody(records: Sequence[InstanceRecord], tokens: Sequence[int] | None) -> str:
    sizes = [record.block_size for record in records if record.layout is not None]
    if not sizes:
        return "no engine has attached to a guard yet: there are no pools"
    if tokens is not None and len(tokens) < min(sizes):
        return f"the prompt has {len(tokens)} tokens; what is shorter than a block ({min(sizes)}) is not kept"
    return "nobody holds it"


def _add_engine_memory(found: list[dict[str, Any]], engines: Sequence[dict[str, Any]]) -> None:
    """What routers know of G1, beside what guards say of their own tiers."""
    by_guard = {entry["guard"]: entry for entry in found}
    for engine in engines:
        entry = by_guard.get(engine["guard"])
        if entry is None:
            entry = {"guard": "", "worker_id": engine["worker_id"], "state": "-", "tiers": [], "domains": {}}
            entry |= {"blocks": 0, "from_start": 0, "held": 0}
            found.append(entry)
        entry |= {"g1_held": engine["held"], "g1_from_start": engine["from_start"]}
        entry["tiers"] = ["G1", *entry["tiers"]]


def _tokenize(arguments: argparse.Namespace, model: str | None) -> list[int]:
    what = arguments.what
    text = text_of(what[1:], "the prompt in") if what.startswith("@") else what
    folder = arguments.model or model
    if folder is None:
        raise ConfigError(
            f"{what[:40]!r} is no key (32 hex digits), so it is a prompt; whose tokenizer counts: give "
            "the model's directory with --model, or name a running `kvcr serve` with --run-dir"
        )
    if not Path(folder).is_dir():
        raise ConfigError(f"--model {folder!r} is no directory")
    from kvcr.vllm.tokens import tokenize

    with deployment.waiting_for(arguments, "the tokenizer"):
        return tokenize(text, folder, raw=arguments.raw)


def _keys(record: InstanceRecord, tokens: Sequence[int], salt: str) -> list[str]:
    """What the prompt's blocks are called at this guard: its namespace, model and block size count."""
    from kvcr.keys import KeySpace, extend_chain

    if record.layout is None:
        return []
    space = KeySpace(record.engine_namespace, record.model, salt=salt)
    return [key.hex() for key in extend_chain(space.root(), list(tokens), record.block_size)]


def _leading(held: Sequence[int | None]) -> int:
    return next((index for index, tier in enumerate(held) if tier is None), len(held))


# --- top ------------------------------------------------------------------------------------------


async def _top(fleet: Fleet, arguments: argparse.Namespace) -> int:
    if arguments.hot:
        return await _top_hot(fleet, arguments)
    before: dict[str, dict[str, float]] = {}
    last_s, shown = 0.0, -1
    while not arguments.count or shown < arguments.count:
        if shown >= 0:
            await asyncio.sleep(arguments.every)
        records = await fleet.guards()
        pages = await asyncio.gather(
            *(asyncio.to_thread(_counters, record.metrics_endpoint) for record in records)
        )
        now_s = time.monotonic()
        rows = []
        for record, page in zip(records, pages, strict=True):
            old = before.get(record.name) or page
            rates = {name: max(0.0, page[name] - old[name]) / (now_s - last_s) for name in page}
            rows.append(
                {
                    "guard": record.name,
                    "state": record.state if page else "no answer",
                    "ready": page.get("ready"),
                    **{name: rates.get(name) for name in _TOP},
                }
            )
        before = {record.name: page for record, page in zip(records, pages, strict=True)}
        last_s = now_s
        shown += 1
        if shown and not records:
            deployment.complain(arguments, [deployment.no_guards(fleet)])
        elif shown:
            _show_top(rows, arguments.json)
    return EXIT_OK


async def _top_hot(fleet: Fleet, arguments: argparse.Namespace) -> int:
    shown = 0
    while not arguments.count or shown < arguments.count:
        if shown:
            await asyncio.sleep(arguments.every)
        shown += 1
        routers = await fleet.routers()
        if not routers.answers:
            raise KvcrError(f"no router answers in namespace {fleet.deployment.namespace}")
        # Each replica has its own requests.
        hot = [{"router": one["router"], **prefix} for one in routers.answers for prefix in one["hot"]]
        hot.sort(key=lambda prefix: -prefix["per_s"])
        deployment.complain(arguments, map(str, routers.silent))
        if arguments.json:
            _print_json({"hot": hot})
            continue
        if not hot:
            deployment.complain(arguments, ["no prefix is asked for often now"])
            continue
        rows = [[p["key"], p["blocks"], f"{p['per_s']:.2f}", ", ".join(p["guards"]) or "-"] for p in hot]
        _show_screen(table(("KEY OF ITS LAST BLOCK", "BLOCKS", "REQUESTS/S", "HELD BY"), rows, right="12"))
    return EXIT_OK


_TOP = {
    "pulled": "kvcr_pulled_bytes_total",
    "served": "kvcr_served_bytes_total",
    "stored": "kvcr_deposited_bytes_total",
    "loaded": "kvcr_loaded_bytes_total",
    "evicted": "kvcr_evicted_blocks_total",
}


def _show_top(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json({"guards": rows})
        return
    cells = [
        [
            row["guard"],
            row["state"],
            f"{row['ready']:.0f}",
            *(f"{size(row[name])}/s" for name in ("pulled", "served", "stored", "loaded")),
            f"{row['evicted']:.0f}/s",
        ]
        if row["ready"] is not None
        else [row["guard"], row["state"], *[""] * 6]
        for row in rows
    ]
    header = ("GUARD", "STATE", "BLOCKS", "PULLED", "SERVED", "STORED", "LOADED", "EVICTED")
    _show_screen(table(header, cells, right="234567"))


def _show_screen(text: str) -> None:
    """In place of the last one on a terminal, where a line that wraps would spoil the table."""
    lines = [time.strftime("%H:%M:%S"), *text.splitlines()]
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = [line[:width] for line in lines]
        print("\x1b[H\x1b[2J", end="")
    print("\n".join(lines), flush=True)


def _counters(url: str) -> dict[str, float]:
    """Totals of a guard's metrics page; empty when it does not answer."""
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            text = answer.read().decode()
    except (OSError, ValueError):
        return {}
    totals = dict.fromkeys((*_TOP, "ready"), 0.0)
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        for short, full in _TOP.items():
            if bare == full:
                totals[short] += float(value)
        if bare == "kvcr_pool_slots" and 'state="ready"' in name:
            totals["ready"] += float(value)
    return totals


def _plain(record: InstanceRecord) -> Any:
    import msgspec

    return msgspec.to_builtins(record)


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=str), flush=True)
