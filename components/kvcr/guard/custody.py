# SPDX-License-Identifier: Apache-2.0
"""The files of a guard's pool: found at its start, made for the first engine, replaced, given back."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from kvcr.config import GuardConfig
from kvcr.errors import LayoutMismatch, MustFail, PoolBusy, PoolCorrupt
from kvcr.guard import leftovers
from kvcr.layout import Layout
from kvcr.policy import DefaultPolicy, Policy, load_policy
from kvcr.pool import META, FileLock, Pool, is_dead
from kvcr.pool.files import require_room
from kvcr.pool.locks import GUARD_LOCK, make_dir
from kvcr.transfer.nixl_messages import LOCK as NIXL_LOCK

log = logging.getLogger(__name__)

LANDING_S = 5.0
"""The kernel ends a NIXL process with its guard, within milliseconds."""


class Custody:
    """One directory, in which one guard at a time has a pool. Belongs to the authority thread."""

    def __init__(self, config: GuardConfig, incarnation: int) -> None:
        """Raises ConfigError on a policy that cannot be had."""
        self.directory = Path(config.pool_dir).absolute()
        self.past_epoch = 0
        """A new pool starts above this: that of a pool that was here, or that is remembered elsewhere."""
        self._pool_bytes = config.pool_bytes
        self._incarnation = incarnation
        self._policy: Policy = (
            load_policy(config.policy) if config.policy else DefaultPolicy(on_mismatch=config.on_mismatch)
        )
        self._lock: FileLock | None = None
        """While there is no pool: it has the lock otherwise."""

    def find(self) -> Pool | None:
        """The pool that is there; with none, the place is ours until :meth:`make`.

        Raises PoolBusy, PoolTooSmall, OSError.
        """
        make_dir(self.directory)
        if (self.directory / META).exists():
            try:
                pool = Pool.attach(self.directory, guard_incarnation=self._incarnation, policy=self._policy)
            except PoolCorrupt as error:
                log.error("the pool in %s cannot be used and will be replaced: %s", self.directory, error)
            else:
                # What the guard before was pulling ended with its processes.
                self._wait_for_landings()
                pool.reclaim_writer("")
                log.info("attached to %s: %s", self.directory, pool.recovery)
                return pool
        self._lock = FileLock(self.directory / GUARD_LOCK)
        self._lock.acquire()
        leftovers.clean_own(self.directory)
        require_room(self.directory, self._pool_bytes)
        return None

    def make(self, layout: Layout) -> Pool:
        """A new pool. Raises PoolError, ConfigError, OSError."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        pool = Pool.create(
            self.directory,
            layout,
            self._pool_bytes,
            guard_incarnation=self._incarnation,
            policy=self._policy,
            epoch=self.past_epoch + 1,
        )
        log.info("made a pool of %d slots in %s", pool.slots, self.directory)
        return pool

    def suits(self, pool: Pool, layout: Layout) -> bool:
        """Whether an engine of this layout may have the pool; False: it is to be discarded for it.

        Raises LayoutMismatch when the engine has to do without, MustFail when it must not start.
        """
        try:
            pool.layout.require_same(layout, ours=f"the pool in {self.directory}", theirs="the engine")
        except LayoutMismatch as mismatch:
            answer = self._policy.on_mismatch(pool.layout, layout)
            if answer == "fail":
                raise MustFail(f"{mismatch}; on_mismatch is 'fail'") from mismatch
            if answer != "discard":
                raise
            log.warning("discarding the pool in %s: its layout is not the engine's", self.directory)
            return False
        return True

    def discard(self, pool: Pool) -> None:
        """Remove a pool, for the next one."""
        self.past_epoch = max(self.past_epoch, pool.epoch)
        pool.close(unlink=True)

    def close(self, pool: Pool | None, *, remove: bool) -> None:
        """Give the place back; ``remove``: with nothing left in it."""
        if pool is not None:
            pool.close(unlink=remove)
        elif self._lock is not None:
            self._lock.release(unlink=remove)
        if remove:
            # Only when nothing but ours was in it.
            with contextlib.suppress(OSError):
                os.rmdir(self.directory)

    def _wait_for_landings(self) -> None:
        """Until nothing of the guard before can write to the pool. Raises PoolBusy when that does not end."""
        patience_s = time.monotonic() + LANDING_S
        lock = self.directory / NIXL_LOCK
        while not is_dead(lock):
            if time.monotonic() > patience_s:
                raise PoolBusy(f"{lock} is held: the NIXL process of the last guard still lives; end it")
            time.sleep(0.01)
