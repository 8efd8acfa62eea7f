# SPDX-License-Identifier: Apache-2.0
"""Engine memory to pool: copies saves to granted slots in order, and answers for those slots to the guard."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.client.fills import Fills
from kvcr.client.grants import SlotSet, send_holding, send_return
from kvcr.client.jobs import SaveSpec
from kvcr.client.link import GuardLink
from kvcr.client.mapping import Attachment, PoolMapping
from kvcr.client.memory import BlockMemory
from kvcr.client.tally import Tally
from kvcr.protocol.engine import Committed


@dataclass(slots=True)
class _Save:
    spec: SaveSpec
    fence: Any
    slots: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    copied: int = 0
    checksums: bytes | None = b""
    """of the blocks copied; None: the copy does not bring them"""


class Saver:
    """The saves of one rank. Methods are for the copy thread, but for those said to be the engine's."""

    def __init__(
        self,
        attached: Attachment,
        memory: BlockMemory,
        rank: int,
        step_blocks: int,
        link: GuardLink[PoolMapping],
        clock: Callable[[], float],
        tally: Tally,
    ) -> None:
        self._attached = attached
        self._memory = memory
        self._rank = rank
        self._step_blocks = step_blocks
        self._link = link
        self._clock = clock
        self._tally = tally
        self._changed = threading.Condition()
        self._queue: deque[_Save] = deque()
        self._saving: dict[str, int] = {}
        """request id -> saves queued or running"""
        self._over: list[int] = []
        self._fills = Fills()
        self._returned: dict[tuple[int, int], SlotSet] = {}
        """(pool token, epoch) -> given back, until the directory says so: with no guard, or one that dies
        over it, the message is lost."""
        self.listed = True
        """This connection's Holding is sent."""
        self._closed = False

    # --- engine's thread ------------------------------------------------------------------------

    def submit(self, spec: SaveSpec) -> None:
        save = _Save(
            spec, self._memory.fence(), np.frombuffer(spec.slots, "<i4"), np.frombuffer(spec.block_ids, "<i4")
        )
        with self._changed:
            self._queue.append(save)
            self._saving[spec.request_id] = self._saving.get(spec.request_id, 0) + 1

    def saving(self, request_id: str) -> bool:
        return request_id in self._saving

    @property
    def busy(self) -> bool:
        """Whether any save is queued or running."""
        return bool(self._saving)

    def take_over(self) -> list[int]:
        """Ids of jobs whose blocks are the engine's again."""
        if not self._over:
            return []
        with self._changed:
            jobs, self._over = self._over, []
        return jobs

    def wait(self, request_ids: Iterable[str] | None) -> None:
        """Until no save of these requests (None: of any) is queued or running, or :meth:`close`."""
        wanted = None if request_ids is None else set(request_ids)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or (not self._saving if wanted is None else wanted.isdisjoint(self._saving))
                )
            )

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- copy thread ----------------------------------------------------------------------------

    @property
    def unsent(self) -> bool:
        """Whether the guard has not taken a fill yet."""
        return self._fills.unsent

    @property
    def unconfirmed(self) -> int:
        """Blocks copied to slots that the guard has not confirmed."""
        return self._fills.blocks

    def flush(self) -> None:
        """Send the fills that the guard did not take before."""
        self._fills.send(self._link.send)

    def confirm(self, message: Committed) -> None:
        self._fills.confirm(message)

    def step(self) -> bool:
        """Copy one step of the oldest save; False when there is none."""
        if not self._queue:
            return False
        save, mapping = self._queue[0], self._attached.mapping
        if mapping is None or mapping.region is None or not self._current(save):
            # Granted by a guard whose pool this process does not map (any more), or in an epoch that is over.
            self._finish(save, written=False)
            return True
        started_s = self._clock()
        step = slice(save.copied, save.copied + self._step_blocks)
        slots = save.slots[step]
        sums = self._memory.store(mapping.region.array, slots, save.block_ids[step], save.fence)
        save.checksums = None if sums is None or save.checksums is None else save.checksums + sums.tobytes()
        save.copied += len(slots)
        self._tally.saved(len(slots), self._clock() - started_s)
        if save.copied == len(save.slots):
            self._finish(save, written=True)
        return True

    def drop(self) -> None:
        """Give the oldest save up."""
        if self._queue:
            self._finish(self._queue[0], written=False)

    def join(self, mapping: PoolMapping) -> None:
        """A guard came (back): it hears what it may have missed. Saves of an earlier epoch end."""
        epoch = self._attached.epoch
        self._fills.settle(mapping.reader.still_granted)
        self._fills.resend(mapping.token, epoch)
        self._fills.send(self._link.send)
        # Those of other pools and epochs are nobody's any more.
        returned = self._returned.get((mapping.token, epoch), SlotSet())
        returned.drop_settled(mapping.reader)
        self._returned = {(mapping.token, epoch): returned}
        send_return(self._link.deliver, epoch, returned.slots, returned.generations)
        self.listed = False

    def list_grants(self) -> None:
        """List the grants we may still fill, to a guard that may not know of them all."""
        mapping = self._attached.mapping
        if mapping is None:
            return
        held = SlotSet()
        held.add(*self._fills.slots())
        with self._changed:
            waiting = [save for save in self._queue if self._current(save)]
        for save in waiting:
            held.add(save.slots, np.frombuffer(save.spec.generations, "<u8"))
        held.drop_settled(mapping.reader)
        self.listed = send_holding(self._link.send, self._attached.epoch, held.slots, held.generations)

    def _current(self, save: _Save) -> bool:
        """Whether the slots of this save are still ours to write to."""
        mapping, spec = self._attached.mapping, save.spec
        return mapping is not None and spec.pool_token == mapping.token and spec.epoch == self._attached.epoch

    def _finish(self, save: _Save, *, written: bool) -> None:
        spec = save.spec
        if written:
            self._fills.add(spec, self._rank, save.checksums or b"", self._link.send)
        else:
            self._give_back(spec)
        with self._changed:
            self._queue.popleft()
            self._over.append(spec.job_id)
            left = self._saving.pop(spec.request_id) - 1
            if left:
                self._saving[spec.request_id] = left
            self._changed.notify_all()

    def _give_back(self, spec: SaveSpec) -> None:
        slots, generations = np.frombuffer(spec.slots, "<i4"), np.frombuffer(spec.generations, "<u8")
        returned = self._returned.setdefault((spec.pool_token, spec.epoch), SlotSet())
        returned.add(slots, generations)
        mapping = self._attached.mapping
        if mapping is not None and mapping.token == spec.pool_token:
            returned.drop_settled_if_large(mapping.reader)
        send_return(self._link.deliver, spec.epoch, slots, generations)
