# SPDX-License-Identifier: Apache-2.0
"""``kvcr pin|unpin|demote|invalidate|prefetch|move``: by hand what the router does by itself."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcr.cli import deployment
from kvcr.cli.values import seconds, text_of
from kvcr.errors import ConfigError, KvcrError
from kvcr.tables import size, table

if TYPE_CHECKING:
    import msgspec

    from kvcr.dynamo.fleet import Fleet
    from kvcr.dynamo.records import InstanceRecord
    from kvcr.protocol.events import ActionResult

    _Order = tuple[str, str, msgspec.Struct]
    """Guard, action and payload."""

COMMANDS = ("pin", "unpin", "demote", "invalidate", "prefetch", "move")
DEFAULT_TTL_S = 600.0
NO_ANSWER = "no answer"
_GOOD = frozenset({"done", "deferred"})
_KEYS = re.compile(r"[0-9a-f]{32}(,[0-9a-f]{32})*")
_FIXES = {
    401: "; give its token with --token-file",
    403: "; give a token of that tenant with --token-file",
    404: "; `kvcr ls` lists sessions, --tenant says whose it is",
}
"""By status of the signals API."""
_HELP = {
    "pin": "keep blocks from eviction for a while",
    "unpin": "end a pin",
    "demote": "make blocks the first to be evicted",
    "invalidate": "drop blocks in every tier, engine memory included",
    "prefetch": "copy blocks to a guard ahead of a request",
    "move": "copy blocks to a guard, then drop them where they were",
}


@dataclass(frozen=True)
class _Holder:
    record: InstanceRecord
    blocks: list[dict[str, Any]]
    """As ``inspect`` answers, one for each key asked for."""

    @property
    def held(self) -> list[bool]:
        return [block["tier"] is not None for block in self.blocks]

    @property
    def leading(self) -> int:
        return next((index for index, held in enumerate(self.held) if not held), len(self.held))


def add_parsers(commands: Any) -> None:
    """Declare the commands."""
    for name in COMMANDS:
        parser = commands.add_parser(name, help=_HELP[name])
        deployment.add_options(parser)
        if name == "unpin":
            parser.add_argument("pin_id", metavar="PIN", help="as `kvcr pin` printed it")
        else:
            parser.add_argument(
                "what",
                metavar="SESSION|KEYS",
                help="a session of the router's, or keys (32 hex digits, separated by commas), or @FILE",
            )
            parser.add_argument("--router", metavar="URL", help="of the signals API; or KVCR_ROUTER_URL")
            parser.add_argument("--token-file", metavar="FILE", help="token of the signals API")
            parser.add_argument("--tenant", default="", help="tenant of the session")
        if name in ("prefetch", "move"):
            parser.add_argument("--to", required=True, metavar="GUARD", help="where the blocks should be")
            parser.add_argument(
                "--source", metavar="GUARD", help="where from (default: who has most of them)"
            )
        elif name != "unpin":
            parser.add_argument("--guard", metavar="GUARD", help="only there (default: wherever they are)")
        if name == "pin":
            parser.add_argument(
                "--ttl-s", type=seconds(1), default=DEFAULT_TTL_S, help="seconds (%(default)s)"
            )
        parser.add_argument(
            "--timeout-s", type=seconds(0.1), default=15.0, help="for the answers (%(default)s)"
        )


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0: every guard did it; 1: some did not. Raises ConfigError, KvcrError."""
    if arguments.command == "pin":
        from kvcr.guard.pins import MAX_TTL_S

        if arguments.ttl_s > MAX_TTL_S:
            raise ConfigError(f"--ttl-s is {arguments.ttl_s:g}; it must be from 1 to {MAX_TTL_S:g} seconds")
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    opened = deployment.open_fleet(arguments)
    from kvcr.dynamo.acting import act, new_plan_id

    place = opened.deployment
    plan_id = new_plan_id()
    async with opened as fleet:
        orders, silent = await _orders(fleet, arguments, plan_id)
    results: Sequence[ActionResult | None] = []
    if orders:
        acting = act(place.nats, place.namespace, orders, plan_id, arguments.timeout_s)
        results = await deployment.patiently(arguments, acting, "guards")
    rows: list[dict[str, Any]] = []
    for (guard, kind, _), result in zip(orders, results, strict=True):
        rows.append(
            {
                "guard": guard,
                "action": kind,
                "result": result.code if result else NO_ANSWER,
                "blocks": result.blocks if result else 0,
                "bytes": result.byte_count if result else 0,
                "seconds": round(result.seconds, 3) if result else 0.0,
                "detail": result.detail if result else f"within {arguments.timeout_s:g} s",
            }
        )
    if arguments.command == "invalidate":
        # Every guard was told; of interest are those that had something.
        rows = [row for row in rows if row["result"] != "miss"]
    rows += [
        {"guard": guard, "action": f"kv.{arguments.command}", "result": NO_ANSWER, "blocks": 0, "bytes": 0}
        | {"seconds": 0.0, "detail": why}
        for guard, why in silent.items()
    ]
    if not rows:
        raise KvcrError("no guard holds any of these blocks")
    if arguments.json:
        print(json.dumps({"plan_id": plan_id, "actions": rows}))
    else:
        cells = [
            [r["guard"], r["action"], r["result"], r["blocks"], size(r["bytes"]), r["detail"]] for r in rows
        ]
        print(table(("GUARD", "ACTION", "RESULT", "BLOCKS", "BYTES", "DETAIL"), cells, right="34"))
        if arguments.command == "pin" and any(row["result"] in _GOOD for row in rows):
            print(f"for {arguments.ttl_s:g} s; to end it: kvcr unpin {plan_id}")
    return 0 if all(row["result"] in _GOOD for row in rows) else 1


async def _orders(
    fleet: Fleet, arguments: argparse.Namespace, plan_id: str
) -> tuple[list[_Order], dict[str, str]]:
    """What to tell whom; and why, of guards that could not be asked what they hold."""
    from kvcr.protocol import events

    # What is wrong with the command is told first, whoever is registered.
    keys = [] if arguments.command == "unpin" else _keys(arguments)
    records = await fleet.guards()
    if not records and not getattr(arguments, "to", ""):
        raise KvcrError(deployment.no_guards(fleet))
    if arguments.command == "unpin":
        unpin = events.UnpinPayload(plan_id=plan_id, pin_id=arguments.pin_id)
        return [(record.name, events.UNPIN, unpin) for record in records], {}
    if arguments.command in ("prefetch", "move"):
        return [await _copy(fleet, records, arguments, keys, plan_id)], {}
    if arguments.guard:
        records = [_named(records, arguments.guard)]
    if arguments.command == "invalidate":
        # What only the engine beside it has in its memory, a guard does not list: all are told of all blocks,
        # and one that is silent now acts if it is back in time.
        dead = events.InvalidatePayload(plan_id=plan_id, keys=bytes.fromhex("".join(keys)))
        return [(record.name, events.INVALIDATE, dead) for record in records], {}
    holders, silent = await _holders(fleet, records, keys)
    orders: list[_Order] = []
    for holder in holders:
        mine = b"".join(bytes.fromhex(k) for k, held in zip(keys, holder.held, strict=True) if held)
        if not mine:
            continue
        if arguments.command == "pin":
            pin = events.PinPayload(plan_id=plan_id, keys=mine, pin_id=plan_id, ttl_s=arguments.ttl_s)
            orders.append((holder.record.name, events.PIN, pin))
        else:
            demote = events.DemotePayload(plan_id=plan_id, keys=mine, descendants=False)
            orders.append((holder.record.name, events.DEMOTE, demote))
    return orders, silent


async def _copy(
    fleet: Fleet,
    records: Sequence[InstanceRecord],
    arguments: argparse.Namespace,
    keys: Sequence[str],
    plan_id: str,
) -> _Order:
    from kvcr.protocol import events

    if arguments.source == arguments.to:
        raise ConfigError(f"--to and --source are both {arguments.to!r}: name two guards")
    target = _named(records, arguments.to)
    others = [record for record in records if record is not target]
    if arguments.source:
        others = [_named(others, arguments.source)]
    holders, silent = await _holders(fleet, others, keys)
    deployment.complain(arguments, silent.values())
    source = max(holders, key=lambda holder: holder.leading, default=None)
    if source is None or not source.leading:
        raise KvcrError(f"no other guard holds the first of these blocks; nothing to copy to {arguments.to}")
    blocks = source.blocks[: source.leading]
    payload = events.PrefetchPayload(
        plan_id=plan_id,
        keys=b"".join(bytes.fromhex(block["key"]) for block in blocks),
        engine_hashes=b"".join(block["engine_hash"].to_bytes(8, "little") for block in blocks),
        parent=blocks[0]["parent"],
        first=blocks[0]["position"],
        sources=[
            events.FetchSource(source.record.control_endpoint, 0, len(blocks), source.record.name),
        ],
        mode="move" if arguments.command == "move" else "copy",
        deadline_ms=arguments.timeout_s * 1000,
    )
    return target.name, events.PREFETCH, payload


async def _holders(
    fleet: Fleet, records: Sequence[InstanceRecord], keys: Sequence[str]
) -> tuple[list[_Holder], dict[str, str]]:
    """What these guards hold, asked all at once; and by name why not, of those that did not answer."""

    async def one(record: InstanceRecord) -> _Holder | KvcrError:
        try:
            return _Holder(record, await fleet.inspect(record, keys))
        except KvcrError as error:
            return error

    found = await asyncio.gather(*(one(record) for record in records))
    silent = {
        record.name: str(answer)
        for record, answer in zip(records, found, strict=True)
        if isinstance(answer, KvcrError)
    }
    return [answer for answer in found if isinstance(answer, _Holder)], silent


def _named(records: Sequence[InstanceRecord], name: str) -> InstanceRecord:
    for record in records:
        if record.name == name:
            return record
    known = [record.name for record in records]
    raise ConfigError(f"no guard {name!r} is registered; there are: {', '.join(known) or 'none'}")


def _keys(arguments: argparse.Namespace) -> list[str]:
    what = arguments.what
    if what.startswith("@"):
        what = ",".join(text_of(what[1:], "the keys in").replace(",", " ").split())
    if _KEYS.fullmatch(what):
        return list(what.split(","))
    if not what:
        raise ConfigError(f"{arguments.what!r} names no session and no keys")
    return _session_keys(arguments, what)


def _session_keys(arguments: argparse.Namespace, session: str) -> list[str]:
    base = deployment.router_url(arguments)
    headers = {"x-tenant-id": arguments.tenant} if arguments.tenant else {}
    if arguments.token_file:
        headers["Authorization"] = f"Bearer {_token(arguments.token_file)}"
    url = f"{base}/v1/kv/sessions/{urllib.parse.quote(session, safe='')}/keys"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            keys: list[str] = json.load(answer)["keys"]
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError):
            reason = json.loads(reason)["error"]["message"]
        fix = _FIXES.get(error.code, "")
        if error.code == 401 and arguments.token_file:
            fix = f"; it knows another than that in {arguments.token_file}"
        raise KvcrError(
            f"session {session!r}: the router at {base} answered {error.code}: {reason}{fix}"
        ) from error
    except (OSError, ValueError) as error:
        raise KvcrError(
            f"the router at {base} does not answer ({error}): --router or KVCR_ROUTER_URL is the URL of its "
            "signals API, e.g. http://host:8490"
        ) from error
    if not keys:
        raise KvcrError(f"session {session!r} has no blocks yet: it has not filled one")
    return keys


def _token(path: str) -> str:
    words = text_of(path, "--token-file").split()
    if len(words) != 1:
        raise ConfigError(
            f"--token-file {path!r} must have one token and nothing else; it has {len(words)} words"
        )
    return words[0]
