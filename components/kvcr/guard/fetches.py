# SPDX-License-Identifier: Apache-2.0
"""Carrying out Fetches: the shell around :class:`kvcr.guard.pulls.Pull`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError
from kvcr.guard.accounts import Accounts
from kvcr.guard.active import Active, Asker, Ended
from kvcr.guard.asking import Asking
from kvcr.guard.choosing import PeerContext
from kvcr.guard.giving_up import GiveUps, gave_up
from kvcr.guard.handing import Handing
from kvcr.guard.keeping import AFTERLIFE_S, Keeping
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.moving import Moving
from kvcr.guard.peers import Peers
from kvcr.guard.pulls import Phase, Projection, Pull, Span
from kvcr.guard.quick import QuickPulls
from kvcr.guard.room import Room
from kvcr.guard.sharing import Sharing
from kvcr.guard.telling import Telling
from kvcr.guard.tracing import FetchTrace, RequestTraces
from kvcr.guard.transit import Handover, TransitSlots
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, u64
from kvcr.protocol.engine import (
    BlockStatus,
    Fetch,
    FetchLease,
    FetchProgress,
    Taken,
    ToEngine,
)

log = logging.getLogger(__name__)

ANSWER_S = 0.04
"""The engine may wait only 50 ms for FetchLease; it gets what is known by then, and the rest when it is."""

MAX_PULLS = 1024
MAX_SOURCES = 64
MAX_DEADLINE_S = 60.0


class Host(Protocol):
    """What fetches need of the guard."""

    pool: Pool | None
    peers: Peers

    @property
    def peer_context(self) -> PeerContext | None: ...
    def pool_changed(self) -> None: ...


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
        self._active: dict[int, Active] = {}
        self._count = 0
        self.give_ups = GiveUps(meters)
        self.transit = transit
        self._accounts = Accounts(meters)
        self._asking = Asking(loop, lease_ms, host.pool_changed, self._advance)
        self._handing = Handing(meters, self._accounts)
        self._keeping = Keeping(loop, lambda: host.pool)
        self._quick = QuickPulls(host, loop, meters)
        self._telling = Telling(meters)
        self._room = Room(loop, transit, self._active, host.pool_changed, self._advance)
        self._moving = Moving(
            host,
            meters,
            transit,
            self._accounts,
            self._handing,
            self._keeping,
            self._room,
            self._telling,
            self._advance,
        )
        self._sharing = Sharing()

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
                fetch, hashes, pool, context, link, self._sharing.getting, answer, asker.broadcast
            )
            if pulled is not None:
                nbytes = count * context.local.block_bytes
                if trace is not None:
                    trace.pulled_at_once(link.label, pulled, nbytes)
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
        active = Active(
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
            self._handing.begin(active)
        found = pool.lookup(fetch.keys)
        here = found.slots >= 0
        pool.touch(found.slots[here], now_s)
        self._keeping.keep(active, found.slots[here], found.generations[here])
        active.pull.resident(here)
        active.timers = [
            self._loop.later(ANSWER_S, lambda: self._telling.answer(active)),
            self._loop.later(deadline_s - now_s, lambda: self._expire(active)),
        ]
        if active.pull.give_up_s is not None and active.pull.give_up_s < deadline_s:
            # A pull that nothing is heard of is stopped too.
            active.timers.append(
                self._loop.later(active.pull.give_up_s - now_s, lambda: self._advance_if_active(active))
            )
        self._sharing.claim(active)
        self._advance(active)

    def finish(self, request_id: str) -> None:
        """The request is over: stop its pulls; steps under way still end, and what they bring is kept."""
        for active in [active for active in self._active.values() if active.fetch.request_id == request_id]:
            self._cancel(active)
        self._keeping.finish(request_id)

    def orphaned(self, origin: object) -> None:
        """The connection that asked is gone for good: stop what it asked for."""
        requests = {active.fetch.request_id for active in self._active.values() if active.origin is origin}
        requests |= self._keeping.requests_of(origin)
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
        taken = self._handing.taken(message, rank)
        if taken is not None:
            active, freed = taken
            self._room.give_back(active, freed, self._host.pool)
            self._close_if_over(active)

    def stop_all(self) -> None:
        """Before the pool is replaced, or the guard ends."""
        for active in list(self._active.values()):
            self._cancel(active)

    # --- one round of a pull ----------------------------------------------------------------------

    def _advance(self, active: Active) -> None:
        """Ask, copy, tell: whatever can be done now."""
        pull = active.pull
        while True:
            pull.expire(time.monotonic())
            for ask in pull.ask():
                self._asking.ask(active, ask)
            self._estimate(active)
            if pull.ready_to_answer:
                # Before anything is copied: the engine waits for this, and movers compete for the CPU.
                self._telling.answer(active)
            self._moving.pump(active)
            # Ends, as every turn uses up a source of the blocks that are wanted again.
            if not pull.wanted:
                break
        for other in self._sharing.resolve(active):
            # From a round of its own: it may have to start what we gave up.
            self._loop.defer(lambda other=other: self._resume(other))  # type: ignore[misc]
        if pull.ready_to_answer:
            self._telling.answer(active)
        if pull.done and not active.reported:
            self._telling.report(active, final=True)
        elif active.untold and not active.reported:
            self._telling.report(active, final=False)
        self._room.count_claim(active)
        self._close_if_over(active)

    def _close_if_over(self, active: Active) -> None:
        handed = active.handover is not None and active.handover.left > 0
        if active.pull.done and active.steps == 0 and not (handed and not active.cancelled):
            self._close(active)

    def _estimate(self, active: Active) -> None:
        """Stop when recomputing would be done before the blocks that are left; what arrived is kept."""
        pull = active.pull
        if pull.give_up_s is None or pull.done or active.given_up:
            return
        block_bytes = active.block_bytes
        rates = [link.bytes_per_s for link in active.links]
        now_s = time.monotonic()
        projection = pull.project(now_s, [rate / block_bytes if rate else None for rate in rates])
        if pull.too_slow(projection):
            self._give_up(active, projection)

    def _give_up(self, active: Active, projection: Projection) -> None:
        active.given_up = True
        self.give_ups.record(gave_up(active, projection))
        active.pull.reasons.setdefault(-1, "recomputing is estimated to be faster")
        active.pull.stop(BlockStatus.TOO_SLOW, moving_too=False)

    def _resume(self, active: Active) -> None:
        if not active.over:
            self._sharing.claim(active)
            self._advance(active)

    def _advance_if_active(self, active: Active) -> None:
        if not active.over:
            self._advance(active)

    # --- its end ----------------------------------------------------------------------------------

    def _expire(self, active: Active) -> None:
        """The deadline: what is under way ends within its step, but is not waited for."""
        if not active.over:
            active.pull.reasons.setdefault(-1, "the deadline passed")
            active.pull.stop(BlockStatus.TOO_SLOW, moving_too=True)
            if active.handover is not None:
                active.timers.append(self._loop.later(AFTERLIFE_S, lambda: self._bury(active)))
            self._advance(active)

    def _bury(self, active: Active) -> None:
        """Its time is over, and the engine has not taken, or finished, what it was handed."""
        if not active.over:
            self._cancel(active)

    def _cancel(self, active: Active) -> None:
        active.cancelled = True
        active.pull.stop(BlockStatus.GONE, moving_too=True)
        self._advance(active)

    def _close(self, active: Active) -> None:
        """Nothing is under way any more: tell the sources what was read, and forget the pull."""
        if self._active.pop(active.number, None) is None:
            return
        active.over = True
        for timer in active.timers:
            timer.cancel()
        self._room.leave(active)
        if active.handover is not None:
            self._handing.end(active)
            self._room.give_back(active, active.handover.drop(), self._host.pool)
        self._accounts.settle(active)
        copied = sum(active.pulled.values())
        nbytes = copied * active.block_bytes
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
