# SPDX-License-Identifier: Apache-2.0
"""Asking the engine to forget blocks in its own memory (G1).

Only the engine's scheduler may touch G1, on its own thread, and an idle engine runs nothing: it reads its
socket when the next request comes, and answers then. So a drop is asked for, not waited for, and little is
left unread in the socket of an engine that sleeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcr.guard.meters import Meters
from kvcr.guard.seat import Seat
from kvcr.guard.view import GuardState
from kvcr.keys import KEY_BYTES
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.engine import DropG1, DroppedG1, Role

MAX_UNANSWERED = 32
"""Drops in the socket of an engine that does not read. What comes on top is merged and waits."""

MAX_WAITING = 1024
"""Messages of up to 2,048 blocks that wait; the oldest is given up for a newer one."""

Done = Callable[[int], None]


@dataclass(slots=True)
class _Drop:
    drop_id: int
    hashes: npt.NDArray[np.uint64]
    keys: bytes
    done: list[Done]
    """Called with the blocks this message dropped."""

    @property
    def size(self) -> int:
        """Blocks named, by hash or by key."""
        return len(self.hashes) + len(self.keys) // KEY_BYTES


class G1Drops:
    """Belongs to the authority thread."""

    def __init__(self, seat: Seat, meters: Meters, incarnation: int) -> None:
        self._seat = seat
        self._meters = meters
        self._engine_id = ""
        self._sent: deque[_Drop] = deque()
        self._waiting: deque[_Drop] = deque()
        # Above those of the guard before us: engines compare them.
        self._last_id = incarnation

    def drop(self, hashes: npt.NDArray[np.uint64], done: Done, keys: bytes = b"") -> int:
        """Ask for these blocks to be dropped, named by the engine's hash or by key; returns the number of the
        drop.

        ``done(count)`` is called when the engine has dropped them: within this call when there is none, and
        never when another engine takes its place. An empty drop only moves the engine's number on.
        """
        if self._seat.state not in (GuardState.STANDBY, GuardState.CHECKING):
            self._last_id += 1
            done(0)
            return self._last_id
        self._follow_engine()
        most, step = max(len(hashes), len(keys) // KEY_BYTES, 1), MAX_BLOCKS_PER_MESSAGE
        parts = [
            (hashes[at : at + step], keys[at * KEY_BYTES : (at + step) * KEY_BYTES])
            for at in range(0, most, step)
        ]
        total, left = 0, len(parts)

        def part_done(count: int) -> None:
            nonlocal total, left
            total, left = total + count, left - 1
            if left == 0:
                done(total)

        for some_hashes, some_keys in parts:
            self._append(some_hashes, some_keys, part_done)
        self._send()
        return self._last_id

    def dropped(self, message: DroppedG1) -> None:
        """The engine has carried out this drop, and thus every one before it."""
        while self._sent and self._sent[0].drop_id <= message.drop_id:
            drop = self._sent.popleft()
            count = message.count if drop.drop_id == message.drop_id else 0
            self._meters.g1_dropped_blocks.inc(max(count, 0))
            for done in drop.done:
                # Of a message that was merged, the first one it was sent for is told of all.
                done(count)
                count = 0
        self._send()

    def attached(self) -> None:
        """The engine's scheduler (re)connected: what it may not have read is sent again."""
        self._follow_engine()
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self._send()

    def _append(self, hashes: npt.NDArray[np.uint64], keys: bytes, done: Done) -> None:
        self._last_id += 1
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last.size + len(hashes) + len(keys) // KEY_BYTES <= MAX_BLOCKS_PER_MESSAGE:
            last.drop_id = self._last_id
            last.hashes = np.concatenate([last.hashes, hashes])
            last.keys += keys
            last.done.append(done)
            return
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
        self._waiting.append(_Drop(self._last_id, hashes, keys, [done]))

    def _send(self) -> None:
        schedulers = [member for member in self._seat.members if member.role is Role.SCHEDULER]
        while schedulers and self._waiting and len(self._sent) < MAX_UNANSWERED:
            drop = self._waiting.popleft()
            self._sent.append(drop)
            schedulers[-1].send(DropG1(drop.drop_id, drop.hashes.astype("<u8").tobytes(), drop.keys))

    def _follow_engine(self) -> None:
        if self._engine_id != self._seat.engine_id:
            # Another engine has another, empty G1.
            self._engine_id = self._seat.engine_id
            self._sent.clear()
            self._waiting.clear()
