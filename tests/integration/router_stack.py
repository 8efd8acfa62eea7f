# SPDX-License-Identifier: Apache-2.0
"""A deployment without engines: real etcd, NATS, frontend and router, fake workers and guards.

Every part is a process of its own that says what happens on stdout, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvcr.graph.infra import Server, free_port, start_etcd, start_nats
from kvcr.harness import Harness
from tests.integration.tiny_tokenizer import READY
from tests.integration.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Their results. Starting and ending processes is mostly waiting."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


class Part:
    """One process, and what it said."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.said: list[dict[str, Any]] = []
        self._arrived: queue.Queue[dict[str, Any]] = queue.Queue()
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._told_to_end = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("ab") as log:
            for line in self.process.stdout:
                if line.startswith(b"{"):
                    self._arrived.put(json.loads(line))
                else:
                    log.write(line)
                    log.flush()

    def expect(self, kind: str, timeout_s: float = PATIENCE_S, **fields: Any) -> dict[str, Any]:
        """The next thing of this kind it says (earlier things are skipped)."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                said = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"{self.name} did not say {kind} {fields}; exit code {self.process.poll()}, {self.log}:\n"
                    + self.log.read_text(errors="replace")[-3000:]
                ) from None
            self.said.append(said)
            if said.get("kind", "ready") == kind and all(
                said.get(key) == value for key, value in fields.items()
            ):
                return said

    def silent(self, kind: str) -> bool:
        """Nothing of this kind has arrived and is still unread."""
        while not self._arrived.empty():
            self.said.append(self._arrived.get())
            if self.said[-1].get("kind") == kind:
                return False
        return True

    def tell(self, **command: Any) -> dict[str, Any]:
        """One command to a fake guard, answered."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self.expect("done")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """SIGTERM (for a fake guard: end of its input), not waiting for what comes of it."""
        if self._told_to_end or self.process.poll() is not None:
            return
        self._told_to_end = True
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        self.process.terminate()

    def stop(self) -> int:
        """:meth:`end`, and wait for it; returns the exit code."""
        if self.process.poll() is None:
            self.end()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode


class Worker(Part):
    worker_id: int


class RealGuard(Part):
    control: str
    socket: str
    metrics_url: str

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith("kvcr_"))
        return {name: float(value) for name, _, value in samples}

    @property
    def state(self) -> str:
        found = (
            name for name, value in self.metrics().items() if name.startswith("kvcr_guard_state") and value
        )
        return next(found).partition('"')[2].rstrip('"}')


class Stack:
    """Servers, frontend, and whatever a test starts; ended by :meth:`close`."""

    def __init__(self, directory: Path, model: Path, request_plane: str = "tcp", lease_s: int = 20) -> None:
        self.directory = directory
        self.model = model
        self.request_plane = request_plane
        self.etcd: Server = start_etcd(directory / "etcd", directory / "etcd.log")
        self.nats: Server = start_nats(directory / "nats", directory / "nats.log")
        self.parts: list[Part] = []
        self.http_port = free_port()
        self.system_port = _low_port()
        self.signals_ports: dict[str, int] = {}
        self.system_ports: dict[str, int] = {"router": self.system_port}
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "KVCR_"))
        } | {
            "PYTHONPATH": f"{ROOT / 'components'}:{ROOT / 'tests'}",
            "ETCD_ENDPOINTS": self.etcd.url,
            "NATS_SERVER": self.nats.url,
            "ETCD_LEASE_TTL": str(lease_s),
            "DYN_DISCOVERY_BACKEND": "etcd",
            "DYN_REQUEST_PLANE": request_plane,
            "DYN_EVENT_PLANE": "nats",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "DYN_LOG": "warn",
            "HF_HUB_OFFLINE": "1",
        }

    def close(self) -> None:
        for part in self.parts:
            part.end()
        for part in self.parts:
            part.stop()
        self.nats.stop()
        self.etcd.stop()

    def kill_servers(self) -> None:
        """etcd and NATS end with SIGKILL."""
        self.etcd.kill()
        self.nats.kill()

    def restart_servers(self) -> None:
        """They come back at their ports, with what they had stored."""
        self.etcd = start_etcd(self.directory / "etcd", self.directory / "etcd.log", port=self.etcd.port)
        self.nats = start_nats(self.directory / "nats", self.directory / "nats.log", port=self.nats.port)

    def start(self, name: str, arguments: list[str], **environment: str) -> Part:
        return self._add(
            Part(name, arguments, self.environment | environment, self.directory / f"{name}.log")
        )

    def _add(self, part: Part) -> Part:
        self.parts.append(part)
        return part

    def frontend(self) -> Part:
        arguments = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.http_port)]
        return self.start("frontend", [*arguments, "--router-mode", "round-robin"])

    def router(self, *arguments: str, name: str = "router", **environment: str) -> Part:
        """A router; one with another name is another replica. A name keeps its ports."""
        signals = self.signals_ports.setdefault(name, free_port())
        system = self.system_ports.setdefault(name, _low_port())
        common = ["-m", "router_hints", "--model-path", str(self.model), "--model-name", "tiny"]
        return self.start(
            name,
            [*common, "--block-size", str(BLOCK), "--signals-port", str(signals), *arguments],
            DYN_SYSTEM_PORT=str(system),
            **environment,
        )

    def harness(self, router: str = "router", **options: Any) -> Harness:
        """A client of this router's signal API."""
        return Harness(f"http://127.0.0.1:{self.signals_ports[router]}", **options)

    def worker(self, name: str, *arguments: str) -> Worker:
        """A fake worker, up and registered."""
        path = str(ROOT / "tests" / "integration" / "fake_worker.py")
        common = [
            path,
            "--name",
            name,
            "--model-path",
            str(self.model),
            "--request-plane",
            self.request_plane,
        ]
        worker = Worker(name, [*common, *arguments], self.environment, self.directory / f"{name}.log")
        self._add(worker)
        worker.worker_id = worker.expect("up", PATIENCE_S)["worker_id"]
        return worker

    def guard(self, name: str, *arguments: str) -> tuple[Part, str]:
        """A fake guard, up and registered, and its control endpoint."""
        path = str(ROOT / "tests" / "integration" / "fake_guard.py")
        part = self.start(name, [path, "--name", name, "--block-size", str(BLOCK), *arguments])
        control: str = part.expect("up", PATIENCE_S)["control"]
        return part, control

    def node(self, number: int) -> tuple[Part, Worker]:
        """A fake guard ``g0``, and the fake worker ``w0`` beside it."""
        guard, control = self.guard(f"g{number}")
        return guard, self.worker(f"w{number}", "--control", control)

    def real_guard(self, name: str, pool_dir: Path, *arguments: str, control: str = "") -> RealGuard:
        """``python -m kvcr.guard`` in the deployment, ready; its pool is in ``pool_dir``."""
        common = ["-m", "kvcr.guard", "--name", name, "--pool-dir", str(pool_dir), "--pool-bytes", "8MiB"]
        common += ["--control", control or "tcp://127.0.0.1:0", "--cluster", *arguments]
        guard = RealGuard(name, common, self.environment, self.directory / f"{name}.log")
        self._add(guard)
        ready = guard.expect("ready", PATIENCE_S)
        guard.control, guard.socket, guard.metrics_url = ready["control"], ready["socket"], ready["metrics"]
        return guard

    # --- as a client ----------------------------------------------------------------------------------

    def ask(
        self, prompt: str, *, headers: dict[str, str] | None = None, timeout_s: float = 30.0, **body: Any
    ) -> tuple[int, dict[str, Any]]:
        """One chat completion: status and answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout_s)
        try:
            connection.request("POST", "/v1/chat/completions", _chat(prompt, body), _headers(headers))
            response = connection.getresponse()
            raw = response.read()
            return response.status, json.loads(raw or b"{}")
        finally:
            connection.close()

    @contextlib.contextmanager
    def stream(
        self, prompt: str, *, headers: dict[str, str] | None = None, receive_bytes: int = 0, **body: Any
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """A streamed chat completion; leaving the block early is a client that disconnects.

        ``receive_bytes`` bounds what the client's system takes for it before it reads.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=30)
        try:
            if receive_bytes:
                connection.sock = socket.socket()
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
                connection.sock.connect(("127.0.0.1", self.http_port))
            connection.request(
                "POST", "/v1/chat/completions", _chat(prompt, {"stream": True, **body}), _headers(headers)
            )
            response = connection.getresponse()
            assert response.status == 200, response.read()

            def chunks() -> Iterator[dict[str, Any]]:
                for line in response:
                    data = line.decode().removeprefix("data:").strip()
                    if line.startswith(b"data:") and data != "[DONE]":
                        yield json.loads(data)

            yield chunks()
        finally:
            connection.close()

    def ready(self, status: int = 200) -> None:
        """Wait until the model is served (or refused with ``status``)."""

        def served() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.ask(READY, timeout_s=5.0)[0] == status
            return False

        until(served, f"the frontend answers {status}", PATIENCE_S, every_s=0.3)

    def joined(self, workers: int, router: str = "router") -> None:
        """Wait until a router knows so many workers, and the guard beside every rank of them."""

        def known() -> bool:
            metrics = self.metrics(router)
            return (
                metrics.get('kvcr_router_workers{state="ready"}') == workers
                and metrics.get("kvcr_router_ranks_without_guard") == 0
            )

        until(known, f"{router} knows {workers} workers and their guards")

    def metrics(self, router: str = "router") -> dict[str, float]:
        """The router's own metrics, by name and labels as written."""
        connection = http.client.HTTPConnection("127.0.0.1", self.system_ports[router], timeout=10)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        samples = (line.rpartition(" ") for line in lines if line.startswith("kvcr_router_"))
        return {name: float(value) for name, _, value in samples}

    def indexed(self, guard: str, router: str = "router") -> float:
        return self.metrics(router).get(f'kvcr_router_index_blocks{{guard="{guard}"}}', 0.0)


def _low_port() -> int:
    """A free port that Dynamo accepts for its system server: it must fit 15 bits."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port below 32000")


def _chat(prompt: str, body: dict[str, Any]) -> bytes:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 200}
    return json.dumps(fields | body).encode()


def _headers(headers: dict[str, str] | None) -> dict[str, str]:
    return {"content-type": "application/json"} | (headers or {})
