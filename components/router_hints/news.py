# SPDX-License-Identifier: Apache-2.0
"""What router replicas tell each other, over core NATS. Version 1.

Nothing here is needed to be right: a replica that hears nothing routes with what it knows itself. Every
message says how things are, not how they changed, so that one may be lost or come twice; the newest wins.
"""

from __future__ import annotations

import math

from kvcr.protocol.codec import Codec, Message

MAX_NEWS_BYTES = 900_000


def news_subject(namespace: str) -> str:
    """Where every replica speaks and listens."""
    return f"kvcr.v1.{namespace}.routers.news"


def ask_subject(namespace: str, router: str) -> str:
    """Where one replica is asked."""
    return f"kvcr.v1.{namespace}.routers.ask.{router}"


class Hello(Message, frozen=True):
    """A replica started, or NATS was away: tell me everything."""

    router: str


class Alive(Message, frozen=True):
    """Once a second. ``bookings`` are its own requests in flight."""

    router: str
    bookings: int


class Leaving(Message, frozen=True):
    """It stops; nothing of it is in flight any more."""

    router: str


class Booked(Message, frozen=True):
    """A request is on its way to a worker."""

    router: str
    request_id: str
    worker_id: int
    dp_rank: int
    prefill_tokens: int
    blocks: int
    copies: dict[str, int]
    """bytes asked of each source guard"""
    prefilling: bool = True
    copied_in_s: float = math.inf
    """when they should have sent them"""


class Started(Message, frozen=True):
    """A request gave its first output."""

    router: str
    request_id: str


class Released(Message, frozen=True):
    """A request is over."""

    router: str
    request_id: str


class TurnNews(Message, frozen=True):
    """An announced turn, as its owner planned it."""

    router: str
    tenant: str
    signal: bytes
    """JSON"""
    plan_id: str
    age_s: float
    """since the signal was received"""
    worker_id: int
    dp_rank: int
    guard: str
    state: str
    prefill_tokens: int
    first: int = 0
    end: int = 0
    ready_in_s: float = 0.0
    """while blocks ``first .. end`` are on their way"""


class TurnOver(Message, frozen=True):
    """It came, was withdrawn, or nobody waits for it any more."""

    router: str
    tenant: str
    signal_id: str


class SessionNews(Message, frozen=True):
    """A session as it is now. Its chain is that of the receiver up to block ``first``, whose last key must
    be ``before``, followed by ``keys``."""

    router: str
    tenant: str
    session: str
    parent: str
    unix_s: float
    namespace: str
    model: str
    group: int
    first: int
    before: bytes
    keys: bytes
    tail: list[int]
    mark: bytes
    """digest of the tokens of all full blocks"""
    home: str
    guards: list[str]
    worker_id: int
    dp_rank: int
    turns: int
    plan: bytes
    """JSON of its last plan; empty without one"""
    ended: bool = False
    names: bytes = b""
    """of the same blocks as ``keys``, see :mod:`router_hints.names`; empty when not known"""


class Wanted(Message, frozen=True):
    """The receiver of a SessionNews lacks its beginning: tell all of it."""

    router: str
    tenant: str
    session: str


News = Hello | Alive | Leaving | Booked | Started | Released | TurnNews | TurnOver | SessionNews | Wanted
news: Codec[News] = Codec(News, max_bytes=MAX_NEWS_BYTES)
