# SPDX-License-Identifier: Apache-2.0
"""Traces for bench/replay: the Mooncake project's, changed for a scenario, and one of agents with signals."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from router_hints.turns import Kind, Turn

TOKENS = 512
"""Tokens of a block of the traces."""


@dataclass(frozen=True)
class Request:
    """One request. ``session`` is what a load balancer with sticky sessions would see."""

    at_s: float
    tokens: int
    output: int
    blocks: tuple[int, ...]
    session: int
    turn: Turn = field(default_factory=Turn)

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """The traces name the last block too when it is not full: no engine keeps that one."""
        return self.blocks[: self.tokens // TOKENS]


@dataclass(frozen=True)
class Notice:
    """A signal without a request: of a turn to come, or of a compaction or end. Only we listen."""

    at_s: float
    turn: Turn
    blocks: tuple[int, ...]


def mooncake(path: Path, limit: int | None = None) -> list[Request]:
    """One of the project's traces. A session is known by the first block that not everybody sends."""
    requests = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number == limit:
                break
            raw = json.loads(line)
            blocks = tuple(raw["hash_ids"])
            session = blocks[1] if len(blocks) > 1 else blocks[0]
            requests.append(
                Request(raw["timestamp"] / 1000, raw["input_length"], raw["output_length"], blocks, session)
            )
    return requests


def burst(requests: list[Request]) -> list[Request]:
    """A twelfth of the trace in the middle arrives four times as fast; the rest keeps its pace."""
    first, last = len(requests) * 5 // 12, len(requests) // 2
    begins, ends = requests[first].at_s, requests[last].at_s
    saved = (ends - begins) * 0.75
    changed = []
    for request in requests:
        at_s = request.at_s
        if at_s >= ends:
            at_s -= saved
        elif at_s > begins:
            at_s = begins + (at_s - begins) / 4
        changed.append(replace(request, at_s=at_s))
    return changed


def hot_prefix(requests: list[Request], per_s: float = 20.0, seconds: float = 60.0) -> list[Request]:
    """From the middle on, for a minute, 20 more requests a second that all begin with the same 40 blocks."""
    begins = requests[len(requests) // 2].at_s
    prefix = tuple(range(-40, 0))
    added = [
        Request(begins + n / per_s, 41 * TOKENS - 100, 150, (*prefix, -1000 - n), -1000 - n)
        for n in range(int(per_s * seconds))
    ]
    return sorted([*requests, *added], key=lambda request: request.at_s)


def agents(sessions: int, seed: int = 3) -> list[Request | Notice]:
    """Coding agents: growing contexts, sub-agents that fork, compactions, one-offs, and long pauses.

    Each request carries its turn; what a harness knows before is announced, as :class:`Notice`.
    """
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 60))
    system = tuple(next(fresh) for _ in range(16))
    events: list[Request | Notice] = []
    for session in range(sessions):
        events.extend(_agent(rng, session, system, fresh, rng.uniform(0, 600)))
    return sorted(events, key=lambda event: event.at_s)


def _agent(
    rng: random.Random, session: int, system: tuple[int, ...], fresh: Iterator[int], at_s: float
) -> list[Request | Notice]:
    events: list[Request | Notice] = []
    name, context = f"s{session}", list(system)
    context += [next(fresh) for _ in range(rng.randint(10, 40))]
    turns = rng.randint(8, 16)
    for number in range(turns):
        idle_s = 0.0
        kind = Kind.TURN
        if number and rng.random() < 0.08:
            idle_s = rng.uniform(700, 1500)
            at_s += idle_s
            kind = Kind.WAKE_UP
        think_s = rng.uniform(1.0, 8.0)
        isl = len(context) * TOKENS - rng.randint(0, TOKENS - 1)
        output = rng.randint(80, 500)
        if number:
            # Before its tool call the harness says when it will be back; a sleeper says so on waking.
            ahead_s = min(think_s, 4.0)
            expected = Turn(session=name, kind=kind, isl=isl, osl=output, starts_in_s=ahead_s, idle_s=idle_s)
            events.append(Notice(at_s - ahead_s, expected, tuple(context)))
        last = number == turns - 1
        turn = Turn(
            session=name,
            kind=kind,
            isl=isl,
            osl=output,
            idle_s=idle_s,
            last=last,
            next_in_s=None if last else 12.0,
        )
        events.append(Request(at_s, isl, output, tuple(context), session, turn))
        runs_s = 3.0 + output * 0.025
        if rng.random() < 0.25:
            for child in range(rng.randint(2, 5)):
                fork = (*context, *(next(fresh) for _ in range(rng.randint(1, 4))))
                child_turn = Turn(
                    session=f"{name}.{number}.{child}", parent=name, kind=Kind.FORK, osl=400, runs_s=30.0
                )
                begins_s = at_s + runs_s + 0.05 * child
                events.append(Request(begins_s, len(fork) * TOKENS, 400, fork, session, child_turn))
                done = Turn(session=child_turn.session, parent=name, kind=Kind.END)
                events.append(Notice(begins_s + 30.0, done, fork))
        if rng.random() < 0.15:
            one_off = (*context[: len(context) // 2], *(next(fresh) for _ in range(20)))
            once = Turn(session=name, kind=Kind.ONE_OFF, osl=100)
            events.append(Request(at_s + 1.0, len(one_off) * TOKENS, 100, one_off, session, once))
        context += [next(fresh) for _ in range(rng.randint(2, 12))]
        if len(context) > 180:
            kept = 30
            gone = Turn(
                session=name,
                kind=Kind.COMPACTION,
                isl_before=len(context) * TOKENS,
                isl_after=kept * TOKENS,
                keeps=kept * TOKENS,
            )
            events.append(Notice(at_s + runs_s, gone, tuple(context)))
            context = context[:kept] + [next(fresh) for _ in range(5)]
        at_s += runs_s + think_s
    events.append(Notice(at_s, Turn(session=name, kind=Kind.END), tuple(context)))
    return events
