# SPDX-License-Identifier: Apache-2.0
"""What guards say of their engines: a worker whose engine is proven dead gets no request from then on.

A change of state comes over NATS within milliseconds. The guard's record in etcd and the revoked lease of the
dead worker say the same, later, and also to a router that did not hear the event.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import nats
import nats.js.errors
from nats.aio.client import Client

from kvcr.errors import ProtocolError
from kvcr.protocol.events import StateChange, event, state_subject, stream_name
from kvcr.protocol.signatures import HEADER, STATE_CHANGE, is_signed
from router_hints.guards import Guard, GuardDirectory
from router_hints.metrics import Metrics
from router_hints.workers import WorkerTable

log = logging.getLogger(__name__)

ACTIVE = "ACTIVE"
STANDBY = "STANDBY"
CATCH_UP_S = 1.0


@dataclass(frozen=True)
class _Standing:
    incarnation: int
    epoch: int
    state: str
    unix_s: float
    """When the guard entered it, by its own clock; 0 when a record said so."""


class Failovers:
    """State of every guard's engine. One event loop."""

    def __init__(
        self,
        namespace: str,
        workers: WorkerTable,
        guards: GuardDirectory,
        metrics: Metrics,
        secret: bytes | None = None,
    ) -> None:
        """With a ``secret``, changes that are not signed with it are not believed."""
        self._secret = secret
        self._warned = False
        self._namespace = namespace
        self._workers = workers
        self._guards = guards
        self._metrics = metrics
        self._standing: dict[str, _Standing] = {}

    def counts(self) -> Counter[str]:
        """Guards by state."""
        return Counter(standing.state for standing in self._standing.values())

    def state(self, guard: str) -> str:
        """Name of a :class:`kvcr.guard.view.GuardState`; empty when nothing was heard."""
        standing = self._standing.get(guard)
        return standing.state if standing is not None else ""

    def received(self, raw: bytes, headers: Mapping[str, str]) -> None:
        """One message of the state subjects. Raises ProtocolError."""
        change = event.decode(raw)
        if not isinstance(change, StateChange):
            raise ProtocolError(f"{type(change).__name__} on a state subject")
        subject = state_subject(self._namespace, change.guard)
        if not is_signed(STATE_CHANGE, subject, raw, headers.get(HEADER, ""), self._secret):
            self._metrics.state_changes.labels("unsigned").inc()
            if not self._warned:
                self._warned = True
                log.warning(
                    "a change of state of guard %s is %s and not believed, nor are others like it; give all "
                    "guards and routers the same secret file, or find out who else writes to %s",
                    change.guard,
                    "signed with another secret" if HEADER in headers else "not signed",
                    subject,
                )
            return
        guard = self._guards.get(change.guard)
        # Of a guard that has no record, nothing is believed.
        if guard is None or change.incarnation < guard.incarnation:
            self._metrics.state_changes.labels("ignored").inc()
            return
        self._metrics.state_changed(change.state.lower())
        # Also when it comes late: an instance id is never used again. The mark ends by itself.
        if change.state == ACTIVE and change.worker_id and self._is_beside(change.worker_id, guard):
            self._workers.mark_dead(change.worker_id, time.monotonic())
            log.warning(
                "guard %s proved the engine of worker %x dead (epoch %d): it gets no more requests",
                change.guard,
                change.worker_id,
                change.epoch,
            )
        known = self._standing.get(change.guard)
        if known is None or (change.incarnation, change.epoch, change.unix_s) >= (
            known.incarnation,
            known.epoch,
            known.unix_s,
        ):
            self._standing[change.guard] = _Standing(
                change.incarnation, change.epoch, change.state, change.unix_s
            )

    def recorded(self, guard: Guard) -> None:
        """A guard's record is new or changed."""
        known = self._standing.get(guard.name)
        if known is None or (guard.incarnation, guard.epoch) >= (known.incarnation, known.epoch):
            unix_s = known.unix_s if known is not None and known.incarnation == guard.incarnation else 0.0
            self._standing[guard.name] = _Standing(guard.incarnation, guard.epoch, guard.state, unix_s)

    def gone(self, guard: str) -> None:
        """A guard's record is gone."""
        self._standing.pop(guard, None)

    async def catch_up(self, client: Client) -> None:
        """NATS is (back) there: the last change of each guard that we know."""
        jetstream = client.jetstream(timeout=CATCH_UP_S)
        for guard in self._guards.all():
            try:
                last = await jetstream.get_last_msg(
                    stream_name(self._namespace, "state"), state_subject(self._namespace, guard.name)
                )
                self.received(last.data or b"", last.headers or {})
            except nats.js.errors.NotFoundError:
                continue
            except (nats.errors.Error, ProtocolError, TimeoutError, OSError) as error:
                # The record in etcd says it too.
                log.info("the last state of guard %s is not read: %s", guard.name, error)
                return

    def _is_beside(self, worker_id: int, guard: Guard) -> bool:
        return guard.endpoint in self._workers.card(worker_id).control_endpoints.values()
