# SPDX-License-Identifier: Apache-2.0
"""An engine dies: what its peers see of it, and what a guard in another PID namespace can prove."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from deployment import Deployment
from engine_client import EngineClient, GuardProcess, chain, guards
from mortal_engine import BLOCKS, MortalEngine
from waiting import PATIENCE_S, eventually

from kvcr.protocol.engine import BlockStatus, FetchProgress, Source

OK = [BlockStatus.OK] * BLOCKS


def state(guard: GuardProcess) -> str:
    samples = guard.metrics().items()
    return next(n for n, v in samples if n.startswith("kvcr_guard_state{") and v).partition('"')[2][:-2]


def until_active(guard: GuardProcess) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while state(guard) != "active":
        assert time.monotonic() < deadline_s, "the guard is not ACTIVE"
        time.sleep(0.01)


def test_pulls_under_way_when_the_engine_dies_end_well(shm_dir: Path) -> None:
    salts = [f"chain {number}" for number in range(8)]
    with (
        guards(shm_dir, "a", "b", slots=768) as (source_guard, target_guard),
        MortalEngine(source_guard.ready["socket"]) as source,
        EngineClient(target_guard, "target") as target,
    ):
        for salt in salts:
            assert source.deposit(salt, BLOCKS) == BLOCKS
        where = [Source(source_guard.endpoint, 0, BLOCKS)]
        for salt in salts:
            root, keys = chain(BLOCKS, salt)
            target.start_fetch(salt, keys, root, where)
        # The first of them are running.
        source.signal(signal.SIGKILL)
        results: dict[str, FetchProgress] = {}
        while len(results) < len(salts):
            progress = target.receive(target.scheduler, FetchProgress)
            if progress.final:
                results[progress.request_id] = progress
        assert all(list(results[salt].statuses) == OK for salt in salts)
        assert all(all(target.right(chain(BLOCKS, salt)[1])) for salt in salts)
        until_active(source_guard)


@pytest.mark.usefixtures("runtimes_end")
async def test_a_first_pull_after_a_death_works_at_once_with_keys_that_peers_held_before(
    deployment: Deployment,
) -> None:
    """CURVE between the guards, discovery by etcd, which is away by then, and no pull before the death."""
    secret = deployment.directory / "secret"
    secret.write_bytes(b"0123456789abcdef0123456789abcdef")
    secured = ("--secret-file", str(secret))
    with deployment.guard("a", *secured) as source_guard, deployment.guard("b", *secured) as target_guard:
        source = await asyncio.to_thread(MortalEngine, source_guard.ready["socket"])
        with source, EngineClient(target_guard, "target") as target:
            assert await asyncio.to_thread(source.deposit, "x", 16) == 16

            async def known() -> bool:
                peers = (await deployment.status("b"))["cluster"]["peers"]
                return source_guard.endpoint in peers

            await eventually(known, "b knows a")
            # Links to peers of one layout are opened ahead, as soon as both have a pool.

            async def open_link() -> bool:
                return any(peer["ready"] for peer in (await deployment.status("b"))["peers"])

            await eventually(open_link, "b has a link to a that is ready")
            source.signal(signal.SIGKILL)
            root, keys = chain(16, "x")
            _, progress = await asyncio.to_thread(
                target.fetch, "first", keys, root, [Source(source_guard.endpoint, 0, 16)]
            )
            assert list(progress.statuses) == OK[:16]
            assert all(target.right(keys))


def test_a_death_in_another_pid_namespace_is_proven(shm_dir: Path) -> None:
    """The guard is told a pid that is not its own: the locks tell of the death, also after a restart."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("PID namespaces are not permitted here")
    with GuardProcess(shm_dir, "a", slots=128) as guard:
        engine = MortalEngine(guard.ready["socket"], prefix)
        assert engine.deposit("x", 16) == 16
        inside = int(Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()[0])
        # Process 1 of its own namespace.
        assert Path(f"/proc/{inside}/status").read_text().partition("NSpid:")[2].split()[1] == "1"
        os.kill(inside, signal.SIGSTOP)
        time.sleep(0.5)
        assert state(guard) == "standby"
        os.kill(inside, signal.SIGCONT)
        assert engine.read("x", 16) == 16
        guard.process.kill()
        guard.process.wait()
        with GuardProcess(shm_dir, "a", slots=128) as successor:
            deadline_s = time.monotonic() + PATIENCE_S
            while state(successor) != "standby":
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            epoch = successor.metrics()["kvcr_pool_epoch"]
            engine.__exit__()
            until_active(successor)
            assert successor.metrics()["kvcr_pool_epoch"] == epoch + 1
            assert successor.metrics()["kvcr_failovers_total"] == 1
            with MortalEngine(successor.ready["socket"], prefix) as again:
                assert again.read("x", 16) == 16
