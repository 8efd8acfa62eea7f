# SPDX-License-Identifier: Apache-2.0
"""A running graph as the demo, the benchmarks and the tests see it: ``graph.json`` and metrics pages."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from demo.metrics import scrape
from kvcr.graph.runs import STATE_FILE, new_run

AGG_GRAPH = Path(__file__).resolve().parents[1] / "deploy/graphs/agg.yaml"

PIN_HEADER = "x-dynamo-meta-kvcr-worker"
"""Asks our router for a worker, by its Dynamo instance id in decimal."""

SESSION_HEADER = "x-dynamo-session-id"
"""Dynamo's own: turns that carry the same one are one chat."""

START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_IDENTIFY_TIMEOUT_S = 30.0


class GraphNotUp(Exception):
    """The graph ended while starting, or its ``graph.json`` lacks something; the message says what."""


@dataclass(frozen=True)
class Worker:
    """One engine worker and the guard beside it."""

    label: str
    """``A`` or ``B``: what the person reads."""
    name: str
    pid: int
    metrics_url: str
    instance_id: int
    """Dynamo instance id."""
    guard: str
    """Name of the guard beside it; empty, as are the next two, in a graph with ``kvcr: off``."""
    guard_metrics_url: str
    pool_dir: Path


@dataclass(frozen=True)
class Graph:
    """Addresses of a graph that is up."""

    run_dir: Path
    pid: int
    """Of ``kvcr serve``; SIGTERM to it takes everything down."""
    frontend_url: str
    model: str
    namespace: str
    nats_url: str
    router_metrics_url: str | None
    """None in a graph without our router."""
    workers: tuple[Worker, ...]
    block_size: int

    @property
    def pair(self) -> tuple[Worker, Worker]:
        """The two workers that a scene is played on. Raises :class:`GraphNotUp` when there are not two."""
        if len(self.workers) != 2:
            raise GraphNotUp(
                f"a scene needs two workers; the graph in {self.run_dir} has {len(self.workers)}"
            )
        return self.workers[0], self.workers[1]

    @property
    def guarded(self) -> bool:
        """Whether the workers have guards."""
        return all(worker.guard for worker in self.workers)

    def component(self, name: str) -> dict[str, Any]:
        """What ``graph.json`` says about one process now; it changes when the process is restarted."""
        state = json.loads((self.run_dir / STATE_FILE).read_text())
        found: dict[str, Any] = next(one for one in state["components"] if one["name"] == name)
        return found

    def where(self, worker: Worker | None, session: str = "") -> dict[str, Any]:
        """Arguments for :func:`demo.client.ask`: on ``worker`` if one is named, as a turn of ``session``."""
        arguments = self.pin(worker) if worker is not None else {}
        if session:
            arguments["headers"] = {**arguments.get("headers", {}), SESSION_HEADER: session}
        return arguments

    def pin(self, worker: Worker) -> dict[str, Any]:
        """Arguments for :func:`demo.client.ask` that make the router choose ``worker``.

        Our router takes a header. The stock KV router is inside the frontend and takes ``nvext``.
        """
        if self.router_metrics_url is not None:
            return {"headers": {PIN_HEADER: str(worker.instance_id)}}
        return {"extra": {"nvext": {"backend_instance_id": worker.instance_id}}}


def load(run_dir: Path) -> Graph:
    """Read ``run_dir/graph.json`` and ask each worker for its instance id. Raises :class:`GraphNotUp`."""
    path = run_dir / STATE_FILE
    try:
        state = json.loads(path.read_text())
    except OSError as error:
        raise GraphNotUp(f"{path}: {error.strerror}; is a graph running with --run-dir {run_dir}?") from error
    except ValueError as error:
        raise GraphNotUp(f"{path}: {error}") from error
    if state["state"] != "ready":
        raise GraphNotUp(f"{path}: the graph is {state['state']}, not ready")
    components: list[dict[str, Any]] = state["components"]
    guards = {c["control"]: c for c in components if c["component"] == "Guard"}
    engines = [c for c in components if c["component"] == "VllmWorker"]
    router = next((c for c in components if c["component"] == "Router"), None)
    if not engines:
        raise GraphNotUp(f"{path}: the graph has no VllmWorker")
    workers = [_worker(index, engine, guards.get(engine["control"])) for index, engine in enumerate(engines)]
    return Graph(
        run_dir=run_dir,
        pid=state["pid"],
        frontend_url=state["url"].removesuffix("/v1"),
        model=state["served_model"],
        namespace=state["namespace"],
        nats_url=state["nats"],
        router_metrics_url=router["metrics"] if router else None,
        workers=tuple(workers),
        block_size=_block_size(engines[0]["argv"]),
    )


def _worker(index: int, engine: Mapping[str, Any], guard: Mapping[str, Any] | None) -> Worker:
    return Worker(
        label=chr(ord("A") + index),
        name=engine["name"],
        pid=engine["pid"],
        metrics_url=engine["metrics"],
        instance_id=_instance_id(engine["metrics"]),
        guard=guard["name"] if guard else "",
        guard_metrics_url=guard["metrics"] if guard else "",
        pool_dir=Path(guard["urls"]["pool_dir"]) if guard else Path(),
    )


def _instance_id(metrics_url: str) -> int:
    """A Dynamo process labels its own metrics with its instance id, in hex."""
    deadline_s = time.monotonic() + _IDENTIFY_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            for (name, labels), _ in scrape(metrics_url).samples.items():
                found = dict(labels)
                if name.startswith("dynamo_component_") and found.get("dynamo_endpoint") == "generate":
                    return int(found["worker_id"], 16)
        if time.monotonic() > deadline_s:
            raise GraphNotUp(f"{metrics_url} shows no dynamo_component_* metric of the endpoint 'generate'")
        time.sleep(0.2)


def _block_size(argv: Sequence[str]) -> int:
    return int(argv[argv.index("--block-size") + 1])


@dataclass
class Serving:
    """A ``kvcr serve`` that was started here. It outlives this process unless it is stopped."""

    process: subprocess.Popen[bytes]
    run_dir: Path

    @property
    def log(self) -> Path:
        """What the launcher said. A file, not a pipe: the launcher may outlive its reader."""
        return self.run_dir / "serve.log"

    def words(self) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> int:
        """Take the graph down, in order; returns the exit code. A launcher that hangs is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def new_run_dir(name: str) -> Path:
    """Where ``kvcr serve`` keeps its runs, so that ``kvcr status`` and the like find it by themselves."""
    return new_run(name).run_dir


def serve(
    run_dir: Path, graph_file: Path = AGG_GRAPH, overrides: Sequence[str] = (), *, quiet: bool = False
) -> Serving:
    """Start ``kvcr serve``, wait until the graph is up. Raises :class:`GraphNotUp` when that fails.

    The launcher's lines go to our stderr unless ``quiet``, and are part of the error in any case.
    ``overrides`` are words such as ``--VllmWorker.max-num-seqs=4``.
    """
    command = [sys.executable, "-m", "kvcr.cli", "serve", "-f", str(graph_file), "--run-dir", str(run_dir)]
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / STATE_FILE).unlink(missing_ok=True)  # of an earlier run, which said "ready" too
    with (run_dir / "serve.log").open("wb") as log:
        # A session of its own: Ctrl-C reaches us, and we decide whether the graph stays.
        process = subprocess.Popen(
            [*command, *overrides],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    serving = Serving(process, run_dir)
    try:
        _wait_ready(serving, quiet)
    except BaseException:
        serving.stop()
        raise
    return serving


def _wait_ready(serving: Serving, quiet: bool) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with serving.log.open(errors="replace") as log:
        while True:
            ended = serving.process.poll()
            _relay(log, quiet)
            if ended is not None:
                raise GraphNotUp(f"kvcr serve ended with {ended}:\n{serving.words()}")
            with contextlib.suppress(OSError, ValueError):
                if json.loads((serving.run_dir / STATE_FILE).read_text())["state"] == "ready":
                    _relay(log, quiet)
                    return
            if time.monotonic() > deadline_s:
                raise GraphNotUp(f"not up after {START_TIMEOUT_S:g} s:\n{serving.words()}")
            time.sleep(0.2)


def _relay(log: TextIO, quiet: bool) -> None:
    """Pass on what the launcher said since the last call."""
    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
    for line in log:
        if not quiet:
            print(f"{clear}  {line}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def serving(
    run_dir: Path, graph_file: Path = AGG_GRAPH, overrides: Sequence[str] = (), *, quiet: bool = False
) -> Iterator[Graph]:
    """A graph for the time of a ``with`` block."""
    running = serve(run_dir, graph_file, overrides, quiet=quiet)
    try:
        yield load(run_dir)
    finally:
        running.stop()
