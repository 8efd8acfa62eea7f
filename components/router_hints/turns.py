# SPDX-License-Identifier: Apache-2.0
"""What the planner takes from the agent harness: one turn of a session, and what is known of that session.

Signals in whatever form they come (header, HTTP, NATS) are read elsewhere and end as a :class:`Turn`. A
request without any signal is planned with the default one. Times are relative to the moment of planning, so
that a plan can be made again from its logged inputs.
"""

from __future__ import annotations

import enum

import msgspec


class Kind(enum.StrEnum):
    """What sort of turn it is. Each leads to another plan in the same situation."""

    TURN = "turn"
    """The next turn of a session, or a request nobody announced."""
    FORK = "fork"
    """The first turn of a sub-agent; its prefix belongs to ``parent``, which goes on."""
    COMPACTION = "compaction"
    """The context was rewritten: what follows the kept head is dead."""
    ONE_OFF = "one_off"
    """Nobody comes back to this prompt."""
    WAKE_UP = "wake_up"
    """A session that was idle for long goes on."""
    END = "end"
    """The session, or the sub-agent, is done: its own blocks are safe to evict."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as the harness announced it. ``None`` and zero mean that it did not say."""

    session: str = ""
    """Decides between equal workers instead of the prompt's head: a session stays together."""
    parent: str = ""
    """The session this one shares its prefix with, and which goes on: its blocks are copied, never moved."""
    kind: Kind = Kind.TURN
    isl: int | None = None
    """Tokens of the prompt."""
    osl: int | None = None
    """Tokens of the answer: KV the worker needs room for."""
    starts_in_s: float = 0.0
    """When its request is expected; 0 for a request that is here."""
    runs_s: float | None = None
    """How long the session will go on from its start, with all its turns: what a copy is paid off over."""
    next_in_s: float | None = None
    """Time from its end to the session's next turn."""
    last: bool = False
    """No further turn comes (``"next_in_s": null`` in a signal). When none came before either, nothing of it
    is kept; otherwise its blocks are safe to evict when it is over."""
    keeps: int | None = None
    """Compaction: leading tokens that the new context still begins with."""
    idle_s: float = 0.0
    """How long the session did nothing."""
    isl_before: int | None = None
    """Compaction: tokens of the context before; what lies beyond is not this session's."""
    isl_after: int | None = None
    """Compaction: tokens of the context after. Without ``keeps``, as many leading tokens survive."""
    expires_in_s: float | None = None
    """What cannot be done by then is not begun."""


class Arriving(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks on their way to a guard: a request that is planned there joins the transfer."""

    guard: str
    first: int
    """position in the session's chain"""
    count: int
    ready_in_s: float


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knows of a turn's session."""

    home: str = ""
    """Guard that has its KV since it was last moved or prefetched; empty when nothing was."""
    arriving: tuple[Arriving, ...] = ()
    shared_blocks: int = 0
    """Leading blocks of its chain that another living session uses too. Shared blocks are always leading
    ones: a key names all tokens before it."""
