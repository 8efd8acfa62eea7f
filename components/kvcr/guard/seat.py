# SPDX-License-Identifier: Apache-2.0
"""The one engine that may write to the pool: who it is, whether it lives, and what it holds.

::

    EMPTY ──first Hello──> STANDBY ──last connection closes──> CHECKING ──death proven──> ACTIVE
                             ^  ^                                │                          │
                             │  └──────── same engine again ─────┘                          │
                             └──────────────────── an engine, old or new ───────────────────┘

Death is proven by the writer locks, which the kernel drops with the processes that hold them; never by time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcr.guard.connection import Connection
from kvcr.guard.view import GuardState
from kvcr.pool import Pool, engine_is_dead, writers_of
from kvcr.protocol.engine import Role, ToEngine, to_engine

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One connected process of the engine."""

    connection: Connection
    role: Role
    rank: int
    pid: int
    loads: dict[str, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]]] = field(default_factory=dict)
    """Slots leased for the loads of each request."""

    def send(self, message: ToEngine) -> None:
        self.connection.send(to_engine.encode(message))


class Seat:
    """Belongs to the authority thread."""

    def __init__(self, on_state: Callable[[GuardState], None]) -> None:
        """``on_state`` is called with every new state, after it took effect."""
        self.state = GuardState.EMPTY
        self.engine_id = ""
        self.namespace = ""
        self.pids: tuple[int, ...] = ()
        self.members: list[Member] = []
        self._on_state = on_state

    def found(self, pool: Pool) -> None:
        """A pool of before this guard's start: whoever was writing to it may still be."""
        engines = {*pool.writers(), *writers_of(pool.dir)}
        alive = sorted(engine_id for engine_id in engines if not engine_is_dead(pool.dir, engine_id))
        for engine_id in engines.difference(alive):
            self._reclaim(pool, engine_id)
        if alive:
            self.engine_id = alive[0]
            log.info("engine %s of the pool in %s is still alive; waiting for it", self.engine_id, pool.dir)
            self._enter(GuardState.CHECKING)
        else:
            if engines:
                pool.raise_epoch()
            self._enter(GuardState.ACTIVE)

    def refusal(self, pool: Pool | None, engine_id: str) -> str:
        """Why this engine cannot have the pool now; empty when it can."""
        if not self.engine_id or self.engine_id == engine_id or self.state is GuardState.ACTIVE:
            return ""
        if self.members:
            return f"engine {self.engine_id} is attached; end it first, or give the new one a pool of its own"
        if pool is not None and not engine_is_dead(pool.dir, self.engine_id):
            return (
                f"engine {self.engine_id} closed its connections, but its processes still hold the writer "
                f"locks in {pool.dir}/writers; the pool is free as soon as they are gone"
            )
        return ""

    def join(self, pool: Pool, engine_id: str, namespace: str, member: Member) -> None:
        """Seat a process whose engine has no :meth:`refusal`. A new engine gets a new epoch."""
        if self.engine_id != engine_id:
            if self.engine_id and self.state is not GuardState.ACTIVE:
                self._take_over(pool)
            if self.state is not GuardState.EMPTY:
                pool.raise_epoch()
            self.engine_id = engine_id
            self.pids = ()
        elif self.state is GuardState.ACTIVE:
            # Its death was proven, and it is back: it had not taken its locks yet, or gave them up.
            pool.raise_epoch()
        self.namespace = namespace
        self.members.append(member)
        self.pids = tuple(sorted({*self.pids, member.pid}))
        self._enter(GuardState.STANDBY)

    def leave(self, pool: Pool | None, member: Member) -> None:
        """A connection closed: its loads are over. After the last one, find out what became of the engine."""
        self.members.remove(member)
        for held in member.loads.values():
            for slots, generations in held:
                if pool is not None:
                    pool.unlease(slots, generations)
        member.loads.clear()
        if not self.members:
            self._enter(GuardState.CHECKING)
            self.check(pool)

    def check(self, pool: Pool | None) -> None:
        """Look for the proof of death; cheap, and does nothing unless the state is CHECKING."""
        if (
            self.state is GuardState.CHECKING
            and pool is not None
            and engine_is_dead(pool.dir, self.engine_id)
        ):
            self._take_over(pool)

    def broadcast(self, message: ToEngine) -> None:
        """Send to every process of the engine."""
        raw = to_engine.encode(message)
        for member in list(self.members):
            member.connection.send(raw)

    def _take_over(self, pool: Pool) -> None:
        epoch = pool.raise_epoch()
        count = self._reclaim(pool, self.engine_id)
        log.info("engine %s is dead: epoch %d, %d granted slots reclaimed", self.engine_id, epoch, count)
        self._enter(GuardState.ACTIVE)

    @staticmethod
    def _reclaim(pool: Pool, engine_id: str) -> int:
        count = pool.reclaim_writer(engine_id)
        for path in writers_of(pool.dir).get(engine_id, []):
            path.unlink(missing_ok=True)
        return count

    def _enter(self, state: GuardState) -> None:
        if state is not self.state:
            log.info("state %s -> %s", self.state, state)
            self.state = state
            self._on_state(state)
