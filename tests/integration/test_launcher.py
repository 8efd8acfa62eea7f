# SPDX-License-Identifier: Apache-2.0
"""``kvcr serve`` as a process: up in order, watched, and gone without a trace.

The graphs here have no model: real etcd, NATS, a stock frontend and guards.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import BUSY_S, PATIENCE_S

from kvcr.dynamo.etcd import connect
from kvcr.graph.infra import start_etcd
from kvcr.graph.processes import all_processes, descendants, processes_with_env

SMALL = """
Etcd: {ServiceArgs: {restart: on-failure}}
Nats: {ServiceArgs: {restart: on-failure}}
Guard: {pool-bytes: 64MB, ServiceArgs: {restart: on-failure}}
Frontend: {ServiceArgs: {restart: on-failure}}
"""
GONE_WITHIN_S = 10.0 + BUSY_S

# Stands in for dynamo.vllm, with its bad habits: it ignores SIGTERM, and so does the engine it forks, which
# holds shared memory and a semaphore that only their creator removes.
STUBBORN_WORKER = """
import http.server, multiprocessing, os, signal
from dynamo.vllm.engine import run

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    context.Process(target=run, args=(started,)).start()
    started.wait()
    http.server.HTTPServer(("127.0.0.1", int(os.environ["DYN_SYSTEM_PORT"])), Health).serve_forever()
"""
STUBBORN_ENGINE = """
import os, pathlib, signal, time
from multiprocessing import shared_memory

def run(started):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    names = [memory.name.lstrip("/"), "sem." + started._flag._semlock.name.lstrip("/")]
    pathlib.Path(os.environ["SEEN"], " ".join([str(os.getpid()), *names])).touch()
    started.set()
    time.sleep(600)
"""


class Serve:
    """A running ``kvcr serve`` and what it says."""

    def __init__(self, directory: Path, graph: str, *arguments: str) -> None:
        self.run_dir = directory / "run"
        file = directory / "small.yaml"
        file.write_text(graph)
        self.output = directory / "serve.out"
        command = [sys.executable, "-m", "kvcr.cli", "serve", "-f", str(file), "--run-dir", str(self.run_dir)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KVCR_CACHE": str(directory / "cache")},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.run_dir / "graph.json").read_text())
        return state

    def component(self, name: str) -> dict[str, Any]:
        return next(entry for entry in self.state["components"] if entry["name"] == name)

    def wait(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except (OSError, ValueError):
                pass
            if time.monotonic() > deadline_s or self.process.poll() is not None:
                pytest.fail(f"condition not met; exit code {self.process.poll()}, output:\n{self.said}")
            time.sleep(0.05)

    def wait_until_up(self) -> None:
        self.wait(lambda: bool(self.state["state"] == "ready"))

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Signal it, wait for its end, return how long that took."""
        started_s = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(GONE_WITHIN_S + 5)
        return time.monotonic() - started_s

    def leftovers(self) -> list[int]:
        return processes_with_env("KVCR_RUN_DIR", str(self.run_dir))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(graph: str = SMALL, *arguments: str) -> Serve:
        started.append(Serve(tmp_path, graph, *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            try:
                one.process.wait(GONE_WITHIN_S + 5)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
        for pid in one.leftovers():
            os.kill(pid, signal.SIGKILL)


def test_the_graph_comes_up_in_order_and_tells_where_everything_is(serve: Callable[..., Serve]) -> None:
    graph = serve()
    graph.wait_until_up()
    # The file says so a moment before the terminal does.
    graph.wait(lambda: "is up in" in graph.said)
    said = graph.said
    assert said.index("etcd  ") < said.index("guard-0  ") < said.index("frontend  ") < said.index("is up in")
    state = graph.state
    assert {entry["name"] for entry in state["components"]} == {"etcd", "nats", "guard-0", "frontend"}
    for entry in state["components"]:
        assert Path(entry["log"]).exists()
        assert entry["state"] == "ready"
        os.kill(entry["pid"], 0)
    with urllib.request.urlopen(f"{state['url']}/models", timeout=5) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(graph.component("guard-0")["metrics"], timeout=5) as answer:
        assert b"kvcr_pool_slots" in answer.read()
    assert Path(state["secret_file"]).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_and_leaves_nothing(serve: Callable[..., Serve], number: int) -> None:
    graph = serve()
    graph.wait_until_up()
    state = graph.state
    pids = [process.pid for process in descendants(graph.process.pid)]
    assert len(pids) >= 4
    assert Path(state["pools"]).is_dir()

    assert graph.stop(number) < GONE_WITHIN_S

    assert graph.process.returncode == 0
    assert not set(pids) & set(all_processes())
    assert graph.leftovers() == []
    assert not Path(state["pools"]).exists()
    assert not Path(state["secret_file"]).exists()
    assert graph.state["state"] == "stopped"
    assert (graph.run_dir / "logs" / "frontend.log").exists()


def test_processes_that_ignore_sigterm_go_too(serve: Callable[..., Serve]) -> None:
    """The frontend and the guard are stopped (SIGSTOP), so that no SIGTERM reaches them."""
    graph = serve()
    graph.wait_until_up()
    for name in ("frontend", "guard-0"):
        os.kill(graph.component(name)["pid"], signal.SIGSTOP)
    assert graph.stop() < GONE_WITHIN_S
    assert graph.leftovers() == []


@pytest.mark.parametrize("dies", ["its parent", "everything at once"])
def test_engines_that_ignore_sigterm_go_too_with_their_shared_memory(
    serve: Callable[..., Serve], tmp_path: Path, dies: str
) -> None:
    package = tmp_path / "path" / "dynamo" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STUBBORN_WORKER)
    (package / "engine.py").write_text(STUBBORN_ENGINE)
    model, seen = tmp_path / "model", tmp_path / "seen"
    model.mkdir()
    (model / "config.json").write_text("{}")
    seen.mkdir()
    env = json.dumps({"PYTHONPATH": str(tmp_path / "path"), "SEEN": str(seen)})
    worker = f"VllmWorker: {{model: {model}, ServiceArgs: {{restart: on-failure, env: {env}}}}}"
    graph = serve(f"Etcd: {{}}\nNats: {{}}\n{worker}\n")
    graph.wait_until_up()
    (first,) = (entry.name.split() for entry in seen.iterdir())
    assert set(first[1:]) <= set(os.listdir("/dev/shm"))

    parent = graph.component("worker-0")["pid"]
    family = [p.pid for p in descendants(graph.process.pid) if p.session == parent]
    assert len(family) > 2, "the engine, its parent, and what cleans up after them"
    for pid in family if dies == "everything at once" else [parent]:
        os.kill(pid, signal.SIGKILL)
    graph.wait(lambda: graph.component("worker-0")["restarts"] == 1 and len(list(seen.iterdir())) == 2)
    assert int(first[0]) not in all_processes()
    assert not set(first[1:]) & set(os.listdir("/dev/shm"))

    graph.wait(lambda: bool(graph.component("worker-0")["state"] == "ready"))
    engines = [int(entry.name.split()[0]) for entry in seen.iterdir()]
    names = [name for entry in seen.iterdir() for name in entry.name.split()[1:]]
    assert graph.stop() < GONE_WITHIN_S
    assert not set(engines) & set(all_processes())
    assert not set(names) & set(os.listdir("/dev/shm"))
    assert graph.leftovers() == []


async def keys_of(url: str) -> list[str]:
    """Everything that graphs registered in an etcd."""
    async with await connect(url) as etcd:
        found = [await etcd.get_prefix(prefix) for prefix in ("v1/", "kvcr/")]
        return [entry.key for listing in found for entry in listing.values]


@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_stays_in_an_etcd_of_somebody_else(
    serve: Callable[..., Serve], tmp_path: Path, stubborn: bool
) -> None:
    """Also when the guard had to be killed, and could not take its registration along."""
    server = start_etcd(tmp_path / "etcd", tmp_path / "etcd.log")
    try:
        graph = serve(
            SMALL.replace("Etcd: {ServiceArgs: {restart: on-failure}}", f"Etcd: {{address: '{server.url}'}}")
        )
        graph.wait_until_up()
        guard = next(entry for entry in graph.state["components"] if entry["component"] == "Guard")
        graph.wait(lambda: any(key.endswith(guard["name"]) for key in asyncio.run(keys_of(server.url))))
        if stubborn:
            os.kill(guard["pid"], signal.SIGSTOP)
        assert graph.stop() < GONE_WITHIN_S
        assert asyncio.run(keys_of(server.url)) == []
        assert server.exit_code is None
    finally:
        server.kill()


def test_a_signal_during_the_start_ends_it(serve: Callable[..., Serve]) -> None:
    graph = serve()
    graph.wait(lambda: "nats  " in graph.said)
    assert graph.stop() < GONE_WITHIN_S
    assert graph.leftovers() == []


@pytest.mark.parametrize("name", ["frontend", "guard-0", "etcd", "nats"])
def test_a_killed_component_is_restarted_where_it_was(serve: Callable[..., Serve], name: str) -> None:
    graph = serve()
    graph.wait_until_up()
    before = graph.component(name)
    os.kill(before["pid"], signal.SIGKILL)
    graph.wait(lambda: graph.component(name)["restarts"] == 1 and graph.component(name)["state"] == "ready")
    after = graph.component(name)
    assert after["pid"] != before["pid"]
    assert after["ports"] == before["ports"]
    for what, url in before["urls"].items():
        # Clients know the others by heart; nats-server's monitoring has a port of the day.
        assert what == "monitor" or after["urls"][what] == url
    graph.wait(lambda: f"{name} ended with SIGKILL, restarting it" in graph.said)


def test_a_component_that_keeps_dying_is_restarted_later_each_time(serve: Callable[..., Serve]) -> None:
    graph = serve("Etcd: {}\nNats: {}\nFrontend: {ServiceArgs: {restart: on-failure}}\n")
    graph.wait_until_up()
    for restarts, when in enumerate(["now", "in 1 s", "in 3 s"]):
        graph.wait(lambda n=restarts: graph.component("frontend")["restarts"] == n)
        graph.wait(lambda: graph.component("frontend")["pid"] is not None)
        os.kill(graph.component("frontend")["pid"], signal.SIGKILL)
        graph.wait(lambda when=when: f"frontend ended with SIGKILL, restarting it {when}" in graph.said)


def test_without_a_restart_policy_a_crash_is_reported_and_left(serve: Callable[..., Serve]) -> None:
    graph = serve("Etcd: {}\nNats: {}\nFrontend: {}\n")
    graph.wait_until_up()
    os.kill(graph.component("frontend")["pid"], signal.SIGKILL)
    graph.wait(lambda: graph.component("frontend")["state"] == "ended")
    graph.wait(lambda: "frontend ended with SIGKILL; not restarted" in graph.said)
    assert graph.process.poll() is None


def test_a_killed_launcher_takes_its_children_along_and_the_next_one_sweeps(
    serve: Callable[..., Serve], tmp_path: Path
) -> None:
    first = serve()
    first.wait_until_up()
    pools = Path(first.state["pools"])
    first.process.kill()
    first.process.wait()
    assert pools.exists()

    other = tmp_path / "other"
    other.mkdir()
    second = Serve(other, "Etcd: {}\nNats: {}\n")
    try:
        second.wait_until_up()
        assert not pools.exists()
        assert first.leftovers() == []
        assert "cleaned up after a killed run" in second.said
    finally:
        second.stop()


def failed(graph: Serve) -> str:
    assert graph.process.wait(PATIENCE_S) == 2, graph.said
    return graph.said


def test_a_taken_port_fails_at_once(serve: Callable[..., Serve]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = failed(serve(SMALL, f"--Frontend.http-port={port}"))
    assert f"port {port}, wanted by Frontend.http-port, is taken" in said


def test_an_unknown_key_fails_at_once(serve: Callable[..., Serve]) -> None:
    said = failed(serve(SMALL, "--Frontend.http-prot=8000"))
    assert "unknown key Frontend.http-prot; did you mean 'http-port'?" in said


def test_a_missing_model_fails_at_once(serve: Callable[..., Serve]) -> None:
    said = failed(serve(SMALL, "--VllmWorker.model=/no/such/model"))
    assert "'/no/such/model' is not a directory" in said


def test_servers_elsewhere_that_do_not_answer_fail_at_once(serve: Callable[..., Serve]) -> None:
    said = failed(serve("Etcd: {address: 'http://127.0.0.1:1'}\nNats: {}\nFrontend: {}\n"))
    assert "Etcd.address http://127.0.0.1:1 does not answer" in said


def test_a_component_that_dies_while_starting_ends_the_start_with_its_log(
    serve: Callable[..., Serve],
) -> None:
    graph = serve(SMALL, "--Frontend.ServiceArgs.args=[--no-such-flag]")
    assert graph.process.wait(PATIENCE_S) == 1
    assert "frontend ended with exit code" in graph.said
    assert "no-such-flag" in graph.said
    assert graph.leftovers() == []


def test_print_plan_starts_nothing(serve: Callable[..., Serve]) -> None:
    graph = serve(SMALL, "--print-plan")
    assert graph.process.wait(PATIENCE_S) == 0
    assert "-m dynamo.frontend" in graph.said
    assert "-m kvcr.guard" in graph.said
    assert not graph.run_dir.exists()


def test_two_runs_cannot_share_a_directory(serve: Callable[..., Serve]) -> None:
    graph = serve("Etcd: {}\nNats: {}\n")
    graph.wait_until_up()
    file = graph.run_dir.parent / "small.yaml"
    second = subprocess.run(
        [sys.executable, "-m", "kvcr.cli", "serve", "-f", str(file), "--run-dir", str(graph.run_dir)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert second.returncode == 2
    assert "is used by another kvcr serve" in second.stderr
    assert graph.process.poll() is None


def test_a_full_disk_ends_nothing_and_keeps_nothing_from_ending(serve: Callable[..., Serve]) -> None:
    """Files of the launcher, and of what it starts, may not grow; what runs already may write as before."""
    graph = serve()
    graph.wait_until_up()

    def room(limit: int) -> None:
        resource.prlimit(graph.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    # More than it has said, less than it has to write.
    little = graph.output.stat().st_size + 600
    assert little < (graph.run_dir / "graph.json").stat().st_size
    room(little)
    before = {name: graph.component(name)["pid"] for name in ("etcd", "nats", "guard-0", "frontend")}
    os.kill(before["frontend"], signal.SIGKILL)
    graph.wait(lambda: "graph.json is not up to date: File too large" in graph.said)
    assert "frontend ended with SIGKILL, restarting it now" in graph.said
    for name in ("etcd", "nats", "guard-0"):
        os.kill(before[name], 0)
    room(resource.RLIM_INFINITY)
    graph.wait(
        lambda: graph.component("frontend")["restarts"] and graph.component("frontend")["state"] == "ready"
    )
    room(little)
    graph.stop()
    assert graph.process.returncode == 0
    assert not graph.leftovers()
    assert not list(graph.run_dir.glob(".graph.json-*"))
