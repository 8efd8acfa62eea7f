# SPDX-License-Identifier: Apache-2.0
"""An engine is killed while it answers: its sessions go on elsewhere, from its own pool; then it comes back.

The same scene runs on a graph with ``kvcr: off``, where the sessions' KV dies with the engine.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo.client import RequestFailed, ask
from demo.document import follow_up, prompt
from demo.graph import AGG_GRAPH, Graph, Worker, load, new_run_dir, serve
from demo.load import QUESTIONS, Load, Outcome, Request, Session
from demo.metrics import Page, growth, scrape
from demo.observe import Seen, observe
from demo.scenes.share import Waiting, warm_up
from demo.states import watching
from kvcr.graph.processes import descendants
from kvcr.protocol.events import StateChange

Tell = Callable[[str], None]

PIECES_BEFORE_KILL = 4
_POLL_S = 0.02
_TURNS_TIMEOUT_S = 300.0
_RETURN_TIMEOUT_S = 600.0
_PROBE_SILENCE_S = 30.0
_WITNESS, _SLEEPER = 98, 99
"""Variants of documents that the load does not ask about."""


@dataclass(frozen=True)
class Scale:
    """How much of it."""

    sessions: int = 6
    """Half of them at home on each worker."""
    turns: int = 4
    """Of each session, before the fault and after the return at least."""
    words: int = 380
    """Of each document: about 500 tokens."""
    max_tokens: int = 24


QUICK = Scale(sessions=4, turns=2, words=300)


@dataclass(frozen=True)
class Failover:
    """What was seen. Times are of ``time.monotonic``; bytes and blocks are counters of the guards."""

    guarded: bool
    victim: Worker
    requests: tuple[Request, ...]
    loaded_s: float
    """From here on every session has its document computed."""
    killed_s: float
    gone_s: float
    """The kernel had ended the last of the killed processes: before it, nothing proves their death."""
    active_s: float | None
    """Guard of the victim ACTIVE; None without one."""
    back_s: float
    """First answer of the victim's successor through the frontend."""
    ended_s: float
    served_bytes: int
    """From the dead worker's pool, between death and return."""
    served_blocks: int
    transfers: int
    computed: Seen
    returned: Seen
    """The same prompt, when the victim computed it and when its successor was asked; the load is over."""
    home: Seen
    """The next turn of a session that slept meanwhile: the victim has its pool, the router places it."""


def on_and_off(
    scale: Scale, tell: Tell, waiting: Waiting, graph_file: Path = AGG_GRAPH
) -> dict[str, Failover]:
    """The scene on a graph of its own with KVCR, and on another one without; by ``on`` and ``off``.

    Raises GraphNotUp, and what :func:`failover` raises.
    """
    seen: dict[str, Failover] = {}
    for switch in ("on", "off"):
        run_dir = new_run_dir("failover")
        tell(f"\nKVCR {switch}: starting a graph of two workers; logs in {run_dir}/logs")
        with waiting("waiting for two engines to start, a minute or two"):
            running = serve(run_dir, graph_file, [f"--kvcr={switch}"])
        try:
            graph = load(run_dir)
            warm_up(graph, waiting)
            seen[switch] = failover(graph, scale, tell, waiting)
        finally:
            with waiting("stopping the graph"):
                running.stop()
    return seen


def failover(graph: Graph, scale: Scale, tell: Tell, waiting: Waiting) -> Failover:
    """Run the scene on a graph of two workers. Raises TimeoutError, and what :func:`observe` raises."""
    script = _Script(graph, graph.pair[0], tell)
    with watching(graph, script.on_change):
        return _play(graph, scale, script, waiting)


def _play(graph: Graph, scale: Scale, script: _Script, waiting: Waiting) -> Failover:
    victim, survivor = graph.pair
    with waiting(f"worker {victim.label} reads two documents that nobody asks about for a while"):
        witness = prompt(_WITNESS, QUESTIONS[0], scale.words)
        computed = observe(graph, witness, max_tokens=scale.max_tokens, worker=victim)
        sleeper = prompt(_SLEEPER, QUESTIONS[0], scale.words)
        slept = observe(graph, sleeper, max_tokens=scale.max_tokens, worker=victim, session="sleeper")
    traffic = Load([_session(graph, number, scale, script) for number in range(scale.sessions)])
    for session in traffic.sessions:
        session.start()
    try:
        with waiting(f"{scale.sessions} sessions have their documents computed"):
            _until(lambda: traffic.turns_since(0.0) >= 1, "first answers", _TURNS_TIMEOUT_S)
        loaded_s = time.monotonic()
        script.tell(
            f"{scale.sessions} sessions are under way, every other one at home on worker {victim.label}; "
            "each asks its next question when it has its answer"
        )
        with waiting(f"{scale.turns} turns each without a fault"):
            _until(lambda: traffic.turns_since(loaded_s) >= scale.turns, "turns", _TURNS_TIMEOUT_S)
            _until(
                lambda: traffic.answering(PIECES_BEFORE_KILL) > 0 and _running(victim) > 0,
                f"a stream on worker {victim.label}",
                _TURNS_TIMEOUT_S,
            )
        before = _guard_pages(graph)
        killed_s = script.kill()
        with waiting(f"worker {victim.label} starts again"):
            back, back_s = script.watch_return(before.get(victim.name, Page()))
        served = growth(before.get(victim.name, Page()), script.page_at_return)
        pulled = growth(before.get(survivor.name, Page()), _guard_pages(graph).get(survivor.name, Page()))
        with waiting(f"{scale.turns} turns each after the return"):
            _until(lambda: traffic.turns_since(back_s) >= scale.turns, "turns", _TURNS_TIMEOUT_S)
    finally:
        with waiting("the last answers"):
            traffic.stop()
    ended_s = time.monotonic()
    with waiting(f"worker {victim.label} gets a prompt that it knew before"):
        returned = observe(back, witness, max_tokens=scale.max_tokens, worker=back.workers[0])
    script.tell_returned(returned, computed)
    with waiting("the next turn of a session that slept meanwhile"):
        turn = follow_up(sleeper, slept.answer.text, QUESTIONS[1])
        home = observe(back, turn, max_tokens=scale.max_tokens, session="sleeper")
    script.tell_home(home)
    return Failover(
        guarded=graph.guarded,
        victim=victim,
        requests=tuple(traffic.requests),
        loaded_s=loaded_s,
        killed_s=killed_s,
        gone_s=script.gone_s(),
        active_s=script.active_s,
        back_s=back_s,
        ended_s=ended_s,
        served_bytes=round(served.total("kvcr_served_bytes_total")),
        served_blocks=round(served.total("kvcr_served_blocks_total")),
        transfers=round(pulled.total("kvcr_pull_seconds_count")),
        computed=computed,
        returned=returned,
        home=home,
    )


class _Script:
    """Kills, watches, and tells the time line."""

    def __init__(self, graph: Graph, victim: Worker, tell: Tell) -> None:
        self._graph = graph
        self._victim = victim
        self._say = tell
        self._lock = threading.Lock()
        self._killed_s = self._killed_unix_s = 0.0
        self._gone_s = 0.0
        self._watcher: threading.Thread | None = None
        self.active_s: float | None = None
        """When the victim's guard was ACTIVE, by its own word; None without a guard."""
        self.page_at_return = Page()
        """Of the dead worker's guard, just before its new engine serves."""

    def tell(self, what: str, at_s: float | None = None) -> None:
        """One line of the time line, at now or at ``at_s``; the clock is set at the kill."""
        now_s = time.monotonic() if at_s is None else at_s
        clock = f"{now_s - self._killed_s:+9.2f} s" if self._killed_s else " " * 11
        with self._lock:
            self._say(f"{clock}  {what}")

    def on_end(self, request: Request) -> None:
        """What the sessions go through, as far as it is worth a line."""
        if not self._killed_s:
            return
        if request.outcome is not Outcome.OK:
            self.tell(
                f"session {request.session} {request.outcome} after {len(request.text_s)} tokens, asks again",
                request.ended_s,
            )
        elif (pause_s := request.pause_s(self._killed_s)) is not None:
            self.tell(
                f"session {request.session}: its stream was under way at the kill; it paused for "
                f"{pause_s:.2f} s and is complete",
                request.ended_s,
            )
        elif request.retry and request.answer is not None and request.ttft_s is not None:
            answer = request.answer
            self.tell(
                f"session {request.session}: first token of the second try after {request.ttft_s:.2f} s; "
                f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were not computed",
                request.sent_s + request.ttft_s,
            )

    def kill(self) -> float:
        """SIGKILL to every process of the worker, as when its container is killed."""
        pids = [p.pid for p in descendants(self._graph.pid) if p.session == self._victim.pid]
        ends = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a short-lived helper of the engine's
                ends.append(os.pidfd_open(pid))
        self._killed_s, self._killed_unix_s = time.monotonic(), time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._watcher = threading.Thread(target=self._watch_ends, args=(ends,), daemon=True)
        self._watcher.start()
        names = ", ".join(map(str, pids))
        self.tell(f"kill -9 of worker {self._victim.label} in mid-stream, pids {names}", self._killed_s)
        return self._killed_s

    def _watch_ends(self, ends: list[int]) -> None:
        """The kernel takes an engine's memory back before it lets go of its locks and sockets."""
        for end in ends:
            select.select([end], [], [])
            os.close(end)
        self._gone_s = time.monotonic()
        self.tell("the kernel has ended the last of them", self._gone_s)

    def gone_s(self) -> float:
        """When the last of the killed processes had ended."""
        assert self._watcher is not None
        self._watcher.join()
        return self._gone_s

    def on_change(self, change: StateChange) -> None:
        """A guard changed its state."""
        if not self._killed_s:
            return
        # Its clock, so that the way of the event does not count.
        at_s = self._killed_s + change.unix_s - self._killed_unix_s
        if change.guard == self._victim.guard and change.state == "ACTIVE" and self.active_s is None:
            self.active_s = at_s
        self.tell(f"{change.guard}: {change.previous} to {change.state}, epoch {change.epoch}", at_s)

    def watch_return(self, before: Page) -> tuple[Graph, float]:
        """The graph with the victim's successor in it, and when that first answered through the frontend.

        ``before``: what the victim's guard had counted at the kill.
        """
        deadline_s = time.monotonic() + _RETURN_TIMEOUT_S
        served = before.total("kvcr_served_blocks_total")
        pid = None
        while time.monotonic() < deadline_s:
            if self._victim.guard:
                page = scrape(self._victim.guard_metrics_url)
                self.page_at_return = page
                now = page.total("kvcr_served_blocks_total")
                if now > served:
                    self.tell(f"{round(now - served)} blocks were read from the dead worker's pool")
                served = now
            component = self._graph.component(self._victim.name)
            if component["pid"] not in (None, pid, self._victim.pid):
                pid = component["pid"]
                self.tell(f"the launcher starts worker {self._victim.label} again, pid {pid}")
            if component["state"] == "ready" and component["instance"] and pid is not None:
                graph = load(self._graph.run_dir)
                if _answers(graph, graph.workers[0]):
                    back_s = time.monotonic()
                    self.tell(f"worker {self._victim.label} answers through the frontend again", back_s)
                    return graph, back_s
            time.sleep(0.1)
        raise TimeoutError(f"worker {self._victim.name} was not back within {_RETURN_TIMEOUT_S:g} s")

    def tell_returned(self, returned: Seen, computed: Seen) -> None:
        answer = returned.answer
        same = "the same answer" if answer.text == computed.answer.text else "ANOTHER ANSWER"
        self.tell(
            f"a prompt it knew before: first token after {answer.ttft_s:.2f} s instead of "
            f"{computed.answer.ttft_s:.2f} s, {returned.own_tokens} of {answer.prompt_tokens} tokens from "
            f"its own pool, {returned.pulled_tokens} pulled, {same}"
        )

    def tell_home(self, home: Seen) -> None:
        self.tell(
            f"a session of worker {self._victim.label} that slept meanwhile goes on on worker "
            f"{home.worker.label}: {home.own_tokens} tokens of its own, {home.pulled_tokens} pulled, "
            f"{home.computed_tokens} computed"
        )


def _session(graph: Graph, number: int, scale: Scale, script: _Script) -> Session:
    return Session(
        number + 1,
        graph,
        graph.workers[number % 2],
        variant=number + 1,
        words=scale.words,
        max_tokens=scale.max_tokens,
        on_end=script.on_end,
    )


def _guard_pages(graph: Graph) -> dict[str, Page]:
    return {worker.name: scrape(worker.guard_metrics_url) for worker in graph.workers if worker.guard}


def _answers(graph: Graph, worker: Worker) -> bool:
    hello = [{"role": "user", "content": "Hello."}]
    try:
        ask(
            graph.frontend_url,
            graph.model,
            hello,
            max_tokens=1,
            timeout_s=_PROBE_SILENCE_S,
            **graph.pin(worker),
        )
    except RequestFailed:
        return False
    return True


def _running(worker: Worker) -> float:
    """Requests its engine works on."""
    return scrape(worker.metrics_url).total("vllm:num_requests_running")


def _until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(_POLL_S)
