# SPDX-License-Identifier: Apache-2.0
"""Freeing the grants that got lost with a connection: those that no process of the engine knows of."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError
from kvcr.pool import Granted, Pool
from kvcr.protocol.codec import i32, u64
from kvcr.protocol.engine import Holding, Role

log = logging.getLogger(__name__)

Process = tuple[Role, int]
"""Role and rank: what a process is to its engine, over all its connections."""


class Holdings:
    """What the processes of the engine said they hold, in one epoch. Belongs to the authority thread."""

    def __init__(self) -> None:
        self._epoch = 0
        self._parts: dict[Process, list[Granted]] = {}
        """Lists that are not complete yet."""
        self._listed: dict[Process, list[Granted]] = {}
        self._suspects: Granted | None = None
        """Grants the scheduler did not list, as of its last list; later grants are not among them."""

    def heard(self, pool: Pool, engine_id: str, message: Holding, process: Process) -> int:
        """Take in one part of a list. Returns how many grants were freed, as nobody knew of them.

        Raises ProtocolError on arrays of different lengths.
        """
        slots, generations = i32(message.slots), u64(message.generations)
        if len(slots) != len(generations):
            raise ProtocolError(f"Holding has {len(slots)} slots, {len(generations)} generations")
        if message.epoch != pool.epoch:
            return 0
        if self._epoch != pool.epoch:
            self._epoch, self._suspects = pool.epoch, None
            self._parts.clear()
            self._listed.clear()
        inside = (slots >= 0) & (slots < pool.slots)
        parts = self._parts.setdefault(process, [])
        parts.append(Granted(slots[inside].copy(), generations[inside].copy()))
        if not message.final:
            return 0
        self._listed[process] = self._parts.pop(process)
        if process[0] is Role.SCHEDULER:
            self._suspects = _without(pool, pool.grants(engine_id), self._listed[process])
        # A rank that has not said so may still be writing for an epoch that is over.
        everybody = {(Role.SCHEDULER, 0), *((Role.WORKER, rank) for rank in range(pool.layout.ranks))}
        if self._suspects is None or not everybody <= self._listed.keys():
            return 0
        lost, self._suspects = self._suspects, None
        for parts in self._listed.values():
            lost = _without(pool, lost, parts)
        count = pool.give_back(*lost)
        if count:
            log.info("freed %d grants that engine %s did not know of", count, engine_id)
        return count

    def restarted(self, process: Process) -> None:
        """A process connected anew: an incomplete list of its last connection is void."""
        self._parts.pop(process, None)


def _without(pool: Pool, grants: Granted, listed: list[Granted]) -> Granted:
    """``grants`` that are not in ``listed``, by slot and generation."""
    # No generation has all bits set.
    named: npt.NDArray[np.uint64] = np.full(pool.slots, np.iinfo(np.uint64).max, np.uint64)
    for part in listed:
        named[part.slots] = part.generations
    missing = named[grants.slots] != grants.generations
    return Granted(grants.slots[missing], grants.generations[missing])
