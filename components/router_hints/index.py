# SPDX-License-Identifier: Apache-2.0
"""Where every G2 block is: the router's view of all guards, built from their inventory events.

Each guard is one stream of batches, numbered from 1 within its incarnation. The index applies them in
order whatever the network does: a duplicate changes nothing, a batch that overtook another waits for it,
and what is lost is found by the next batch or heartbeat and listed in :meth:`LocationIndex.repairs`.
Until the repair is done the guard's known blocks stay in use: a wrong entry costs its reader one failed
check, dropping a guard for one lost message would cost every request.

Pure: no I/O, no clock, one thread.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcr.keys import KEY_BYTES
from kvcr.protocol.events import Heartbeat, Inventory
from kvcr.protocol.peer import SnapshotChunk
from router_hints.table import BlockTable

MAX_PENDING_BATCHES = 1024
"""Batches kept of one guard beyond a gap, or during a snapshot; more is answered by a new snapshot."""

_MAX_TOMBSTONES = 1024
_G2 = 2


class Outcome(enum.StrEnum):
    """What a message did to the index."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    WAITING = "waiting"
    """A batch before it is missing."""
    UNKNOWN = "unknown"
    """No such guard is admitted."""
    STALE = "stale"
    """Of an incarnation that is over."""
    DIFFERS = "differs"
    """A heartbeat's digest is not ours."""
    BEHIND = "behind"
    """A heartbeat knows batches we have not seen."""


class RepairKind(enum.StrEnum):
    REPLAY = "replay"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Repair:
    """What to ask a guard for. ``first`` and ``last`` are batch sequences, for a replay."""

    guard: str
    incarnation: int
    kind: RepairKind
    first: int = 0
    last: int = 0
    reason: str = ""


class IndexView(NamedTuple):
    """Who holds the blocks of one request: ``held[g, i]`` says guard ``g`` has block ``i``.

    Only guards that hold at least one of them have a row.
    """

    guards: tuple[str, ...]
    held: npt.NDArray[np.bool_]

    @property
    def blocks(self) -> int:
        return int(self.held.shape[1])

    def row(self, guard: str) -> npt.NDArray[np.bool_] | None:
        """What ``guard`` holds, bool ``[blocks]``, or None for nothing."""
        return self.held[self.guards.index(guard)] if guard in self.guards else None

    def without(self, guards: Collection[str]) -> IndexView:
        """The same, as if these guards had nothing."""
        kept = [row for row, guard in enumerate(self.guards) if guard not in guards]
        if len(kept) == len(self.guards):
            return self
        return IndexView(tuple(self.guards[row] for row in kept), self.held[kept])

    @classmethod
    def empty(cls, blocks: int) -> IndexView:
        return cls((), np.zeros((0, blocks), dtype=np.bool_))


# A fifth of the time of the class's own constructor, which is a function in Python.
_make_view = tuple.__new__


@dataclass
class _Snapshot:
    """A snapshot being received, and the batches that arrived meanwhile."""

    sequence: int | None = None
    """of the first chunk: every later batch is applied again on top"""
    keys: list[bytes] = field(default_factory=list)
    journal: dict[int, Inventory] = field(default_factory=dict)
    overrun: bool = False


@dataclass
class _Stream:
    """One guard, as far as its events were understood."""

    bit: int
    incarnation: int
    sequence: int = 0
    pending: dict[int, Inventory] = field(default_factory=dict)
    behind: int = 0
    """highest sequence known to exist"""
    wants_snapshot: str = ""
    """the reason, or empty"""
    snapshot: _Snapshot | None = None
    complete: bool = False
    """it was read whole once"""


class LocationIndex:
    """Key to guards, for all admitted guards. See the module for what it promises."""

    def __init__(self, *, max_blocks: int = 2_000_000) -> None:
        self._table = BlockTable(max_blocks)
        self._streams: dict[str, _Stream] = {}
        self._names: list[str] = []
        """by bit; empty for a bit that is free"""
        self._dead: dict[str, int] = {}
        self._evicted_before = 0

    # --- membership -----------------------------------------------------------------------------

    def admit(self, guard: str, incarnation: int) -> None:
        """Follow this incarnation of ``guard``. Another one known under its name is replaced at once.

        Incarnations of one guard only grow. Admitting the one already followed changes nothing.
        """
        stream = self._streams.get(guard)
        if stream is not None and stream.incarnation >= incarnation:
            return
        if stream is None and self._dead.get(guard, -1) > incarnation:
            return
        bit = stream.bit if stream is not None else self._take_bit(guard)
        self._clear(bit)
        self._streams[guard] = _Stream(bit, incarnation, wants_snapshot="new guard")

    def retire(self, guard: str) -> None:
        """Forget the guard; what is still under way from this incarnation is ignored from now on."""
        stream = self._streams.pop(guard, None)
        if stream is not None:
            self._dead[guard] = stream.incarnation
            if len(self._dead) > _MAX_TOMBSTONES:
                del self._dead[next(iter(self._dead))]
            self._clear(stream.bit)
            self._names[stream.bit] = ""

    def guards(self) -> list[str]:
        return list(self._streams)

    def incarnation(self, guard: str) -> int | None:
        stream = self._streams.get(guard)
        return None if stream is None else stream.incarnation

    def sequence(self, guard: str) -> int:
        """Of the last batch of this guard that was taken; 0 for one that is not known."""
        stream = self._streams.get(guard)
        return stream.sequence if stream is not None else 0

    def blocks(self, guard: str) -> int:
        """Blocks indexed for ``guard``."""
        stream = self._streams.get(guard)
        return 0 if stream is None else self._table.count(stream.bit)

    def lag(self, guard: str) -> int:
        """Batches that the guard is known to have published and that were not applied yet."""
        stream = self._streams.get(guard)
        return 0 if stream is None else max(0, stream.behind - stream.sequence)

    @property
    def evicted_blocks(self) -> int:
        """Blocks that had to leave a full table, since the start; one with two holders counts twice."""
        now = sum(self._table.evicted(stream.bit) for stream in self._streams.values())
        return self._evicted_before + now

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._table.nbytes

    @property
    def complete(self) -> tuple[int, int]:
        """Guards that were read whole since they were admitted, and all of them."""
        return sum(stream.complete for stream in self._streams.values()), len(self._streams)

    def __len__(self) -> int:
        """Distinct blocks indexed."""
        return len(self._table)

    # --- events ---------------------------------------------------------------------------------

    def apply(self, batch: Inventory) -> Outcome:
        """Take one inventory batch, in whatever order it arrives."""
        stream = self._stream_of(batch.guard, batch.incarnation)
        if isinstance(stream, Outcome):
            return stream
        if stream.snapshot is not None:
            _keep(stream.snapshot, batch)
        stream.behind = max(stream.behind, batch.sequence)
        if batch.sequence <= stream.sequence:
            return Outcome.DUPLICATE
        if batch.sequence > stream.sequence + 1:
            if batch.sequence in stream.pending:
                return Outcome.DUPLICATE
            if len(stream.pending) >= MAX_PENDING_BATCHES:
                stream.pending.clear()
                stream.wants_snapshot = "too many batches wait for a lost one"
            stream.pending[batch.sequence] = batch
            return Outcome.WAITING
        self._apply_next(stream, batch)
        self._drain(stream)
        return Outcome.APPLIED

    def beat(self, heartbeat: Heartbeat) -> Outcome:
        """Compare with what the guard says it has sent and holds."""
        stream = self._stream_of(heartbeat.guard, heartbeat.incarnation)
        if isinstance(stream, Outcome):
            return stream
        if heartbeat.sequence < stream.sequence:
            return Outcome.DUPLICATE
        if heartbeat.sequence > stream.sequence:
            stream.behind = max(stream.behind, heartbeat.sequence)
            return Outcome.BEHIND
        if self._table.evicted(stream.bit):
            # Ours is a part of it by our own doing, until its next snapshot finds room.
            return Outcome.APPLIED
        known = self._table.count(stream.bit), self._table.digest(stream.bit)
        if (heartbeat.count, heartbeat.digest) == known:
            return Outcome.APPLIED
        stream.wants_snapshot = stream.wants_snapshot or "digest differs"
        return Outcome.DIFFERS

    # --- repair ---------------------------------------------------------------------------------

    def repairs(self) -> list[Repair]:
        """What is missing now, at most one for each guard; a snapshot under way is not listed again."""
        wanted = []
        for guard, stream in self._streams.items():
            if stream.snapshot is not None:
                continue
            if stream.wants_snapshot:
                wanted.append(
                    Repair(guard, stream.incarnation, RepairKind.SNAPSHOT, reason=stream.wants_snapshot)
                )
            elif stream.behind > stream.sequence:
                # Up to the first batch we have: those from there on follow by themselves.
                last = min((s for s in stream.pending if s > stream.sequence), default=stream.behind + 1) - 1
                first = stream.sequence + 1
                wanted.append(Repair(guard, stream.incarnation, RepairKind.REPLAY, first, last, reason="gap"))
        return wanted

    def request_snapshot(self, guard: str, reason: str) -> None:
        """Give up on a replay of this guard: list a snapshot instead."""
        stream = self._streams.get(guard)
        if stream is not None:
            stream.wants_snapshot = reason

    def begin_snapshot(self, guard: str) -> None:
        """From now on batches of ``guard`` are also kept, to be applied again on top of its snapshot."""
        stream = self._streams.get(guard)
        if stream is not None:
            stream.snapshot = _Snapshot()

    def abort_snapshot(self, guard: str) -> None:
        """The snapshot could not be received; it stays listed in :meth:`repairs`."""
        stream = self._streams.get(guard)
        if stream is not None:
            stream.snapshot = None

    def add_chunk(self, chunk: SnapshotChunk) -> bool:
        """Take one chunk, in order; False when it belongs to no snapshot under way (start again).

        With the last chunk the guard's blocks are replaced in one step.
        """
        stream = self._streams.get(chunk.guard)
        if stream is None or stream.snapshot is None or stream.incarnation != chunk.incarnation:
            return False
        snapshot = stream.snapshot
        if snapshot.sequence is None:
            snapshot.sequence = chunk.sequence
        snapshot.keys.append(chunk.keys)
        if chunk.next_cursor < 0:
            self._replace(stream, snapshot)
        return True

    # --- lookup ---------------------------------------------------------------------------------

    def lookup(self, keys: bytes) -> IndexView:
        """Who has which of these blocks (16 bytes a key, in chain order)."""
        guards, rows = self._table.lookup(keys, self._names)
        blocks = len(keys) // KEY_BYTES
        if not guards:
            return IndexView.empty(blocks)
        return _make_view(IndexView, (guards, np.ndarray((len(guards), blocks), np.bool_, rows)))

    def held_by(self, guard: str) -> bytes:
        """Every key of ``guard``, 16 bytes each, in no order."""
        stream = self._streams.get(guard)
        return b"" if stream is None else self._table.held_by(stream.bit)

    # --- inside ---------------------------------------------------------------------------------

    def _take_bit(self, guard: str) -> int:
        bit = self._names.index("") if "" in self._names else len(self._names)
        if bit == len(self._names):
            self._names.append(guard)
        self._names[bit] = guard
        self._table.reserve_bit(bit)
        return bit

    def _stream_of(self, guard: str, incarnation: int) -> _Stream | Outcome:
        stream = self._streams.get(guard)
        if stream is None:
            return Outcome.UNKNOWN
        if incarnation > stream.incarnation:
            self.admit(guard, incarnation)
            return self._streams[guard]
        return stream if incarnation == stream.incarnation else Outcome.STALE

    def _drain(self, stream: _Stream) -> None:
        while (following := stream.pending.pop(stream.sequence + 1, None)) is not None:
            self._apply_next(stream, following)
        if not stream.pending:
            return
        stream.pending = {s: b for s, b in stream.pending.items() if s > stream.sequence}

    def _apply_next(self, stream: _Stream, batch: Inventory) -> None:
        stream.sequence = batch.sequence
        if batch.tier != _G2:
            return
        self._table.remove(batch.removed_keys, stream.bit)
        self._table.add(batch.stored_keys, stream.bit)

    def _clear(self, bit: int) -> None:
        self._evicted_before += self._table.evicted(bit)
        self._table.clear(bit)

    def _replace(self, stream: _Stream, snapshot: _Snapshot) -> None:
        stream.snapshot = None
        if snapshot.overrun:
            stream.wants_snapshot = "the guard changed faster than its snapshot was read"
            return
        self._clear(stream.bit)
        stream.complete = True
        stream.wants_snapshot = ""
        stream.sequence = snapshot.sequence or 0
        for keys in snapshot.keys:
            self._table.add(keys, stream.bit)
        # A later chunk is newer than the first. Batches set and clear, so applying those after the first
        # chunk again, in order, ends where the guard ended.
        stream.pending |= snapshot.journal
        stream.pending = {s: b for s, b in stream.pending.items() if s > stream.sequence}
        self._drain(stream)


def _keep(snapshot: _Snapshot, batch: Inventory) -> None:
    if len(snapshot.journal) >= MAX_PENDING_BATCHES:
        snapshot.overrun = True
        snapshot.journal.clear()
    snapshot.journal[batch.sequence] = batch
