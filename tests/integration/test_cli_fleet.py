# SPDX-License-Identifier: Apache-2.0
"""``kvcr status``, ``where`` and ``top`` against real guards in a real deployment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, runtime
from engine_client import EngineClient, GuardProcess, chain
from waiting import PATIENCE_S, eventually

COMPONENTS = Path(__file__).parents[2] / "components"


class Cli:
    """Runs ``kvcr`` as a user in that deployment would, with nothing but two variables and flags."""

    def __init__(self, deployment: Deployment, home: Path) -> None:
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(COMPONENTS),
            "ETCD_ENDPOINTS": deployment.etcd_url,
            "DYN_NAMESPACE": deployment.namespace,
            "KVCR_CACHE": str(home),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvcr.cli", *words],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """What went wrong is all that may be on stderr, whatever Dynamo's runtime would like to say."""
        done = subprocess.run(
            [sys.executable, "-m", "kvcr.cli", *words],
            env={**self._environment, "DYN_LOG": "info", **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if not done.stderr.startswith("usage: "):
            said = [line for line in done.stderr.splitlines() if not line.startswith(f"kvcr {words[0]}: ")]
            assert said == [], done.stderr
        return done


@pytest.fixture
def cli(deployment: Deployment, tmp_path: Path) -> Cli:
    return Cli(deployment, tmp_path)


@pytest.fixture
def guards(deployment: Deployment) -> Iterator[tuple[GuardProcess, GuardProcess]]:
    environment = {"DYN_TOPOLOGY_DOMAINS": ""}
    with deployment.guard("g0", env=environment) as first, deployment.guard("g1", env=environment) as second:
        yield first, second


async def test_status_shows_every_guard(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess]
) -> None:
    await deployment.registered("g0")
    await deployment.registered("g1")
    root, keys = chain(5, "status")
    with EngineClient(guards[0], "engine") as engine:
        engine.deposit(keys, root)
        done = cli("status")
        assert done.returncode == 0, done.stderr
        lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("g")}
        assert "STANDBY" in lines["g0"]
        assert "5/64 blocks" in lines["g0"]
        assert "EMPTY" in lines["g1"]
        report = json.loads(cli("status", "--json").stdout)
    assert [guard["record"]["name"] for guard in report["guards"]] == ["g0", "g1"]
    assert report["guards"][0]["status"]["pool"]["counts"]["READY"] == 5


async def test_where_finds_a_block_and_says_so_when_nobody_has_it(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess]
) -> None:
    await deployment.registered("g0")
    await deployment.registered("g1")
    root, keys = chain(2, "where")
    with EngineClient(guards[0], "engine") as engine:
        engine.deposit(keys, root)
        found = cli("where", keys[1].hex(), "--json")
        assert found.returncode == 0, found.stderr
        held = {guard["guard"]: guard["tiers"] for guard in json.loads(found.stdout)["guards"]}
        assert held == {"g0": ["G2"], "g1": []}
        assert cli("where", "ff" * 16).returncode == 1


async def test_a_stopped_guard_is_told_and_fails_the_command(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess]
) -> None:
    await deployment.registered("g0")
    await deployment.registered("g1")
    guards[0].process.send_signal(19)
    try:
        done = cli("status")
    finally:
        guards[0].process.send_signal(18)
    assert done.returncode == 1
    assert "guard g0 did not answer within 5 s" in done.stderr
    assert "no answer" in done.stdout
    assert "EMPTY" in done.stdout, "the other one is still shown"
    assert "waiting for guards" in done.stderr


@pytest.fixture
async def routers(deployment: Deployment, runtimes_end: None) -> AsyncIterator[str]:
    """One that answers, and one that is registered, takes connections and says nothing: its address."""

    async def status(_: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"router": "router-1", "mode": "on", "workers": {}, "hot": []}

    prefix = f"v1/instances/{deployment.namespace}/router/status/"
    endpoint = runtime(deployment).endpoint(f"{deployment.namespace}.router.status")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(status))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        async with await deployment.etcd() as etcd:

            async def registered() -> list[Any]:
                return (await etcd.get_prefix(prefix)).values

            (entry,) = await eventually(registered, "the router registers")
            record = json.loads(entry.value)
            record |= {"instance_id": 0xDEAF, "transport": {"tcp": f"{address}/deaf/router/status"}}
            await etcd.put(f"{prefix}deaf", json.dumps(record).encode())
        yield address
    serving.cancel()


async def test_a_router_that_does_not_answer_is_told_with_its_address(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess], routers: str
) -> None:
    await deployment.registered("g0")
    await deployment.registered("g1")
    calls = (("status",), ("status", "--json"), ("mode",), ("doctor", "--json"))
    shown, as_json, mode, doctor = await asyncio.gather(*(asyncio.to_thread(cli, *words) for words in calls))
    assert shown.returncode == as_json.returncode == mode.returncode == 1
    table = {line.split()[0]: line for line in shown.stdout.splitlines() if line.startswith("router-")}
    assert table["router-1"].split() == ["router-1", "on", "0"]
    assert f"no answer from {routers}" in table["router-deaf"]
    assert f"router-deaf at {routers} did not answer: no answer within 5 s" in shown.stderr
    report = json.loads(as_json.stdout)
    assert [router["router"] for router in report["routers"]] == ["router-1"]
    assert [(r["router"], r["address"]) for r in report["silent_routers"]] == [("router-deaf", routers)]
    assert f"no answer from {routers}" in mode.stdout
    (told,) = [check for check in json.loads(doctor.stdout)["checks"] if check["name"] == "routers"]
    assert told["outcome"] == "warn"
    assert routers in told["detail"]


async def test_top_shows_rates(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess]
) -> None:
    await deployment.registered("g0")
    done = cli("top", "--count", "1", "--every", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["guards"]
    assert {"guard", "state", "pulled", "served", "stored", "loaded"} <= set(rows[0])


def test_an_unsigned_record_is_not_believed(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a deployment's secret of some length")
    done = cli("status", "--secret-file", str(secret))
    assert done.returncode == 1
    assert "not signed" in done.stderr


def test_no_deployment_is_an_error_that_says_what_to_give(cli: Cli) -> None:
    done = cli("status", ETCD_ENDPOINTS="")
    assert done.returncode == 2
    assert "--etcd" in done.stderr


@pytest.mark.parametrize("words", [("status",), ("mode", "off")], ids=" ".join)
def test_an_etcd_that_is_away_is_named(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*words, ETCD_ENDPOINTS="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "etcd at http://127.0.0.1:9 does not answer" in done.stderr


def test_explain_does_not_wait_long_for_an_etcd_that_is_away(cli: Cli) -> None:
    done = cli("explain", ETCD_ENDPOINTS="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "kvcr explain: no router was reached" in done.stderr


async def test_a_nats_that_is_away_is_named(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess]
) -> None:
    await deployment.registered("g0")
    root, keys = chain(1, "pin")
    with EngineClient(guards[0], "engine") as engine:
        engine.deposit(keys, root)
        done = cli("pin", keys[0].hex(), NATS_SERVER="nats://127.0.0.1:9")
    assert done.returncode == 1
    assert "kvcr pin: actions go over NATS: nats://127.0.0.1:9" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("where", "@/nowhere/prompt", "--model", "/nowhere"), ("/nowhere/prompt", "cannot be read")),
        (("where", "hello", "--model", "/nowhere"), ("--model '/nowhere'", "no directory")),
        (("where", "hello"), ("32 hex digits", "--model")),
        (("pin", "@/nowhere/keys"), ("/nowhere/keys", "cannot be read")),
        (
            ("pin", "s", "--router", "http://127.0.0.1:9", "--token-file", "/nowhere/t"),
            ("--token-file '/nowhere/t'",),
        ),
        (("pin", "s", "--router", "http://127.0.0.1:9"), ("http://127.0.0.1:9 does not answer", "--router")),
        (("pin", "s", "--router", "nonsense"), ("nonsense does not answer", "--router")),
        (("prefetch", "00" * 16, "--to", "g7"), ("no guard 'g7'", "none")),
        (("status",), ("no guard is registered in namespace", "--namespace")),
        (("ls",), ("no guard is registered in namespace", "--namespace")),
        (("mode",), ("no router answers in namespace",)),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_is_wrong_is_named_with_what_to_do(
    cli: Cli, words: tuple[str, ...], told: tuple[str, ...]
) -> None:
    done = cli(*words)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    for part in told:
        assert part in done.stderr


async def test_top_ends_with_ctrl_c_and_without_a_word(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess]
) -> None:
    await deployment.registered("g0")
    top = cli.start("top", "--every", "0.2")
    assert top.stdout is not None
    await asyncio.to_thread(top.stdout.readline)
    # What a terminal does, and bash does not to what it runs in the background.
    top.send_signal(signal.SIGINT)
    _, stderr = await asyncio.to_thread(top.communicate, None, PATIENCE_S)
    assert (top.returncode, stderr) == (130, "")


async def test_ls_lists_the_chains_of_the_pools(
    cli: Cli, deployment: Deployment, guards: tuple[GuardProcess, GuardProcess]
) -> None:
    await deployment.registered("g0")
    await deployment.registered("g1")
    assert cli("ls").returncode == 1, "nothing is there yet"
    root, keys = chain(5, "ls")
    _, others = chain(3, "another tenant")
    with EngineClient(guards[0], "engine") as engine:
        engine.deposit(keys, root)
        engine.deposit(others, chain(3, "another tenant")[0])
        done = cli("ls", "--json")
        assert done.returncode == 0, done.stderr
        listed = json.loads(done.stdout)
        by_tail = {row["tail"]: row for row in listed["chains"]}
        assert {tail: row["blocks"] for tail, row in by_tail.items()} == {
            keys[-1].hex(): 5,
            others[-1].hex(): 3,
        }
        assert by_tail[keys[-1].hex()]["tenant"] == root.hex()
        assert {row["guard"] for row in listed["chains"]} == {"g0"}
        assert [(worker["guard"], worker["blocks"]) for worker in listed["workers"]] == [("g0", 8), ("g1", 0)]
        assert len(json.loads(cli("ls", "--json", "--limit", "1").stdout)["chains"]) == 1
        shown = cli("ls", "--worker", "g0", "--tier", "G2")
        assert shown.returncode == 0, shown.stderr
        assert keys[-1].hex() in shown.stdout
        assert "g0: 8 blocks" in shown.stdout
        assert cli("ls", "--worker", "g1").returncode == 1
        wrong = cli("ls", "--worker", "g7")
        assert (wrong.returncode, "g0" in wrong.stderr) == (2, True)
        assert cli("ls", "--limit", "0").returncode == 2
