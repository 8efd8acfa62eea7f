# SPDX-License-Identifier: Apache-2.0
"""Prefetches: fetches ahead of a request, within bounds, and stopped when they are not wanted any more.

A request that comes while its blocks are on their way waits for that same transfer: fetches share what they
are getting. Long prefetches go in parts, in prefix order, so that what arrives first is of use first.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError
from kvcr.guard.active import Ended
from kvcr.guard.fetches import MAX_SOURCES, Fetches
from kvcr.guard.meters import Meters
from kvcr.guard.reports import End, Outcome, code_of_failures
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, u64
from kvcr.protocol.engine import BlockStatus, Fetch, Source, ToEngine
from kvcr.protocol.events import ActionCode, PrefetchPayload
from kvcr.transfer.base import LocalRegions

MAX_PREFETCHES = 32
MAX_BYTES_IN_FLIGHT = 4 << 30

MAX_SHARE = 0.25
"""Of the pool: what prefetches under way and prefetched blocks that nobody used yet may take together."""

MAX_POSITION = (1 << 32) - 1
"""Of a block in its chain: the directory keeps them as uint32."""

MAX_CANCELLED = 1024
"""Plans remembered as withdrawn before their prefetch came."""


class Host(Protocol):
    """What prefetches need of the guard."""

    pool: Pool | None

    @property
    def local(self) -> LocalRegions | None: ...


class _Nobody:
    """No engine waits for a prefetch."""

    def broadcast(self, message: ToEngine) -> None: ...


@dataclass(slots=True, eq=False)
class _Prefetch:
    plan_id: str
    payload: PrefetchPayload
    pool: Pool
    started_s: float
    deadline_s: float
    done: End
    blocks: int
    """that were missing when it started"""
    next_block: int = 0
    request_id: str = ""
    """of the part under way"""
    tally: Counter[int] = field(default_factory=Counter)
    """Blocks by :class:`BlockStatus`."""
    copied: int = 0
    byte_count: int = 0
    cancelled: bool = False
    details: list[str] = field(default_factory=list)


class Prefetches:
    """Belongs to the authority thread."""

    def __init__(self, host: Host, fetches: Fetches, meters: Meters) -> None:
        self._host = host
        self._fetches = fetches
        self._meters = meters
        self._active: dict[str, _Prefetch] = {}
        """By the request id of the part under way."""
        self._unused: list[tuple[Pool, npt.NDArray[np.int32], npt.NDArray[np.uint64]]] = []
        """Blocks that prefetches brought, as of when they ended."""
        self._withdrawn: OrderedDict[str, None] = OrderedDict()
        self._count = 0

    def start(self, plan_id: str, payload: PrefetchPayload, deadline_s: float, done: End) -> None:
        """Begin, or call ``done`` at once with the reason why not. ``deadline_s`` is on ``time.monotonic``.

        Raises ProtocolError, before anything is done, on what cannot be right.
        """
        count = len(payload.keys) // KEY_BYTES
        if not 0 <= payload.first <= MAX_POSITION - count:
            raise ProtocolError(f"first is {payload.first}, positions are 0 to {MAX_POSITION}")
        if len(u64(payload.engine_hashes)) != count:
            raise ProtocolError(f"{count} keys, {len(payload.engine_hashes)} bytes of engine_hashes")
        if not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", payload.parent):
            raise ProtocolError(f"parent is {payload.parent!r}, must be {2 * KEY_BYTES} hex digits")
        if payload.mode not in ("copy", "move"):
            raise ProtocolError(f"mode is {payload.mode!r}, must be copy or move")
        pool, local = self._host.pool, self._host.local
        if plan_id in self._withdrawn:
            done(Outcome(ActionCode.CANCELLED, detail="withdrawn before it came"))
        elif pool is None or local is None:
            done(Outcome(ActionCode.REFUSED, detail="no pool: no engine has attached yet"))
        elif refusal := self._refusal(pool, local, payload):
            done(Outcome(ActionCode.REFUSED, detail=refusal))
        else:
            missing = int((pool.lookup(payload.keys).slots < 0).sum())
            now_s = time.monotonic()
            prefetch = _Prefetch(plan_id, payload, pool, now_s, deadline_s, done, missing)
            self._next_part(prefetch)

    def cancel(self, plan_id: str) -> int:
        """Stop the prefetches of a plan, now or when they come; what arrived stays. Returns how many ran."""
        self._withdrawn[plan_id] = None
        if len(self._withdrawn) > MAX_CANCELLED:
            self._withdrawn.popitem(last=False)
        running = [prefetch for prefetch in self._active.values() if prefetch.plan_id == plan_id]
        for prefetch in running:
            prefetch.cancelled = True
            self._fetches.finish(prefetch.request_id)
        return len(running)

    def has(self, request_id: str) -> bool:
        """Whether this fetch is a part of a prefetch."""
        return request_id in self._active

    def part_ended(self, ended: Ended, code: ActionCode, detail: str) -> bool:
        """A fetch ended, as ``code``. False: it was no part of a prefetch."""
        prefetch = self._active.pop(ended.fetch.request_id, None)
        if prefetch is None:
            return False
        prefetch.tally.update(ended.statuses.tolist())
        prefetch.copied += ended.copied_blocks
        prefetch.byte_count += ended.byte_count
        if detail:
            prefetch.details.append(detail)
        self._remember(ended)
        left = prefetch.next_block < len(prefetch.payload.keys) // KEY_BYTES
        # A part of which something is missing ends it: what comes after a hole is of no use.
        if left and code is ActionCode.DONE and not prefetch.cancelled and ended.pool is self._host.pool:
            self._next_part(prefetch)
        else:
            self._finish(prefetch)
        self._gauge()
        return True

    def _refusal(self, pool: Pool, local: LocalRegions, payload: PrefetchPayload) -> str:
        sources, missing = len(payload.sources), int((pool.lookup(payload.keys).slots < 0).sum())
        if not 0 < sources <= MAX_SOURCES:
            return f"{sources} sources, from 1 to {MAX_SOURCES} are allowed"
        if len(self._active) >= MAX_PREFETCHES:
            return f"{MAX_PREFETCHES} prefetches are under way"
        flying = sum(prefetch.blocks for prefetch in self._active.values())
        if (flying + missing) * local.block_bytes > MAX_BYTES_IN_FLIGHT:
            limit = f"the limit is {MAX_BYTES_IN_FLIGHT} bytes"
            return f"{flying} blocks are on their way and {missing} come on top; {limit}"
        waiting, most = self._count_unused(pool), int(pool.slots * MAX_SHARE)
        if flying + waiting + missing > most:
            return (
                f"{flying} blocks are on their way, {waiting} wait for their first use and {missing} come "
                f"on top; the limit is {most} of the pool's {pool.slots}"
            )
        return ""

    def _next_part(self, prefetch: _Prefetch) -> None:
        payload, start = prefetch.payload, prefetch.next_block
        keys = payload.keys[start * KEY_BYTES : (start + MAX_BLOCKS_PER_MESSAGE) * KEY_BYTES]
        prefetch.next_block += len(keys) // KEY_BYTES
        now_s = time.monotonic()
        give_up_ms = (
            payload.give_up_ms - (now_s - prefetch.started_s) * 1000 if payload.give_up_ms > 0 else 0.0
        )
        self._count += 1
        prefetch.request_id = f"prefetch {self._count} of {prefetch.plan_id}"
        fetch = Fetch(
            epoch=prefetch.pool.epoch,
            request_id=prefetch.request_id,
            first=payload.first + start,
            parent=payload.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES]
            if start
            else bytes.fromhex(payload.parent),
            keys=keys,
            engine_hashes=payload.engine_hashes[8 * start : 8 * prefetch.next_block],
            sources=[
                Source(source.endpoint, payload.first + source.first, source.count, source.guard)
                for source in payload.sources
            ],
            # 0 would mean that there is no estimate.
            give_up_ms=max(give_up_ms, 0.001) if payload.give_up_ms > 0 else 0.0,
            deadline_ms=max(prefetch.deadline_s - now_s, 0.0) * 1000,
            plan_id=prefetch.plan_id,
            move=payload.mode == "move",
        )
        self._active[prefetch.request_id] = prefetch
        refusal = self._fetches.start(fetch, _Nobody(), _ignore, self)
        if refusal and self._active.pop(prefetch.request_id, None) is not None:
            prefetch.details.append(refusal)
            prefetch.tally[BlockStatus.FAILED] += len(keys) // KEY_BYTES
            self._finish(prefetch)
        self._gauge()

    def _finish(self, prefetch: _Prefetch) -> None:
        count = len(prefetch.payload.keys) // KEY_BYTES
        arrived = prefetch.tally.pop(BlockStatus.OK, 0)
        if arrived == count:
            code = ActionCode.DONE
        elif prefetch.cancelled:
            code = ActionCode.CANCELLED
        else:
            code = ActionCode.PARTIAL if arrived else code_of_failures(set(prefetch.tally))
        if code is ActionCode.DONE and prefetch.details:
            # Copied, but a source of a move kept its own.
            code = ActionCode.PARTIAL
        detail = "; ".join(dict.fromkeys(prefetch.details))
        prefetch.done(Outcome(code, prefetch.copied, prefetch.byte_count, detail))

    def _remember(self, ended: Ended) -> None:
        if ended.copied_blocks and ended.pool is self._host.pool:
            found = ended.pool.lookup(ended.fetch.keys)
            here = found.slots >= 0
            self._unused.append((ended.pool, found.slots[here], found.generations[here]))

    def _count_unused(self, pool: Pool) -> int:
        kept = []
        for owner, slots, generations in self._unused:
            if owner is pool and (mask := pool.unused(slots, generations)).any():
                kept.append((pool, slots[mask], generations[mask]))
        self._unused = kept
        return sum(len(slots) for _, slots, _ in kept)

    def _gauge(self) -> None:
        self._meters.prefetching_blocks.set(sum(prefetch.blocks for prefetch in self._active.values()))


def _ignore(message: ToEngine) -> None:
    """A lease reply that nobody waits for."""
