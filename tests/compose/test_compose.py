# SPDX-License-Identifier: Apache-2.0
"""The compose file, unmodified, under a real Docker daemon: bring-up, a question, a kill, and down again.

The images are stand-ins under the upstream names (etcd and NATS from their wheels, our own image built from
the Dockerfile on a Debian with the packages already there), so this does not prove that the upstream tags
exist or behave the same, nor anything about GPUs.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcr.graph.models import SMOLLM2, cache_dir, ensure_model
from tests.compose.docker import Daemon, load_base, load_stand_ins

ROOT = Path(__file__).parents[2]
IMAGE = "dynamo-kvcr:dev"
URL = "http://127.0.0.1:8000/v1/chat/completions"
UP_TIMEOUT_S = 600

pytestmark = pytest.mark.timeout(1800)


class Deployment:
    """The compose project, brought up."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    def compose(self, *words: str, timeout_s: float = UP_TIMEOUT_S) -> str:
        done = self.daemon.run(
            "docker-compose", "-f", str(ROOT / "deploy/compose/compose.yaml"), *words, timeout_s=timeout_s
        )
        return done.stdout

    def ask(self, words: str) -> dict[str, Any]:
        body = {
            "model": SMOLLM2,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 4,
            "temperature": 0,
        }
        request = urllib.request.Request(URL, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=180) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def metric(self, service: str, name: str) -> float:
        """Sum of a metric of a guard, asked from inside its container."""
        text = self.compose(
            "exec", "-T", service, "python", "-c",
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9400/metrics').read().decode())",
        )  # fmt: skip
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def pid(self, service: str) -> int:
        container = self.compose("ps", "-q", service).strip()
        return int(self.daemon.run("docker", "inspect", "-f", "{{.State.Pid}}", container).stdout)

    def health(self, service: str) -> str:
        found = json.loads(self.compose("ps", "--format", "json", service) or "{}")
        return str(found.get("Health"))

    def wait(self, what: str, done: Any, timeout_s: float = 240) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
            time.sleep(1)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    _loopback_up()
    ensure_model(SMOLLM2)
    daemon = Daemon(tmp_path_factory.mktemp("docker"))
    # There is no network here: the prepared model comes with the volume.
    daemon.environment |= {"COMPOSE_PROFILES": "cpu", "COMPOSE_ANSI": "never"}
    try:
        load_stand_ins(daemon)
        load_base(daemon)
        daemon.run(
            "docker", "build", "-f", "deploy/compose/Dockerfile", "-t", IMAGE, str(ROOT), timeout_s=900
        )
        daemon.run("docker", "volume", "create", "kvcr_cache")
        daemon.run(
            "docker", "run", "--rm", "--network=none", "--user=0:0", "-v", "kvcr_cache:/cache",
            "-v", f"{cache_dir()}/models:/prepared:ro", "--entrypoint=cp", IMAGE,
            "-r", "/prepared", "/cache/models",
        )  # fmt: skip
        deployment = Deployment(daemon)
        try:
            deployment.compose("up", "-d", "--wait", "--wait-timeout", str(UP_TIMEOUT_S), "--pull", "never")
            yield deployment
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{deployment.compose('logs', '--tail', '40')}") from error
        finally:
            deployment.compose("down", "-v", "--timeout", "5")
    finally:
        daemon.stop()


def test_it_comes_up_healthy_and_answers(deployment: Deployment) -> None:
    answer = deployment.ask("Say hello.")
    assert answer["choices"][0]["message"]["content"]
    for service in ("etcd", "nats", "guard-0", "guard-1", "worker-0", "worker-1", "router", "frontend"):
        assert deployment.health(service) == "healthy", service


def test_processes_are_not_root(deployment: Deployment) -> None:
    for service in ("guard-0", "worker-0", "router", "frontend"):
        status = Path(f"/proc/{deployment.pid(service)}/status").read_text()
        assert "Uid:\t10001" in status, service


def test_a_killed_engine_comes_back_to_its_pool(deployment: Deployment) -> None:
    """Its death is proven by record locks across PID namespaces: guard and engine share none."""
    deployment.ask("Tell me a long story about a lighthouse keeper who counts ships. " * 12)
    guards = ("guard-0", "guard-1")
    stored = {guard: deployment.metric(guard, "kvcr_deposited_blocks_total") for guard in guards}
    guard = max(stored, key=lambda name: stored[name])
    assert stored[guard] > 0
    worker = guard.replace("guard", "worker")
    failovers = deployment.metric(guard, "kvcr_failovers_total")
    before = deployment.metric(guard, 'kvcr_pool_slots{state="ready"}')
    _kill(deployment.pid(worker))
    deployment.wait("take-over", lambda: deployment.metric(guard, "kvcr_failovers_total") > failovers, 60)
    assert deployment.metric(guard, 'kvcr_pool_slots{state="ready"}') == before
    deployment.wait(f"{worker} to be healthy again", lambda: deployment.health(worker) == "healthy")
    assert deployment.metric(guard, 'kvcr_pool_slots{state="ready"}') == before


def test_a_killed_guard_comes_back_with_its_pool(deployment: Deployment) -> None:
    ready = 'kvcr_pool_slots{state="ready"}'
    before = deployment.metric("guard-0", ready) + deployment.metric("guard-1", ready)
    first = deployment.pid("guard-0")
    _kill(first)
    deployment.wait("guard-0 to be started again", lambda: deployment.pid("guard-0") not in (0, first), 60)
    deployment.wait("guard-0 to be healthy again", lambda: deployment.health("guard-0") == "healthy", 120)
    after = deployment.metric("guard-0", ready) + deployment.metric("guard-1", ready)
    assert after == before
    assert deployment.ask("Are you still there?")["choices"]


def _kill(pid: int) -> None:
    """PID 1 of a container, seen from outside: the whole of it goes."""
    os.kill(pid, signal.SIGKILL)


def _loopback_up() -> None:
    """A new network namespace has its loopback down."""
    with socket.socket() as any_socket:
        request = struct.pack("16sh", b"lo", 1)  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS
