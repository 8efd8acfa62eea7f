# SPDX-License-Identifier: Apache-2.0
"""The Dynamo worker beside a guard: which one it is, and taking it out of service when its engine is dead."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec

from kvcr.dynamo.etcd import EtcdClient
from kvcr.dynamo.leases import revoke_lease, revoke_worker, workers_beside
from kvcr.guard.view import GuardState
from kvcr.protocol.events import StateChange

log = logging.getLogger(__name__)

FIRST_LOOK_S = 1.0
LONGEST_LOOK_S = 30.0
"""A worker registers some time after its engine attached, and some engines are no Dynamo workers at all."""


class WorkerBeside:
    """:meth:`changed` is for the authority thread, the rest for one event loop."""

    def __init__(self) -> None:
        self.worker_id = 0
        """Of the engine that is attached, or was last; 0 while it is not known."""
        self._deaths: deque[int] = deque()
        """Workers whose engine is proven dead and whose leases are still to be revoked."""
        self._ended: set[int] = set()
        """Every worker that was dead once: its id never comes back."""
        self._by_endpoint_done = False
        self._look_s = FIRST_LOOK_S
        self._next_look_s = 0.0

    def changed(self, change: StateChange) -> StateChange:
        """The change with the worker it is about."""
        told = msgspec.structs.replace(change, worker_id=self.worker_id)
        if change.state == GuardState.ACTIVE:
            self._by_endpoint_done = False
            if self.worker_id:
                self._died(self.worker_id)
        elif change.state == GuardState.STANDBY:
            if self.worker_id in self._ended:
                self.worker_id = 0
                told = msgspec.structs.replace(change, worker_id=0)
            self._look_s, self._next_look_s = FIRST_LOOK_S, 0.0
        return told

    def inherit(self, worker_id: int, dead: bool) -> None:
        """What the guard before knew: the worker of the last epoch, and whether that epoch is over."""
        if worker_id and not self.worker_id:
            self.worker_id = worker_id
            if dead:
                self._died(worker_id)

    async def revoke_dead(
        self, etcd: EtcdClient, namespace: str, control_endpoint: str, is_active: Callable[[], bool]
    ) -> None:
        """Remove dead workers from the deployment, also when the engine is back by now. Raises EtcdError."""
        while self._deaths:
            # The instance id of a Dynamo process is the id of its lease.
            await revoke_lease(etcd, self._deaths[0], "worker whose engine is dead")
            self._deaths.popleft()
        if is_active() and not self._by_endpoint_done:
            await revoke_worker(etcd, namespace, control_endpoint, still_dead=is_active)
            self._by_endpoint_done = True

    async def find(self, etcd: EtcdClient, namespace: str, control_endpoint: str) -> None:
        """Look for the worker of the engine that is attached, often until found. Raises EtcdError.

        Now and then also later: what a guard that has just started finds may be the card of a dead worker,
        whose lease lives on.
        """
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + (LONGEST_LOOK_S if self.worker_id else self._look_s)
        self._look_s = min(2 * self._look_s, LONGEST_LOOK_S)
        found = await workers_beside(etcd, namespace, control_endpoint)
        alive = [worker_id for worker_id in found if worker_id not in self._ended]
        if alive and alive[-1] != self.worker_id:
            self.worker_id = alive[-1]
            log.info("worker %x is beside this guard", self.worker_id)

    def _died(self, worker_id: int) -> None:
        self._ended.add(worker_id)
        self._deaths.append(worker_id)
