# SPDX-License-Identifier: Apache-2.0
"""What every engine has in its own memory (G1), from Dynamo's KV events: the top tier of the router's view.

Blocks are named as :mod:`router_hints.names` does, because events carry no tokens and our keys cannot be made
from their hashes. Kept beside a name is the engine's hash, by which a block is dropped.

Each publisher's messages are taken in order: one that comes again changes nothing, one that overtook another
waits for it. What stays missing is repaired by a dump of Dynamo's ``KvRouter``, which recovers from each
engine by itself; known blocks stay in use meanwhile. A dump may be older than what is known: the last
messages are taken again on top of it. A block whose parent is not known is parked until the parent comes,
within a bound. A wrong entry costs a recompute, no wrong answer.

Pure: no I/O, no clock, one thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from router_hints.costs import Rank
from router_hints.kv_events import G1Batch, G1Change
from router_hints.names import follow, unpack

MAX_WAITING = 256
"""Messages kept of one publisher beyond a gap, and during a repair; more is answered by another dump."""
MAX_RECENT = 256
MAX_RECENT_BLOCKS = 4096
"""Messages kept of one publisher that were taken, and blocks in them, at most: on a busy machine ``KvRouter``
may lag by seconds."""
MAX_PARKED = 4096
"""Blocks of one engine whose parent is not known."""
_MAX_TOMBSTONES = 1024


@dataclass
class _Engine:
    """One engine's memory."""

    names: dict[int, int] = field(default_factory=dict)
    """name by the engine's hash"""
    hashes: dict[int, int] = field(default_factory=dict)
    """the engine's hash by name"""
    parked: OrderedDict[int, dict[int, int]] = field(default_factory=OrderedDict)
    """hash of the unknown parent: (hash, hash of its tokens) of what follows it"""
    awaits: dict[int, int] = field(default_factory=dict)
    """the unknown parent by the hash of each block that is parked"""


@dataclass
class _Publisher:
    worker_id: int
    sequence: int
    """of the last message that was taken"""
    waiting: dict[int, G1Batch] = field(default_factory=dict)
    recent: deque[G1Batch] = field(default_factory=deque)
    """the last ones that were taken, without a gap"""
    recent_blocks: int = 0

    def took(self, batch: G1Batch) -> None:
        if batch.sequence != self.sequence + 1:
            # What was lost may have taken back what came before it.
            self.forget()
        self.sequence = batch.sequence
        self.recent.append(batch)
        self.recent_blocks += batch.blocks
        while len(self.recent) > MAX_RECENT or self.recent_blocks > MAX_RECENT_BLOCKS:
            self.recent_blocks -= self.recent.popleft().blocks

    def forget(self) -> None:
        self.recent.clear()
        self.recent_blocks = 0


class EngineMemory:
    """Blocks in G1 by engine. See the module for what it promises. About 180 bytes a block."""

    def __init__(self, *, max_blocks: int = 2_000_000) -> None:
        self._max_blocks = max_blocks
        self._engines: dict[Rank, _Engine] = {}
        self._publishers: dict[int, _Publisher] = {}
        self._dead: OrderedDict[int, None] = OrderedDict()
        self._blocks = 0
        self._repairing = False
        self.wants_repair = "start"
        """why a dump is needed, or empty"""
        self.refused_blocks = 0
        """blocks there was no room for, since the start"""

    def __len__(self) -> int:
        """Blocks known, one that two engines have counted twice."""
        return self._blocks

    @property
    def parked_blocks(self) -> int:
        return sum(len(engine.awaits) for engine in self._engines.values())

    # --- membership -----------------------------------------------------------------------------

    def admit(self, worker_id: int) -> None:
        """Discovery knows this worker. One that it had lost is read again."""
        if worker_id in self._dead:
            del self._dead[worker_id]
            self.wants_repair = "a worker is back"

    def retire(self, worker_id: int) -> None:
        """The worker is gone, and its memory; late events of it are ignored."""
        for rank in [rank for rank in self._engines if rank[0] == worker_id]:
            self._clear(rank)
            del self._engines[rank]
        self._publishers = {p: s for p, s in self._publishers.items() if s.worker_id != worker_id}
        self._dead[worker_id] = None
        if len(self._dead) > _MAX_TOMBSTONES:
            self._dead.popitem(last=False)

    # --- events ---------------------------------------------------------------------------------

    def take(self, batch: G1Batch) -> None:
        """One message, in whatever order it arrives."""
        worker_id = batch.changes[0].rank[0] if batch.changes else 0
        if worker_id in self._dead:
            return
        publisher = self._publishers.get(batch.publisher)
        if publisher is None:
            if batch.sequence:
                self.wants_repair = self.wants_repair or "an engine was there before"
            publisher = self._publishers[batch.publisher] = _Publisher(worker_id, batch.sequence - 1)
        publisher.worker_id = publisher.worker_id or worker_id
        if batch.sequence <= publisher.sequence:
            return
        publisher.waiting[batch.sequence] = batch
        if len(publisher.waiting) > MAX_WAITING:
            publisher.waiting.clear()
            publisher.forget()
            publisher.sequence = batch.sequence
            self.wants_repair = "too many messages wait for a lost one"
        if not self._repairing:
            self._drain(publisher)

    def missing(self) -> bool:
        """Whether a message is missing that later ones wait for, now. Looked at from time to time: what is
        missing twice in a row is lost."""
        return any(publisher.waiting for publisher in self._publishers.values())

    # --- repair ---------------------------------------------------------------------------------

    def begin_repair(self) -> None:
        """From now on messages wait, to be taken on top of a dump. Begin a moment before the dump is taken:
        what came before is in it, and what it does not have yet must be among those that wait."""
        self._repairing = True
        self.wants_repair = ""
        for publisher in self._publishers.values():
            for sequence in sorted(publisher.waiting):
                publisher.took(publisher.waiting[sequence])
            publisher.waiting.clear()

    def abort_repair(self, reason: str) -> None:
        """There is no dump: go on with what is known."""
        if not self.wants_repair:
            self.wants_repair = reason
        self._end_repair()

    def repair(self, dump: Iterable[G1Change]) -> None:
        """Put this in place of everything that is known, and take what waited."""
        for rank in self._engines:
            self._clear(rank)
        for change in dump:
            if change.rank[0] not in self._dead:
                self._apply(change)
        for publisher in self._publishers.values():
            for batch in publisher.recent:
                self._apply_all(batch)
        self._end_repair()

    # --- lookup ---------------------------------------------------------------------------------

    def ranks(self) -> list[Rank]:
        return list(self._engines)

    def blocks(self, rank: Rank) -> int:
        """Blocks known in this engine's memory."""
        engine = self._engines.get(rank)
        return len(engine.names) if engine is not None else 0

    def held(self, names: bytes | bytearray) -> dict[Rank, list[bool]]:
        """Who has which of these blocks. Only engines that have one of them are there."""
        wanted = unpack(names)
        return {
            rank: [name in engine.hashes for name in wanted]
            for rank, engine in self._engines.items()
            if not engine.hashes.keys().isdisjoint(wanted)
        }

    def leading(self, names: bytes | bytearray) -> dict[Rank, int]:
        """How many of these blocks each engine has, from the first one on."""
        wanted = unpack(names)
        return {
            rank: next((at for at, name in enumerate(wanted) if name not in engine.hashes), len(wanted))
            for rank, engine in self._engines.items()
        }

    def engine_hashes(self, rank: Rank | None, names: bytes | bytearray) -> npt.NDArray[np.uint64]:
        """The engine's hash of each of the blocks, uint64 ``[blocks]``; 0 where it does not have it."""
        engine = self._engines.get(rank) if rank is not None else None
        wanted = unpack(names)
        if engine is None:
            return np.zeros(len(wanted), np.uint64)
        return np.array([engine.hashes.get(name, 0) for name in wanted], np.uint64)

    # --- inside ---------------------------------------------------------------------------------

    def _drain(self, publisher: _Publisher) -> None:
        while (batch := publisher.waiting.pop(publisher.sequence + 1, None)) is not None:
            publisher.took(batch)
            self._apply_all(batch)

    def _end_repair(self) -> None:
        for publisher in self._publishers.values():
            for sequence in sorted(publisher.waiting):
                if sequence != publisher.sequence + 1:
                    # It may have changed what the dump says and an older message takes back here.
                    self.wants_repair = self.wants_repair or "a message was lost meanwhile"
                publisher.took(publisher.waiting[sequence])
                self._apply_all(publisher.waiting[sequence])
            publisher.waiting.clear()
        self._repairing = False

    def _apply_all(self, batch: G1Batch) -> None:
        for change in batch.changes:
            self._apply(change)

    def _apply(self, change: G1Change) -> None:
        engine = self._engines.setdefault(change.rank, _Engine())
        if change.cleared:
            self._clear(change.rank)
            return
        for removed in change.removed:
            self._remove(engine, removed)
        if change.stored:
            self._store(engine, change.parent, change.stored)

    def _store(self, engine: _Engine, parent: int | None, blocks: tuple[tuple[int, int], ...]) -> None:
        """Blocks that follow each other, and what was parked for want of one of them."""
        todo = [(parent, blocks)]
        while todo:
            parent, blocks = todo.pop()
            if parent is not None and parent not in engine.names:
                self._park(engine, parent, blocks)
                continue
            before = engine.names[parent] if parent is not None else None
            for block_hash, tokens_hash in blocks:
                before = follow(before, tokens_hash)
                if not self._put(engine, block_hash, before):
                    break
                for each, tokens in _unpark(engine, block_hash).items():
                    todo.append((block_hash, ((each, tokens),)))

    def _put(self, engine: _Engine, block_hash: int, name: int) -> bool:
        known = engine.names.get(block_hash)
        if known == name:
            return True
        if self._blocks >= self._max_blocks:
            self.refused_blocks += 1
            return False
        if known is not None:
            self._remove(engine, block_hash)
        if (other := engine.hashes.get(name)) is not None:
            self._remove(engine, other)
        engine.names[block_hash], engine.hashes[name] = name, block_hash
        self._blocks += 1
        return True

    def _park(self, engine: _Engine, parent: int, blocks: tuple[tuple[int, int], ...]) -> None:
        # A full view lacks parents by its own doing; what is taken again over a dump may be older than it.
        if self._blocks < self._max_blocks and not self._repairing:
            self.wants_repair = self.wants_repair or "a block's parent is not known"
        for block_hash, tokens_hash in blocks:
            if engine.awaits.get(block_hash, parent) != parent:
                _give_up(engine, block_hash)
            engine.parked.setdefault(parent, {})[block_hash] = tokens_hash
            engine.awaits[block_hash] = parent
            parent = block_hash
        while len(engine.awaits) > MAX_PARKED:
            _unpark(engine, next(iter(engine.parked)))

    def _remove(self, engine: _Engine, block_hash: int) -> None:
        name = engine.names.pop(block_hash, None)
        if name is not None:
            del engine.hashes[name]
            self._blocks -= 1
            return
        _give_up(engine, block_hash)

    def _clear(self, rank: Rank) -> None:
        engine = self._engines[rank]
        self._blocks -= len(engine.names)
        self._engines[rank] = _Engine()


def _unpark(engine: _Engine, parent: int) -> dict[int, int]:
    """Take out what waits for this block."""
    followers = engine.parked.pop(parent, {})
    for block_hash in followers:
        del engine.awaits[block_hash]
    return followers


def _give_up(engine: _Engine, block_hash: int) -> None:
    """A parked block waits no longer. Not by looking through all of them: a full view is told of thousands of
    blocks a second that it never knew.
    """
    parent = engine.awaits.pop(block_hash, None)
    if parent is not None:
        del engine.parked[parent][block_hash]
        if not engine.parked[parent]:
            del engine.parked[parent]
