# SPDX-License-Identifier: Apache-2.0
"""The one engine that may write to the pool: who it is, whether it lives, and what it holds.

::

    EMPTY ──first Hello──> STANDBY ──last connection closes──> CHECKING ──death proven──> ACTIVE
                             ^  ^                                │                          │
                             │  └──────── same engine again ─────┘                          │
                             └──────────────────── an engine, old or new ───────────────────┘

Death is proven by the writer locks, which the kernel drops with the processes that hold them; never by time.
An engine that only stopped stays in STANDBY, or CHECKING, for as long as it takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcr.errors import PoolBusy
from kvcr.guard.connection import Connection
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.processes import Processes
from kvcr.guard.view import GuardState
from kvcr.pool import FileLock, Pool, engine_is_dead, is_dead, writers_of
from kvcr.protocol.engine import Role, ToEngine, to_engine

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One connected process of the engine."""

    connection: Connection
    role: Role
    rank: int
    pid: int
    heard_s: float = field(default_factory=time.monotonic)
    """When its last message came."""
    loads: dict[str, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]]] = field(default_factory=dict)
    """Slots leased for the loads of each request."""
    leaving: bool = False
    """It said that it ends in good order."""

    def send(self, message: ToEngine) -> None:
        self.connection.send(to_engine.encode(message))


class Seat:
    """Belongs to the authority thread."""

    def __init__(
        self,
        loop: Loop,
        meters: Meters,
        current: Callable[[], Pool | None],
        on_state: Callable[[GuardState, GuardState], None],
    ) -> None:
        """``current`` gives the guard's pool; ``on_state(previous, state)`` hears of every new state that is
        in effect."""
        self.state = GuardState.EMPTY
        self.engine_id = ""
        self.namespace = ""
        self.pids: tuple[int, ...] = ()
        self.members: list[Member] = []
        self.processes = Processes(loop, self._process_ended)
        self._meters = meters
        self._current = current
        self._on_state = on_state
        self._suspected_s = 0.0
        self._fenced = False
        self._killed = False
        self._scheduler_lost = False
        """The scheduler hung up without a word. It holds no writer lock that would tell."""

    def found(self, pool: Pool) -> None:
        """A pool of before this guard's start: whoever was writing to it may still be."""
        engines = {*pool.writers(), *writers_of(pool.dir)}
        alive = sorted(engine_id for engine_id in engines if not engine_is_dead(pool.dir, engine_id))
        dead = engines.difference(alive)
        if alive:
            self.engine_id = alive[0]
            log.info("engine %s of the pool in %s is still alive; waiting for it", self.engine_id, pool.dir)
            self._enter(GuardState.CHECKING)
        else:
            if engines:
                # Before anything of theirs is given away: what they may still say is of the past.
                pool.raise_epoch()
            self._enter(GuardState.ACTIVE)
        for engine_id in dead:
            locks = self._seize(pool, engine_id)
            if locks is not None and self._bury(pool, engine_id, locks) is not None and locks:
                # It died while no guard was there to see it, and with it its grants.
                self._meters.failovers.inc()

    def admit(self, pool: Pool | None, engine_id: str) -> str:
        """Why this engine cannot have the pool now; empty when it can. Proves the death of the one before."""
        if self.members and self.engine_id != engine_id:
            return f"engine {self.engine_id} is attached; end it first, or give the new one a pool of its own"
        if pool is None:
            return ""
        if self.engine_id != engine_id:
            self.check(pool)
        for other in writers_of(pool.dir):
            if other != engine_id and not engine_is_dead(pool.dir, other):
                return (
                    f"engine {other} closed its connections, but its processes still hold the writer "
                    f"locks in {pool.dir}/writers; the pool is free as soon as they are gone"
                )
        return ""

    def join(self, pool: Pool, engine_id: str, namespace: str, member: Member) -> None:
        """Seat a process whose engine was admitted. A new engine gets a new epoch."""
        if self.engine_id != engine_id:
            if self.engine_id and self.state is not GuardState.ACTIVE:
                self._take_over(pool)
            if self.state is not GuardState.EMPTY:
                pool.raise_epoch()
            self.engine_id = engine_id
            self._scheduler_lost = False
            self.pids = ()
            self.processes.clear()
        elif self.state is GuardState.ACTIVE:
            # Its death was proven, and it is back: it had not taken its locks yet, or gave them up.
            pool.raise_epoch()
        self.namespace = namespace
        self.members.append(member)
        if member.role is Role.SCHEDULER:
            self._scheduler_lost = False
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
        if member.role is Role.SCHEDULER and not any(m.role is Role.SCHEDULER for m in self.members):
            self._scheduler_lost = not member.leaving
        if not self.members:
            self._enter(GuardState.CHECKING)
            self.check(pool)

    def check(self, pool: Pool | None) -> None:
        """Look for the proof of death; cheap, and does nothing unless the engine is missing."""
        if (
            self.state is GuardState.CHECKING
            and not self.members
            and pool is not None
            and engine_is_dead(pool.dir, self.engine_id)
        ):
            self._take_over(pool)

    def heard(self, member: Member) -> None:
        """A message came: whatever was suspected, this engine lives."""
        member.heard_s = time.monotonic()
        if self.state is GuardState.CHECKING and self.members and not self._killed:
            self._enter(GuardState.STANDBY)

    def fence(self, silent_s: float, now_s: float) -> None:
        """End an engine of which a worker was silent for ``silent_s``, or that hung up and does not end.

        Its death still has to be proven. What this guard cannot signal, it leaves alone and says so once.
        """
        silent = [m for m in self.members if m.role is Role.WORKER and now_s - m.heard_s >= silent_s]
        missing = self.state is GuardState.CHECKING and now_s - self._suspected_s >= silent_s
        if self._fenced or not (silent or missing):
            return
        reached, unreachable = self.processes.kill()
        log.error(
            "engine %s was silent for %.1f s: SIGKILL to pids %s%s",
            self.engine_id,
            silent_s,
            reached,
            f", out of reach {unreachable}: end them yourself" if unreachable else "",
        )
        self._enter(GuardState.CHECKING)
        self._fenced, self._killed = True, bool(reached)
        if reached:
            self._meters.fences.inc()

    def excuse(self, now_s: float) -> None:
        """This guard itself was not running: nobody's silence counts so far."""
        self._suspected_s = now_s
        for member in self.members:
            member.heard_s = now_s

    def dismiss(self) -> None:
        """Close every connection: the engine's processes attach again, by themselves and at once."""
        for member in list(self.members):
            member.connection.close()

    def broadcast(self, message: ToEngine) -> None:
        """Send to every process of the engine."""
        raw = to_engine.encode(message)
        for member in list(self.members):
            member.connection.send(raw)

    def _process_ended(self, pid: int) -> None:
        # A forked child may keep the dead process's sockets open; it maps no pool and speaks for nobody.
        for member in [member for member in self.members if member.pid == pid]:
            member.connection.close()
        self.check(self._current())

    def _take_over(self, pool: Pool) -> None:
        locks = self._seize(pool, self.engine_id)
        if locks is None:
            return
        epoch = pool.raise_epoch()
        # Ranks that left in good order removed their lock files, also when their scheduler was killed.
        died = bool(locks) or self._scheduler_lost
        count = self._bury(pool, self.engine_id, locks)
        if count is None:
            return
        log.info("engine %s is dead: epoch %d, %d granted slots reclaimed", self.engine_id, epoch, count)
        self.processes.clear()
        if died:
            self._meters.failovers.inc()
            self._meters.failover_seconds.observe(time.monotonic() - self._suspected_s)
        self._enter(GuardState.ACTIVE)

    @staticmethod
    def _seize(pool: Pool, engine_id: str) -> list[FileLock] | None:
        """Every writer lock of an engine: the proof of its death. None while one is not to be had."""
        locks: list[FileLock] = []
        for path in writers_of(pool.dir).get(engine_id, []):
            lock = FileLock(path)
            try:
                lock.acquire()
            except (PoolBusy, OSError) as error:
                log.info("engine %s is not proven dead: %s", engine_id, error)
                for seized in locks:
                    seized.release()
                return None
            locks.append(lock)
        return locks

    @staticmethod
    def _bury(pool: Pool, engine_id: str, locks: list[FileLock]) -> int | None:
        """Reclaim the grants of an engine whose locks we have and whose epoch is over; remove its files.

        None, and nothing reclaimed, if a process of it took a lock after we listed them: whoever does that
        reads the epoch afterwards, so that either it sees the new epoch or we see its lock.
        """
        ours = {lock.path for lock in locks}
        late = [path for path in writers_of(pool.dir).get(engine_id, []) if path not in ours]
        alive = not all(is_dead(path) for path in late)
        count = None if alive else pool.reclaim_writer(engine_id)
        for lock in locks:
            lock.release(unlink=True)
        if not alive:
            for path in late:
                path.unlink(missing_ok=True)
        return count

    def _enter(self, state: GuardState) -> None:
        if state is not self.state:
            log.info("state %s -> %s", self.state, state)
            previous, self.state = self.state, state
            self._fenced = self._killed = False
            if state is GuardState.CHECKING:
                self._suspected_s = time.monotonic()
            self._on_state(previous, state)
