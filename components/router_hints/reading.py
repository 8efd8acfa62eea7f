# SPDX-License-Identifier: Apache-2.0
"""From a signal as it was sent to what the planner takes: a :class:`Turn`. Pure."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from kvcr.protocol.signals import Kind, Signal
from router_hints import turns
from router_hints.turns import Turn

_KINDS = {
    Kind.FORK: turns.Kind.FORK,
    Kind.COMPACTION: turns.Kind.COMPACTION,
    Kind.ONE_OFF: turns.Kind.ONE_OFF,
    Kind.WAKE_UP: turns.Kind.WAKE_UP,
    Kind.NEXT_TURN: turns.Kind.TURN,
    Kind.SUB_AGENT_DONE: turns.Kind.END,
    Kind.SESSION_END: turns.Kind.END,
    Kind.PIN: turns.Kind.TURN,
}


def turn_of(signal: Signal, since_s: float = 0.0, *, here: bool = False) -> Turn:
    """The turn that ``signal`` announced, ``since_s`` after it was received.

    ``here``: its request has arrived, so it neither starts later nor expires.
    """
    starts_in_s = max(0.0, (signal.starts_in_s or 0.0) - since_s)
    expires = None if signal.deadline_s is None else max(0.0, signal.deadline_s - since_s)
    next_in_s = signal.next_in_s if isinstance(signal.next_in_s, float | int) else None
    return Turn(
        session=signal.session,
        parent=signal.parent,
        kind=_KINDS[signal.kind],
        isl=signal.isl,
        osl=signal.osl,
        starts_in_s=0.0 if here else starts_in_s,
        runs_s=signal.runs_s,
        next_in_s=next_in_s,
        last=signal.kind is Kind.ONE_OFF or signal.next_in_s is None,
        keeps=signal.keeps,
        idle_s=signal.idle_s or 0.0,
        isl_before=signal.isl_before,
        isl_after=signal.isl_after,
        expires_in_s=None if here else expires,
    )


def kept_tokens(signal: Signal, message_starts: tuple[int, ...]) -> int | None:
    """Leading tokens of the old context that survive a compaction; None when the signal does not say.

    ``message_starts`` are the token positions at which the messages of the old prompt begin.
    """
    if signal.keeps is not None:
        return signal.keeps
    if signal.keeps_messages is not None and message_starts:
        if signal.keeps_messages < len(message_starts):
            return message_starts[signal.keeps_messages]
        return message_starts[-1]
    return signal.isl_after


def already_compacted(signal: Signal, tokens: int) -> bool:
    """Whether a session of ``tokens`` tokens is the one after the compaction: its request was faster."""
    if signal.isl_before is None or not tokens:
        return False
    return tokens < (signal.isl_before + (signal.isl_after or 0)) / 2


def merged(announced: Signal, carried: Signal) -> Signal:
    """What both say of one turn: the signal on the request wins, field by field."""
    fields = {
        name: getattr(announced, name)
        for name in Signal.__struct_fields__
        if name not in ("kind", "session", "version", "signal_id") and _said(getattr(announced, name))
    }
    fields |= {
        name: getattr(carried, name)
        for name in Signal.__struct_fields__
        if _said(getattr(carried, name)) or name in ("kind", "session", "next_in_s")
        if not (name == "next_in_s" and carried.next_in_s is UNSET)
    }
    return msgspec.structs.replace(carried, **fields)


def _said(value: object) -> bool:
    return value is not None and value is not UNSET and value != ""
