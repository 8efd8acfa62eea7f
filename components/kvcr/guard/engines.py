# SPDX-License-Identifier: Apache-2.0
"""What engine processes ask of the guard, message by message."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from kvcr.errors import ConfigError, LayoutMismatch, MustFail, PoolError, ProtocolError
from kvcr.guard.actions import Actions
from kvcr.guard.connection import Connection
from kvcr.guard.deposits import Deposits
from kvcr.guard.fetches import Fetches
from kvcr.guard.g1 import G1Drops
from kvcr.guard.holdings import Holdings
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.pins import Pins
from kvcr.guard.rarely import Rarely
from kvcr.guard.scrub import Scrubber
from kvcr.guard.seat import Member, Seat
from kvcr.guard.tracing import RequestTraces
from kvcr.keys import KEY_BYTES, probe_key
from kvcr.layout import Layout
from kvcr.pool import Pool
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, i32, u64
from kvcr.protocol.engine import (
    VERSION,
    Act,
    Alive,
    DroppedG1,
    Fetch,
    Filled,
    Finish,
    Granted,
    Hello,
    Holding,
    Leaving,
    LoadBegin,
    LoadEnd,
    Pin,
    Rejected,
    Reserve,
    Return,
    Role,
    Taken,
    ToGuard,
    Unpin,
    Use,
    Welcome,
    to_engine,
)

log = logging.getLogger(__name__)

ORPHAN_S = 1.0
"""A request outlives its scheduler's connection by this long, for the case that it reconnects."""

MAX_GRANTED_FRACTION = 0.5
"""Of the pool: what standing grants may take, so that pulls and resident blocks keep room."""


class Host(Protocol):
    """What engines need of the guard."""

    name: str
    incarnation: int
    control_endpoint: str
    pool: Pool | None

    def open_pool(self, layout: Layout) -> Pool:
        """The pool for this layout, made if need be. Raises LayoutMismatch, PoolError, OSError."""

    def pool_changed(self) -> None: ...


class EngineServer:
    """Belongs to the authority thread."""

    def __init__(
        self,
        host: Host,
        loop: Loop,
        seat: Seat,
        deposits: Deposits,
        fetches: Fetches,
        scrubber: Scrubber,
        meters: Meters,
        heartbeat_s: float,
        pins: Pins,
        actions: Actions,
        g1: G1Drops,
        traces: RequestTraces,
    ) -> None:
        """``heartbeat_s``: how often workers are asked to say that they are alive, 0: not at all."""
        self._heartbeat_s = heartbeat_s
        self._holdings = Holdings()
        self._host = host
        self._loop = loop
        self._seat = seat
        self._deposits = deposits
        self._fetches = fetches
        self._scrubber = scrubber
        self._meters = meters
        self._pins = pins
        self._actions = actions
        self._g1 = g1
        self._traces = traces
        self._rarely = Rarely(log)

    def hello(self, hello: Hello, connection: Connection) -> Member | None:
        """Seat the process, or reject it and close its connection."""
        code, reason = "", ""
        pool: Pool | None = None
        if hello.version != VERSION:
            code, reason = "version", f"engine protocol {hello.version}, this guard speaks {VERSION}"
        elif hello.probe and hello.probe != probe_key(hello.namespace, hello.layout):
            code = "keys"
            reason = (
                f"engine and guard compute other block keys for namespace {hello.namespace!r} and model "
                f"{hello.layout.model!r}: they are of releases that do not fit"
            )
        elif not 0 <= hello.rank < hello.layout.ranks:
            code, reason = "layout", f"rank {hello.rank} is outside of 0..{hello.layout.ranks - 1}"
        elif refusal := self._seat.admit(self._host.pool, hello.engine_id):
            code, reason = "busy", refusal
        else:
            try:
                pool = self._host.open_pool(hello.layout)
                # Enters the id in the pool's table of writers, or refuses it.
                pool.allocate(0, time.monotonic(), engine_id=hello.engine_id)
            except MustFail as error:
                code, reason = "fail", str(error)
            except LayoutMismatch as error:
                code, reason = "layout", str(error)
            except (PoolError, ConfigError, OSError) as error:
                code, reason = "pool", str(error)
        if code or pool is None:
            self._rarely.warning("engine %.100s rejected, %s: %s", hello.engine_id, code, reason)
            connection.send(to_engine.encode(Rejected(code, reason)))
            connection.close_after_sending()
            return None
        member = Member(connection, hello.role, hello.rank, hello.pid)
        before = [m for m in self._seat.members if m.role is hello.role is Role.SCHEDULER]
        self._seat.join(pool, hello.engine_id, hello.namespace, member)
        self._seat.processes.add(hello.pid, connection.sock, connection.take_passed_fd())
        self._holdings.restarted((hello.role, hello.rank))
        for old in before:
            # What is still unread on it would be granted to nobody.
            old.connection.close()
        member.send(
            Welcome(
                epoch=pool.epoch,
                guard=self._host.name,
                incarnation=self._host.incarnation,
                pool_dir=str(pool.dir),
                slots=pool.slots,
                slot_part_bytes=pool.slot_part_bytes,
                control_endpoint=self._host.control_endpoint,
                heartbeat_s=self._heartbeat_s,
            )
        )
        if hello.role is Role.SCHEDULER:
            self._g1.attached()
        return member

    def hung_up(self, member: Member) -> None:
        """The connection of a seated process closed."""
        self._seat.leave(self._host.pool, member)
        if not self._seat.members:
            self._deposits.forget()
        if member.role is Role.SCHEDULER:
            self._loop.later(ORPHAN_S, lambda: self._fetches.orphaned(member))

    def handle(self, message: ToGuard, member: Member) -> None:
        """Raises ProtocolError on arrays of odd lengths; the connection is then closed."""
        pool = self._host.pool
        if pool is None:
            raise ProtocolError(f"{type(message).__name__} before there is a pool")
        self._seat.heard(member)
        if getattr(message, "epoch", pool.epoch) != pool.epoch:
            self._meters.stale_messages.inc(message=type(message).__name__)
        match message:
            case Filled():
                self._deposits.filled(message, member.rank, member.send)
            case Hello():
                raise ProtocolError("a second Hello on one connection")
            case Fetch():
                self._fetches.start(message, self._seat, member.send, member)
            case Taken():
                self._fetches.taken(message, member.rank)
            case Finish():
                self._fetches.finish(message.request_id)
            case LoadBegin():
                self._load_begin(pool, message, member)
            case LoadEnd():
                self._load_end(pool, message, member)
            case Reserve():
                self._reserve(pool, message, member)
            case Return():
                self._deposits.returned(message, member.rank if member.role is Role.WORKER else None)
            case Holding():
                self._holding(pool, message, member)
            case Alive():
                pass
            case Leaving():
                member.leaving = True
            case Use():
                if message.epoch == pool.epoch:
                    _require_keys(message.keys)
                    slots = pool.lookup(message.keys).slots
                    pool.touch(slots[slots >= 0], time.monotonic())
            case Pin():
                self._pin(pool, message)
            case Unpin():
                self._pins.unpin(pool, message.pin_id, time.monotonic())
            case Act():
                self._actions.act_for_request(message)
            case DroppedG1():
                self._g1.dropped(message)

    def _holding(self, pool: Pool, message: Holding, member: Member) -> None:
        freed = self._holdings.heard(pool, self._seat.engine_id, message, (member.role, member.rank))
        self._meters.lost_grants.inc(freed)

    def _reserve(self, pool: Pool, message: Reserve, member: Member) -> None:
        if message.epoch != pool.epoch:
            member.send(Granted(pool.epoch, b"", b""))
            return
        held = len(pool.grants(self._seat.engine_id).slots)
        count = min(message.count, max(0, int(pool.slots * MAX_GRANTED_FRACTION) - held))
        slots, generations = pool.allocate(count, time.monotonic(), engine_id=self._seat.engine_id)
        self._host.pool_changed()
        for start in range(0, max(len(slots), 1), MAX_BLOCKS_PER_MESSAGE):
            part = slice(start, start + MAX_BLOCKS_PER_MESSAGE)
            member.send(Granted(pool.epoch, slots[part].tobytes(), generations[part].tobytes()))

    def _load_begin(self, pool: Pool, message: LoadBegin, member: Member) -> None:
        slots, generations = i32(message.slots), u64(message.generations)
        if len(slots) != len(generations):
            raise ProtocolError(f"LoadBegin has {len(slots)} slots, {len(generations)} generations")
        inside = (slots >= 0) & (slots < pool.slots)
        slots, generations = slots[inside], generations[inside]
        held = pool.lease(slots, generations)
        pool.touch(slots[held], time.monotonic())
        member.loads.setdefault(message.request_id, []).append((slots[held], generations[held]))

    def _load_end(self, pool: Pool, message: LoadEnd, member: Member) -> None:
        for slots, generations in member.loads.pop(message.request_id, []):
            pool.unlease(slots, generations)
        if member.rank == 0 and message.block_count > 0:
            # Every rank loads its part of the same blocks.
            self._meters.loaded_blocks.inc(message.block_count)
        self._meters.loaded_bytes.inc(max(message.byte_count, 0))
        self._traces.load(message, member.rank)
        if message.corrupt_slots:
            self._scrubber.distrust(i32(message.corrupt_slots), u64(message.corrupt_generations), "load")

    def _pin(self, pool: Pool, message: Pin) -> None:
        _require_keys(message.keys)
        if message.epoch != pool.epoch:
            return
        _, refusal = self._pins.pin(pool, message.pin_id, message.keys, message.ttl_s, time.monotonic())
        if refusal:
            self._rarely.warning(
                "pin %.100s of engine %s refused: %s", message.pin_id, self._seat.engine_id, refusal
            )


def _require_keys(keys: bytes) -> None:
    if len(keys) % KEY_BYTES:
        raise ProtocolError(f"{len(keys)} bytes of keys, {KEY_BYTES} a key")
