# SPDX-License-Identifier: Apache-2.0
"""A small agent run against the live graph: one line for each signal, with the plan and what it did.

Worker A has everything the agent worked on so far, and is busy with others; worker B has room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from demo.client import Answer, RequestFailed, ask
from demo.document import follow_up, prompt
from demo.graph import Graph, GraphNotUp
from demo.metrics import scrape
from demo.table import size
from kvcr.harness import Harness, SessionInfo, SignalReply, headers

ANSWER_TOKENS = 16
TREND_S = 50.0
"""After so long a queue is no spike any more, and a session is worth moving away from it."""
_KNOWN_S = 30.0

Waiting = Callable[[str], AbstractContextManager[None]]
Messages = list[Mapping[str, str]]


@dataclass(frozen=True)
class Scale:
    """How long the contexts are, in words of the document; None for all of it."""

    main_words: int | None = None
    short_words: int = 350
    others: int = 3
    """Clients that send one long prompt after the other to A."""


@dataclass(frozen=True)
class Decision:
    """One signal, and what came of it."""

    signal: str
    plan: str
    moved: str
    """what it moved or dropped, in words"""
    blocks: int
    ttft_s: float | None
    """of the request it was for"""
    saved_s: float | None
    """computing what that request found in the cache, at the speed measured in the same run"""
    expected: bool
    """whether the plan is the one that the situation calls for"""


def agent(
    graph: Graph, say: Callable[[str], None], waiting: Waiting, variant: int = 1, scale: Scale | None = None
) -> list[Decision]:
    """Play the run. Raises what :func:`demo.client.ask` and the harness client raise."""
    scale = scale or Scale()
    run = _Run(graph, waiting, variant, scale)
    for name in ("main", "notes", "archive", "sleeper"):
        with waiting(f"worker A works on {name!r}, nothing to reuse"):
            run.begin(name, scale.main_words if name == "main" else scale.short_words)
    say(f"  worker A computed four contexts, at {run.tokens_per_s:.0f} tokens/s; others keep it busy now")
    decisions = []
    with run.others_on_a():
        for step in (run.fork, run.next_turn, run.one_off, run.wake_up):
            decisions.append(step())
            say(f"  {decisions[-1].signal}: {decisions[-1].plan}; {decisions[-1].moved}")
    for step in (run.sub_agent_done, run.compaction):
        decisions.append(step())
        say(f"  {decisions[-1].signal}: {decisions[-1].plan}; {decisions[-1].moved}")
    return decisions


class _Run:
    def __init__(self, graph: Graph, waiting: Waiting, variant: int, scale: Scale) -> None:
        self._graph = graph
        self._scale = scale
        self._waiting = waiting
        self._variant = variant
        self._a, self._b = graph.pair
        self._kv = Harness(graph.component("router")["urls"]["signals"])
        self._messages: dict[str, Messages] = {}
        self._answers: dict[str, Answer] = {}
        self._loaded_s = 0.0
        self._block_bytes = 0

    @property
    def tokens_per_s(self) -> float:
        main = self._answers["main"]
        return main.prompt_tokens / main.ttft_s

    def begin(self, name: str, words: int | None) -> None:
        """The first turn of a session, on A; its blocks are in A's pool when this returns."""
        self._variant += 1
        self._messages[name] = prompt(self._variant, words=words)
        where = self._graph.pin(self._a)["headers"] | headers(name)
        self._answers[name] = ask(
            self._graph.frontend_url,
            self._graph.model,
            self._messages[name],
            max_tokens=ANSWER_TOKENS,
            headers=where,
        )
        deadline_s = time.monotonic() + _KNOWN_S
        full = self._answers[name].prompt_tokens // self._graph.block_size
        while not any(p.tier == "G2" and p.blocks >= full for p in self._info(name).places):
            if time.monotonic() > deadline_s:
                raise GraphNotUp(f"the router does not see the blocks of session {name!r}")
            time.sleep(0.1)

    @contextmanager
    def others_on_a(self) -> Iterator[None]:
        """Others send long prompts to A while the block runs; it ends when the last one is answered."""

        def send(client: int) -> None:
            number = 0
            try:
                while not over.is_set():
                    number += 1
                    ask(
                        self._graph.frontend_url,
                        self._graph.model,
                        prompt(self._variant + 1000 * (client + 1) + number, words=self._scale.main_words),
                        max_tokens=2,
                        headers=self._graph.pin(self._a)["headers"],
                    )
            except RequestFailed as error:
                failures.append(error)

        failures: list[RequestFailed] = []
        over = threading.Event()
        clients = [threading.Thread(target=send, args=(n,)) for n in range(self._scale.others)]
        for client in clients:
            client.start()
        self._loaded_s = time.monotonic()
        try:
            time.sleep(1.0)
            yield
        finally:
            over.set()
            with self._waiting("the prompts of others end"):
                for client in clients:
                    client.join()
        if failures:
            raise failures[0]

    # --- the run ---------------------------------------------------------------------------------

    def fork(self) -> Decision:
        main = self._answers["main"]
        reply = self._kv.fork(
            "child",
            parent="main",
            isl=main.prompt_tokens + 40,
            osl=ANSWER_TOKENS,
            starts_in_s=2.0,
            runs_s=300.0,
            wait_s=20.0,
        )
        messages = follow_up(self._messages["main"], main.text, "Sub-agent: name the ship.")
        answer = self._turn("child", messages, parent="main")
        return self._moved("fork of main", reply, answer, "prefetch")

    def next_turn(self) -> Decision:
        reply = self._kv.next_turn("notes", starts_in_s=2.0, osl=ANSWER_TOKENS, wait_s=20.0)
        answer = self._turn("notes", follow_up(self._messages["notes"], self._answers["notes"].text))
        return self._moved("next turn of notes in 2 s", reply, answer, "prefetch")

    def one_off(self) -> Decision:
        reply = self._kv.one_off("once", osl=ANSWER_TOKENS)
        messages = follow_up(self._messages["archive"], self._answers["archive"].text, "One question only.")
        pulled, kept = self._pulled(), self._resident()
        answer = self._turn("once", messages)
        # Guards count after the answer, and what should not stay has had time to.
        time.sleep(1.0)
        blocks = self._pulled() - pulled
        stayed = self._resident() - kept
        plan = "fetch into engine memory, retain nothing"
        moved = f"{blocks} blocks read from A, {stayed} more in B's pool afterwards"
        expected = reply.result == "noted" and blocks > 0 >= stayed
        return self._decision("one-off on archive", plan, moved, blocks, answer, expected)

    def wake_up(self) -> Decision:
        with self._waiting("a session sleeps, and A stays busy"):
            time.sleep(max(0.0, self._loaded_s + TREND_S - time.monotonic()))
        reply = self._kv.wake_up("sleeper", idle_s=2400.0, osl=ANSWER_TOKENS, wait_s=20.0)
        answer = self._turn("sleeper", follow_up(self._messages["sleeper"], self._answers["sleeper"].text))
        return self._moved("sleeper wakes up after 40 min", reply, answer, "move")

    def sub_agent_done(self) -> Decision:
        reply = self._kv.sub_agent_done("child", wait_s=20.0)
        moved = f"{reply.blocks} blocks of its own go first from now on; the prefix of main stays"
        return self._decision(
            "sub-agent done", reply.decision, moved, reply.blocks, None, reply.decision == "demote"
        )

    def compaction(self) -> Decision:
        before = self._info("main")
        kept = before.tokens // 4
        reply = self._kv.compaction("main", keeps=kept, isl_before=before.tokens, isl_after=kept, wait_s=20.0)
        guards = sorted({action.guard for action in reply.actions})
        moved = (
            f"{reply.blocks} blocks dropped at {len(guards)} holders ({size(reply.bytes)}): {reply.result}"
        )
        expected = reply.decision == "invalidate" and reply.blocks > 0 and len(guards) == 2
        return self._decision(
            f"compaction of main to {kept} tokens", reply.decision, moved, reply.blocks, None, expected
        )

    # --- inside ----------------------------------------------------------------------------------

    def _turn(self, session: str, messages: Messages, parent: str = "") -> Answer:
        with self._waiting(f"{session!r} asks"):
            return ask(
                self._graph.frontend_url,
                self._graph.model,
                messages,
                max_tokens=ANSWER_TOKENS,
                headers=headers(session, parent=parent),
            )

    def _moved(self, signal: str, reply: SignalReply, answer: Answer, decision: str) -> Decision:
        moved = f"{reply.blocks} blocks, {size(reply.bytes)}, to {reply.guard}: {reply.result}"
        expected = reply.decision == decision and reply.result in ("done", "partial") and reply.blocks > 0
        return self._decision(
            signal, f"{reply.decision} ({reply.reason})", moved, reply.blocks, answer, expected
        )

    def _decision(
        self, signal: str, plan: str, moved: str, blocks: int, answer: Answer | None, expected: bool
    ) -> Decision:
        if answer is None:
            return Decision(signal, plan, moved, blocks, None, None, expected)
        saved_s = answer.cached_tokens / self.tokens_per_s
        return Decision(signal, plan, moved, blocks, answer.ttft_s, saved_s, expected)

    def _info(self, session: str) -> SessionInfo:
        info = self._kv.session(session)
        if info is None:
            raise GraphNotUp(f"the router does not know session {session!r}")
        return info

    def _pulled(self) -> int:
        return round(scrape(self._b.guard_metrics_url).total("kvcr_pulled_blocks_total"))

    def _resident(self) -> int:
        return round(scrape(self._b.guard_metrics_url).total("kvcr_pool_slots", state="ready"))
