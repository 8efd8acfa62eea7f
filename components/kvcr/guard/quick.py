# SPDX-License-Identifier: Apache-2.0
"""Pulls that are over sooner than begun: a few blocks from a pool whose files are mapped here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcr.guard.choosing import PeerContext
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.peers import PeerLink
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol.engine import BlockStatus, Fetch, FetchProgress, ToEngine
from kvcr.protocol.peer import Release
from kvcr.transfer.base import INLINE_BYTES
from kvcr.transfer.shm import OPTIMISTIC_BLOCKS, ShmTransport

TELL_S = 0.02
"""Sources are told what was read from them, and meters count it, this often: nobody waits for it."""


_OK, _FAILED = np.uint8(BlockStatus.OK), np.uint8(BlockStatus.FAILED)


class Pulled(NamedTuple):
    """A pull that is over; every block was copied."""

    statuses: npt.NDArray[np.uint8]
    seconds: float


class Host(Protocol):
    """What quick pulls need of the guard."""

    def pool_changed(self) -> None: ...


class QuickPulls:
    """Belongs to the authority thread. Makes a pull whole or not at all: whatever is out of the ordinary is
    left to :class:`kvcr.guard.fetches.Fetches`, which begins from the start."""

    def __init__(self, host: Host, loop: Loop, meters: Meters) -> None:
        self._host = host
        self._loop = loop
        self._meters = meters
        self._read: dict[PeerLink, int] = {}
        """Blocks of each peer that it was not told of."""
        self._seconds: list[float] = []
        self._results: Counter[str] = Counter()
        self._refused = 0

    def pull(
        self,
        fetch: Fetch,
        hashes: npt.NDArray[np.uint64],
        pool: Pool,
        context: PeerContext,
        link: PeerLink,
        others: Collection[bytes],
        answer: Callable[[ToEngine], None],
    ) -> Pulled | None:
        """Copy, verify, commit and answer; None if this is no pull for here, and nothing was done then.

        ``others``: keys that other pulls are getting.
        """
        transport, count = link.transport, len(hashes)
        block_bytes = context.local.block_bytes
        if (
            not isinstance(transport, ShmTransport)
            or not 0 < count <= OPTIMISTIC_BLOCKS
            or count * block_bytes > INLINE_BYTES
            or fetch.no_retain
            or fetch.move
            or fetch.deadline_ms <= 0
            or not _covered(fetch, count)
            or (
                fetch.give_up_ms
                and 1000 * count * block_bytes > fetch.give_up_ms * (link.bytes_per_s or np.inf)
            )
        ):
            return None
        keys = fetch.keys
        distinct = {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}
        if len(distinct) < count or (others and any(key in others for key in distinct)):
            return None
        if (pool.lookup(keys).slots >= 0).any():
            return None
        theirs = transport.lookup(keys)
        if theirs.hits < count:
            return None
        started_s = time.monotonic()
        granted = pool.allocate(count, started_s)
        if len(granted.slots) < count or not transport.take(theirs, granted.slots):
            pool.give_back(*granted)
            return None
        now_s = time.monotonic()
        stored = pool.commit_new(
            granted,
            keys,
            fetch.parent + keys[:-KEY_BYTES],
            np.where(hashes == 0, theirs.engine_hashes, hashes),
            np.arange(fetch.first, fetch.first + count, dtype=np.uint32),
            theirs.checksums,
            now_s,
        )
        # What the policy did not want, or the index had no room for: arrived, and not kept.
        statuses = np.where(stored, _OK, _FAILED)
        kept = int(np.count_nonzero(stored))
        seconds = now_s - started_s
        # Once, as each message wakes a process, and to the scheduler alone: the blocks are in the directory
        # before any worker can be told to load them.
        answer(
            FetchProgress(
                request_id=fetch.request_id,
                statuses=statuses.tobytes(),
                final=True,
                pulled_blocks=count,
                pulled_bytes=count * block_bytes,
                seconds=seconds,
                transport=transport.name,
                first=fetch.first,
            )
        )
        link.measured(transport.name, count * block_bytes, seconds)
        self._account(link, count, count - kept, seconds, block_bytes)
        return Pulled(statuses, seconds)

    def _account(self, link: PeerLink, count: int, refused: int, seconds: float, block_bytes: int) -> None:
        self._host.pool_changed()
        if not self._read:
            self._loop.later(TELL_S, lambda: self._tell(block_bytes))
        self._read[link] = self._read.get(link, 0) + count
        self._seconds.append(seconds)
        self._results["partial" if refused else "ok"] += 1
        self._refused += refused

    def _tell(self, block_bytes: int) -> None:
        """Count what was read. No lease ends with the message; it keeps the counters of both sides equal."""
        read, self._read = self._read, {}
        meters, name = self._meters, ShmTransport.name
        for link, count in read.items():
            nbytes = count * block_bytes
            link.release(Release(0, block_count=count, byte_count=nbytes, transport=name))
            meters.pulled_blocks.inc(count, transport=name)
            meters.pulled_bytes.inc(nbytes, transport=name)
        for seconds in self._seconds:
            meters.pull_seconds.observe(seconds)
        for result, count in self._results.items():
            meters.fetches.inc(count, result=result)
        if self._refused:
            meters.failed_blocks.inc(self._refused, status=BlockStatus.FAILED.name.lower())
        self._seconds.clear()
        self._results.clear()
        self._refused = 0


def _covered(fetch: Fetch, count: int) -> bool:
    """Whether the first source is said to have every block."""
    if not fetch.sources:
        return False
    source = fetch.sources[0]
    return source.first <= fetch.first and fetch.first + count <= source.first + source.count
