# SPDX-License-Identifier: Apache-2.0
"""What an agent harness tells the router about a session: one JSON object, version 1.

The same object travels as the request header ``x-dynamo-meta-kvcr``, as the body of ``POST /v1/kv/signals``
and as a NATS message on :func:`signals_subject`. ``docs/signals.schema.json`` is generated from the struct
below. Every time is a duration from receipt, in seconds: clocks of harness and router need not agree.
"""

from __future__ import annotations

import enum
import json
import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvcr.errors import KvcrError

VERSION = 1
MAX_SIGNAL_BYTES = 8192
MAX_TOKENS = 16_777_216
MAX_SECONDS = 604_800.0
MAX_NAME = 256
MAX_MESSAGES = 100_000

HEADER = "x-dynamo-meta-kvcr"
"""On a request. Dynamo passes ``x-dynamo-meta-*`` headers on as context metadata."""
METADATA_KEY = "kvcr"
"""The same, as the router sees it."""
SESSION_HEADER = "x-dynamo-session-id"
PARENT_HEADER = "x-dynamo-parent-session-id"
TENANT_HEADER = "x-tenant-id"
"""On HTTP and NATS signals; the same header that gives a request its cache salt in Dynamo's frontend."""


def signals_subject(namespace: str) -> str:
    """Where routers listen for signals. A request (with a reply subject) is answered as over HTTP."""
    return f"kvcr.v1.{namespace}.signals"


class Kind(enum.StrEnum):
    """What happens to the session."""

    FORK = "fork"
    """``session`` starts from the context of ``parent``: a sub-agent."""
    COMPACTION = "compaction"
    """The context is replaced by a shorter one; only the kept head will be asked for again."""
    ONE_OFF = "one_off"
    """The next request of this session is its only one."""
    WAKE_UP = "wake_up"
    """The session comes back after a long pause."""
    NEXT_TURN = "next_turn"
    """The next request of this session is on its way."""
    SUB_AGENT_DONE = "sub_agent_done"
    """A forked session ended; its own blocks are safe to evict, its parent's stay."""
    SESSION_END = "session_end"
    """The session ended: everything that only it used is safe to evict."""
    PIN = "pin"
    """Keep the session's blocks from eviction for ``ttl_s``. Withdrawing the signal unpins."""


Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
SomeSeconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]


class Signal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One signal. Only ``kind`` and ``session`` are always needed; every other field improves the plan."""

    kind: Annotated[Kind, Meta(description="What happens to the session.")]
    session: Annotated[
        str, Meta(min_length=1, max_length=MAX_NAME, description="Session the signal is about.")
    ]
    version: Annotated[Literal[1], Meta(description="Version of this schema.")] = 1
    signal_id: Annotated[
        str,
        Meta(
            max_length=MAX_NAME,
            description="Names the signal, to repeat it safely and to withdraw it. Made up when empty.",
        ),
    ] = ""
    parent: Annotated[
        str,
        Meta(max_length=MAX_NAME, description="Session whose context this one starts from. fork needs it."),
    ] = ""
    isl: Annotated[
        Tokens | None,
        Meta(description="Prompt tokens of the turn that is coming."),
    ] = None
    osl: Annotated[Tokens | None, Meta(description="Tokens that the turn will probably generate.")] = None
    starts_in_s: Annotated[
        Seconds | None,
        Meta(description="Seconds until the turn is sent. Without it: now."),
    ] = None
    runs_s: Annotated[
        Seconds | None,
        Meta(description="Seconds that the session will be at work, all turns together."),
    ] = None
    next_in_s: Annotated[
        Seconds | UnsetType | None,
        Meta(
            description="Seconds until the turn after this one; null: there is none; absent: not known.",
        ),
    ] = UNSET
    keeps: Annotated[
        Tokens | None,
        Meta(description="Leading tokens of the old context that the new one keeps."),
    ] = None
    keeps_messages: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_MESSAGES)] | None,
        Meta(description="The same, in leading messages. Only one of the two."),
    ] = None
    idle_s: Annotated[
        Seconds | None,
        Meta(description="Seconds the session has been idle, or will be."),
    ] = None
    isl_before: Annotated[Tokens | None, Meta(description="Tokens of the context before compaction.")] = None
    isl_after: Annotated[Tokens | None, Meta(description="Tokens of the context after compaction.")] = None
    deadline_s: Annotated[
        SomeSeconds | None,
        Meta(description="Seconds from now after which acting is of no use."),
    ] = None
    ttl_s: Annotated[SomeSeconds | None, Meta(description="Seconds that a pin lasts. pin needs it.")] = None


class BadSignal(KvcrError):
    """A signal was refused; says which field, what it held and what is allowed."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        where = f"field {field!r} is {shown}" if field else f"the signal is {shown}"
        super().__init__(f"{where}; {limit}")
        self.field = field
        self.value = shown
        self.limit = limit

    def as_json(self) -> dict[str, str]:
        return {"field": self.field, "value": self.value, "limit": self.limit, "message": str(self)}


class ActionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one action at one guard. ``result`` is an ``ActionCode``, or ``pending``."""

    guard: str
    action: str
    result: str
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    detail: str = ""


class SignalReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a signal."""

    signal_id: str
    session: str
    plan_id: str
    decision: str
    """``copy``, ``move``, ``prefetch``, ``invalidate``, ``demote``, ``pin``, ``no_retain`` or ``none``"""
    result: str
    """``done``, ``partial``, ``pending`` (guards have not all answered yet), ``scheduled`` (will be acted on
    shortly before the turn), ``noted`` (nothing to move; the next request is planned with it), ``withdrawn``,
    or the code of the guards when they all gave the same"""
    reason: str
    blocks: int = 0
    bytes: int = 0
    worker_id: int = 0
    """Dynamo instance the announced turn is planned on; 0 for none"""
    guard: str = ""
    """the guard beside it"""
    actions: list[ActionReport] = []


class BlockPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What one guard, or the engine beside it, has of a session."""

    guard: str
    """empty for an engine without one"""
    tier: str
    """G1: in the memory of the engine; G2: in the guard's pool"""
    blocks: int
    leading_blocks: int
    """without a gap from the first one on: what a request can reuse there"""
    worker_id: int = 0
    """Dynamo instance of the engine; 0 while none is beside the guard"""


class AnnouncedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that was announced and has not come."""

    signal_id: str
    kind: str
    starts_in_s: float
    worker_id: int
    guard: str
    state: str
    """``noted``, ``scheduled``, ``moving``, ``ready`` or ``failed``"""
    plan_id: str


class LastPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The last decision about a session."""

    plan_id: str
    signal: str
    """kind of the signal, or ``request``"""
    decision: str
    reason: str
    worker_id: int = 0
    guard: str = ""
    blocks: int = 0
    bytes: int = 0
    sources: list[str] = []
    expected_s: float = 0.0
    """estimated time to first token of its turn"""


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session's blocks are, and what was decided about it."""

    session: str
    parent: str
    home: str
    """guard that its blocks were last put at; empty before its first request"""
    worker_id: int
    """Dynamo instance that ran it last"""
    tokens: int
    blocks: int
    shared_blocks: int
    """leading blocks that another session uses too"""
    children: list[str]
    turns: int
    running: int
    idle_s: float
    places: list[BlockPlace]
    announced: list[AnnouncedTurn]
    last_plan: LastPlan | None = None


_NEEDED = {Kind.FORK: ("parent",), Kind.PIN: ("ttl_s",)}
_PATH = re.compile(r" - at `\$\.(\w+)`$")
_UNKNOWN = re.compile(r"unknown field `(.+)`")
_MISSING = re.compile(r"missing required field `(.+)`")


def read_signal(raw: bytes | str, defaults: Mapping[str, str] | None = None) -> Signal:
    """The signal in ``raw`` (JSON). ``defaults`` are fields that the message may leave out, because its
    carrier says them. A signal without an id is given one. Raises :class:`BadSignal`.
    """
    size = len(raw)
    if size > MAX_SIGNAL_BYTES:
        raise BadSignal("", f"{size} bytes long", f"at most {MAX_SIGNAL_BYTES} bytes are read")
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        text = raw if isinstance(raw, str) else raw.decode(errors="replace")
        raise BadSignal("", text, f"expected a JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise BadSignal("", fields, "expected a JSON object")
    fields = {name: value for name, value in (defaults or {}).items() if value} | fields
    return check(fields)


def check(fields: Mapping[str, Any]) -> Signal:
    """The signal with these fields. Raises :class:`BadSignal`."""
    try:
        signal = msgspec.convert(dict(fields), Signal)
    except msgspec.ValidationError as error:
        raise _refusal(fields, str(error)) from error
    for needed in _NEEDED.get(signal.kind, ()):
        if not getattr(signal, needed):
            raise BadSignal(needed, getattr(signal, needed), f"kind {signal.kind.value!r} needs it")
    if signal.keeps is not None and signal.keeps_messages is not None:
        raise BadSignal("keeps_messages", signal.keeps_messages, "give keeps or keeps_messages, not both")
    if signal.parent == signal.session:
        raise BadSignal("parent", signal.parent, "a session is not its own parent")
    if signal.isl_before is not None and (signal.isl_after or 0) > signal.isl_before:
        raise BadSignal("isl_after", signal.isl_after, f"at most isl_before, {signal.isl_before}")
    if not signal.signal_id:
        signal = msgspec.structs.replace(signal, signal_id=uuid.uuid4().hex)
    return signal


def _refusal(fields: Mapping[str, Any], text: str) -> BadSignal:
    if unknown := _UNKNOWN.search(text):
        name = unknown.group(1)
        return BadSignal(
            name, fields.get(name), f"no such field; known are {', '.join(Signal.__struct_fields__)}"
        )
    if missing := _MISSING.search(text):
        return BadSignal(missing.group(1), None, "required")
    path = _PATH.search(text)
    name = path.group(1) if path else ""
    limit = _PATH.sub("", text)
    if name == "kind":
        limit = f"expected one of {', '.join(Kind)}"
    return BadSignal(name, fields.get(name) if name else dict(fields), limit[:1].lower() + limit[1:])


def schema() -> dict[str, Any]:
    """The JSON Schema of a signal, as published in ``docs/signals.schema.json``."""
    (found,), components = msgspec.json.schema_components([Signal], ref_template="#/$defs/{name}")
    defs = dict(components)
    built = defs.pop(found["$ref"].rpartition("/")[2])
    built["allOf"] = [
        {
            "if": {"properties": {"kind": {"const": kind.value}}},
            "then": {"required": list(names)},
        }
        for kind, names in _NEEDED.items()
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:kvcr:signal:{VERSION}",
        **built,
        "$defs": defs,
    }
