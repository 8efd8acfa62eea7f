# SPDX-License-Identifier: Apache-2.0
"""One pull: which block to get from which source next, and what became of each. No I/O, no clock.

Phases of a block::

    WANTED ──ask──> ASKED ──leased──> LEASED ──next_move──> MOVING ──moved──> FINAL
       ^              │ miss            │ source_failed        │ not OK
       │              │                 │ lease over           │
       └──────────────┴─────────────────┴──────────────────────┘   next source, or FINAL if none is left
    JOINED: another pull is getting the same block; ends as FINAL, or WANTED when that pull gives up
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcr.protocol.engine import BlockStatus

Indices = npt.NDArray[np.int64]


class Phase(enum.IntEnum):
    """In the order of the picture, which comparisons rely on: ``numpy.isin`` takes 40 us."""

    WANTED = 0
    ASKED = 1
    LEASED = 2
    MOVING = 3
    JOINED = 4
    FINAL = 5


# A pull of one block looks at these more than a hundred times, and each look into an enum takes half a
# microsecond; so does what numpy makes of its members.
_WANTED, _ASKED, _LEASED, _MOVING, _JOINED, _FINAL = map(int, Phase)
_OK = int(BlockStatus.OK)


class Span(NamedTuple):
    """What a source is said to hold: block positions of the chain."""

    first: int
    blocks: int


class Ask(NamedTuple):
    """Ask this source for these blocks."""

    source: int
    indices: Indices


class Move(NamedTuple):
    """Copy these blocks from this source; they are leased there."""

    source: int
    indices: Indices


class Projection(NamedTuple):
    """When a pull would end, and what says so."""

    finish_s: float
    """Moment at which the last block that is leased would be here."""
    left: int
    """Blocks leased and not here."""
    blocks_per_s: float
    """Mean over what is left, 0 when nothing is known."""
    own: bool
    """The rate is this pull's own; otherwise it is what links to its sources brought before."""


class Pull:
    """State of one Fetch. Blocks are numbered from 0 in prefix order; times are seconds of one clock."""

    def __init__(
        self,
        *,
        count: int,
        ranks: int,
        first: int,
        spans: Sequence[Span],
        started_s: float,
        deadline_s: float,
        give_up_s: float | None,
    ) -> None:
        """``give_up_s``: moment at which recomputing would be done; None when there is no estimate."""
        self.count = count
        self.first = first
        self.started_s = started_s
        self.deadline_s = deadline_s
        self.give_up_s = give_up_s
        self.promised = -1
        """``available`` of the last FetchLease sent, -1 before the first; kept here for the shell."""
        self.phase = np.zeros(count, np.uint8)
        """Of each block; changed by :meth:`_enter` alone."""
        self.source = np.full(count, -1, np.int16)
        self.remote_slots = np.full(count, -1, np.int32)
        self.remote_generations = np.zeros(count, np.uint64)
        self.checksums = np.zeros((count, ranks), np.uint64)
        self.usable_until_s = np.zeros(count)
        """A read of a leased block must have begun by then."""
        self.reasons: dict[int, str] = {}
        """Why a source was given up."""
        self._statuses = np.full(count, BlockStatus.PENDING, np.uint8)
        # What a block ends as when no source is left; grows from MISS to the worst that happened to it.
        self._fallback = np.full(count, BlockStatus.MISS, np.uint8)
        positions = np.arange(first, first + count)
        self._untried = np.array(
            [(positions >= span.first) & (positions < span.first + span.blocks) for span in spans], bool
        ).reshape(len(spans), count)
        self._moved = 0
        self._first_move_s: float | None = None
        self._in_phase: list[int] | None = None
        """How many blocks are in each phase; None after a change, until somebody asks."""
        self._available: int | None = None

    # --- questions --------------------------------------------------------------------------------

    @property
    def statuses(self) -> npt.NDArray[np.uint8]:
        """BlockStatus of each block; PENDING until it is final. A copy."""
        return self._statuses.copy()

    @property
    def done(self) -> bool:
        return self._count(_FINAL) == self.count

    @property
    def wanted(self) -> bool:
        """Some blocks wait for :meth:`ask`."""
        return self._count(_WANTED) > 0

    @property
    def moving(self) -> int:
        return self._count(_MOVING)

    @property
    def leased_blocks(self) -> int:
        """Blocks that wait for :meth:`next_move`."""
        return self._count(_LEASED)

    @property
    def ready_to_answer(self) -> bool:
        """Nothing is left to ask, for now."""
        return self._count(_WANTED) + self._count(_ASKED) == 0

    def available(self) -> int:
        """Blocks from the first on, contiguous, that are here, leased, or on their way."""
        if self._available is None:
            good = (self.phase >= _LEASED) & (self.phase <= _JOINED)
            good |= self._statuses == _OK
            self._available = self.count if np.count_nonzero(good) == self.count else int(good.argmin())
        return self._available

    def reason(self) -> str:
        """Why :meth:`available` is less than all; empty when it is not."""
        available = self.available()
        if available == self.count:
            return ""
        if self.phase[available] in (_WANTED, _ASKED):
            why = "its source has not answered yet"
        else:
            why = BlockStatus(int(self._statuses[available])).name.lower()
        sources = "; ".join(self.reasons.values())
        return f"block {self.first + available}: {why}" + (f" ({sources})" if sources else "")

    def tally(self) -> dict[BlockStatus, int]:
        """Final blocks by status."""
        values, counts = np.unique(self._statuses, return_counts=True)
        return {BlockStatus(int(value)): int(count) for value, count in zip(values, counts, strict=True)}

    def project(self, now_s: float, rates: Sequence[float | None]) -> Projection:
        """When the blocks that are leased would be here.

        ``rates``: blocks per second that each source is known for, used until this pull has a rate of its
        own. Sources are read one after the other; one nothing is known of is taken to be infinitely fast.
        """
        coming = np.flatnonzero((self.phase == _LEASED) | (self.phase == _MOVING))
        left = len(coming)
        if self._first_move_s is not None and self._moved and now_s > self._first_move_s:
            own = self._moved / (now_s - self._first_move_s)
            return Projection(now_s + left / own, left, own, own=True)
        at = np.bincount(self.source[coming], minlength=len(rates))
        seconds = sum(
            blocks / rate for blocks, rate in zip(at.tolist(), rates, strict=True) if blocks and rate
        )
        return Projection(now_s + seconds, left, left / seconds if seconds else 0.0, own=False)

    def too_slow(self, projection: Projection) -> bool:
        """Whether recomputing would be done before the blocks that are left."""
        return self.give_up_s is not None and not self.done and projection.finish_s > self.give_up_s

    # --- events -----------------------------------------------------------------------------------

    def resident(self, mask: npt.NDArray[np.bool_]) -> None:
        """These blocks are in our pool already."""
        self._finish(np.flatnonzero(mask), BlockStatus.OK)

    def join(self, indices: Sequence[int]) -> None:
        """Another pull is getting these."""
        if indices:
            self._enter(np.array(indices), _JOINED)

    def leave(self, index: int, status: BlockStatus) -> None:
        """The pull that was getting this block is through with it."""
        if self.phase[index] != _JOINED:
            return
        if status is BlockStatus.OK:
            self._finish(np.array([index]), status)
        else:
            self._enter(np.array([index]), _WANTED)

    def ask(self) -> list[Ask]:
        """Give every wanted block its next source; those that have none left become final."""
        if not self.wanted:
            return []
        wanted = (self.phase == _WANTED).nonzero()[0]
        open_ = self._untried[:, wanted]
        has = open_.any(axis=0) if len(open_) else np.zeros(len(wanted), bool)
        if np.count_nonzero(has) < len(wanted):
            self._settle(wanted[~has])
        asking = wanted[has]
        if not len(asking):
            return []
        sources = open_[:, has].argmax(axis=0)
        self._enter(asking, _ASKED)
        self.source[asking] = sources
        self._untried[sources, asking] = False
        return [
            Ask(source, asking[sources == source]) for source in np.bincount(sources).nonzero()[0].tolist()
        ]

    def leased(
        self,
        source: int,
        indices: Indices,
        slots: npt.NDArray[np.int32],
        generations: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint64],
        usable_until_s: float,
        gone: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """The source's answer for blocks that were asked of it; ``slots`` is -1 where it has none.

        ``checksums`` is [blocks, ranks]. ``usable_until_s``: when the lease is too near its end to begin a
        read. ``gone``: what the source had, and has no more.
        """
        current = (self.phase[indices] == _ASKED) & (self.source[indices] == source)
        if gone is not None:
            self._fallback[indices[current & gone]] = BlockStatus.GONE
        has = current & (slots >= 0)
        found = indices[has]
        self._enter(found, _LEASED)
        self.remote_slots[found] = slots[has]
        self.remote_generations[found] = generations[has]
        self.checksums[found] = checksums[has]
        self.usable_until_s[found] = usable_until_s
        if len(found) < len(indices):
            self._enter(indices[current & (slots < 0)], _WANTED)

    def source_failed(self, source: int, status: BlockStatus, reason: str) -> None:
        """Give up on a source: what it owes is wanted again. Its steps under way still end by themselves."""
        self.reasons[source] = reason
        self._untried[source] = False
        open_ = (self.phase == _ASKED) | (self.phase == _LEASED)
        owed = np.flatnonzero((self.source == source) & open_)
        self._retry(owed, status)

    def expire(self, now_s: float) -> bool:
        """Leases over by now: their blocks are wanted again, of the same source. True if there were any."""
        if not self.leased_blocks:
            return False
        late = ((self.phase == _LEASED) & (self.usable_until_s <= now_s)).nonzero()[0]
        if len(late):
            self._untried[self.source[late], late] = True
            self._enter(late, _WANTED)
        return bool(len(late))

    def next_source(self) -> int | None:
        """From which source :meth:`next_move` would copy; None where nothing is leased."""
        if not self.leased_blocks:
            return None
        return int(self.source[(self.phase == _LEASED).argmax()])

    def next_move(self, most: int) -> Move | None:
        """The next blocks to copy, in prefix order, ``most`` at once, all from one source."""
        if not self.leased_blocks or most < 1:
            return None
        leased = (self.phase == _LEASED).nonzero()[0]
        source = int(self.source[leased[0]])
        indices = leased[self.source[leased] == source][:most]
        self._enter(indices, _MOVING)
        return Move(source, indices)

    def moved(self, indices: Indices, statuses: npt.NDArray[np.uint8], started_s: float) -> None:
        """A step ended. ``started_s``: when it began."""
        if self._first_move_s is None or started_s < self._first_move_s:
            self._first_move_s = started_s
        moving = self.phase[indices] == _MOVING
        arrived = moving & (statuses == _OK)
        good = int(np.count_nonzero(arrived))
        self._moved += good
        self._finish(indices[arrived], BlockStatus.OK)
        if good < len(indices):
            for status in np.unique(statuses[moving & ~arrived]):
                self._retry(indices[moving & (statuses == status)], BlockStatus(int(status)))

    def handed(self, indices: Indices) -> None:
        """A move that takes no copy of ours: the engine reads these where they are."""
        self._finish(indices, BlockStatus.OK)

    def refuse(self, indices: Indices, status: BlockStatus, reason: str) -> None:
        """These blocks cannot be taken at all, whoever has them."""
        self.reasons[-1] = reason
        self._finish(indices, status)

    def stop(self, status: BlockStatus, *, moving_too: bool) -> None:
        """End every block that is not final; without ``moving_too`` the steps under way may bring theirs."""
        open_ = self.phase != _FINAL
        if not moving_too:
            open_ &= self.phase != _MOVING
            self._untried[:] = False
        self._finish(np.flatnonzero(open_), status)

    # --- inside -----------------------------------------------------------------------------------

    def unmove(self, indices: Indices) -> None:
        """A :meth:`next_move` that could not begin: its blocks are leased as before."""
        self._enter(indices, _LEASED)

    def _count(self, phase: int) -> int:
        if self._in_phase is None:
            self._in_phase = np.bincount(self.phase, minlength=len(Phase)).tolist()
        return self._in_phase[phase]

    def _enter(self, indices: Indices, phase: int) -> None:
        self.phase[indices] = phase
        self._in_phase = self._available = None

    def _retry(self, indices: Indices, status: BlockStatus) -> None:
        self._fallback[indices] = status
        self._enter(indices, _WANTED)

    def _settle(self, indices: Indices) -> None:
        self._statuses[indices] = self._fallback[indices]
        self._enter(indices, _FINAL)

    def _finish(self, indices: Indices, status: BlockStatus) -> None:
        self._statuses[indices] = status
        self._enter(indices, _FINAL)
