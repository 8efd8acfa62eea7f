# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of an engine: looks up, reserves slots, submits hints. Never waits."""

from __future__ import annotations

import logging
import os
import select
import time
import uuid
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcr.client.fetch import FetchState
from kvcr.client.grants import SlotSet, send_holding, send_return
from kvcr.client.guard_socket import find_socket
from kvcr.client.jobs import Grants
from kvcr.client.link import GuardLink, Session
from kvcr.client.mapping import PoolMapping, map_directory
from kvcr.config import EngineConfig
from kvcr.errors import Refused
from kvcr.keys import KEY_BYTES, probe_key
from kvcr.layout import Layout
from kvcr.protocol import engine as msg
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, i32, u64
from kvcr.protocol.engine import BlockStatus, Source

logger = logging.getLogger(__name__)

RESERVE_RETRY_S = 0.5
"""How long to wait before asking a guard again that granted less than was asked."""

SPIN_S = 0.0003
"""How long a fetch that is waited for is asked after before the caller sleeps. A small pull takes about as
long, and being woken on a core that went to sleep a third of it."""

MAX_SOURCES = 64
"""Sources a guard takes in one Fetch."""


class SchedulerHandle:
    """One per engine, in the process that schedules. Every method is for one thread, and returns at once.

    ``standing_blocks``: slots to keep reserved, about two steps' worth of new blocks. It is cut to a
    quarter of the pool, with a warning when it is more than a tenth.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        *,
        engine_id: str,
        standing_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self._on_mismatch = config.on_mismatch
        self._wanted = max(1, standing_blocks)
        self._target = self._wanted
        self._clock = clock
        self._standing = SlotSet()
        """Granted slots not yet assigned to a save."""
        self._taken = SlotSet()
        """Granted slots assigned to saves, until the directory says that they are settled."""
        self._standing_of: tuple[int, int] | None = None
        self._listed = False
        """This connection's Holding is sent."""
        self._session_number = 0
        self._session: Session[PoolMapping] | None = None
        self._reserve_at = 0.0
        self._reserving = False
        self._fetches: dict[str, FetchState] = {}
        self._drops: list[msg.DropG1] = []
        self._link: GuardLink[PoolMapping] = GuardLink(
            find_socket=lambda: find_socket(config),
            hello=msg.Hello(
                msg.VERSION,
                msg.Role.SCHEDULER,
                engine_id,
                0,
                os.getpid(),
                layout,
                config.namespace,
                probe_key(config.namespace, layout),
            ),
            attach=lambda welcome, previous: map_directory(welcome, layout, previous),
        )

    # --- connection -----------------------------------------------------------------------------

    def wait_connected(self, timeout_s: float) -> bool:
        """Start-up only: wait for the first answer of the guard. False when there is none, or it refused."""
        if self._link.wait(timeout_s):
            self.poll()
            return True
        return False

    @property
    def connected(self) -> bool:
        """A guard is there and empties its socket."""
        return self._link.usable

    @property
    def refused(self) -> Refused | None:
        """Why the guard turned this engine down, if it did."""
        return self._link.refused

    def require_start(self) -> None:
        """After :meth:`wait_connected`: raise MustFail if this engine must not start, see ``on_mismatch``."""
        self._link.require_start(self._on_mismatch)

    @property
    def welcome(self) -> msg.Welcome | None:
        session = self._link.session
        return session.welcome if session is not None else None

    @property
    def own_endpoint(self) -> str:
        """Control endpoint of the guard of this engine, '' without one."""
        session = self._link.session
        return session.welcome.control_endpoint if session is not None else ""

    @property
    def pool_slots(self) -> int:
        """Slots of the mapped pool, 0 before the first connection."""
        mapping = self._link.resources
        return mapping.reader.slots if mapping is not None else 0

    def fileno(self) -> int:
        """Descriptor that has input when :meth:`poll` has something to take in; -1 without a guard."""
        return self._link.fileno()

    def poll(self) -> None:
        """Take in what the guard said and top up the standing grants. Call once a step."""
        messages = self._link.receive()
        # Before anything about a new connection: grants that came over the old one are listed on the new.
        for message in messages:
            self._take(message)
        session = self._link.session
        if session is not None and session.number != self._session_number:
            self._on_session(session)
        elif session is None and self._session is not None:
            self._on_lost()
        self._top_up()

    def close(self) -> None:
        """Return the unused grants and disconnect."""
        session = self._link.session
        if session is not None and len(self._standing):
            slots, generations = self._standing.take(len(self._standing))
            send_return(self._link.send, session.welcome.epoch, slots, generations)
        self._link.send(msg.Leaving())
        self._link.close()

    def _on_session(self, session: Session[PoolMapping]) -> None:
        self._session_number = session.number
        self._session = session
        self._reserving = False
        self._reserve_at = 0.0
        self._listed = False
        identity = (session.resources.token, session.welcome.epoch)
        if identity != self._standing_of:
            # Grants of another pool or epoch: the slots are somebody else's now.
            self._standing, self._taken = SlotSet(), SlotSet()
            self._standing_of = identity
            self._size_grants(session.resources.reader.slots)
        self._end_fetches("connection to the guard was lost")

    def _on_lost(self) -> None:
        self._session = None
        self._end_fetches("connection to the guard was lost")

    def _end_fetches(self, why: str) -> None:
        for state in self._fetches.values():
            if not state.final:
                state.end(BlockStatus.GONE, why)

    def _size_grants(self, slots: int) -> None:
        self._target = min(self._wanted, max(1, slots // 4))
        if self._wanted > slots // 10:
            logger.warning(
                "two steps fill up to %d blocks, %.0f %% of the pool's %d slots; keeping %d granted. "
                "Raise pool_bytes (10 x or more is good) or lower max_num_batched_tokens.",
                self._wanted,
                100 * self._wanted / max(1, slots),
                slots,
                self._target,
            )

    # --- directory ------------------------------------------------------------------------------

    def lookup(self, keys: bytes) -> npt.NDArray[np.bool_]:
        """Which of these blocks (16 bytes a key) are in the local pool now. No message is sent."""
        mapping = self._link.resources
        if mapping is None or not keys:
            return np.zeros(len(keys) // KEY_BYTES, np.bool_)
        slots, _ = mapping.reader.lookup(keys)
        return slots >= 0

    def hits(self, keys: bytes) -> int:
        """How many of these blocks are in the local pool now. No message is sent."""
        mapping = self._link.resources
        return mapping.reader.hits(keys) if mapping is not None and keys else 0

    def use(self, keys: bytes) -> None:
        """These resident blocks are about to be loaded: counts against their eviction."""
        self._send_keys(lambda epoch, part: msg.Use(epoch, part), keys)

    def pin(self, keys: bytes, ttl_s: float) -> str:
        """Keep these blocks from eviction for ``ttl_s``. Returns the id for :meth:`unpin`, '' if not sent."""
        pin_id = uuid.uuid4().hex
        sent = self._send_keys(lambda epoch, part: msg.Pin(epoch, part, ttl_s, pin_id), keys)
        return pin_id if sent else ""

    def unpin(self, pin_id: str) -> None:
        self._link.deliver(msg.Unpin(pin_id))

    def _send_keys(self, make: Callable[[int, bytes], msg.ToGuard], keys: bytes) -> bool:
        session = self._link.session
        if session is None or not keys:
            return False
        step = MAX_BLOCKS_PER_MESSAGE * KEY_BYTES
        return all(
            self._link.send(make(session.welcome.epoch, keys[start : start + step]))
            for start in range(0, len(keys), step)
        )

    # --- grants ---------------------------------------------------------------------------------

    @property
    def grants_available(self) -> int:
        return len(self._standing)

    def take_grants(self, count: int) -> Grants:
        """Up to ``count`` granted slots, now the caller's to fill or to :meth:`give_back`."""
        token, epoch = self._standing_of or (0, 0)
        slots, generations = self._standing.take(count)
        self._taken.add(slots, generations)
        if self._link.resources is not None:
            self._taken.drop_settled_if_large(self._link.resources.reader)
        self._top_up()
        return Grants(slots, generations, token, epoch)

    def give_back(self, grants: Grants) -> None:
        """Undo :meth:`take_grants`, for slots nothing was told to fill."""
        if (grants.pool_token, grants.epoch) == self._standing_of:
            self._taken.discard(grants.slots)
            self._standing.add(grants.slots, grants.generations)

    def _list(self, session: Session[PoolMapping]) -> bool:
        """Tell a guard that does not know it what of its grants we still have. False: not taken yet."""
        if not self._listed:
            self._taken.drop_settled(session.resources.reader)
            self._listed = send_holding(
                self._link.send,
                session.welcome.epoch,
                np.concatenate([self._standing.slots, self._taken.slots]),
                np.concatenate([self._standing.generations, self._taken.generations]),
            )
        return self._listed

    def _top_up(self) -> None:
        session = self._session
        missing = self._target - len(self._standing)
        if self._listed and 2 * missing < self._target:
            return
        now_s = self._clock()
        # In this order: what is granted now must not be taken for what we do not know of.
        if session is None or not self._list(session):
            return
        if 2 * missing < self._target or (self._reserving and now_s < self._reserve_at):
            return
        if now_s >= self._reserve_at and self._link.send(msg.Reserve(session.welcome.epoch, missing)):
            self._reserving = True
            self._reserve_at = now_s + RESERVE_RETRY_S

    # --- fetches --------------------------------------------------------------------------------

    def fetch(
        self,
        request_id: str,
        *,
        first: int,
        parent: bytes,
        keys: bytes,
        engine_hashes: npt.NDArray[np.uint64],
        sources: list[Source],
        deadline_ms: float,
        give_up_ms: float = 0.0,
        plan_id: str = "",
        no_retain: bool = False,
        move: bool = False,
        action_id: str = "",
        local_estimate: bool = False,
        traceparent: str = "",
    ) -> FetchState:
        """Ask the guard to pull a run of a request's chain, from the first :data:`MAX_SOURCES` sources.

        Without a guard the returned state is already final, all GONE.
        """
        state = FetchState(request_id, first, len(keys) // KEY_BYTES, self._clock())
        session = self._link.session
        for position, count in state.parts:
            start = position - first
            sent = session is not None and self._link.send(
                msg.Fetch(
                    epoch=session.welcome.epoch,
                    request_id=request_id,
                    first=position,
                    parent=keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else parent,
                    keys=keys[start * KEY_BYTES : (start + count) * KEY_BYTES],
                    engine_hashes=engine_hashes[start : start + count].astype("<u8").tobytes(),
                    sources=sources[:MAX_SOURCES],
                    give_up_ms=give_up_ms,
                    deadline_ms=deadline_ms,
                    plan_id=plan_id,
                    no_retain=no_retain,
                    move=move,
                    action_id=action_id,
                    local_estimate=local_estimate,
                    traceparent=traceparent,
                )
            )
            if not sent:
                state.end(BlockStatus.GONE, "no guard")
                break
        self._fetches[request_id] = state
        return state

    def wait_for(self, state: FetchState, deadline_s: float) -> None:
        """Wait until a fetch is final or, on the monotonic clock, the deadline: for callers with nothing else
        to do, which a scheduler is not."""
        asleep_s = time.monotonic() + SPIN_S
        while True:
            # First, as a guard on the same core has answered by the time that the engine's message is sent.
            self.poll()
            now_s = time.monotonic()
            left_s = deadline_s - now_s
            if state.final or left_s <= 0.0:
                return
            if now_s < asleep_s:
                continue
            poller = select.poll()
            if (descriptor := self._link.fileno()) >= 0:
                poller.register(descriptor, select.POLLIN)
            poller.poll(1000 * min(left_s, RESERVE_RETRY_S))

    def fetch_state(self, request_id: str) -> FetchState | None:
        return self._fetches.get(request_id)

    # --- other actions --------------------------------------------------------------------------

    def act(self, request_id: str, envelope: bytes) -> None:
        """Pass on actions that rode on a request (JSON of a ``kv_hint``). Lost without a guard."""
        session = self._link.session
        if session is not None:
            self._link.send(msg.Act(session.welcome.epoch, request_id, envelope))

    def take_drops(self) -> list[msg.DropG1]:
        """What the guard asked to be dropped in G1 since the last call. Answer each by :meth:`dropped`."""
        drops, self._drops = self._drops, []
        return drops

    def dropped(self, drop: msg.DropG1, count: int) -> None:
        """``count`` of its blocks were in G1 and are not any more."""
        self._link.deliver(msg.DroppedG1(drop.drop_id, count))

    def finish(self, request_id: str) -> None:
        """The request is over: forget its fetch, and let the guard drop its pulls and leases."""
        if self._fetches.pop(request_id, None) is not None:
            self._link.deliver(msg.Finish(request_id))

    # --- input ----------------------------------------------------------------------------------

    def _take(self, message: msg.ToEngine) -> None:
        if isinstance(message, msg.Granted):
            self._reserving = False
            slots, generations = i32(message.slots), u64(message.generations)
            if self._standing_of is not None and message.epoch == self._standing_of[1]:
                self._standing.add(slots, generations)
            if len(slots):
                self._reserve_at = 0.0
        elif isinstance(message, msg.FetchLease):
            state = self._fetches.get(message.request_id)
            if state is not None:
                state.leased(message)
        elif isinstance(message, msg.FetchProgress):
            state = self._fetches.get(message.request_id)
            if state is not None:
                state.progressed(message)
        elif isinstance(message, msg.DropG1):
            self._drops.append(message)
