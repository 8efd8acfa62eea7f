# SPDX-License-Identifier: Apache-2.0
"""Routers, guards, engines, etcd and NATS are killed or stopped at random moments, one at a time, under load.

What must hold: a request fails only where the stock frontend met a router that was killed; no byte is wrong;
in the end every index is its pool's, every slot is accounted for, and nobody was restarted but the killed.
``KVCR_FAULTS`` makes it longer, ``KVCR_FAULT_SEED`` repeats a run's choices.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvcr.graph.infra import start_etcd, start_nats
from tests.integration.router_stack import Part, RealGuard, Stack, Worker, at_once, until
from tests.integration.tiny_tokenizer import write_model

FAULTS = int(os.environ.get("KVCR_FAULTS", "10"))
LONGEST_S = 6.0
SESSIONS = 4
SERVERS = ("etcd", "nats")
ROUTERS = ("router", "router2")
NODES = (0, 1)

pytestmark = pytest.mark.timeout(240 + 20 * FAULTS)


class Site:
    """Two routers and two nodes, each part replaced when it was killed."""

    def __init__(self, stack: Stack, pools: Path) -> None:
        self.stack, self.pools = stack, pools
        self.started = 0
        stack.frontend()
        self.routers: dict[str, Part] = {name: self.router(name) for name in ROUTERS}
        self.guards: list[RealGuard] = at_once(*(partial(self.guard, node) for node in NODES))
        self.workers: list[Worker] = at_once(*(partial(self.worker, node) for node in NODES))
        stack.ready()

    def router(self, name: str) -> Part:
        return self.stack.router("--prefill-tokens-per-s", "2000", name=name)

    def guard(self, node: int, control: str = "") -> RealGuard:
        return self.stack.real_guard(f"g{node}", self.pools / f"g{node}", control=control)

    def worker(self, node: int) -> Worker:
        self.started += 1
        guard = self.guards[node]
        beside = ("--control", guard.control, "--guard-socket", guard.socket)
        return self.stack.worker(f"w{node}-{self.started}", *beside)

    def fault(self, what: str, how: str, seconds: float) -> None:
        """One part is away for so long."""
        if what in SERVERS:
            self._server_fault(what, how, seconds)
            return
        name, node = what.rstrip("01"), int(what[-1]) if what[-1] in "01" else 0
        part: Part = self.routers[what] if what in ROUTERS else getattr(self, f"{name}s")[node]
        if how == "stop":
            part.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            part.process.send_signal(signal.SIGCONT)
            return
        part.kill()
        self.stack.parts.remove(part)
        time.sleep(seconds)
        if what in ROUTERS:
            self.routers[what] = self.router(what)
        elif name == "guard":
            self.guards[node] = self.guard(node, self.guards[node].control)
        else:
            self.workers[node] = self.worker(node)

    def _server_fault(self, what: str, how: str, seconds: float) -> None:
        stack, server = self.stack, getattr(self.stack, what)
        if how == "stop":
            server.pause()
            time.sleep(seconds)
            server.resume()
            return
        server.kill()
        time.sleep(seconds)
        start = start_etcd if what == "etcd" else start_nats
        started = start(stack.directory / what, stack.directory / f"{what}.log", port=server.port)
        setattr(stack, what, started)

    def reconciled(self, router: str) -> bool:
        """Whether a router knows both workers, and of each pool what is in it."""
        metrics = self.stack.metrics(router)
        return metrics.get('kvcr_router_workers{state="ready"}') == len(NODES) and all(
            metrics.get(f'kvcr_router_index_blocks{{guard="{guard.name}"}}')
            == guard.metrics()['kvcr_pool_slots{state="ready"}']
            for guard in self.guards
        )


@pytest.fixture
def site(tmp_path: Path, shm_dir: Path) -> Iterator[Site]:
    stack = Stack(tmp_path, write_model(tmp_path / "tiny"))
    try:
        yield Site(stack, shm_dir)
    finally:
        stack.close()


def test_after_any_faults_everything_is_right_again(site: Site) -> None:
    seed = int(os.environ.get("KVCR_FAULT_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"KVCR_FAULT_SEED={seed}")
    chance, over, answers = random.Random(seed), threading.Event(), []

    def talk(session: int) -> None:
        turn = 0
        while not over.wait(0.1):
            turn += 1
            prompt = f"session {session}. ".ljust(200, "x") + " and then" * (turn % 12)
            try:
                status, answer = site.stack.ask(prompt, timeout_s=60.0)
                answers.append((status, str(answer)))
            except (OSError, http.client.HTTPException) as error:
                answers.append((0, repr(error)))

    talkers = [threading.Thread(target=talk, args=(session,), daemon=True) for session in range(SESSIONS)]
    for talker in talkers:
        talker.start()
    routers_killed = 0
    for _ in range(FAULTS):
        time.sleep(chance.uniform(0.5, 3.0))
        what = chance.choice([*SERVERS, *ROUTERS, "guard0", "guard1", "worker0", "worker1"])
        how, seconds = chance.choice(["kill", "stop"]), chance.uniform(0.2, LONGEST_S)
        print(f"{how} {what} for {seconds:.1f} s", flush=True)
        routers_killed += what in ROUTERS and how == "kill"
        site.fault(what, how, seconds)
    time.sleep(2.0)
    over.set()
    for talker in talkers:
        talker.join(70)
        assert not talker.is_alive(), "a request hangs"

    bad = [answer for answer in answers if answer[0] != 200]
    print(f"{len(answers)} requests, {len(bad)} refused, {routers_killed} routers killed")
    assert all(status == 503 for status, _ in bad), bad
    # Until its lease ends, the frontend tries a killed router now and then.
    assert len(bad) <= 20 * routers_killed, bad
    for router in ROUTERS:
        until(lambda router=router: site.reconciled(router), f"{router} knows everything")
    for guard in site.guards:
        assert 'kvcr_self_checks_total{result="broken"}' not in guard.metrics()
        assert not [name for name in guard.metrics() if name.startswith("kvcr_corrupt_blocks_total")]
    for worker in site.workers:
        worker.silent("-")
        assert not [said for said in worker.said if said.get("wrong")]
    assert [(part.name, code) for part in site.stack.parts if (code := part.process.poll()) is not None] == []
