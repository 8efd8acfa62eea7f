# SPDX-License-Identifier: Apache-2.0
"""NATS with a user for each role: guards, router and command line work, and nobody can do another's part."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from deployment import Deployment
from engine_client import EngineClient, chain
from waiting import PATIENCE_S, eventually

from kvcr.graph import bootstrap, infra
from kvcr.protocol.events import (
    Act,
    ActionResult,
    actions_subject,
    event,
    inventory_subject,
    locations_subject,
    results_subject,
    state_subject,
    stream_name,
)

COMPONENTS = Path(__file__).parents[2] / "components"


class Secured:
    """A deployment whose NATS knows the users that ``init`` of the compose file makes."""

    def __init__(self, plain: Deployment, folder: Path) -> None:
        bootstrap.make_secrets(folder, plain.namespace)
        config = folder / "nats.conf"
        config.write_text("include nats-users.conf\n")
        self.folder = folder
        self.server = infra.start_nats(folder / "js", folder / "nats.log", config=config)
        self.deployment = Deployment(plain.etcd_url, self.server.url, plain.namespace, plain.directory)

    def environment(self, role: str) -> dict[str, str]:
        """As the entry point of the image reads it."""
        lines = (self.folder / f"{role}.env").read_text().split()
        return dict(line.split("=", 1) for line in lines)

    async def connect(self, role: str) -> nats.NATS:
        env = self.environment(role)
        return await nats.connect(
            self.server.url, user=env["NATS_AUTH_USERNAME"], password=env["NATS_AUTH_PASSWORD"]
        )


@pytest.fixture
def secured(deployment: Deployment, tmp_path: Path) -> Iterator[Secured]:
    made = Secured(deployment, tmp_path)
    yield made
    made.server.stop()


async def _denied(secured: Secured, role: str, subject: str) -> bool:
    """Whether NATS refuses what this role publishes there."""
    errors: list[Exception] = []
    env = secured.environment(role)

    async def trouble(error: Exception) -> None:
        errors.append(error)

    client = await nats.connect(
        secured.server.url,
        user=env["NATS_AUTH_USERNAME"],
        password=env["NATS_AUTH_PASSWORD"],
        error_cb=trouble,
    )
    await client.publish(subject, b"x")
    await client.flush()
    await asyncio.sleep(0.1)
    await client.close()
    return any("permissions violation" in str(error).lower() for error in errors)


async def test_a_guard_tells_and_obeys_with_nothing_but_its_own_rights(secured: Secured) -> None:
    place = secured.deployment
    ours = await secured.connect("router")
    heard = await ours.subscribe(inventory_subject(place.namespace, "g0"))
    results = await ours.subscribe(results_subject(place.namespace))
    with place.guard("g0", env=secured.environment("guard")) as guard:
        await place.registered("g0")

        async def streams() -> bool:
            try:
                await ours.jetstream().stream_info(stream_name(place.namespace, "actions"))
                await ours.jetstream().stream_info(stream_name(place.namespace, "state"))
            except nats.js.errors.NotFoundError:
                return False
            return True

        await eventually(streams, "the guard makes its streams")
        root, keys = chain(3, "roles")
        with EngineClient(guard, "engine") as engine:
            engine.deposit(keys, root)
            assert (await heard.next_msg(PATIENCE_S)).data
            environment = {
                **os.environ,
                **place.environment,
                **secured.environment("router"),
                "PYTHONPATH": str(COMPONENTS),
                "DYN_NAMESPACE": place.namespace,
            }
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "kvcr.cli", "demote", ",".join(key.hex() for key in keys)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            answer = event.decode((await results.next_msg(PATIENCE_S)).data)
            assert isinstance(answer, ActionResult)
            assert answer.code == "done"
    await ours.close()


async def test_no_role_can_do_the_part_of_another(secured: Secured) -> None:
    ns = secured.deployment.namespace
    for role in ("guard", "worker", "frontend"):
        assert await _denied(secured, role, actions_subject(ns, "g0")), f"{role} gives orders to guards"
        assert await _denied(secured, role, locations_subject(ns)), f"{role} says where blocks are"
        deletion = f"$JS.API.STREAM.DELETE.{stream_name(ns, 'actions')}"
        assert await _denied(secured, role, deletion), f"{role} deletes streams"
    for role in ("worker", "frontend"):
        assert await _denied(secured, role, inventory_subject(ns, "g0")), f"{role} says what a guard has"
        assert await _denied(secured, role, state_subject(ns, "g0")), f"{role} declares engines dead"
    assert not await _denied(secured, "router", actions_subject(ns, "g0"))
    assert not await _denied(secured, "guard", inventory_subject(ns, "g0"))


async def test_a_worker_cannot_listen_to_what_guards_and_routers_say(secured: Secured) -> None:
    ns = secured.deployment.namespace
    env = secured.environment("worker")
    errors: list[Exception] = []

    async def trouble(error: Exception) -> None:
        errors.append(error)

    client = await nats.connect(
        secured.server.url,
        user=env["NATS_AUTH_USERNAME"],
        password=env["NATS_AUTH_PASSWORD"],
        error_cb=trouble,
    )
    heard = await client.subscribe("kvcr.>")
    await client.flush()
    router = await secured.connect("router")
    act = Act("plan", "router", b"{}", 0.0)
    await router.publish(actions_subject(ns, "g0"), event.encode(act))
    await router.flush()
    with pytest.raises(nats.errors.TimeoutError):
        await heard.next_msg(0.5)
    assert any("permissions violation" in str(error).lower() for error in errors)
    await router.close()
    await client.close()


async def test_a_stranger_is_refused(secured: Secured) -> None:
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(secured.server.url, allow_reconnect=False)


async def test_credentials_are_in_no_log_and_on_no_metrics_page(secured: Secured) -> None:
    place = secured.deployment
    password = secured.environment("guard")["NATS_AUTH_PASSWORD"]
    with place.guard("g0", env=secured.environment("guard")) as guard:
        await place.registered("g0")
        command = Path(f"/proc/{guard.pid}/cmdline").read_bytes()
        assert password.encode() not in command
        assert password not in str(guard.metrics())
    assert password not in guard.log_path.read_text()
