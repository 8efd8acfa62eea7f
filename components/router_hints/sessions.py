# SPDX-License-Identifier: Apache-2.0
"""Sessions of agent harnesses: the chain of blocks each has built up, and who shares it.

A session is named by its tenant and its id, so a tenant reaches only its own. What is kept of one is 16
bytes a block and no text. The table is bounded by sessions, blocks and idle time; a session that was
forgotten comes back with its next request. Pure: the time is an argument. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcr.keys import KEY_BYTES, KeySpace
from kvcr.protocol.signals import LastPlan
from router_hints.chains import Chain, Tokens, common_blocks
from router_hints.costs import Rank
from router_hints.names import NAME_BYTES

MAX_STALE = 8
"""Abandoned branches remembered of one session."""


class SessionKey(NamedTuple):
    tenant: str
    """Cache salt of its requests; empty without tenants."""
    session: str


@dataclass
class Branch:
    """Blocks that were in a session's chain and no longer are: its history was written anew."""

    space: KeySpace
    first: int
    keys: bytes
    names: bytes = b""


class Piece(NamedTuple):
    """Consecutive blocks of a session."""

    space: KeySpace
    first: int
    """position of the first one"""
    keys: bytes
    names: bytes
    """of the same blocks, see :mod:`router_hints.names`; empty when not known"""


@dataclass
class Session:
    """What is known of one session."""

    key: SessionKey
    parent: str = ""
    chain: Chain | None = None
    """None until its first request."""
    stale: list[Branch] = field(default_factory=list)
    home: str = ""
    """Guard that its blocks were moved or prefetched to, or whose worker ran it last."""
    rank: Rank | None = None
    """Where it ran last."""
    guards: set[str] = field(default_factory=set)
    """Guards that may have any of its blocks: it ran beside them, or they were sent copies."""
    turns: int = 0
    running: int = 0
    touched_s: float = 0.0
    plan: LastPlan | None = None
    """The last decision about it, as it is shown."""
    marks: tuple[int, ...] = ()
    """Token positions at which the messages of its last prompt begin, when that is known."""
    changed_unix_s: float = 0.0
    """When its chain changed, by the clock of the router that changed it: the newest wins."""
    writer: str = ""
    """Router that changed it last; empty before it was told to others."""
    ended: bool = False

    @property
    def blocks(self) -> int:
        return (self.chain.blocks if self.chain else 0) + sum(len(b.keys) for b in self.stale) // KEY_BYTES


@dataclass
class Run:
    """One request of a session."""

    session: Session
    chain: Chain
    """Of this request's prompt; decoded tokens are appended to it."""
    dropped: Branch | None
    """What the session's chain before does not have in common with it."""
    closed: bool = False


class SessionTable:
    """All sessions. What it returns is live: it may change with the next call."""

    def __init__(
        self,
        *,
        block_size: int,
        max_sessions: int = 20_000,
        max_blocks: int = 4_000_000,
        ttl_s: float = 7200.0,
    ) -> None:
        self.block_size = block_size
        self.max_sessions = max_sessions
        self.max_blocks = max_blocks
        self.ttl_s = ttl_s
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._by_head: dict[bytes, set[SessionKey]] = {}
        """sessions by the key of their first block: only those can share anything"""
        self._blocks = 0
        self.forgotten = {"idle": 0, "full": 0, "ended": 0}
        """sessions dropped, by reason"""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def blocks(self) -> int:
        return self._blocks

    def all(self) -> Iterable[Session]:
        return self._sessions.values()

    def get(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def open(self, key: SessionKey, parent: str, now_s: float) -> Session:
        """The session, made when it is new. A parent that is named later is kept; it is never replaced."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(key)
        session.parent = session.parent or parent
        session.touched_s = now_s
        self._sessions.move_to_end(key)
        self._bound(now_s, keep=key)
        return session

    def begin(self, key: SessionKey, parent: str, space: KeySpace, tokens: Tokens, now_s: float) -> Run:
        """A request of this session arrived: its prompt is the session's chain from now on."""
        session = self.open(key, parent, now_s)
        before = session.chain
        chain = Chain.of(space, self.block_size, tokens, before or self._parents_chain(session))
        dropped = None
        if before is not None and before.space == space:
            kept = before.common(chain)
            if kept < before.blocks:
                dropped = Branch(space, kept, before.cut(kept), before.cut_names(kept))
        self._set_chain(session, chain)
        if dropped is not None:
            self._blocks -= session.blocks
            session.stale = [*session.stale, dropped][-MAX_STALE:]
            self._blocks += session.blocks
        session.turns += 1
        session.running += 1
        session.ended = False
        self._bound(now_s, keep=key)
        return Run(session, chain, dropped)

    def decoded(self, run: Run, tokens: Sequence[int]) -> None:
        """The worker put these out."""
        before = run.chain.blocks
        head = before > 0
        run.chain.append(tokens)
        if run.session.chain is run.chain and self._sessions.get(run.session.key) is run.session:
            self._blocks += run.chain.blocks - before
            if not head and run.chain.blocks:
                self._enter(run.session)

    def finish(self, run: Run, now_s: float) -> None:
        """The request is over, however it ended. Again: nothing."""
        if not run.closed:
            run.closed = True
            run.session.running -= 1
            run.session.touched_s = now_s

    def adopt(
        self, key: SessionKey, parent: str, chain: Chain | None, unix_s: float, now_s: float
    ) -> Session | None:
        """Take another router's newer chain of this session; None when ours is newer."""
        known = self._sessions.get(key)
        if known is not None and known.changed_unix_s >= unix_s:
            return None
        session = self.open(key, parent, now_s)
        session.changed_unix_s = unix_s
        if chain is not None:
            self._set_chain(session, chain)
            self._bound(now_s, keep=key)
        return session

    def compact(self, session: Session, keep_blocks: int) -> None:
        """Its chain ends after this many blocks, and its abandoned branches are gone."""
        self._blocks -= session.blocks
        session.stale = []
        chain = session.chain
        if chain is not None and keep_blocks < chain.blocks:
            self._leave(session)
            # A chain of its own: a request that still decodes appends to the old one.
            kept, names = chain.cut(0, keep_blocks), chain.cut_names(0, keep_blocks)
            session.chain = Chain.restored(chain.space, chain.block_size, kept, [], b"", names)
            self._enter(session)
        self._blocks += session.blocks

    def forget(self, key: SessionKey, reason: str = "ended") -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._leave(session)
            self._blocks -= session.blocks
            self.forgotten[reason] += 1

    def expire(self, now_s: float) -> None:
        """Drop what was idle for too long."""
        self._bound(now_s, keep=None)

    # --- sharing -----------------------------------------------------------------------------------

    def shared_blocks(self, session: Session, without: Iterable[SessionKey] = ()) -> int:
        """Leading blocks of its chain that another session uses too."""
        chain = session.chain
        return self._shared(session, chain.keys, without) if chain else 0

    def own_blocks(self, session: Session, after: int) -> list[Piece]:
        """What of it nobody else uses, beyond its first ``after`` blocks: of its chain, and of what it left
        behind."""
        chain = session.chain
        if chain is None:
            return []
        found = []
        first = max(after, self.shared_blocks(session))
        if first < chain.blocks:
            found.append(Piece(chain.space, first, chain.cut(first), chain.cut_names(first)))
        for branch in session.stale:
            # The part of a branch that is in use again, here or elsewhere, is its beginning.
            head = bytes(branch.first * KEY_BYTES) + branch.keys
            until = max(
                self._shared(session, head, (), branch.first), common_blocks(head, chain.keys, branch.first)
            )
            if until < branch.first + len(branch.keys) // KEY_BYTES:
                names = branch.names[(until - branch.first) * NAME_BYTES :]
                found.append(Piece(branch.space, until, head[until * KEY_BYTES :], names))
        return found

    def children(self, session: Session) -> list[Session]:
        tenant, name = session.key
        return [s for s in self._sessions.values() if s.parent == name and s.key.tenant == tenant]

    # --- inside ------------------------------------------------------------------------------------

    def _shared(
        self, session: Session, keys: bytes | bytearray, without: Iterable[SessionKey], first: int = 0
    ) -> int:
        """End of what ``keys`` has in common with a chain of another session, from position ``first`` on."""
        chain = session.chain
        if chain is None or not chain.blocks:
            return first
        excluded = {session.key, *without}
        head = bytes((chain.keys if first else keys)[:KEY_BYTES])
        most = first
        for key in self._by_head.get(head, ()):
            other = self._sessions[key].chain
            if key not in excluded and other is not None:
                most = max(most, common_blocks(keys, other.keys, first))
        return most

    def _parents_chain(self, session: Session) -> Chain | None:
        parent = self._sessions.get(SessionKey(session.key.tenant, session.parent))
        return parent.chain if parent is not None else None

    def _set_chain(self, session: Session, chain: Chain) -> None:
        self._leave(session)
        self._blocks -= session.chain.blocks if session.chain else 0
        session.chain = chain
        self._blocks += chain.blocks
        self._enter(session)

    def _enter(self, session: Session) -> None:
        if session.chain is not None and session.chain.blocks:
            self._by_head.setdefault(bytes(session.chain.keys[:KEY_BYTES]), set()).add(session.key)

    def _leave(self, session: Session) -> None:
        if session.chain is not None and session.chain.blocks:
            head = bytes(session.chain.keys[:KEY_BYTES])
            others = self._by_head.get(head)
            if others is not None:
                others.discard(session.key)
                if not others:
                    del self._by_head[head]

    def _bound(self, now_s: float, keep: SessionKey | None) -> None:
        """Forget the longest idle ones, first those that were idle for too long."""
        spared: list[SessionKey] = []
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            idle = session.touched_s + self.ttl_s < now_s
            full = len(self._sessions) > self.max_sessions or self._blocks > self.max_blocks
            if not idle and not full:
                break
            if key == keep or session.running:
                if len(spared) == len(self._sessions):
                    break
                self._sessions.move_to_end(key)
                spared.append(key)
                continue
            self.forget(key, "idle" if idle else "full")
