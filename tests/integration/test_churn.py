# SPDX-License-Identifier: Apache-2.0
"""Guards and engines come and are killed, some under names that return, most under new ones, as pods do.

What stays of them in etcd, NATS, the router and a guard that lives on depends on who is there, not on how
many were. ``KVCR_CHURN_ROUNDS`` makes it longer: fifty rounds are two hundred nodes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import nats
import pytest

from kvcr.dynamo.actions import FORGOTTEN_S
from kvcr.dynamo.etcd import connect
from kvcr.protocol.events import stream_name
from tests.integration.router_stack import Part, RealGuard, Stack, at_once, until
from tests.integration.tiny_tokenizer import write_model

ROUNDS = int(os.environ.get("KVCR_CHURN_ROUNDS", "3"))
AT_ONCE = 4
RETURNING = 1
"""Of each round: its guard finds the pool of the one before it."""
LEASE_S = 5
SETTLE_S = 60.0

pytestmark = pytest.mark.timeout(240 + 30 * ROUNDS)


class Churn:
    """A deployment with one node that stays."""

    def __init__(self, stack: Stack, pools: Path) -> None:
        self.stack, self.pools = stack, pools
        stack.frontend()
        self.router = stack.router()
        self.stays = self.node("stays")[0]
        stack.ready()
        until(lambda: self.known() == 1, "the router knows the node that stays")

    def node(self, name: str) -> tuple[RealGuard, Part]:
        guard = self.stack.real_guard(name, self.pools / name)
        return guard, self.stack.worker(
            f"w-{name}", "--control", guard.control, "--guard-socket", guard.socket
        )

    def known(self) -> int:
        """Guards that the router has in service."""
        metrics = self.stack.metrics()
        return round(sum(metrics.get(f'kvcr_router_guards{{state="{s}"}}', 0) for s in ("standby", "active")))

    def round(self, number: int) -> None:
        """Nodes come, serve, and are killed with all they have."""
        names = [f"returns-{i}" if i < RETURNING else f"pod-{number}-{i}" for i in range(AT_ONCE)]
        nodes = at_once(*(partial(self.node, name) for name in names))
        until(lambda: self.known() > AT_ONCE, "the router knows those that came")
        at_once(*(partial(self.stack.ask, f"round {number}, request {i} " * 20) for i in range(2 * AT_ONCE)))
        for part in (part for node in nodes for part in node):
            part.kill()
            self.stack.parts.remove(part)
        for name in names[RETURNING:]:
            shutil.rmtree(self.pools / name)

    def gone(self) -> bool:
        """Whether only the node that stays is in etcd."""
        return not any("pod-" in key or "returns-" in key for key in self.keys() if "/epochs/" not in key)

    def keys(self) -> list[str]:
        async def listed() -> list[str]:
            async with await connect(self.stack.etcd.url) as etcd:
                parts = [await etcd.get_prefix(prefix) for prefix in ("v1/", "kvcr/")]
                return [found.key for part in parts for found in part.values]

        return asyncio.run(listed())

    def consumers(self) -> list[nats.js.api.ConsumerInfo]:
        async def listed() -> list[nats.js.api.ConsumerInfo]:
            client = await nats.connect(self.stack.nats.url)
            try:
                return await client.jetstream().consumers_info(stream_name("dynamo", "actions"))
            finally:
                await client.close()

        return asyncio.run(listed())

    def sizes(self) -> dict[str, int]:
        """What must not grow with those that are gone."""
        sizes = {"etcd keys": sum("/epochs/" not in key for key in self.keys())}
        with urllib.request.urlopen(self.stays.metrics_url, timeout=10) as page:
            sizes["guard's samples"] = page.read().count(b"\n")
        sizes["router's samples"] = len(self.stack.metrics())
        for name, part in (("guard", self.stays), ("router", self.router)):
            process = Path(f"/proc/{part.process.pid}")
            sizes[f"{name}'s descriptors"] = len(list((process / "fd").iterdir()))
            sizes[f"{name}'s threads"] = len(list((process / "task").iterdir()))
        return sizes

    def grown(self, before: dict[str, int]) -> dict[str, tuple[int, int]]:
        """By more than may come and go with what is under way."""
        return {name: (before[name], now) for name, now in self.sizes().items() if now > before[name] + 4}

    def memory(self) -> dict[str, float]:
        """Resident MB."""
        page_mb = os.sysconf("SC_PAGE_SIZE") / 1e6
        return {
            name: int(Path(f"/proc/{part.process.pid}/statm").read_text().split()[1]) * page_mb
            for name, part in (("guard", self.stays), ("router", self.router))
        }


@pytest.fixture
def churn(tmp_path: Path, shm_dir: Path) -> Iterator[Churn]:
    stack = Stack(tmp_path, write_model(tmp_path / "tiny"), lease_s=LEASE_S)
    try:
        yield Churn(stack, shm_dir)
    finally:
        stack.close()


def test_what_is_left_does_not_grow_with_those_that_were_killed(churn: Churn) -> None:
    churn.round(0)
    until(churn.gone, "leases of the killed end", SETTLE_S, every_s=0.5)
    until(lambda: churn.known() == 1, "the router forgets the killed", SETTLE_S)
    before, memory = churn.sizes(), churn.memory()
    print(f"after {AT_ONCE} killed nodes: {before}, {memory} MB")
    for number in range(1, ROUNDS):
        churn.round(number)
        print(f"round {number}: {churn.memory()} MB", flush=True)
    until(churn.gone, "leases of the killed end", SETTLE_S, every_s=0.5)
    until(lambda: churn.known() == 1, "the router forgets the killed", SETTLE_S)

    until(lambda: not churn.grown(before), "nothing has grown", SETTLE_S, every_s=0.5)
    after = churn.memory()
    print(f"after {AT_ONCE * ROUNDS} killed nodes: {churn.sizes()}, {after} MB")
    # The pool of one of them is 8 MiB, which a guard beside it has mapped.
    for name in after:
        assert after[name] < memory[name] + 24, f"{name}: {memory[name]} MB before, {after[name]} MB now"
    # These go later than a test can wait for.
    assert all((found.config.inactive_threshold or 0) == FORGOTTEN_S for found in churn.consumers())
    assert churn.stack.ask("and still")[0] == 200
