# SPDX-License-Identifier: Apache-2.0
"""The values the planner takes and gives."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router_hints.costs import Rank
from router_hints.turns import SessionView, Turn


class Mode(enum.StrEnum):
    """What is done with KV."""

    NONE = "none"
    COPY = "copy"
    MOVE = "move"
    """Copied, and dropped at the source once the copy is committed."""
    NO_RETAIN = "no_retain"
    """Used in engine memory only; what is fetched for it is not kept, and nothing of it is deposited."""
    PREFETCH = "prefetch"
    """Copied (or moved) ahead of the request."""
    INVALIDATE = "invalidate"
    """Dropped on every holder, in every tier."""
    DEMOTE = "demote"
    """First to be evicted on every holder."""


class Reason(enum.StrEnum):
    """Why the plan is what it is, in one word for metrics and logs."""

    PINNED = "pinned"
    """The request named its worker."""
    COPY = "copy"
    """Blocks are copied to the cheapest worker."""
    SPREAD = "spread"
    """Copied because many ask for this prefix, before its holders queue."""
    WAKE_UP = "wake_up"
    """A session that slept is moved away from where it would wait."""
    JOIN = "join"
    """The blocks are already on their way to the chosen worker."""
    NEXT_TURN = "next_turn"
    """Copied ahead to where the announced turn will run."""
    ONE_OFF = "one_off"
    """Nobody comes back for it: nothing of it is kept."""
    RESIDENT = "resident"
    """The cheapest worker has blocks itself."""
    COLD = "cold"
    """Nothing is reused: nobody has the prefix, or fetching it costs more than computing it."""
    SHORT = "short"
    """The prompt is shorter than a block, and only whole blocks are reused."""
    TOO_EARLY = "too_early"
    """A copy this far ahead would only push out what is used meanwhile; plan again in ``again_in_s``."""
    TOO_LATE = "too_late"
    """It could not be done before the turn's deadline."""
    BUDGET = "budget"
    """Copies have used up their bytes a second."""
    COMPACTED = "compacted"
    """What follows the kept head is dead."""
    ENDED = "ended"
    """The session is over, and nobody else uses these blocks."""


_UNANNOUNCED = Turn()
_UNKNOWN = SessionView()


@dataclass(frozen=True)
class RequestView:
    """What the planner has to know of a request, or of a turn that is only announced."""

    plan_id: str
    prompt_tokens: int
    block_size: int
    affinity: bytes
    """Decides between equals: requests with the same start go to the same worker."""
    pinned_worker: int | None = None
    pinned_rank: int | None = None
    required_taints: frozenset[str] = frozenset()
    preferred_taints: Mapping[str, float] | None = None
    """Weight by taint, positive to prefer and negative to avoid."""
    turn: Turn = _UNANNOUNCED
    session: SessionView = _UNKNOWN
    ahead: bool = False
    """Only announced: no request is here to carry a hint."""
    rates_per_s: tuple[float, ...] = ()
    """Arrivals a second of its first 1, 2, 4, ... blocks."""
    router: str = ""
    """Which router plans: replicas with equal knowledge must not all choose the same worker."""

    @property
    def tokens(self) -> int:
        """Prompt tokens, as far as known: of an announced turn, what the harness said."""
        return max(self.prompt_tokens, self.turn.isl or 0) if self.ahead else self.prompt_tokens

    @property
    def reusable_blocks(self) -> int:
        """Full blocks whose KV may be reused: an engine always computes at least the last token."""
        return max(0, self.prompt_tokens - 1) // self.block_size


class Worker(msgspec.Struct, frozen=True):
    """One candidate: an engine replica, and the guard beside it."""

    rank: Rank
    g1_blocks: int = 0
    """Leading blocks in its engine memory, or on their way there with prompts that are computed before."""
    guard: str = ""
    """Name of its guard; empty: no KVCR here, and no hint."""
    taints: frozenset[str] = frozenset()
    max_requests: int = 0
    """Size of its batch; 0 when unknown."""
    kv_blocks: int = 0
    """Size of its engine memory; 0 when unknown."""


class SourceRun(msgspec.Struct, frozen=True):
    """Blocks ``first .. first + count`` of the request come from this guard."""

    guard: str
    endpoint: str
    first: int
    count: int
    byte_count: int
    frees: bool = False
    """Moved: the source drops them once they are committed at the target."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Cost terms of one candidate, in seconds, for its cheapest way to get the blocks."""

    rank: Rank
    wait_s: float
    """Its queue when the request gets there, announced turns included."""
    fetch_s: float
    """Loads from the pool, and what of the copies would not be done by its turn."""
    prefill_s: float
    load_s: float
    """What its other requests slow it down by."""
    later_s: float = 0.0
    """What later turns of the session would wait by the trend of the queue, and others behind this one."""
    delay_s: float = 0.0
    """What announced turns of others would wait for this one."""
    pressure_s: float = 0.0
    """Recomputing what has to leave a full engine memory or a full pool for it."""
    copy_s: float = 0.0
    """What its copies cost others: sources, links, and a place in a pool that nobody may use again."""
    hot_s: float = 0.0
    """What requests for the same prefix in the next second would wait at its holders."""
    jitter_s: float = 0.0
    """Work that other routers may have sent there unseen: a guess, another one for each router."""
    bias: float
    """Factor from preferred taints; below 1 is preferred."""
    g1_blocks: int
    local_blocks: int
    """Blocks beyond G1 that its own guard has."""
    copied_blocks: int
    runs: int = 0
    """Copies that bring those."""
    joined: bool = False
    """They are on their way already."""
    at_home: bool = False
    """The session's KV was last put here."""

    @property
    def ttft_s(self) -> float:
        """The part that this request waits for itself."""
        return self.wait_s + self.fetch_s + self.prefill_s

    @property
    def total_s(self) -> float:
        cluster_s = self.later_s + self.delay_s + self.pressure_s + self.copy_s + self.hot_s + self.jitter_s
        # A floor under the biased part, so that a preference counts between idle workers too.
        return (self.ttft_s + self.load_s + cluster_s + 1e-3) * self.bias

    @property
    def reused_blocks(self) -> int:
        return self.g1_blocks + self.local_blocks + self.copied_blocks


class Estimates:
    """The cost terms of all candidates. Most are looked at only when somebody asks why.

    Candidates are numbered from 0; iterating gives each as an :class:`Estimate`.
    """

    __slots__ = ("_rows", "total_s")

    def __init__(self, rows: list[tuple[Any, ...]], total_s: list[float]) -> None:
        """``rows``: of each candidate the fields of :class:`Estimate`, in their order."""
        self._rows = rows
        self.total_s = total_s
        """of each, as :attr:`Estimate.total_s`"""

    def column(self, field: str) -> list[Any]:
        """One field of all candidates."""
        at = Estimate.__struct_fields__.index(field)
        return [row[at] for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Estimate:
        return Estimate(**dict(zip(Estimate.__struct_fields__, self._rows[row], strict=True)))

    def __iter__(self) -> Iterator[Estimate]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Estimates) and self._rows == other._rows


@dataclass(frozen=True)
class Plan:
    """The decision, and what it was made from."""

    plan_id: str
    rank: Rank
    mode: Mode
    reason: Reason
    sources: tuple[SourceRun, ...]
    give_up_ms: float
    """What recomputing the copied blocks would take, from when the request's turn comes: a slower copy is not
    worth its wait."""
    prefill_tokens: int
    """Tokens left to compute."""
    blocks: int
    """Blocks the whole prompt occupies."""
    chosen: Estimate
    candidates: Estimates
    planned_s: float
    no_retain: bool = False
    """Nothing of this request is to be kept outside the engine, nor in it afterwards."""
    again_in_s: float | None = None
    """Too early to act: plan again then."""
    copies_s: float = 0.0
    """Until the copies should be in the target's pool."""
    spare: tuple[SourceRun, ...] = ()
    """What need not stay at its sources once it is at the target: the first to be evicted there."""

    @property
    def byte_counts(self) -> dict[str, int]:
        """Bytes asked of each source guard; none for copies that are under way anyhow."""
        totals: dict[str, int] = {}
        for run in () if self.chosen.joined else self.sources:
            totals[run.guard] = totals.get(run.guard, 0) + run.byte_count
        return totals

    @property
    def moved_bytes(self) -> int:
        """Bytes this plan puts on the wire."""
        return sum(self.byte_counts.values())


@dataclass(frozen=True)
class Release:
    """What a compaction or the end of a session lets go of, on every holder."""

    plan_id: str
    mode: Mode
    """:attr:`Mode.INVALIDATE`, :attr:`Mode.DEMOTE`, or :attr:`Mode.NONE` when nothing is left to do."""
    reason: Reason
    first: int
    """First block that goes; what is before stays."""
    end: int
    holders: tuple[str, ...]
    """Guards that have any of them."""
    planned_s: float


class NoWorker(Exception):
    """No candidate may run the request; the message says which condition left none."""
