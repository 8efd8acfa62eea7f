# SPDX-License-Identifier: Apache-2.0
"""Carrying out Fetches: the shell around :class:`kvcr.guard.pulls.Pull`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError
from kvcr.guard.choosing import PeerContext
from kvcr.guard.giving_up import GaveUp, GiveUps
from kvcr.guard.loop import Loop, Timer
from kvcr.guard.meters import Meters
from kvcr.guard.peers import LEASE_MARGIN_S, TIER, Grant, PeerLink, Peers
from kvcr.guard.pulls import Ask, Indices, Move, Phase, Projection, Pull, Span
from kvcr.guard.quick import QuickPulls
from kvcr.guard.tracing import FetchTrace, RequestTraces, end_lease
from kvcr.guard.transit import Freed, Handover, TransitSlots
from kvcr.keys import KEY_BYTES
from kvcr.pool import Granted, Pool
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, i32, u64
from kvcr.protocol.engine import (
    BlockStatus,
    Fetch,
    FetchLease,
    FetchProgress,
    Handed,
    Taken,
    ToEngine,
)
from kvcr.protocol.peer import Release
from kvcr.tracing import NO_SPAN, TraceSpan
from kvcr.transfer.base import Step, StepResult, Transport
from kvcr.transfer.nixl import NixlTransport
from kvcr.transfer.nixl_messages import STALL_S
from kvcr.transfer.shm import OPTIMISTIC_BLOCKS, ShmTransport

log = logging.getLogger(__name__)

ANSWER_S = 0.04
"""The engine may wait only 50 ms for FetchLease; it gets what is known by then, and the rest when it is."""

STEPS_IN_FLIGHT = 2
"""Per pull: one is hashed while the next is copied."""

OVERLOADED = "too many slots wait in quarantine for reads that timed out"

OPTIMISTIC_S = 1.5
"""How long a lookup without a lease may be used: an evicted slot is not reused for 2 s."""

NO_ROOM_S = 0.05
"""How often a pull that waits for slots looks for some."""

AFTERLIFE_S = 1.0
"""After its deadline a request takes no more blocks; what was handed to it is freed then."""

_HANDED_PER_MESSAGE = 1024
"""At 8 ranks 80 kB."""

MAX_PULLS = 1024
_PENDING = np.uint8(BlockStatus.PENDING)
MAX_SOURCES = 64
MAX_DEADLINE_S = 60.0


class Host(Protocol):
    """What fetches need of the guard."""

    pool: Pool | None
    peers: Peers
    peer_context: PeerContext | None

    def pool_changed(self) -> None: ...


class Asker(Protocol):
    """The engine, as a fetch sees it."""

    def broadcast(self, message: ToEngine) -> None:
        """Send to every process of the engine."""


@dataclass(slots=True)
class _Account:
    """What a pull did at one source, told to it when the pull ends."""

    leases: list[int] = field(default_factory=list)
    blocks: int = 0
    transport: str = ""
    corrupt_slots: list[int] = field(default_factory=list)
    corrupt_generations: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Kept:
    """Blocks of one Fetch in our pool, leased until its request is over or its time is."""

    pool: Pool
    origin: object
    number: int
    """Of the Fetch."""
    held: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Active:
    """A Fetch under way."""

    number: int
    fetch: Fetch
    pull: Pull
    hashes: npt.NDArray[np.uint64]
    keys: list[bytes]
    parents: bytes
    """16 bytes for each key: the one before it"""
    asker: Asker
    answer: Callable[[ToEngine], None]
    """To the scheduler connection that asked."""
    origin: object
    """That connection."""
    links: list[PeerLink]
    pool: Pool
    context: PeerContext
    owned: npt.NDArray[np.bool_]
    """Blocks that others may be waiting for."""
    accounts: dict[int, _Account] = field(default_factory=dict)
    timers: list[Timer] = field(default_factory=list)
    steps: int = 0
    reported: bool = False
    """The final FetchProgress was sent."""
    pulled: dict[str, int] = field(default_factory=dict)
    """Blocks by transport."""
    cancelled: bool = False
    dead: set[int] = field(default_factory=set)
    """Blocks invalidated while they were on their way: not published when they arrive."""

    handover: Handover | None = None
    """Of a no-retain Fetch: blocks the engine has not taken yet."""
    lease_of: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Lease at its source of each block, 0: none."""
    claim: int = 0
    """Blocks that are leased and need a slot."""
    given_up: bool = False
    """Stopped, as recomputing is faster; steps under way may still bring something."""
    untold: bool = False
    """Blocks became OK without a step of ours, and the engine was not told."""
    trace: FetchTrace | None = None

    def learn(self, indices: Indices, hashes: npt.NDArray[np.uint64]) -> None:
        """Take a source's engine hashes of these blocks where whoever asked did not know them."""
        self.hashes[indices] = np.where(self.hashes[indices] == 0, hashes, self.hashes[indices])


@dataclass(frozen=True, slots=True)
class Ended:
    """A Fetch that is over: no step of it is under way, and its leases are given back."""

    fetch: Fetch
    pool: Pool
    statuses: npt.NDArray[np.uint8]
    """:class:`BlockStatus` of each key of the fetch"""
    links: list[PeerLink]
    """to each of its sources"""
    copied_blocks: int
    byte_count: int
    seconds: float
    cancelled: bool
    reason: str


class Fetches:
    """All pulls of this guard. Belongs to the authority thread."""

    def __init__(
        self,
        host: Host,
        loop: Loop,
        meters: Meters,
        lease_ms: int,
        transit: TransitSlots,
        on_end: Callable[[Ended], None],
        traces: RequestTraces,
    ) -> None:
        """``on_end`` hears of each Fetch that began, once it is over."""
        self._traces = traces
        self._host = host
        self._loop = loop
        self._on_end = on_end
        self._meters = meters
        self._lease_ms = lease_ms
        self._active: dict[int, _Active] = {}
        self._getting: dict[bytes, _Active] = {}
        """Key -> the pull that is getting it: one pull in flight for each key."""
        self._waiting: dict[bytes, list[tuple[_Active, int]]] = {}
        self.give_ups = GiveUps(meters)
        self.transit = transit
        self._handing: dict[tuple[str, int], _Active] = {}
        """(request id, first) -> its no-retain Fetch."""
        self._kept: dict[str, list[_Kept]] = {}
        self._claimed = 0
        """Sum over the pulls of the blocks that are leased and need a slot."""
        self._hungry: set[int] = set()
        """Pulls that wait for slots."""
        self._feeding: Timer | None = None
        self._count = 0
        self._quick = QuickPulls(host, loop, meters)

    @property
    def active(self) -> int:
        return len(self._active)

    # --- called by the engine's side --------------------------------------------------------------

    def start(self, fetch: Fetch, asker: Asker, answer: Callable[[ToEngine], None], origin: object) -> str:
        """Begin; answers with FetchLease soon, and FetchProgress until it is final.

        Returns why it did not begin, which it has also answered; empty when it did. Raises ProtocolError on
        arrays of odd lengths or beyond the limits.
        """
        count = len(fetch.keys) // KEY_BYTES
        hashes = u64(fetch.engine_hashes)
        if len(fetch.keys) % KEY_BYTES or len(hashes) != count or len(fetch.parent) != KEY_BYTES:
            raise ProtocolError(
                f"Fetch has {len(fetch.keys)} bytes of keys, {len(hashes)} hashes, "
                f"{len(fetch.parent)} bytes of parent"
            )
        if count > MAX_BLOCKS_PER_MESSAGE or len(fetch.sources) > MAX_SOURCES:
            raise ProtocolError(
                f"Fetch has {count} blocks and {len(fetch.sources)} sources, "
                f"the limits are {MAX_BLOCKS_PER_MESSAGE} and {MAX_SOURCES}"
            )
        pool, context = self._host.pool, self._host.peer_context
        refusal = ""
        if pool is None or context is None:
            refusal = "no pool"
        elif fetch.epoch != pool.epoch:
            refusal = f"epoch {fetch.epoch} is over, it is {pool.epoch} now"
        elif len(self._active) >= MAX_PULLS:
            refusal = f"{MAX_PULLS} pulls are under way"
        trace = self._traces.fetch(fetch, count)
        if pool is None or context is None or refusal:
            if trace is not None:
                trace.end(bytes([BlockStatus.MISS]) * count, copied=0, nbytes=0, reason=refusal)
            answer(FetchLease(fetch.request_id, fetch.first, 0, refusal))
            statuses = bytes([BlockStatus.MISS]) * count
            asker.broadcast(
                FetchProgress(fetch.request_id, statuses, final=True, first=fetch.first, reason=refusal)
            )
            return refusal
        if fetch.sources:
            link = self._host.peers.link(context, fetch.sources[0].endpoint)
            pulled = self._quick.pull(
                fetch, hashes, pool, context, link, self._getting, answer, asker.broadcast
            )
            if pulled is not None:
                nbytes = count * context.local.block_bytes
                if trace is not None:
                    trace.pulled_at_once(link.name or link.endpoint, pulled, nbytes)
                self._on_end(
                    Ended(fetch, pool, pulled.statuses, [link], count, nbytes, pulled.seconds, False, "")
                )
                return ""
        self._begin(fetch, count, hashes, pool, context, asker, answer, origin, trace)
        return ""

    def _begin(
        self,
        fetch: Fetch,
        count: int,
        hashes: npt.NDArray[np.uint64],
        pool: Pool,
        context: PeerContext,
        asker: Asker,
        answer: Callable[[ToEngine], None],
        origin: object,
        trace: FetchTrace | None,
    ) -> None:
        now_s = time.monotonic()
        keys = [fetch.keys[at : at + KEY_BYTES] for at in range(0, len(fetch.keys), KEY_BYTES)]
        deadline_s = now_s + min(max(fetch.deadline_ms, 0.0) / 1000, MAX_DEADLINE_S)
        self._count += 1
        active = _Active(
            number=self._count,
            fetch=fetch,
            pull=Pull(
                count=count,
                ranks=pool.layout.ranks,
                first=fetch.first,
                spans=[Span(source.first, source.count) for source in fetch.sources],
                started_s=now_s,
                deadline_s=deadline_s,
                give_up_s=now_s + fetch.give_up_ms / 1000 if fetch.give_up_ms > 0 else None,
            ),
            hashes=hashes.copy(),
            keys=keys,
            parents=(fetch.parent + fetch.keys)[: len(fetch.keys)],
            asker=asker,
            answer=answer,
            origin=origin,
            links=[self._host.peers.link(context, source.endpoint) for source in fetch.sources],
            pool=pool,
            context=context,
            owned=np.zeros(count, np.bool_),
            handover=Handover(count, pool.layout.ranks) if fetch.no_retain else None,
            lease_of=np.zeros(count, np.int64),
            trace=trace,
        )
        self._active[active.number] = active
        if active.handover is not None:
            self._handing[fetch.request_id, fetch.first] = active
        found = pool.lookup(fetch.keys)
        here = found.slots >= 0
        pool.touch(found.slots[here], now_s)
        self._keep(active, found.slots[here], found.generations[here])
        active.pull.resident(here)
        active.timers = [
            self._loop.later(ANSWER_S, lambda: self._answer(active)),
            self._loop.later(deadline_s - now_s, lambda: self._expire(active)),
        ]
        if active.pull.give_up_s is not None and active.pull.give_up_s < deadline_s:
            # A pull that nothing is heard of is stopped too.
            active.timers.append(
                self._loop.later(active.pull.give_up_s - now_s, lambda: self._advance_if_active(active))
            )
        self._claim(active)
        self._advance(active)

    def finish(self, request_id: str) -> None:
        """The request is over: stop its pulls; steps under way still end, and what they bring is kept."""
        for active in [active for active in self._active.values() if active.fetch.request_id == request_id]:
            self._cancel(active)
        for kept in self._kept.pop(request_id, ()):
            self._unkeep(kept)

    def orphaned(self, origin: object) -> None:
        """The connection that asked is gone for good: stop what it asked for."""
        requests = {active.fetch.request_id for active in self._active.values() if active.origin is origin}
        requests |= {
            request_id for request_id, kept in self._kept.items() if any(one.origin is origin for one in kept)
        }
        for request_id in requests:
            self.finish(request_id)

    def forbid(self, keys: set[bytes], *, and_after: bool) -> int:
        """Publish none of these blocks that are on their way; with ``and_after`` none that come after them
        either. Returns how many were on their way. Pulls that begin later are not concerned."""
        count = 0
        for active in list(self._active.values()):
            named = keys if and_after else ()
            after = active.fetch.parent in named
            dead = []
            # A loop over blocks, at an invalidation only: 50 ns a block on its way.
            for index, key in enumerate(active.keys):
                after = after or key in named
                if after or key in keys:
                    dead.append(index)
            open_ = [index for index in dead if active.pull.phase[index] != Phase.FINAL]
            if open_:
                count += len(open_)
                active.dead.update(open_)
                active.pull.refuse(np.array(open_), BlockStatus.GONE, "invalidated on the way")
                self._loop.defer(lambda active=active: self._advance_if_active(active))  # type: ignore[misc]
        return count

    def taken(self, message: Taken, rank: int) -> None:
        """A worker has blocks that were handed to it. Raises ProtocolError on a ragged array."""
        indices = i32(message.indices)
        active = self._handing.get((message.request_id, message.first))
        if active is None or active.handover is None:
            return
        if message.unreachable:
            # What was handed in place is recomputed, once: from now on its blocks pass through our pool.
            inside = indices[(indices >= 0) & (indices < active.pull.count)]
            for source in np.unique(active.pull.source[inside]).tolist():
                link = active.links[source]
                log.warning("the engine cannot map the pool of %s", link.name or link.endpoint)
                link.in_place = False
        freed = active.handover.taken(indices.astype(np.int64), rank)
        if message.copied:
            self._count_in_place(active, freed.in_place)
        if message.corrupt:
            self._note_corrupt(active, i32(message.corrupt))
        self._free(active, freed)
        self._close_if_over(active)

    def stop_all(self) -> None:
        """Before the pool is replaced, or the guard ends."""
        for active in list(self._active.values()):
            self._cancel(active)

    # --- one round of a pull ----------------------------------------------------------------------

    def _advance(self, active: _Active) -> None:
        """Ask, copy, tell: whatever can be done now."""
        pull = active.pull
        while True:
            pull.expire(time.monotonic())
            for ask in pull.ask():
                self._ask(active, ask)
            self._estimate(active)
            if pull.ready_to_answer:
                # Before anything is copied: the engine waits for this, and movers compete for the CPU.
                self._answer(active)
            self._pump(active)
            # Ends, as every turn uses up a source of the blocks that are wanted again.
            if not pull.wanted:
                break
        self._resolve(active)
        if pull.ready_to_answer:
            self._answer(active)
        if pull.done and not active.reported:
            self._report(active, final=True)
        elif active.untold and not active.reported:
            self._report(active, final=False)
        self._count_claim(active)
        self._close_if_over(active)

    def _close_if_over(self, active: _Active) -> None:
        handed = active.handover is not None and active.handover.left > 0
        if active.pull.done and active.steps == 0 and not (handed and not active.cancelled):
            self._close(active)

    def _count_claim(self, active: _Active) -> None:
        claim = 0 if active.handover is not None else active.pull.leased_blocks
        self._claimed += claim - active.claim
        active.claim = claim

    def _estimate(self, active: _Active) -> None:
        """Stop when recomputing would be done before the blocks that are left; what arrived is kept."""
        pull = active.pull
        if pull.give_up_s is None or pull.done or active.given_up:
            return
        block_bytes = active.context.local.block_bytes
        rates = [link.bytes_per_s for link in active.links]
        now_s = time.monotonic()
        projection = pull.project(now_s, [rate / block_bytes if rate else None for rate in rates])
        if pull.too_slow(projection):
            self._give_up(active, projection)

    def _give_up(self, active: _Active, projection: Projection) -> None:
        pull, fetch = active.pull, active.fetch
        active.given_up = True
        open_ = np.flatnonzero(pull.phase != Phase.FINAL)
        source = int(pull.source[open_[0]])
        link = active.links[source] if source >= 0 else None
        self.give_ups.record(
            GaveUp(
                request_id=fetch.request_id,
                plan_id=fetch.plan_id,
                peer=(link.name or link.endpoint) if link is not None else "",
                transport=link.transport.name if link is not None and link.transport is not None else "",
                estimate="engine" if fetch.local_estimate else "planner",
                recompute_ms=fetch.give_up_ms,
                projected_ms=1000 * (projection.finish_s - pull.started_s),
                blocks_here=int((pull.statuses == BlockStatus.OK).sum()),
                blocks_left=len(open_),
                bytes_per_s=projection.blocks_per_s * active.context.local.block_bytes,
                rate="pull" if projection.own else "link" if projection.blocks_per_s else "none",
            )
        )
        pull.reasons.setdefault(-1, "recomputing is estimated to be faster")
        pull.stop(BlockStatus.TOO_SLOW, moving_too=False)

    def _claim(self, active: _Active) -> None:
        """Blocks that another pull is getting are waited for, the others are ours to get."""
        joined = []
        for index in np.flatnonzero(active.pull.phase == 0).tolist():
            key = active.keys[index]
            if active.handover is not None and key not in self._getting:
                # What comes for one request alone is found by no other.
                continue
            owner = self._getting.setdefault(key, active)
            if owner is active:
                active.owned[index] = True
            else:
                joined.append(index)
                self._waiting.setdefault(key, []).append((active, index))
        active.pull.join(joined)

    def _resolve(self, active: _Active) -> None:
        """Tell those who wait for our blocks what became of them."""
        statuses = active.pull.statuses
        # A pull of 2,048 blocks is told of in as many steps as it takes: only what is new is looped over.
        ended = active.owned & (statuses != _PENDING)
        if not ended.any():
            return
        active.owned &= ~ended
        waiting: dict[int, _Active] = {}
        for index in np.flatnonzero(ended).tolist():
            key = active.keys[index]
            if self._getting.get(key) is active:
                del self._getting[key]
            for other, position in self._waiting.pop(key, []):
                other.pull.leave(position, BlockStatus(int(statuses[index])))
                waiting[other.number] = other
        for other in waiting.values():
            # From a round of its own: it may have to start what we gave up.
            self._loop.defer(lambda other=other: self._resume(other))  # type: ignore[misc]

    def _resume(self, active: _Active) -> None:
        if active.number in self._active:
            self._claim(active)
            self._advance(active)

    # --- asking sources ---------------------------------------------------------------------------

    def _ask(self, active: _Active, ask: Ask) -> None:
        link = active.links[ask.source]
        if (
            isinstance(link.transport, ShmTransport)
            and len(ask.indices) <= OPTIMISTIC_BLOCKS
            and active.handover is None
        ):
            found = link.transport.lookup(self._blob(active, ask.indices))
            active.learn(ask.indices, found.engine_hashes)
            until_s = time.monotonic() + OPTIMISTIC_S
            active.pull.leased(
                ask.source, ask.indices, found.slots, found.generations, found.checksums, until_s
            )
            return
        if link.ready:
            self._lease(active, ask)
            return

        def opened(reason: str) -> None:
            if active.number not in self._active:
                return
            if reason:
                self._give_up_source(active, ask.source, reason)
            else:
                self._ask(active, ask)
            if not calling:
                self._advance(active)

        # The answer may come within the call, from _advance, which must not be entered twice.
        calling = True
        link.when_ready(time.monotonic(), opened)
        calling = False

    def _lease(self, active: _Active, ask: Ask) -> None:
        link = active.links[ask.source]
        transport = link.transport
        if isinstance(transport, NixlTransport) and transport.overloaded:
            self._give_up_source(active, ask.source, OVERLOADED)
            return
        width = link.keys_per_lease()
        left_s = active.pull.deadline_s - time.monotonic()
        lease_ms = int(min(max(left_s, 0.0) * 1000 + 250 + 1000 * LEASE_MARGIN_S, self._lease_ms))
        old = active.lease_of[ask.indices]
        for renew in np.unique(old).tolist():
            group = ask.indices[old == renew]
            for start in range(0, len(group), width):
                indices = group[start : start + width]
                span = NO_SPAN
                if active.trace is not None:
                    name = transport.name if transport is not None else ""
                    span = active.trace.lease(link.name or link.endpoint, name, len(indices))
                link.lease(
                    self._blob(active, indices),
                    lease_ms,
                    max(left_s, 0.001),
                    lambda grant, reason, indices=indices, renew=renew, span=span: self._leased(  # type: ignore[misc]
                        active, ask.source, indices, grant, reason, renew, span
                    ),
                    renew,
                    span.traceparent,
                )

    def _leased(
        self,
        active: _Active,
        source: int,
        indices: Indices,
        grant: Grant | None,
        reason: str,
        renewed: int,
        span: TraceSpan,
    ) -> None:
        link = active.links[source]
        if active.trace is not None:
            end_lease(span, grant, reason)
        if grant is not None and active.number not in self._active:
            link.release(Release(grant.lease_id))
            return
        if grant is None:
            self._give_up_source(active, source, reason)
        else:
            leases = self._account(active, source).leases
            if renewed in leases:
                leases.remove(renewed)
            if grant.lease_id:
                leases.append(grant.lease_id)
            active.lease_of[indices] = grant.lease_id
            active.learn(indices, grant.engine_hashes)
            active.pull.leased(
                source,
                indices,
                grant.slots,
                grant.generations,
                grant.checksums,
                grant.usable_until_s,
                grant.gone,
            )
            if active.handover is None:
                active.pool.make_room(active.pull.leased_blocks, time.monotonic())
                self._host.pool_changed()
        # Never from within _advance: requests are answered by messages, or by a link that is lost meanwhile.
        self._loop.defer(lambda: self._advance_if_active(active))

    def _advance_if_active(self, active: _Active) -> None:
        if active.number in self._active:
            self._advance(active)

    def _give_up_source(self, active: _Active, source: int, reason: str) -> None:
        link = active.links[source]
        active.pull.source_failed(source, BlockStatus.GONE, f"{link.name or link.endpoint}: {reason}")

    # --- copying ----------------------------------------------------------------------------------

    def _pump(self, active: _Active) -> None:
        pull = active.pull
        while active.steps < STEPS_IN_FLIGHT:
            now_s = time.monotonic()
            move = pull.next_move(active.context.local.blocks_per_step)
            if move is None:
                return
            link = active.links[move.source]
            transport = link.transport
            if transport is None:
                gone = np.full(len(move.indices), BlockStatus.GONE, np.uint8)
                pull.moved(move.indices, gone, now_s)
                self._give_up_source(active, move.source, link.reason)
                continue
            if isinstance(transport, NixlTransport) and transport.overloaded:
                gone = np.full(len(move.indices), BlockStatus.GONE, np.uint8)
                pull.moved(move.indices, gone, now_s)
                self._give_up_source(active, move.source, OVERLOADED)
                continue
            if active.handover is not None and isinstance(transport, ShmTransport) and link.in_place:
                self._hand_in_place(active, move, transport)
                continue
            if not self._move(active, move, transport, now_s):
                return

    def _move(self, active: _Active, move: Move, transport: Transport, now_s: float) -> bool:
        """Begin a step; False when there is no slot for more, for now or at all."""
        pull = active.pull
        slots, generations = self._take_slots(active, len(move.indices), now_s)
        indices, rest = move.indices[: len(slots)], move.indices[len(slots) :]
        if len(rest):
            pull.unmove(rest)
            if self._may_get_slots(active, len(slots)):
                self._hungry.add(active.number)
                self._feed_later(NO_ROOM_S)
            else:
                left = np.flatnonzero(pull.phase == Phase.LEASED)
                pull.refuse(left, BlockStatus.FAILED, "no free slot in our pool")
        if not len(slots):
            return False
        step = Step(
            pull=active.number,
            source=move.source,
            indices=indices,
            local_slots=slots,
            local_generations=generations,
            remote_slots=pull.remote_slots[indices],
            remote_generations=pull.remote_generations[indices],
            checksums=pull.checksums[indices],
            deadline_s=pull.deadline_s,
        )
        active.steps += 1
        transport.read(
            step,
            lambda result: self._stepped(active, result, transport.name, now_s),
            lambda step: self._quiet(active, step),
        )
        return not len(rest)

    # --- slots for what is copied -------------------------------------------------------------------

    def _take_slots(self, active: _Active, count: int, now_s: float) -> Granted:
        """Up to ``count`` slots. Where they are scarce, the pull that began first has the first claim: two
        pulls that share what is enough for one would both end in the middle."""
        pool = active.pool
        if active.handover is not None:
            granted = pool.allocate(min(count, self.transit.room(pool)), now_s)
            self.transit.used += len(granted.slots)
        else:
            pool.tick(now_s)
            if pool.free_count < self._claimed:
                older = sum(one.claim for one in self._active.values() if one.number < active.number)
                count = max(0, min(count, pool.free_count - older))
            granted = pool.allocate(count, now_s)
        self._host.pool_changed()
        return granted

    def _may_get_slots(self, active: _Active, got: int) -> bool:
        """Whether slots may come free while this pull waits. Its deadline ends it in any case."""
        if got or active.pool.cooling_count:
            return True
        if active.handover is not None and self.transit.used:
            return True
        return any(
            other.steps or (other.claim and other.number < active.number)
            for other in self._active.values()
            if other is not active
        )

    def _feed_later(self, delay_s: float) -> None:
        if self._feeding is None:
            self._feeding = self._loop.later(delay_s, self._feed)

    def _feed(self) -> None:
        """Let the pulls that wait for slots try again, those that began first first."""
        self._feeding = None
        hungry, self._hungry = sorted(self._hungry), set()
        for number in hungry:
            if number in self._active:
                self._advance(self._active[number])

    def _keep(
        self, active: _Active, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64]
    ) -> None:
        """Lease what the request was promised until it is over, or its time is: no later pull evicts it."""
        request_id, now_s = active.fetch.request_id, time.monotonic()
        left_s = active.pull.deadline_s + AFTERLIFE_S - now_s
        if not len(slots) or left_s <= 0 or active.cancelled:
            return
        kept = next((one for one in self._kept.get(request_id, ()) if one.number == active.number), None)
        if kept is None:
            kept = _Kept(active.pool, active.origin, active.number)
            self._kept.setdefault(request_id, []).append(kept)
            self._loop.later(left_s, lambda: self._forget_kept(request_id, kept))
        held = active.pool.lease(slots, generations)
        kept.held.append((slots[held], generations[held]))

    def _forget_kept(self, request_id: str, kept: _Kept) -> None:
        remaining = self._kept.get(request_id, [])
        if kept in remaining:
            remaining.remove(kept)
            self._unkeep(kept)
        if not remaining:
            self._kept.pop(request_id, None)

    def _unkeep(self, kept: _Kept) -> None:
        if kept.pool is self._host.pool:
            for slots, generations in kept.held:
                kept.pool.unlease(slots, generations)
        kept.held.clear()

    # --- what is handed to one request alone --------------------------------------------------------

    def _hand_in_place(self, active: _Active, move: Move, transport: ShmTransport) -> None:
        """The engine reads these in their source's pool, under our lease."""
        pull, indices = active.pull, move.indices
        slots, generations = pull.remote_slots[indices], pull.remote_generations[indices]
        self._hand(
            active,
            indices,
            slots,
            generations,
            pull.checksums[indices],
            transport.pool_dir,
            transport.incarnation,
        )
        pull.handed(indices)
        self._trace_step(active, move.source, transport.name, time.monotonic(), len(indices), 0)
        active.untold = True
        active.pulled[transport.name] = active.pulled.get(transport.name, 0) + len(indices)
        self._meters.transit_blocks.inc(len(indices), how="in_place")

    def _hand(
        self,
        active: _Active,
        indices: Indices,
        slots: npt.NDArray[np.int32],
        generations: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint64],
        pool_dir: str = "",
        incarnation: int = 0,
    ) -> None:
        assert active.handover is not None
        active.handover.hand(indices, slots, generations, in_place=bool(pool_dir))
        for start in range(0, len(indices), _HANDED_PER_MESSAGE):
            part = slice(start, start + _HANDED_PER_MESSAGE)
            active.asker.broadcast(
                Handed(
                    request_id=active.fetch.request_id,
                    first=active.fetch.first,
                    indices=indices[part].astype("<i4").tobytes(),
                    slots=slots[part].astype("<i4").tobytes(),
                    generations=generations[part].astype("<u8").tobytes(),
                    checksums=checksums[part].astype("<u8").tobytes(),
                    pool_dir=pool_dir,
                    incarnation=incarnation,
                )
            )

    def _free(self, active: _Active, freed: Freed) -> None:
        if len(freed.slots):
            self.transit.used -= len(freed.slots)
            if active.pool is self._host.pool:
                active.pool.give_back(freed.slots, freed.generations)
            if self._hungry:
                self._loop.defer(self._feed_now)

    def _feed_now(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
        self._feed()

    def _count_in_place(self, active: _Active, indices: npt.NDArray[np.intp]) -> None:
        """What every rank has read in a source's pool counts as pulled from it, on both sides."""
        for source in np.unique(active.pull.source[indices]).tolist():
            count = int((active.pull.source[indices] == source).sum())
            self._count_pulled(active, source, count, ShmTransport.name)

    def _note_corrupt(self, active: _Active, indices: npt.NDArray[np.int32]) -> None:
        """Bytes that a rank read in a source's pool do not verify: its guard is told with the release."""
        inside = indices[(indices >= 0) & (indices < active.pull.count)]
        self._meters.corrupt_blocks.inc(len(inside), where="pull")
        for source in np.unique(active.pull.source[inside]).tolist():
            mine = inside[active.pull.source[inside] == source]
            account = self._account(active, source)
            account.corrupt_slots += active.pull.remote_slots[mine].tolist()
            account.corrupt_generations += active.pull.remote_generations[mine].tolist()

    def _count_pulled(self, active: _Active, source: int, count: int, transport: str) -> None:
        self._meters.pulled_blocks.inc(count, transport=transport)
        self._meters.pulled_bytes.inc(count * active.context.local.block_bytes, transport=transport)
        link = active.links[source]
        self._meters.peer_pulled_bytes.inc(
            count * active.context.local.block_bytes, peer=link.name or link.endpoint
        )
        account = self._account(active, source)
        account.blocks += count
        account.transport = transport

    # --- when a step ends ---------------------------------------------------------------------------

    def _stepped(self, active: _Active, result: StepResult, transport: str, started_s: float) -> None:
        step, pool = result.step, active.pool
        active.steps -= 1
        link = active.links[step.source]
        good = result.statuses == BlockStatus.OK
        statuses = result.statuses
        current = pool is self._host.pool
        if active.dead:
            good &= ~np.isin(step.indices, list(active.dead))
        if good.any() and current:
            refused = self._accept(active, step, good, result.checksums, transport)
            statuses[np.flatnonzero(good)[refused]] = BlockStatus.FAILED
            self._measure(active, link, transport, int(good.sum()), result.seconds)
        if active.handover is not None:
            self.transit.used -= int((~good).sum()) if current else len(step)
        if not current:
            log.debug("a step for a pool that was replaced ended")
        elif result.slots_in_flight:
            # Not free and not ours: out of use, and seen to be, until the transport says that it is quiet.
            pool.quarantine(step.local_slots, step.local_generations)
            self._meters.quarantined_slots.inc(len(step))
        elif not good.all():
            pool.give_back(step.local_slots[~good], step.local_generations[~good])
        if result.corrupt.any():
            account = self._account(active, step.source)
            account.corrupt_slots += step.remote_slots[result.corrupt].tolist()
            account.corrupt_generations += step.remote_generations[result.corrupt].tolist()
            self._meters.corrupt_blocks.inc(int(result.corrupt.sum()), where="pull")
        if result.reason:
            log.warning(
                "request %s: step of %d blocks from %s: %s",
                active.fetch.request_id,
                len(step),
                link.name or link.endpoint,
                result.reason,
            )
            active.pull.reasons[step.source] = f"{link.name or link.endpoint}: {result.reason}"
        active.pull.moved(step.indices, statuses, started_s)
        arrived = int((statuses == BlockStatus.OK).sum())
        self._trace_step(active, step.source, transport, started_s, arrived, len(step) - arrived)
        unreachable = (statuses == BlockStatus.GONE) | (statuses == BlockStatus.TOO_SLOW)
        if transport == "nixl" and unreachable.all():
            # Whatever is wrong with the peer is wrong for its other blocks too.
            status = BlockStatus(int(statuses[0]))
            active.pull.source_failed(step.source, status, result.reason)
            if status is BlockStatus.GONE or result.seconds > 0.9 * STALL_S:
                # Not when it was only this pull that had no time left.
                link.suspect(result.reason)
        if not active.pull.done:
            self._report(active, final=False)
        self._advance(active)

    def _trace_step(
        self, active: _Active, source: int, transport: str, started_s: float, good: int, bad: int
    ) -> None:
        if active.trace is not None:
            link, nbytes = active.links[source], good * active.context.local.block_bytes
            active.trace.moved(link.name or link.endpoint, transport, started_s, good, nbytes, bad)

    def _measure(self, active: _Active, link: PeerLink, transport: str, blocks: int, seconds: float) -> None:
        rate = link.measured(transport, blocks * active.context.local.block_bytes, seconds)
        self._meters.peer_rate.set(rate, peer=link.name or link.endpoint, transport=transport, tier=str(TIER))

    def _accept(
        self,
        active: _Active,
        step: Step,
        good: npt.NDArray[np.bool_],
        checksums: npt.NDArray[np.uint64],
        transport: str,
    ) -> npt.NDArray[np.bool_]:
        """Publish what arrived, or hand it to its request alone; a mask over it of what our pool did not want
        (its slots are free again)."""
        indices = step.indices[good]
        slots, generations = step.local_slots[good], step.local_generations[good]
        active.pulled[transport] = active.pulled.get(transport, 0) + len(indices)
        self._count_pulled(active, step.source, len(indices), transport)
        if active.handover is not None:
            if active.reported:
                # Nobody waits for it any more.
                self._free(active, Freed(slots, generations, np.empty(0, np.intp)))
            else:
                self._hand(active, indices, slots, generations, checksums[good])
                self._meters.transit_blocks.inc(len(indices), how="slot")
            return np.zeros(len(indices), bool)
        result = active.pool.commit(
            slots,
            generations,
            self._blob(active, indices),
            _rows(active.parents)[indices].tobytes(),
            active.hashes[indices],
            (indices + active.pull.first).astype(np.uint32),
            checksums[good],
            time.monotonic(),
        )
        self._host.pool_changed()
        self._keep(active, slots[result.committed], generations[result.committed])
        return ~(result.committed | result.duplicate)

    def _quiet(self, active: _Active, step: Step) -> None:
        """Nothing can write to these slots any more."""
        self._meters.requalified_slots.inc(len(step))
        if active.pool is self._host.pool:
            active.pool.requalify(step.local_slots, step.local_generations)

    # --- telling ----------------------------------------------------------------------------------

    def _answer(self, active: _Active) -> None:
        """Say what the load may count on; again when a source that was late made it more."""
        fetch, pull = active.fetch, active.pull
        available = pull.available()
        if available > pull.promised:
            pull.promised = available
            active.answer(FetchLease(fetch.request_id, fetch.first, available, pull.reason()))

    def _report(self, active: _Active, *, final: bool) -> None:
        pull, fetch = active.pull, active.fetch
        active.untold = False
        blocks = sum(active.pulled.values())
        seconds = time.monotonic() - pull.started_s
        active.asker.broadcast(
            FetchProgress(
                request_id=fetch.request_id,
                statuses=pull.statuses.tobytes(),
                final=final,
                pulled_blocks=blocks,
                pulled_bytes=blocks * active.context.local.block_bytes,
                seconds=seconds,
                transport="+".join(active.pulled),
                first=fetch.first,
                reason=pull.reason() if final else "",
            )
        )
        if final:
            active.reported = True
            tally = pull.tally()
            good = tally.pop(BlockStatus.OK, 0)
            for status, count in tally.items():
                self._meters.failed_blocks.inc(count, status=status.name.lower())
            self._meters.fetches.inc(result="ok" if good == pull.count else "partial" if good else "none")
            if blocks:
                self._meters.pull_seconds.observe(seconds)

    def _expire(self, active: _Active) -> None:
        """The deadline: what is under way ends within its step, but is not waited for."""
        if active.number in self._active:
            active.pull.reasons.setdefault(-1, "the deadline passed")
            active.pull.stop(BlockStatus.TOO_SLOW, moving_too=True)
            if active.handover is not None:
                active.timers.append(self._loop.later(AFTERLIFE_S, lambda: self._bury(active)))
            self._advance(active)

    def _bury(self, active: _Active) -> None:
        """Its time is over, and the engine has not taken, or finished, what it was handed."""
        if active.number in self._active:
            self._cancel(active)

    def _cancel(self, active: _Active) -> None:
        active.cancelled = True
        active.pull.stop(BlockStatus.GONE, moving_too=True)
        self._advance(active)

    def _close(self, active: _Active) -> None:
        """Nothing is under way any more: tell the sources what was read, and forget the pull."""
        if self._active.pop(active.number, None) is None:
            return
        for timer in active.timers:
            timer.cancel()
        self._claimed -= active.claim
        self._hungry.discard(active.number)
        if active.handover is not None:
            if self._handing.get((active.fetch.request_id, active.fetch.first)) is active:
                del self._handing[active.fetch.request_id, active.fetch.first]
            self._free(active, active.handover.drop())
        for source, account in active.accounts.items():
            self._settle(active, active.links[source], account)
        copied = sum(active.pulled.values())
        nbytes = copied * active.context.local.block_bytes
        if active.trace is not None:
            active.trace.end(
                active.pull.statuses.tobytes(), copied=copied, nbytes=nbytes, reason=active.pull.reason()
            )
        self._on_end(
            Ended(
                fetch=active.fetch,
                pool=active.pool,
                statuses=active.pull.statuses,
                links=active.links,
                copied_blocks=copied,
                byte_count=nbytes,
                seconds=time.monotonic() - active.pull.started_s,
                cancelled=active.cancelled,
                reason=active.pull.reason(),
            )
        )

    def _settle(self, active: _Active, link: PeerLink, account: _Account) -> None:
        if not account.leases and not account.blocks and not account.corrupt_slots:
            return
        # After an optimistic read there is no lease; the message then only keeps both sides' counters equal.
        first, *others = account.leases or [0]
        link.release(
            Release(
                lease_id=first,
                block_count=account.blocks,
                byte_count=account.blocks * active.context.local.block_bytes,
                transport=account.transport,
                corrupt_slots=np.array(account.corrupt_slots, "<i4").tobytes(),
                corrupt_generations=np.array(account.corrupt_generations, "<u8").tobytes(),
            )
        )
        for lease_id in others:
            link.release(Release(lease_id))

    def _account(self, active: _Active, source: int) -> _Account:
        return active.accounts.setdefault(source, _Account())

    def _blob(self, active: _Active, indices: Indices) -> bytes:
        return _rows(active.fetch.keys)[indices].tobytes()

    def status(self) -> list[dict[str, Any]]:
        """JSON-ready: pulls under way."""
        return [
            {
                "request_id": active.fetch.request_id,
                "plan_id": active.fetch.plan_id,
                "blocks": active.pull.count,
                "available": active.pull.available(),
                "moving": active.pull.moving,
                "sources": [link.endpoint for link in active.links],
            }
            for active in self._active.values()
        ]


def _rows(blob: bytes) -> npt.NDArray[np.void]:
    """A blob of keys as an array of them."""
    return np.frombuffer(blob, f"V{KEY_BYTES}")
