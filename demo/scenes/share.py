# SPDX-License-Identifier: Apache-2.0
"""One long prefix, two workers: computed on one, pulled by the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from demo.document import follow_up, prompt
from demo.graph import Graph
from demo.observe import Seen, observe

MAX_TOKENS = 24

Waiting = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Shared:
    """The three requests of the scene, in order."""

    cold: Seen
    follow_up: Seen
    pulled: Seen
    """The prompt of ``cold``, on the other worker."""

    @property
    def identical(self) -> bool:
        """Whether the pulled request was answered word for word like the computed one."""
        return self.cold.answer.text == self.pulled.answer.text

    @property
    def sides_agree(self) -> bool:
        """Whether source and destination count the same blocks and bytes."""
        return (self.pulled.pulled_blocks, self.pulled.pulled_bytes) == (
            self.pulled.served_blocks,
            self.pulled.served_bytes,
        )


def warm_up(graph: Graph, waiting: Waiting) -> None:
    """One short unrelated request on each worker, so that first-request costs are not measured."""
    for worker in graph.workers:
        with waiting(f"warming up worker {worker.label}"):
            messages = [{"role": "user", "content": f"Worker {worker.label}, count from one to five."}]
            observe(graph, messages, max_tokens=8, worker=worker, settle=False)


def share(graph: Graph, waiting: Waiting, variant: int = 0, holder: int = 0) -> Shared:
    """Ask about the document on worker ``holder``, follow up there, then ask the same on the other worker."""
    here, there = graph.pair[holder], graph.pair[1 - holder]
    messages = prompt(variant)
    with waiting(f"worker {here.label} computes the document: nothing to reuse yet"):
        cold = observe(graph, messages, max_tokens=MAX_TOKENS, worker=here)
    with waiting(f"worker {here.label} answers a follow-up question"):
        turn = observe(graph, follow_up(messages, cold.answer.text), max_tokens=MAX_TOKENS, worker=here)
    with waiting(f"worker {there.label} gets the same question; it has never seen the document"):
        pulled = observe(graph, messages, max_tokens=MAX_TOKENS, worker=there)
    return Shared(cold, turn, pulled)
