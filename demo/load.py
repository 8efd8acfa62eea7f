# SPDX-License-Identifier: Apache-2.0
"""A steady load of chat sessions: each asks its next question when it has read the last answer.

A request that fails is asked again at once, as any client would; both are in the record.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from demo.client import Answer, RequestFailed, RequestHung, ask
from demo.document import follow_up, prompt
from demo.graph import Graph, Worker

QUESTIONS = (
    "What is the dog called?",
    "Who keeps the light?",
    "What is the supply boat called?",
    "What does the lamp burn?",
    "How high is the tower?",
    "What was the weather like?",
)
THINK_S = 0.5
"""Between an answer and the next question."""
RETRY_S = 0.1
SILENCE_S = 90.0
"""A request that gets nothing for this long is called hung. Six prompts on two busy cores take a minute."""


class Outcome(enum.StrEnum):
    OK = "ok"
    FAILED = "failed"
    """An error, or a stream that broke."""
    HUNG = "hung"
    """Neither an answer nor an error."""


@dataclass(frozen=True)
class Request:
    """One request of a session; times are of ``time.monotonic``."""

    session: int
    home: str
    """Label of the worker that computed the session's document."""
    turn: int
    retry: bool
    """It repeats one that failed."""
    sent_s: float
    text_s: tuple[float, ...]
    """When each piece of text came; a piece is a token, or a few."""
    ended_s: float
    outcome: Outcome
    words: str = ""
    """Of the error."""
    answer: Answer | None = None

    @property
    def ttft_s(self) -> float | None:
        """None when no text came."""
        return self.text_s[0] - self.sent_s if self.text_s else None

    def pause_s(self, moment_s: float) -> float | None:
        """Silence around a moment in the middle of the answer; None when it was not in the middle."""
        before = [s for s in self.text_s if s < moment_s]
        after = [s for s in self.text_s if s >= moment_s]
        return after[0] - before[-1] if before and after else None


class Session(threading.Thread):
    """One chat about one document. The first turn runs at ``home``, the router places all others."""

    def __init__(
        self,
        number: int,
        graph: Graph,
        home: Worker,
        *,
        variant: int,
        words: int,
        max_tokens: int,
        on_end: Callable[[Request], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        """``variant`` and ``words`` choose the document. ``on_end`` is called from this thread."""
        super().__init__(name=f"session-{number}", daemon=True)
        self.number = number
        self.home = home
        self.requests: list[Request] = []
        self.under_way: list[float] = []
        """Times of the text of the request that is running; read by others, for what they see is so."""
        self.messages: list[Mapping[str, str]] = prompt(variant, QUESTIONS[0], words)
        """The next prompt."""
        self._graph = graph
        self._max_tokens = max_tokens
        self._on_end = on_end
        self._silence_s = silence_s
        self._stopping = threading.Event()

    def run(self) -> None:
        turn, retry = 0, False
        while not self._stopping.is_set():
            request = self._ask(turn, retry)
            self.requests.append(request)
            self._on_end(request)
            if request.answer is None:
                retry = True
                self._stopping.wait(RETRY_S)
                continue
            turn, retry = turn + 1, False
            question = QUESTIONS[turn % len(QUESTIONS)]
            self.messages = follow_up(self.messages, request.answer.text, question)
            self._stopping.wait(THINK_S)

    def stop(self) -> None:
        """Ask no more; the request under way ends first."""
        self._stopping.set()

    def _ask(self, turn: int, retry: bool) -> Request:
        times: list[float] = []
        self.under_way = times
        at_home = turn == 0 and not retry
        sent_s = time.monotonic()
        answer, outcome, words = None, Outcome.OK, ""
        try:
            answer = ask(
                self._graph.frontend_url,
                self._graph.model,
                self.messages,
                max_tokens=self._max_tokens,
                timeout_s=self._silence_s,
                on_text=lambda _piece: times.append(time.monotonic()),
                **self._graph.where(self.home if at_home else None, self.name),
            )
        except RequestHung as error:
            outcome, words = Outcome.HUNG, str(error)
        except RequestFailed as error:
            outcome, words = Outcome.FAILED, str(error)
        self.under_way = []
        return Request(
            session=self.number,
            home=self.home.label,
            turn=turn,
            retry=retry,
            sent_s=sent_s,
            text_s=tuple(times),
            ended_s=time.monotonic(),
            outcome=outcome,
            words=words,
            answer=answer,
        )


class Load:
    """All sessions together."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = sessions

    @property
    def requests(self) -> list[Request]:
        """Everything that ended so far, in the order of sending."""
        return sorted((r for s in self.sessions for r in list(s.requests)), key=lambda r: r.sent_s)

    def turns_since(self, since_s: float) -> int:
        """Answers to requests sent since then, of the session that has the fewest."""
        return min(
            sum(r.outcome is Outcome.OK and r.sent_s >= since_s for r in list(session.requests))
            for session in self.sessions
        )

    def answering(self, pieces: int) -> int:
        """How many sessions have got this many pieces of an answer and wait for more."""
        return sum(len(session.under_way) >= pieces for session in self.sessions)

    def stop(self) -> None:
        """Let the requests under way end."""
        for session in self.sessions:
            session.stop()
        for session in self.sessions:
            session.join()
