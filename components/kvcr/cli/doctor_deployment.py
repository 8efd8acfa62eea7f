# SPDX-License-Identifier: Apache-2.0
"""``kvcr doctor`` on a deployment: its servers, clocks, keys, streams, releases and tenants.

Asks everybody and changes nothing, but for one key in etcd that it writes and removes again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from typing import Any

from kvcr.cli.doctor import Check, Outcome
from kvcr.dynamo.environment import silence_runtime
from kvcr.dynamo.etcd import EtcdError
from kvcr.dynamo.fleet import Deployment, Fleet, Routers
from kvcr.dynamo.nats_check import check_nats
from kvcr.dynamo.polling import poll
from kvcr.dynamo.records import InstanceRecord
from kvcr.errors import KvcrError
from kvcr.keys import KeySpace, probe_key

CLOCK_S = 1.0
"""Actions expire by the wall clock after seconds, and time lines are drawn by it."""
BEHIND_S = 3.0
"""A router that is behind for longer is not merely busy: heartbeats come every second."""
LISTED = 1000

Answers = dict[str, dict[str, Any]]


async def examine(place: Deployment) -> list[Check]:
    """Every check, in an order in which the first that fails explains the rest."""
    level, told = await check_nats(place.nats, place.namespace)
    checks = [Check("NATS", Outcome(level), told)]
    fleet = Fleet(place)
    try:
        async with fleet:
            checks.insert(0, await _check_etcd(fleet))
            if checks[0].outcome is not Outcome.FAIL:
                checks += await _check_members(fleet)
    except (EtcdError, OSError) as error:
        checks.insert(0, Check("etcd", Outcome.FAIL, f"{error}; start it, or name it with --etcd"))
    return checks


async def _check_etcd(fleet: Fleet) -> Check:
    """Reachable, and does it let us read and write below our prefix."""
    place = fleet.deployment
    key = f"kvcr/v1/{place.namespace}/doctor/{uuid.uuid4().hex}"
    try:
        took_s = await fleet.try_etcd(key)
    except EtcdError as error:
        return Check(
            "etcd",
            Outcome.FAIL,
            f"{place.etcd}: {error}; name it with --etcd, start it, or let these credentials read and write "
            f"below kvcr/v1/{place.namespace}/ and v1/ (ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD)",
        )
    return Check("etcd", Outcome.OK, f"{place.etcd} answers, reads and writes; {1000 * took_s:.0f} ms")


async def _check_members(fleet: Fleet) -> list[Check]:
    records = await fleet.guards()
    asked_s = time.time()
    answers: Answers = {}
    troubles = [f"{n} record(s): {why}" for why, n in fleet.ignored.items()]
    for record, answer in zip(records, await fleet.ask_all(records, "status"), strict=True):
        if isinstance(answer, dict):
            answers[record.name] = answer
        else:
            troubles.append(str(answer))
    answered_s = time.time()
    asked = await fleet.routers()
    routers = {router["router"]: router for router in asked.answers}
    routers_s = time.time()
    if troubles:
        members = Check("guards", Outcome.WARN, "; ".join(troubles))
    elif not records:
        members = Check(
            "guards",
            Outcome.WARN,
            f"none is registered in namespace {fleet.deployment.namespace}; start guards with --cluster and "
            "the same --namespace, or name another one",
        )
    else:
        members = Check("guards", Outcome.OK, f"{len(records)} answer")
    known = [record for record in records if record.name in answers]
    return [
        members,
        check_routers(asked),
        check_clocks(answers, asked_s, answered_s, routers, routers_s),
        check_versions({**answers, **routers}),
        check_keys(known, answers, routers),
        await _check_lag(fleet, known),
        check_tenants(routers, *await _chains(fleet, known)),
    ]


def check_routers(asked: Routers) -> Check:
    """Whether all that are registered answer."""
    if asked.silent:
        told = "; ".join(map(str, asked.silent))
        return Check(
            "routers",
            Outcome.WARN,
            f"{told}. One that was killed is registered for up to two minutes (its lease); one that hangs or "
            "cannot be reached from here: restart it, or see that its address is one of this network",
        )
    return Check("routers", Outcome.OK, f"{len(asked.answers)} answer" if asked.answers else "none of ours")


def check_clocks(
    guards: Answers, asked_s: float, answered_s: float, routers: Answers, routers_s: float
) -> Check:
    """Whether a clock lies outside of when it must have been read."""
    off: dict[str, float] = {}
    for name, answer, first_s, last_s in (
        *((name, answer, asked_s, answered_s) for name, answer in guards.items()),
        *((name, answer, answered_s, routers_s) for name, answer in routers.items()),
    ):
        there_s = answer.get("unix_s")
        if there_s is not None:
            off[name] = there_s - min(max(there_s, first_s), last_s)
    bad = {name: s for name, s in off.items() if abs(s) > CLOCK_S}
    if bad:
        listed = ", ".join(f"{name} {seconds:+.1f} s" for name, seconds in bad.items())
        return Check(
            "clocks",
            Outcome.WARN,
            f"differ from this host's: {listed}. Actions expire too early or too late there; let NTP "
            "(chrony, systemd-timesyncd) set the clock of those hosts",
        )
    return Check("clocks", Outcome.OK, f"{len(off)} agree with this host's within {CLOCK_S:g} s")


def check_versions(members: Answers) -> Check:
    """One release everywhere, but while it is being replaced."""
    releases = Counter(str(answer.get("version", "before 0.1.0")) for answer in members.values())
    if len(releases) <= 1:
        return Check("releases", Outcome.OK, ", ".join(releases) or "nobody to ask")
    listed = ", ".join(f"{name} {answer.get('version', '?')}" for name, answer in sorted(members.items()))
    return Check(
        "releases",
        Outcome.WARN,
        f"{len(releases)} at once: {listed}. Right while you upgrade, see docs/upgrades.md; otherwise "
        "restart those that are behind",
    )


def check_keys(records: list[InstanceRecord], guards: Answers, routers: Answers) -> Check:
    """Everybody names the blocks of one prompt alike: guard and engine, router, and this command."""
    differ, compared = [], 0
    for record in records:
        theirs = guards[record.name].get("engine", {}).get("probe", "")
        if record.layout is None or not theirs:
            continue
        ours = probe_key(record.engine_namespace, record.layout).hex()
        compared += 1
        if theirs != ours:
            differ.append(f"guard {record.name} and its engine, this command")
        for name, router in routers.items():
            known = router.get("guards", {}).get(record.name, {}).get("probe", "")
            if known and known != theirs:
                differ.append(f"guard {record.name}, router {name}")
    if differ:
        return Check(
            "block keys",
            Outcome.FAIL,
            f"the same prompt has other keys at: {'; '.join(differ)}. No block is found across them; they "
            "are of releases that do not fit: restart the older ones with the newer release",
        )
    if not compared:
        return Check("block keys", Outcome.OK, "no engine has attached yet: nothing to compare")
    return Check(
        "block keys", Outcome.OK, f"a probe prompt has the same keys at {compared} guards and all else"
    )


async def _check_lag(fleet: Fleet, records: list[InstanceRecord]) -> Check:
    """How far each router is behind each guard's inventory, given time to catch up."""
    behind: list[str] = []
    compared = 0

    async def caught_up() -> bool:
        nonlocal compared
        beats = await fleet.ask_all(records, "control", {"op": "heartbeat"})
        routers = (await fleet.routers()).answers
        behind.clear()
        compared = 0
        for record, beat in zip(records, beats, strict=True):
            if not isinstance(beat, dict):
                continue
            for router in routers:
                known = router.get("guards", {}).get(record.name)
                compared += 1
                if known is None:
                    behind.append(f"router {router['router']} does not know {record.name}")
                elif known["sequence"] < beat["sequence"]:
                    by = beat["sequence"] - known["sequence"]
                    behind.append(f"router {router['router']} is {by} batches behind {record.name}")
        return not behind

    await poll(caught_up, BEHIND_S)
    if behind:
        return Check(
            "inventory",
            Outcome.WARN,
            f"{'; '.join(behind)}. Hints are late or missing: is NATS up for both (kvcr doctor there), have "
            "they one secret, and can the router reach the guard's control endpoint",
        )
    return Check("inventory", Outcome.OK, f"no router is behind ({compared} pairs)")


async def _chains(fleet: Fleet, records: list[InstanceRecord]) -> tuple[int, int]:
    """How many chains are in the pools, as far as listed, and how many of them carry no tenant's salt."""
    chains, unsalted = 0, 0
    for record, answer in zip(
        records, await fleet.ask_all(records, "control", {"op": "list", "limit": LISTED}), strict=True
    ):
        if isinstance(answer, dict) and record.layout is not None:
            nobody = KeySpace(record.engine_namespace, record.model, record.layout.group).root().hex()
            chains += len(answer["rows"])
            unsalted += sum(row["tenant"] == nobody for row in answer["rows"])
    return chains, unsalted


def check_tenants(routers: Answers, chains: int, unsalted: int) -> Check:
    """Whether somebody who is trusted says whose a request is: routers know, blocks show it where there are
    other routers."""
    trusting = [name for name, router in routers.items() if not router.get("tenant_header")]
    if routers and not trusting:
        headers = sorted({str(router["tenant_header"]) for router in routers.values()})
        return Check("tenants", Outcome.OK, f"the routers take them from a gateway's {', '.join(headers)}")
    if not trusting and not unsalted:
        detail = f"all {chains} chains carry a salt" if chains else "no router of ours, and no blocks yet"
        return Check("tenants", Outcome.OK, detail)
    if unsalted < chains:
        seen = (
            f"{unsalted} of {chains} chains are of requests without a tenant, the others of whoever says so"
        )
    else:
        seen = "all requests are one tenant, and share each other's KV"
    return Check(
        "tenants",
        Outcome.WARN,
        f"{seen}. With one tenant only this is right; otherwise let a gateway authenticate, and start the "
        "routers with --tenant-header, the header that it sets (docs/security.md)",
    )


def run_all(place: Deployment) -> list[Check]:
    """:func:`examine`, for the command line."""
    silence_runtime()
    try:
        return asyncio.run(examine(place))
    except KvcrError as error:
        return [Check("deployment", Outcome.FAIL, str(error))]
