# SPDX-License-Identifier: Apache-2.0
"""The compose file, unmodified, under a real Docker daemon: bring-up, a question, kills, dashboards' data.

The images are stand-ins under the upstream names (etcd, NATS and Prometheus of other releases, our own image
built from the Dockerfile on a Debian with the packages already there), so this does not prove that the
upstream tags exist or behave the same, nor anything about Grafana and GPUs. Run by scripts/compose-test.sh,
in namespaces of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sysconfig
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcr.graph.models import SMOLLM2, cache_dir
from tests.compose.docker import Daemon, DaemonError, load_bases, load_stand_ins

ROOT = Path(__file__).parents[2]
COMPOSE = Path(sysconfig.get_path("scripts")) / "docker-compose"
URL = "http://127.0.0.1:8000/v1/chat/completions"
UP_TIMEOUT_S = 900
SERVICES = ("etcd", "nats", "guard-0", "guard-1", "worker-0", "worker-1", "router", "frontend")
READY = 'kvcr_pool_slots{state="ready"}'
PROMPT = "Tell me a long story about a lighthouse keeper who counts ships. " * 12

pytestmark = pytest.mark.timeout(1800)


class Deployment:
    """The compose project."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    def compose(self, *words: str) -> str:
        return self.daemon.run(*self._command(*words), timeout_s=UP_TIMEOUT_S).stdout

    def up(self) -> None:
        """As the documents say. A container that ends is an error at once, although it would be restarted."""
        before = self.restarts()
        words = ("up", "-d", "--wait", "--wait-timeout", str(UP_TIMEOUT_S), "--pull", "never")
        up = subprocess.Popen(
            self._command(*words),
            env=self.daemon.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            while up.poll() is None:
                for name, restarts in self.restarts().items():
                    if restarts > before.get(name, 0):
                        logs = self.daemon.run("docker", "logs", "--tail", "60", name)
                        raise AssertionError(
                            f"{name} ended and was started again:\n{logs.stdout}{logs.stderr}"
                        )
                time.sleep(2)
            assert up.stdout is not None
            assert up.returncode == 0, up.stdout.read() + self.compose("logs", "--tail", "40")
        finally:
            up.kill()
            up.wait()

    def restarts(self) -> dict[str, int]:
        """Of each container."""
        containers = self.daemon.run("docker", "ps", "-aq").stdout.split()
        if not containers:
            return {}
        found = self.daemon.run("docker", "inspect", "-f", "{{.Name}} {{.RestartCount}}", *containers).stdout
        return {name.lstrip("/"): int(count) for name, count in (line.split() for line in found.splitlines())}

    def _command(self, *words: str) -> tuple[str, ...]:
        return (str(COMPOSE), "-f", str(ROOT / "deploy/compose/compose.yaml"), *words)

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

    def inspect(self, service: str, what: str) -> str:
        container = self.compose("ps", "-aq", service).strip()
        return self.daemon.run("docker", "inspect", "-f", what, container).stdout.strip()

    def pid(self, service: str) -> int:
        return int(self.inspect(service, "{{.State.Pid}}"))

    def health(self, service: str) -> str:
        return self.inspect(service, "{{.State.Health.Status}}")

    def metric(self, guard: str, name: str) -> float:
        """Sum of a metric of a guard."""
        address = self.inspect(guard, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
        with urllib.request.urlopen(f"http://{address}:9400/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    _loopback_up()
    try:
        daemon = Daemon(tmp_path_factory.mktemp("docker"), os.environ["KVCR_COMPOSE_CGROUP"])
    except DaemonError as error:
        pytest.skip(f"no Docker daemon can run here: {error}")
    # A folder for a user's own models: Docker would make the one of the file.
    models = tmp_path_factory.mktemp("models")
    daemon.environment |= {"COMPOSE_PROFILES": "cpu", "COMPOSE_ANSI": "never", "KVCR_MODELS": str(models)}
    deployment = Deployment(daemon)
    try:
        with _timed("stand-in images"):
            load_stand_ins(daemon)
        with _timed("base images"):
            load_bases(daemon)
        with _timed("docker compose build"):
            deployment.compose("build")
        # There is no network here: the prepared model comes with the volume.
        daemon.run("docker", "volume", "create", "kvcr_cache")
        volume = Path(
            daemon.run("docker", "volume", "inspect", "-f", "{{.Mountpoint}}", "kvcr_cache").stdout.strip()
        )
        shutil.copytree(cache_dir() / "models" / SMOLLM2, volume / "models" / SMOLLM2)
        try:
            with _timed("docker compose up"):
                deployment.up()
            yield deployment
        finally:
            if request.session.testsfailed:
                print(deployment.compose("logs", "--no-color", "--tail", "60"))
            with _timed("docker compose down"):
                deployment.compose("down", "-v", "--timeout", "5")
    finally:
        daemon.stop()


def test_it_comes_up_healthy(deployment: Deployment) -> None:
    assert {service: deployment.health(service) for service in SERVICES} == dict.fromkeys(SERVICES, "healthy")


def test_the_curl_lines_of_the_documents_work(deployment: Deployment) -> None:
    for page in ("README.md", "docs/deploy/compose.md"):
        section = (ROOT / page).read_text().split("docker compose up", 1)[1]
        line = re.search(r"^curl [^`]*?(?=\n```|\n\n)", section, re.MULTILINE)
        assert line, f"{page} has no curl line behind docker compose up"
        done = subprocess.run(
            ["bash", "-c", line[0]], capture_output=True, text=True, timeout=180, check=True
        )
        answer = json.loads(done.stdout)
        assert answer.get("choices") or answer.get("data"), f"{page}: {line[0]}: {done.stdout}"


def test_processes_are_not_root(deployment: Deployment) -> None:
    for service in ("guard-0", "worker-0", "router", "frontend"):
        status = Path(f"/proc/{deployment.pid(service)}/status").read_text()
        assert "Uid:\t10001" in status, service


def test_a_killed_engine_leaves_its_pool_and_comes_back_to_it(deployment: Deployment) -> None:
    """Its death is proven by record locks across PID namespaces: guard and engine share none."""
    deployment.ask(PROMPT)
    guards = ("guard-0", "guard-1")
    _wait("blocks in a pool", lambda: max(deployment.metric(guard, READY) for guard in guards) > 0, 60)
    stored = {guard: deployment.metric(guard, READY) for guard in guards}
    guard, other = sorted(guards, key=lambda name: -stored[name])
    worker = guard.replace("guard", "worker")
    failovers = deployment.metric(guard, "kvcr_failovers_total")
    first = deployment.pid(worker)
    os.kill(first, signal.SIGKILL)
    _wait("take-over", lambda: deployment.metric(guard, "kvcr_failovers_total") > failovers, 60)
    assert deployment.metric(guard, READY) >= stored[guard]
    assert deployment.ask(PROMPT)["choices"], "the other worker answers meanwhile"

    # The time that the engine takes to start is used for the other guard.
    before = deployment.metric(other, READY)
    was = deployment.pid(other)
    os.kill(was, signal.SIGKILL)
    _wait(f"{other} to be started again", lambda: deployment.pid(other) not in (0, was), 60)
    _wait(f"{other} to be healthy again", lambda: deployment.health(other) == "healthy", 120)
    assert deployment.metric(other, READY) >= before

    _wait(f"{worker} to be started again", lambda: deployment.pid(worker) not in (0, first), 60)
    _wait(f"{worker} to be healthy again", lambda: deployment.health(worker) == "healthy", UP_TIMEOUT_S)
    assert deployment.metric(guard, READY) >= stored[guard]
    assert deployment.ask(PROMPT)["choices"]


def test_the_metrics_profile_scrapes_everything_and_has_its_dashboards(deployment: Deployment) -> None:
    deployment.daemon.environment["COMPOSE_PROFILES"] = "cpu,metrics"
    with _timed("metrics profile"):
        deployment.up()
    jobs = {"guard": 2, "worker": 2, "router": 1, "frontend": 1, "etcd": 1, "nats": 1}
    _wait("every target", lambda: _query("sum by (job) (up)") == jobs, 60)
    assert _query('count by (job) (kvcr_pool_slots{state="ready"})') == {"guard": 2}
    with urllib.request.urlopen("http://127.0.0.1:9090/api/v1/rules", timeout=20) as answer:
        assert json.load(answer)["data"]["groups"], "Prometheus has no alert rules"
    assert deployment.health("grafana") == "healthy"
    mounted = deployment.compose("logs", "grafana")
    assert "http://prometheus:9090" in mounted, "Grafana's data source is Prometheus under its name"
    assert "/etc/grafana/kvcr" in mounted, "and its dashboards are where they are mounted"


def _query(expression: str) -> dict[str, int]:
    """A query's values by job."""
    url = f"http://127.0.0.1:9090/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        found = json.load(answer)["data"]["result"]
    return {series["metric"]["job"]: int(series["value"][1]) for series in found}


def _wait(what: str, done: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        # A container that is just being started again has no address.
        with contextlib.suppress(OSError, RuntimeError):
            if done():
                return
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(1)


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    started_s = time.monotonic()
    try:
        yield
    finally:
        print(f"{what}: {time.monotonic() - started_s:.0f} s", flush=True)


def _loopback_up() -> None:
    """A new network namespace has its loopback down."""
    with socket.socket() as any_socket:
        request = struct.pack("16sh", b"lo", 1)  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS
