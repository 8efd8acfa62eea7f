# SPDX-License-Identifier: Apache-2.0
"""Pulls that are over sooner than begun: blocks from a pool whose files are mapped here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcr.guard.choosing import PeerContext
from kvcr.guard.inventory import TIER
from kvcr.guard.link import PeerLink
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.keys import KEY_BYTES
from kvcr.pool import Found, Granted, Pool
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.engine import BlockStatus, Fetch, FetchLease, FetchProgress, ToEngine
from kvcr.protocol.peer import Release
from kvcr.transfer.base import INLINE_BYTES
from kvcr.transfer.shm import ShmTransport

TELL_S = 0.02
"""Sources are told what was read from them, and meters count it, this often: nobody waits for it."""

QUICK_BYTES = 32 << 20
"""Most that is copied here: 2 to 3 ms of this thread on a quiet machine (measured), in steps of 8 MiB that
are each published and told. Handing steps to the movers and their results back took longer than copying."""

_OK, _FAILED = np.uint8(BlockStatus.OK), np.uint8(BlockStatus.FAILED)


class Pulled(NamedTuple):
    """A pull that is over; every block was copied."""

    statuses: npt.NDArray[np.uint8]
    seconds: float


class _Done(NamedTuple):
    """A pull of which nobody was told."""

    link: PeerLink
    statuses: npt.NDArray[np.uint8]
    seconds: float
    theirs: Found


class Host(Protocol):
    """What quick pulls need of the guard."""

    def pool_changed(self) -> None: ...


class QuickPulls:
    """Belongs to the authority thread. Whatever is out of the ordinary is left to
    :class:`kvcr.guard.fetches.Fetches`, which begins from the start: what was published by then is here."""

    def __init__(self, host: Host, loop: Loop, meters: Meters) -> None:
        self._host = host
        self._loop = loop
        self._meters = meters
        self._untold: list[_Done] = []
        """Pulls that nobody was told of."""
        self._rest_until_s = 0.0
        """Until then large pulls are the movers', as this thread has others to hear."""

    def pull(
        self,
        fetch: Fetch,
        hashes: npt.NDArray[np.uint64],
        pool: Pool,
        context: PeerContext,
        link: PeerLink,
        others: Collection[bytes],
        answer: Callable[[ToEngine], None],
        broadcast: Callable[[ToEngine], None],
    ) -> Pulled | None:
        """Copy, verify, commit and tell; None if this is no pull for here, or did not go smoothly.

        ``others``: keys that other pulls are getting. ``answer`` sends to the scheduler that asked,
        ``broadcast`` to every process of its engine.
        """
        transport, count, local = link.transport, len(hashes), context.local
        nbytes = count * local.block_bytes
        if (
            not isinstance(transport, ShmTransport)
            or not 0 < nbytes <= QUICK_BYTES
            or (nbytes > INLINE_BYTES and time.monotonic() < self._rest_until_s)
            or fetch.no_retain
            or fetch.move
            or fetch.deadline_ms <= 0
            or not _covered(fetch, count)
            or (fetch.give_up_ms and 1000 * nbytes > fetch.give_up_ms * (link.bytes_per_s or np.inf))
        ):
            return None
        keys = fetch.keys
        if not _distinct(keys, count, others) or pool.hits(keys):
            return None
        theirs = transport.lookup(keys)
        if theirs.hits < count:
            return None
        started_s = time.monotonic()
        granted = pool.allocate(count, started_s)
        if len(granted.slots) < count:
            pool.give_back(*granted)
            return None
        if any(fetch.engine_hashes):
            hashes = np.where(hashes == 0, theirs.engine_hashes, hashes)
        else:
            hashes = theirs.engine_hashes
        statuses, step = np.zeros(count, np.uint8), local.blocks_per_step
        if count > step:
            answer(FetchLease(fetch.request_id, fetch.first, count))
        for start in range(0, count, step):
            part = slice(start, start + step)
            if not transport.take(theirs, granted.slots, part):
                pool.give_back(granted.slots[start:], granted.generations[start:])
                return None
            now_s = time.monotonic()
            stored = pool.commit_new(
                Granted(granted.slots[part], granted.generations[part]),
                keys[KEY_BYTES * start : KEY_BYTES * part.stop],
                (fetch.parent + keys[:-KEY_BYTES])[KEY_BYTES * start : KEY_BYTES * part.stop],
                hashes[part],
                np.arange(fetch.first + start, fetch.first + min(part.stop, count), dtype=np.uint32),
                theirs.checksums[part],
                now_s,
            )
            # What the policy did not want, or the index had no room for: arrived, and not kept.
            statuses[part] = np.where(stored, _OK, _FAILED)
            final = part.stop >= count
            progress = FetchProgress(
                request_id=fetch.request_id,
                statuses=statuses.tobytes(),
                final=final,
                pulled_blocks=min(part.stop, count),
                pulled_bytes=min(part.stop, count) * local.block_bytes,
                seconds=now_s - started_s,
                transport=transport.name,
                first=fetch.first,
            )
            if count <= step:
                # To the scheduler alone, as each message wakes a process: the blocks are in the directory
                # before any worker can be told to load them.
                answer(progress)
            else:
                broadcast(progress)
        seconds = now_s - started_s
        if nbytes > INLINE_BYTES:
            # No more than half of this thread's time.
            self._rest_until_s = now_s + seconds
        self._host.pool_changed()
        if not self._untold:
            self._loop.later(TELL_S, lambda: self._tell(local.block_bytes))
        self._untold.append(_Done(link, statuses, seconds, theirs))
        return Pulled(statuses, seconds)

    def _tell(self, block_bytes: int) -> None:
        """Count what was read, here and at the sources, for which it is a use: no lease said so."""
        untold, self._untold = self._untold, []
        meters, name = self._meters, ShmTransport.name
        read: dict[PeerLink, list[Found]] = {}
        for link, statuses, seconds, theirs in untold:
            read.setdefault(link, []).append(theirs)
            rate = link.measured(name, len(statuses) * block_bytes, seconds)
            meters.peer_rate.set(rate, peer=link.label, transport=name, tier=str(TIER))
            meters.pull_seconds.observe(seconds, transport=name)
            refused = int(np.count_nonzero(statuses == _FAILED))
            meters.fetches.inc(result="partial" if refused else "ok")
            if refused:
                meters.failed_blocks.inc(refused, status=BlockStatus.FAILED.name.lower())
        for link, all_found in read.items():
            slots = np.concatenate([found.slots for found in all_found])
            generations = np.concatenate([found.generations for found in all_found])
            meters.count_pulled(link.label, name, len(slots), len(slots) * block_bytes)
            for start in range(0, len(slots), MAX_BLOCKS_PER_MESSAGE):
                used = slots[start : start + MAX_BLOCKS_PER_MESSAGE]
                link.release(
                    Release(
                        0,
                        block_count=len(used),
                        byte_count=len(used) * block_bytes,
                        transport=name,
                        used_slots=used.astype("<i4").tobytes(),
                        used_generations=generations[start : start + len(used)].astype("<u8").tobytes(),
                    )
                )


def _distinct(keys: bytes, count: int, others: Collection[bytes]) -> bool:
    """Whether no key is there twice, or among ``others``."""
    if count == 1:
        return not others or keys not in others
    distinct = {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}
    return len(distinct) == count and (not others or not any(key in others for key in distinct))


def _covered(fetch: Fetch, count: int) -> bool:
    """Whether the first source is said to have every block."""
    if not fetch.sources:
        return False
    source = fetch.sources[0]
    return source.first <= fetch.first and fetch.first + count <= source.first + source.count
