# SPDX-License-Identifier: Apache-2.0
"""Steps of a pull: slots for them, the transport that reads into those, and what becomes of what arrives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcr.guard.accounts import Accounts
from kvcr.guard.active import Active
from kvcr.guard.asking import OVERLOADED
from kvcr.guard.handing import Handing
from kvcr.guard.keeping import Keeping
from kvcr.guard.meters import Meters
from kvcr.guard.pulls import Move, Phase
from kvcr.guard.room import Room
from kvcr.guard.telling import Telling
from kvcr.guard.transit import Freed, TransitSlots
from kvcr.pool import Pool
from kvcr.protocol.engine import BlockStatus
from kvcr.transfer.base import Step, StepResult, Transport
from kvcr.transfer.nixl import NixlTransport
from kvcr.transfer.nixl_messages import STALL_S
from kvcr.transfer.shm import ShmTransport

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
"""Per pull: one is hashed while the next is copied."""

_OK = int(BlockStatus.OK)
_UNREACHABLE = (BlockStatus.GONE, BlockStatus.TOO_SLOW)


class Host(Protocol):
    """What steps need of the guard."""

    pool: Pool | None

    def pool_changed(self) -> None: ...


class Moving:
    """Belongs to the authority thread."""

    def __init__(
        self,
        host: Host,
        meters: Meters,
        transit: TransitSlots,
        accounts: Accounts,
        handing: Handing,
        keeping: Keeping,
        room: Room,
        telling: Telling,
        advance: Callable[[Active], None],
    ) -> None:
        """``advance`` lets a pull go on of which a step ended."""
        self._host = host
        self._meters = meters
        self._transit = transit
        self._accounts = accounts
        self._handing = handing
        self._keeping = keeping
        self._room = room
        self._telling = telling
        self._advance = advance

    def pump(self, active: Active) -> None:
        """Begin the steps that can be begun."""
        pull = active.pull
        while active.steps < STEPS_IN_FLIGHT:
            now_s = time.monotonic()
            source = pull.next_source()
            if source is None:
                return
            link = active.links[source]
            transport = link.transport
            local, most, overloaded = active.context.local, 0, False
            if isinstance(transport, NixlTransport):
                most, overloaded = local.blocks_of(transport.step_bytes), transport.overloaded
            move = pull.next_move(most or local.blocks_per_step)
            if move is None:
                return
            if transport is None or overloaded:
                gone = np.full(len(move.indices), BlockStatus.GONE, np.uint8)
                pull.moved(move.indices, gone, now_s)
                active.source_failed(move.source, OVERLOADED if overloaded else link.reason)
                continue
            if active.handover is not None and isinstance(transport, ShmTransport) and link.in_place:
                self._handing.in_place(active, move, transport)
                continue
            if not self._move(active, move, transport, now_s):
                return

    def _move(self, active: Active, move: Move, transport: Transport, now_s: float) -> bool:
        """Begin a step; False when there is no slot for more, for now or at all."""
        pull = active.pull
        slots, generations = self._room.take(active, len(move.indices), now_s)
        indices, rest = move.indices[: len(slots)], move.indices[len(slots) :]
        if len(rest):
            pull.unmove(rest)
            if self._room.may_come(active, len(slots)):
                self._room.wait(active)
            else:
                left = np.flatnonzero(pull.phase == Phase.LEASED)
                pull.refuse(left, BlockStatus.FAILED, "no free slot in our pool")
        if not len(slots):
            return False
        step = Step(
            pull=active.number,
            source=move.source,
            indices=indices,
            local_slots=slots,
            local_generations=generations,
            remote_slots=pull.remote_slots[indices],
            remote_generations=pull.remote_generations[indices],
            checksums=pull.checksums[indices],
            deadline_s=pull.deadline_s,
        )
        active.steps += 1
        transport.read(
            step,
            lambda result: self._stepped(active, result, transport.name, now_s),
            lambda step: self._quiet(active, step),
        )
        return not len(rest)

    def _stepped(self, active: Active, result: StepResult, transport: str, started_s: float) -> None:
        step, pool = result.step, active.pool
        active.steps -= 1
        link = active.links[step.source]
        statuses = result.statuses
        good = statuses == _OK
        current = pool is self._host.pool
        if active.dead:
            good &= ~np.isin(step.indices, list(active.dead))
        good_count = int(np.count_nonzero(good))
        if good_count and current:
            refused = self._accept(active, step, good, result.checksums, transport)
            if np.count_nonzero(refused):
                statuses[np.flatnonzero(good)[refused]] = BlockStatus.FAILED
            self._accounts.measured(active, link, transport, good_count, result.seconds)
        if active.handover is not None:
            self._transit.used -= len(step) - good_count if current else len(step)
        if not current:
            log.debug("a step for a pool that was replaced ended")
        elif result.slots_in_flight:
            # Not free and not ours: out of use, and seen to be, until the transport says that it is quiet.
            pool.quarantine(step.local_slots, step.local_generations)
            self._meters.quarantined_slots.inc(len(step))
        elif good_count < len(step):
            pool.give_back(step.local_slots[~good], step.local_generations[~good])
        self._accounts.corrupt(active, step, result.corrupt)
        if result.reason:
            log.warning(
                "request %s: step of %d blocks from %s: %s",
                active.fetch.request_id,
                len(step),
                link.label,
                result.reason,
            )
            active.pull.reasons[step.source] = f"{link.label}: {result.reason}"
        active.pull.moved(step.indices, statuses, started_s)
        arrived = int(np.count_nonzero(statuses == _OK))
        active.moved_at(step.source, transport, started_s, arrived, len(step) - arrived)
        if transport == "nixl" and not arrived and np.isin(statuses, _UNREACHABLE).all():
            # Whatever is wrong with the peer is wrong for its other blocks too.
            status = BlockStatus(int(statuses[0]))
            active.pull.source_failed(step.source, status, result.reason)
            if status is BlockStatus.GONE or result.seconds > 0.9 * STALL_S:
                # Not when it was only this pull that had no time left.
                link.suspect(result.reason)
        if not active.pull.done:
            self._telling.report(active, final=False)
        self._advance(active)

    def _accept(
        self,
        active: Active,
        step: Step,
        good: npt.NDArray[np.bool_],
        checksums: npt.NDArray[np.uint64],
        transport: str,
    ) -> npt.NDArray[np.bool_]:
        """Publish what arrived, or hand it to its request alone; a mask over it of what our pool did not want
        (its slots are free again)."""
        indices = step.indices[good]
        slots, generations = step.local_slots[good], step.local_generations[good]
        active.count_by_transport(transport, len(indices))
        self._accounts.pulled(active, step.source, len(indices), transport)
        if active.handover is not None:
            if active.reported:
                # Nobody waits for it any more.
                self._room.give_back(active, Freed(slots, generations, np.empty(0, np.intp)), self._host.pool)
            else:
                self._handing.hand(active, indices, slots, generations, checksums[good])
                self._meters.transit_blocks.inc(len(indices), how="slot")
            return np.zeros(len(indices), bool)
        result = active.pool.commit(
            slots,
            generations,
            active.key_blob(indices),
            active.parent_blob(indices),
            active.hashes[indices],
            (indices + active.pull.first).astype(np.uint32),
            checksums[good],
            time.monotonic(),
        )
        self._host.pool_changed()
        self._keeping.keep(active, slots[result.committed], generations[result.committed])
        return ~(result.committed | result.duplicate)

    def _quiet(self, active: Active, step: Step) -> None:
        """Nothing can write to these slots any more."""
        self._meters.requalified_slots.inc(len(step))
        if active.pool is self._host.pool:
            active.pool.requalify(step.local_slots, step.local_generations)
