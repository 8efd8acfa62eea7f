# SPDX-License-Identifier: Apache-2.0
"""Bring a planned graph up, keep it up, take it down. One thread, one loop.

Up: servers first, then wave after wave, each process ready before the next wave. Up means up: a process
that dies before the graph is ready ends the start. Afterwards the graph file decides what a crash does.
Down, on SIGTERM or Ctrl-C: engines and routers get a short grace, then everything they forked is killed;
guards go after their engines, servers last. A second signal skips the graces.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from kvcr.errors import KvcrError
from kvcr.graph import infra, probes, processes, runs
from kvcr.graph.config import Kind, Restart
from kvcr.graph.external import check_reachable
from kvcr.graph.members import Member, Server, State
from kvcr.graph.plan import WAVES, Plan
from kvcr.graph.ports import PortBook
from kvcr.graph.site import RunPaths

ENGINE_GRACE_S = 3.0
"""dynamo.vllm needs more than 20 s to leave by itself, which nobody waits for."""
GUARD_GRACE_S = 2.5
FORGET_GRACE_S = 2.0
SERVER_GRACE_S = 1.0
"""With the three above: under the ten seconds in which a graph is gone."""

_REAP_TIMEOUT_S = 1.0
_POLL_S = 0.2
_QUIET_POLL_S = 2.0
"""While everything runs: the end of a child ends the sleep anyway."""
_MAX_PROBE_EVERY_S = 2.0
"""Dynamo logs an error for each health check before it is ready."""
_MAX_BACKOFF_S = 30.0
_STABLE_S = 60.0
_SERVER_RESTART_TIMEOUT_S = 5.0
_MODEL_SERVED_TIMEOUT_S = 60.0
_INSTANCES = (Kind.WORKER, Kind.ROUTER)


class GraphFailed(KvcrError):
    """The graph did not come up; the message has the component and the end of its log."""


class _Stopped(Exception):
    """A signal arrived while starting."""


class Launcher:
    """One run of a plan. Use from the main thread of a process that does nothing else."""

    def __init__(self, plan: Plan, paths: RunPaths, ports: PortBook, report: Callable[[str], None]) -> None:
        self._plan = plan
        self._paths = paths
        self._ports = ports
        self._report = report
        self._members = [Member(process) for process in plan.processes]
        self._servers = [Server(server) for server in plan.servers]
        self._forgetting: list[processes.Child] = []
        self._signals = 0
        self._phase = "starting"
        self._unsaved = ""
        """Why the file of the state is not up to date."""
        self._started_s = time.monotonic()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Blocks until the graph is gone; 0 after a stop by signal. Raises GraphFailed, ConfigError."""
        processes.become_subreaper()
        # Servers inherit it: see runs.sweep_dead_runs.
        os.environ[runs.RUN_DIR_VARIABLE] = str(self._paths.run_dir)
        self._catch_signals()
        with runs.opened(self._paths):
            try:
                self._start()
                while not self._signals:
                    self._watch()
                    self._sleep(_QUIET_POLL_S if self._quiet else _POLL_S)
            except _Stopped:
                pass
            finally:
                self._stop()
        return 0

    # -- up ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._save()
        for server in self._servers:
            self._start_server(server, infra.START_TIMEOUT_S)
        for wave in WAVES:
            wanted = [member for member in self._members if member.plan.kind in wave]
            if wanted:
                self._report(f"starting {', '.join(member.plan.name for member in wanted)}")
            for member in wanted:
                self._spawn(member)
            self._until(functools.partial(self._all_ready, wanted))
        if self._plan.url and self._plan.served_model:
            deadline_s = time.monotonic() + _MODEL_SERVED_TIMEOUT_S
            self._until(lambda: self._model_served(deadline_s))
        self._phase = "ready"
        self._save()
        where = self._plan.url or "no frontend"
        model = f", model {self._plan.served_model}" if self._plan.served_model else ""
        took = _seconds(self._started_s)
        self._report(f"graph {self._plan.graph.name} is up in {took}: {where}{model}; Ctrl-C stops it")

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._signals:
                raise _Stopped
            self._sleep(_POLL_S)

    def _all_ready(self, members: Iterable[Member]) -> bool:
        for member in self._members:
            if member.child is not None and (code := member.child.exit_code) is not None:
                raise GraphFailed(
                    f"{member.plan.name} ended with {probes.exit_words(code)} while the graph was starting; "
                    f"the end of {member.child.log}:\n{probes.tail(member.child.log)}"
                )
        waiting = [member for member in members if not self._probe(member)]
        return not waiting

    def _model_served(self, deadline_s: float) -> bool:
        """Whether the frontend takes requests.

        It lists a model with the first worker's card, and answers 404 until it has read the router's card,
        tokenizer included (observed in 1.6.1): so being listed says nothing.
        """
        self._all_ready(())
        if probes.refuses_well(f"{self._plan.url}/chat/completions", self._plan.served_model):
            return True
        if time.monotonic() > deadline_s:
            raise GraphFailed(
                f"the frontend did not take requests for model {self._plan.served_model} within "
                f"{_MODEL_SERVED_TIMEOUT_S:g} s, though all components are ready; "
                f"see the logs of router and frontend in {self._paths.logs}"
            )
        return False

    def _start_server(self, server: Server, timeout_s: float) -> None:
        plan = server.plan
        if plan.external:
            check_reachable(plan)
            self._report(f"{plan.name:<12} ready  external  {plan.url}")
            return
        since_s = time.monotonic()
        data, log = self._paths.run_dir / plan.name, self._paths.logs / f"{plan.name}.log"
        self._ports.release(plan.port)
        if plan.kind is Kind.ETCD:
            server.running = infra.start_etcd(data, log, port=plan.port, timeout_s=timeout_s)
        else:
            config = Path(plan.config) if plan.config else None
            server.running = infra.start_nats(data, log, config=config, port=plan.port, timeout_s=timeout_s)
        self._report(f"{plan.name:<12} ready  {_seconds(since_s):>8}  {plan.url}")
        self._save()

    def _spawn(self, member: Member) -> None:
        plan = member.plan
        for port in plan.ports.values():
            self._ports.release(port)
        for name, text in plan.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        member.child = processes.Child(plan.argv, plan.env, self._paths.logs / f"{plan.name}.log")
        member.state, member.instance, member.probe_at_s = State.STARTING, None, 0.0
        self._save()

    def _probe(self, member: Member) -> bool:
        """Whether a member is ready; announces it the first time. Raises GraphFailed when it is too late."""
        if member.state is State.READY:
            return True
        child, plan = member.child, member.plan
        assert child is not None
        age_s = time.monotonic() - child.started_s
        if time.monotonic() < member.probe_at_s:
            return False
        member.probe_at_s = time.monotonic() + min(_MAX_PROBE_EVERY_S, 0.05 * age_s)
        announced = probes.ready_line(child) if plan.health_url is None else None
        if announced is not None or (
            plan.health_url is not None and probes.page(plan.health_url) is not None
        ):
            member.announced = announced or {}
            member.state = State.READY
            member.shared_memory = processes.shared_memory_of(self._sessions([child]))
            self._identify(member)
            shown = plan.urls.get("openai") or plan.urls.get("signals") or plan.health_url
            where = plan.control if plan.kind is Kind.GUARD else shown
            again = f"  (restart {member.restarts})" if member.restarts else ""
            self._report(f"{plan.name:<12} ready  {_seconds(child.started_s):>8}  {where}{again}")
            self._save()
            return True
        if age_s > plan.start_timeout_s:
            raise GraphFailed(
                f"{plan.name} was not ready within {plan.start_timeout_s:g} s "
                f"({plan.kind.value}.ServiceArgs.start-timeout-s); the end of {child.log}:\n"
                f"{probes.tail(child.log)}"
            )
        return False

    def _identify(self, member: Member) -> None:
        """Learn the instance id of a Dynamo component."""
        plan = member.plan
        if plan.kind in _INSTANCES and member.instance is None and plan.metrics is not None:
            member.instance = probes.instance_of(plan.metrics)

    # -- watching ------------------------------------------------------------------------------------

    @property
    def _quiet(self) -> bool:
        """Nothing is starting, waiting to be restarted, or to be cleaned up after."""
        return not self._forgetting and all(
            member.state in (State.READY, State.ENDED) for member in self._members
        )

    def _watch(self) -> None:
        for server in self._servers:
            self._watch_server(server)
        for member in self._members:
            self._watch_member(member)
        self._forgetting = [child for child in self._forgetting if child.exit_code is None]
        self._reap()

    def _watch_server(self, server: Server) -> None:
        plan, running = server.plan, server.running
        if running is None or running.exit_code is None:
            return
        component = self._plan.graph.get(plan.kind)
        policy = component.service.restart if component is not None else Restart.NO
        ended = f"{plan.name} ended with {probes.exit_words(running.exit_code)}"
        if not _restarts(policy, running.exit_code):
            self._report(f"{ended}; the graph goes on without it")
            server.running = None
            self._save()
            return
        self._report(f"{ended}, restarting it")
        server.restarts += 1
        try:
            self._start_server(server, _SERVER_RESTART_TIMEOUT_S)
        except (infra.InfraError, OSError) as error:
            self._report(f"{plan.name} did not come back, trying again: {error}")

    def _watch_member(self, member: Member) -> None:
        child, now = member.child, time.monotonic()
        if member.state is State.WAITING:
            if now >= member.restart_at_s:
                member.restarts += 1
                try:
                    self._spawn(member)
                except OSError as error:
                    member.restart_at_s = now + _MAX_BACKOFF_S
                    self._report(f"{member.plan.name} cannot be started, trying again: {error}")
            return
        if member.state is State.ENDED or child is None:
            return
        code = child.exit_code
        if code is None:
            if member.state is State.STARTING:
                try:
                    self._probe(member)
                except GraphFailed as error:
                    self._report(str(error))
                    child.send(signal.SIGKILL)
            elif member.plan.kind in _INSTANCES and member.instance is None:
                self._identify(member)
                if member.instance is not None:
                    self._save()
            return
        self._clean_up_after(member, child)
        if now - child.started_s > _STABLE_S:
            member.failures_in_row = 0
        if not _restarts(member.plan.restart, code):
            member.state = State.ENDED
            self._report(
                f"{member.plan.name} ended with {probes.exit_words(code)}; not restarted "
                f"({member.plan.kind.value}.ServiceArgs.restart is {member.plan.restart.value})"
            )
        else:
            delay_s = min(_MAX_BACKOFF_S, 2.0**member.failures_in_row - 1.0)
            member.failures_in_row += 1
            member.state, member.restart_at_s = State.WAITING, now + delay_s
            when = f"in {delay_s:g} s" if delay_s else "now"
            self._report(f"{member.plan.name} ended with {probes.exit_words(code)}, restarting it {when}")
        self._save()

    def _clean_up_after(self, member: Member, child: processes.Child) -> None:
        """A dead process leaves forked engines, shared memory and a lease of two minutes behind."""
        self._kill(self._sessions([child]))
        # If all of them were killed at once, nobody is left to ask.
        for path in member.shared_memory:
            path.unlink(missing_ok=True)
        member.shared_memory = set()
        self._forget(member, child)

    def _forget(self, member: Member, child: processes.Child) -> None:
        """Have the dead process's Dynamo lease revoked, by a helper: this process never talks gRPC."""
        if self._plan.etcd is None:
            return
        command = [sys.executable, "-m", "kvcr.graph.forget", "--etcd", self._plan.etcd]
        command += ["--namespace", self._plan.namespace, "--pid", str(child.pid)]
        if member.plan.kind is Kind.WORKER and member.plan.control is not None:
            command += ["--worker-control", member.plan.control]
        if member.instance is not None:
            command += ["--instance", member.instance]
        log = self._paths.logs / "forget.log"
        try:
            self._forgetting.append(processes.Child(command, member.plan.env, log))
        except OSError as error:
            self._report(f"{member.plan.name} stays in etcd until its lease ends: {error}")

    # -- down ----------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._phase = "stopping"
        self._save()
        self._report("stopping")
        self._ports.close()
        # Counted from here, so that only a further signal skips the graces.
        signals = self._signals
        engines = [member for member in self._members if member.plan.kind is not Kind.GUARD]
        guards = [member for member in self._members if member.plan.kind is Kind.GUARD]
        forced = self._end(engines, ENGINE_GRACE_S, signals)
        forced += self._end(guards, GUARD_GRACE_S, signals)
        if any(server.kind is Kind.ETCD and server.external for server in self._plan.servers):
            for member, child in forced:
                self._forget(member, child)
        deadline_s = time.monotonic() + FORGET_GRACE_S
        while any(child.exit_code is None for child in self._forgetting) and time.monotonic() < deadline_s:
            self._sleep(0.05)
        for server in reversed(self._servers):
            if server.running is not None:
                server.running.stop(SERVER_GRACE_S)
        self._kill(process.pid for process in processes.descendants(os.getpid()))
        self._reap()
        for member in self._members:
            member.state = State.ENDED
        self._phase = "stopped"
        for server in self._servers:
            server.running = None
        self._save()
        self._report(f"graph {self._plan.graph.name} is gone; logs stay in {self._paths.logs}")

    def _end(
        self, members: list[Member], grace_s: float, signals: int
    ) -> list[tuple[Member, processes.Child]]:
        """SIGTERM, a grace, SIGKILL for all they forked; returns those that did not leave by themselves."""
        running = [(member, member.child) for member in members if member.child is not None]
        running = [(member, child) for member, child in running if child.exit_code is None]
        mapped = processes.shared_memory_of(self._sessions(child for _, child in running))
        for _, child in running:
            child.send(signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while any(child.exit_code is None for _, child in running):
            if time.monotonic() > deadline_s or self._signals > signals:
                break
            self._sleep(0.05)
        forced = [(member, child) for member, child in running if child.exit_code is None]
        self._kill(self._sessions(child for _, child in running))
        # Of engines that ended in the grace, but not in good order.
        for path in mapped:
            path.unlink(missing_ok=True)
        return forced

    def _sessions(self, children: Iterable[processes.Child]) -> list[int]:
        """Pids of these children and of what they forked, as far as it stayed in their sessions."""
        sessions = {child.pid for child in children}
        below = processes.descendants(os.getpid())
        return [process.pid for process in below if process.session in sessions]

    def _kill(self, pids: Iterable[int]) -> None:
        """SIGKILL, wait until they are reaped, remove the shared memory they had mapped."""
        victims = set(pids)
        leftovers = processes.shared_memory_of(victims)
        processes.kill_gently(victims)
        deadline_s = time.monotonic() + _REAP_TIMEOUT_S
        while victims & processes.all_processes().keys() and time.monotonic() < deadline_s:
            self._reap()
            time.sleep(0.02)
        for path in leftovers:
            path.unlink(missing_ok=True)

    def _reap(self) -> None:
        """Collect whatever ended: our own children by asking for their exit code, adopted ones here."""
        owned: list[processes.Child | infra.Server] = [*self._forgetting]
        owned += [server.running for server in self._servers if server.running is not None]
        owned += [member.child for member in self._members if member.child is not None]
        running = {child.pid for child in owned if child.exit_code is None}
        processes.reap_orphans(running)

    # -- the loop's plumbing -------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        def on_stop(_number: int, _frame: FrameType | None) -> None:
            self._signals += 1

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, on_stop)
        # The handler does nothing; the byte in the pipe ends the sleep.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _sleep(self, seconds: float) -> None:
        """Until a signal comes, a child ends, or the time is over."""
        select.select([self._wake_read], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def _save(self) -> None:
        plan, logs = self._plan, self._paths.logs
        parts: list[Server | Member] = [*self._servers, *self._members]
        state = {
            "graph": plan.graph.name,
            "id": self._paths.run_id,
            "state": self._phase,
            "pid": os.getpid(),
            "run_dir": str(self._paths.run_dir),
            "logs": str(logs),
            "pools": str(self._paths.pools),
            "secret_file": str(self._paths.secret),
            "namespace": plan.namespace,
            "model": plan.model,
            "served_model": plan.served_model,
            "etcd": plan.etcd,
            "nats": plan.nats,
            "url": plan.url,
            "components": [part.shown(logs) for part in parts],
        }
        try:
            runs.write_state(self._paths, state)
            problem = ""
        except OSError as error:
            # The graph runs without it: a full disk must end nothing, and keep nothing from ending.
            problem = error.strerror or str(error)
        if problem and problem != self._unsaved:
            self._report(f"{self._paths.run_dir / runs.STATE_FILE} is not up to date: {problem}")
        self._unsaved = problem


def _restarts(policy: Restart, exit_code: int) -> bool:
    return policy is Restart.ALWAYS or (policy is Restart.ON_FAILURE and exit_code != 0)


def _seconds(since_s: float) -> str:
    return f"{time.monotonic() - since_s:.1f} s"
