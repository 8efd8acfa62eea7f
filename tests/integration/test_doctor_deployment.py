# SPDX-License-Identifier: Apache-2.0
"""``kvcr doctor`` in a deployment: each thing that can be wrong is made wrong, and told with its fix."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import other_release
import pytest
from deployment import Deployment, runtime
from engine_client import LAYOUT, EngineClient, GuardProcess, chain
from secure_etcd import SecureEtcd
from waiting import eventually

from kvcr.graph import bootstrap, infra
from kvcr.keys import KeySpace, extend_chain

COMPONENTS = Path(__file__).parents[2] / "components"

# The machine's part has tests of its own, and each call of it would start a NIXL agent.
WITHOUT_NIXL = """
from kvcr.cli import doctor, main
doctor.check_nixl = lambda: doctor.Check("nixl", doctor.Outcome.OK, "not looked at")
raise SystemExit(main.main())
"""

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 30;
    return result;
}
"""


async def doctor(place: Deployment, *words: str, **variables: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and outcome and detail of every check."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WITHOUT_NIXL, "doctor", "--json", *words],
        env={
            **os.environ,
            **place.environment,
            "PYTHONPATH": str(COMPONENTS),
            "DYN_NAMESPACE": place.namespace,
            "KVCR_CACHE": str(place.directory),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    names = [check["name"] for check in report["checks"]]
    assert len(set(names)) == len(names), f"two checks of one name: {names}"
    return done.returncode, {c["name"]: (c["outcome"], c["detail"]) for c in report["checks"]}


async def test_a_healthy_deployment_is_found_healthy(deployment: Deployment) -> None:
    with deployment.guard("g0") as guard:
        await deployment.registered("g0")
        with EngineClient(guard, "engine"):
            code, found = await doctor(deployment)
    assert code == 0
    names = ("etcd", "NATS", "guards", "clocks", "releases", "block keys", "inventory", "tenants")
    assert {name: found[name][0] for name in names} == dict.fromkeys(names, "ok"), found
    assert "1 answer" in found["guards"][1]
    assert "same keys at 1 guards" in found["block keys"][1]


async def test_servers_that_are_away_are_named_with_what_to_do(deployment: Deployment) -> None:
    code, found = await doctor(deployment, "--etcd", "http://127.0.0.1:9", "--nats", "nats://127.0.0.1:9")
    assert code == 1
    assert found["etcd"][0] == found["NATS"][0] == "fail"
    assert "--etcd" in found["etcd"][1]
    assert "--nats" in found["NATS"][1]


async def test_an_etcd_user_without_the_rights_of_a_guard_is_told(
    deployment: Deployment, tmp_path: Path
) -> None:
    passwords = {"kvcr": "of-guards-and-routers", "worker": "of-workers"}
    secure = SecureEtcd(tmp_path, tls=False)
    try:
        secure.give_least_rights(passwords)
        for user, outcome in (("worker", "fail"), ("kvcr", "ok")):
            rights = secure.environment(user, passwords[user])
            found = (await doctor(deployment, DYN_NAMESPACE="dynamo", **rights))[1]["etcd"]
            assert found[0] == outcome, (user, found)
            assert outcome == "ok" or "read and write below kvcr/v1/dynamo/" in found[1]
    finally:
        secure.kill()


async def test_a_nats_user_without_the_rights_of_a_router_is_told(
    deployment: Deployment, tmp_path: Path
) -> None:
    bootstrap.make_secrets(tmp_path, deployment.namespace)
    (tmp_path / "nats.conf").write_text("include nats-users.conf\n")
    server = infra.start_nats(tmp_path / "js", tmp_path / "nats.log", config=tmp_path / "nats.conf")
    try:
        found = (await doctor(deployment, "--nats", server.url))[1]["NATS"]
        assert found[0] == "fail", "nobody"
        assert "NATS_AUTH_USERNAME" in found[1]
        for role, outcome in (("guard", "warn"), ("router", "ok")):
            lines = (tmp_path / f"{role}.env").read_text().split()
            user = dict(line.split("=", 1) for line in lines)
            found = (await doctor(deployment, "--nats", server.url, **user))[1]["NATS"]
            assert found[0] == outcome, (role, found)
            assert (outcome == "ok") or "rights of the role router" in found[1]
    finally:
        server.stop()


async def test_a_nats_without_jetstream_is_told(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "nats.conf").write_text("")
    port = infra.free_port()
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([infra.nats_binary(), "-a", "127.0.0.1", "-p", str(port)], stderr=log)
    try:
        url = f"nats://127.0.0.1:{port}"
        await eventually(lambda: b"ready" in (tmp_path / "log").read_bytes(), "NATS is up")
        found = (await doctor(deployment, "--nats", url))[1]["NATS"]
    finally:
        server.kill()
        server.wait()
    assert (found[0], "-js" in found[1]) == ("warn", True), found


async def test_a_clock_that_is_wrong_is_told(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    with deployment.guard("g0", env={"LD_PRELOAD": str(library)}):
        await deployment.registered("g0")
        found = (await doctor(deployment))[1]["clocks"]
    assert found[0] == "warn"
    assert "g0 +30." in found[1] or "g0 +29." in found[1], found
    assert "NTP" in found[1]


async def test_two_releases_at_once_and_keys_that_differ_are_told(
    deployment: Deployment, tmp_path: Path
) -> None:
    other = other_release.environment(
        tmp_path, {"kvcr.keys._PERSON": b"kvcr-other", "kvcr.__version__": "9.9.9"}
    )
    with deployment.guard("g0") as one, deployment.guard("g1", env=other) as two:
        await deployment.registered("g0")
        await deployment.registered("g1")
        with EngineClient(one, "engine-0"), EngineClient(two, "engine-1"):
            code, found = await doctor(deployment)
    assert code == 1
    assert found["releases"][0] == "warn"
    assert "g1 9.9.9" in found["releases"][1]
    assert found["block keys"][0] == "fail"
    assert "guard g1" in found["block keys"][1]
    assert "g0" not in found["block keys"][1]


async def test_requests_without_a_tenant_are_told(deployment: Deployment) -> None:
    with deployment.guard("g0") as guard:
        await deployment.registered("g0")
        with EngineClient(guard, "engine") as engine:
            nobody = KeySpace("test", LAYOUT.model)
            engine.deposit(
                extend_chain(nobody.root(), list(range(4 * LAYOUT.block_size)), LAYOUT.block_size),
                nobody.root(),
            )
            assert "all requests are one tenant" in (await doctor(deployment))[1]["tenants"][1]
            root, keys = chain(2, "a tenant")
            engine.deposit(keys, root)
            found = (await doctor(deployment))[1]["tenants"]
            assert found[0] == "warn"
            assert "1 of 2 chains" in found[1]
            assert "--tenant-header" in found[1]


@pytest.fixture
async def lagging_router(deployment: Deployment, runtimes_end: None) -> AsyncIterator[dict[str, Any]]:
    """Something that answers as a router of this deployment, and follows no guard."""
    answer: dict[str, Any] = {"router": "router-1", "mode": "on", "workers": {}, "unix_s": 0.0, "guards": {}}

    async def status(_: Any) -> AsyncIterator[dict[str, Any]]:
        yield {**answer, "unix_s": time.time()}

    serving = asyncio.ensure_future(
        runtime(deployment).endpoint(f"{deployment.namespace}.router.status").serve_endpoint(status)
    )
    yield answer
    serving.cancel()


async def test_a_router_that_is_behind_or_names_blocks_otherwise_is_told(
    deployment: Deployment, lagging_router: dict[str, Any]
) -> None:
    def ready(guard: GuardProcess) -> float:
        return guard.metrics().get("kvcr_inventory_sequence", 0)

    with deployment.guard("g0") as guard:
        await deployment.registered("g0")
        with EngineClient(guard, "engine") as engine:
            root, keys = chain(3, "behind")
            engine.deposit(keys, root)
            await eventually(lambda: ready(guard) > 0, "the guard has told of it")
            found = (await doctor(deployment))[1]
            assert found["inventory"][0] == "warn", found
            assert "--tenant-header" in found["tenants"][1], "the router says that it takes no tenant's word"
            assert "does not know g0" in found["inventory"][1]
            lagging_router["guards"] = {"g0": {"sequence": 0, "blocks": 0, "probe": "00" * 16}}
            code, found = await doctor(deployment)
            assert "batches behind g0" in found["inventory"][1]
            assert (code, found["block keys"][0]) == (1, "fail")
            assert "guard g0, router router-1" in found["block keys"][1]
