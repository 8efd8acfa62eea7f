# SPDX-License-Identifier: Apache-2.0
"""No-retain Fetches: blocks that are handed to one request alone, and what its workers have taken of them."""

from __future__ import annotations

import logging
import time

import numpy as np
import numpy.typing as npt

from kvcr.guard.accounts import Accounts
from kvcr.guard.active import Active
from kvcr.guard.meters import Meters
from kvcr.guard.pulls import Indices, Move
from kvcr.guard.transit import Freed
from kvcr.protocol.codec import i32
from kvcr.protocol.engine import Handed, Taken
from kvcr.transfer.shm import ShmTransport

log = logging.getLogger(__name__)

_HANDED_PER_MESSAGE = 1024
"""At 8 ranks 80 kB."""


class Handing:
    """Belongs to the authority thread."""

    def __init__(self, meters: Meters, accounts: Accounts) -> None:
        self._meters = meters
        self._accounts = accounts
        self._handing: dict[tuple[str, int], Active] = {}
        """(request id, first) -> its no-retain Fetch."""

    def begin(self, active: Active) -> None:
        """What arrives for this Fetch is handed over."""
        self._handing[active.fetch.request_id, active.fetch.first] = active

    def end(self, active: Active) -> None:
        """It is over, and nobody takes what is left."""
        if self._handing.get((active.fetch.request_id, active.fetch.first)) is active:
            del self._handing[active.fetch.request_id, active.fetch.first]

    def in_place(self, active: Active, move: Move, transport: ShmTransport) -> None:
        """The engine reads these in their source's pool, under our lease."""
        pull, indices = active.pull, move.indices
        slots, generations = pull.remote_slots[indices], pull.remote_generations[indices]
        self.hand(
            active,
            indices,
            slots,
            generations,
            pull.checksums[indices],
            transport.pool_dir,
            transport.incarnation,
        )
        pull.handed(indices)
        active.moved_at(move.source, transport.name, time.monotonic(), len(indices), 0)
        active.untold = True
        active.count_by_transport(transport.name, len(indices))
        self._meters.transit_blocks.inc(len(indices), how="in_place")

    def hand(
        self,
        active: Active,
        indices: Indices,
        slots: npt.NDArray[np.int32],
        generations: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint64],
        pool_dir: str = "",
        incarnation: int = 0,
    ) -> None:
        """Tell the engine where these are; without ``pool_dir`` in transit slots of our pool."""
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

    def taken(self, message: Taken, rank: int) -> tuple[Active, Freed] | None:
        """A worker has blocks that were handed to it: the Fetch, and what is free now. None: of none that is
        under way. Raises ProtocolError on a ragged array."""
        indices = i32(message.indices)
        active = self._handing.get((message.request_id, message.first))
        if active is None or active.handover is None:
            return None
        if message.unreachable:
            # What was handed in place is recomputed, once: from now on its blocks pass through our pool.
            inside = indices[(indices >= 0) & (indices < active.pull.count)]
            for source in np.unique(active.pull.source[inside]).tolist():
                link = active.links[source]
                log.warning("the engine cannot read the pool of %s", link.label)
                link.in_place = False
        freed = active.handover.taken(indices.astype(np.int64), rank)
        if message.copied:
            self._accounts.read_in_place(active, freed.in_place)
        if message.corrupt:
            self._accounts.corrupt_in_place(active, i32(message.corrupt))
        return active, freed
