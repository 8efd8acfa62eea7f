# SPDX-License-Identifier: Apache-2.0
"""The other side of pulls: what this guard answers to guards and routers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError
from kvcr.guard.addresses import Place, rdma_devices
from kvcr.guard.canary import Canary
from kvcr.guard.inventory import InventoryLog
from kvcr.guard.loop import Loop, Timer
from kvcr.guard.meters import Meters
from kvcr.guard.probing import Prober
from kvcr.guard.rarely import Rarely
from kvcr.guard.scrub import Scrubber
from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, i32, u64
from kvcr.protocol.engine import BlockStatus
from kvcr.protocol.peer import (
    CANARY_KEY,
    VERSION,
    Discard,
    Discarded,
    Lease,
    Leased,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Probe,
    Release,
    Replay,
    Replayed,
    Snapshot,
    SnapshotChunk,
    ToClient,
    ToServer,
)
from kvcr.tracing import NO_SPAN, Tracer, TraceSpan
from kvcr.transfer.nixl import NixlIdentity, NixlProcess
from kvcr.transfer.plugins import Plugin

log = logging.getLogger(__name__)

SNAPSHOT_BLOCKS = 4096
"""Per chunk: 115 kB, which fits a Unix seqpacket message."""

REPLAY_BYTES = 150_000
MAX_LEASES = 4096
CANARY_LEASE_MS = 10_000
"""Longest lease on the canary block, which holds nothing but our NIXL agent to its work."""

ALONE_S = 0.02
"""A reader that copies by itself (CMA) needs our NIXL agent only to connect anew. Most are through before,
and cost our NIXL process nothing."""

TRANSPORTS = ("shm", "nixl")

Reply = Callable[[ToClient], None]


class Host(Protocol):
    """What serving needs of the guard."""

    name: str
    incarnation: int
    place: Place
    unix_socket: str
    pool: Pool | None

    @property
    def canary(self) -> Canary | None: ...
    @property
    def plugins(self) -> Mapping[str, Plugin]: ...
    def nixl(self) -> NixlProcess: ...
    def discard(self, keys: bytes, plan_id: str, who: str) -> int:
        """Drop these blocks in every tier, unless they are in use or pinned; returns how many went."""


@dataclass(slots=True)
class _Lease:
    slots: npt.NDArray[np.int32]
    generations: npt.NDArray[np.uint64]
    timer: Timer
    helping: Timer | None = None
    """Until our NIXL agent is kept progressing for it; None where it never is."""
    held: bool = False
    """Our NIXL agent is."""
    span: TraceSpan = NO_SPAN


@dataclass(slots=True)
class Caller:
    """One way a request came in. ``leases`` end with a Unix connection; over ZMQ they only expire."""

    leases: set[int] = field(default_factory=set)


class PeerServer:
    """Belongs to the authority thread. Replies may come later than the call, in any order."""

    def __init__(
        self,
        host: Host,
        loop: Loop,
        inventory: InventoryLog,
        meters: Meters,
        scrubber: Scrubber,
        max_lease_ms: int,
        prober: Prober,
        tracer: Tracer,
    ) -> None:
        self._tracer = tracer
        self._host = host
        self._loop = loop
        self._inventory = inventory
        self._meters = meters
        self._scrubber = scrubber
        self._max_lease_ms = max_lease_ms
        self._prober = prober
        self._rarely = Rarely(log)
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    def handle(self, message: ToServer, caller: Caller, reply: Reply) -> None:
        """Answer one request. Raises ProtocolError on arrays of odd lengths."""
        match message:
            case PeerHello():
                self._hello(message, reply)
            case Lease():
                self._lease(message, caller, reply)
            case Release():
                self._release(message, caller)
            case Snapshot():
                self._snapshot(message, reply)
            case Probe():
                if not self._prober.start(message, reply):
                    self._refuse(reply, message.op, "busy", "another probe is under way, or there is no pool")
            case Discard():
                self._discard(message, reply)
            case Replay():
                batches = self._inventory.replay(message.first, message.last, REPLAY_BYTES)
                if batches is None:
                    self._refuse(
                        reply, message.op, "too_large", "those batches are no longer kept; take a snapshot"
                    )
                else:
                    reply(Replayed(message.op, batches))

    def hung_up(self, caller: Caller) -> None:
        """A Unix connection closed: whatever it leased is read no more."""
        for lease_id in list(caller.leases):
            self._end(lease_id, "hung_up")
        caller.leases.clear()

    def end_all(self) -> None:
        """Before the pool is replaced."""
        for lease_id in list(self._leases):
            self._end(lease_id, "pool_replaced")

    def _hello(self, hello: PeerHello, reply: Reply) -> None:
        pool = self._host.pool
        if hello.version != VERSION:
            self._refuse(
                reply, hello.op, "version", f"peer protocol {hello.version}, this guard speaks {VERSION}"
            )
            return
        if pool is not None and hello.layout_digest and hello.layout_digest != pool.layout.digest():
            self._refuse(
                reply,
                hello.op,
                "layout",
                f"{hello.name} has layout {hello.layout_digest}, we have {pool.layout.digest()}",
            )
            return
        if hello.want_nixl and pool is not None:
            self._host.nixl().serve(lambda identity: self._welcome(hello, identity, reply))
        else:
            self._welcome(hello, None, reply)

    def _welcome(self, hello: PeerHello, identity: NixlIdentity | None, reply: Reply) -> None:
        host, pool = self._host, self._host.pool
        plugin = host.plugins.get(hello.want_offer) if pool is not None else None
        reply(
            PeerWelcome(
                op=hello.op,
                name=host.name,
                incarnation=host.incarnation,
                epoch=pool.epoch if pool else 0,
                layout=pool.layout if pool else None,
                boot_id=host.place.boot_id,
                pool_dir=str(pool.dir) if pool else "",
                unix_socket=host.unix_socket,
                slots=pool.slots if pool else 0,
                nixl_agent=identity.agent if identity else "",
                nixl_metadata=identity.metadata if identity else b"",
                region_addresses=tuple(identity.addresses) if identity else (),
                canary_slot=host.canary.slot if host.canary else -1,
                pid=identity.pid if identity else 0,
                pid_namespace=host.place.pid_namespace,
                net_namespace=host.place.net_namespace,
                rdma_ports=tuple(rdma_devices()),
                plugins=tuple(host.plugins),
                offer=plugin.offer() if plugin is not None else b"",
            )
        )

    def _lease(self, request: Lease, caller: Caller, reply: Reply) -> None:
        pool = self._host.pool
        count = len(request.keys) // KEY_BYTES
        if len(request.keys) % KEY_BYTES:
            raise ProtocolError(f"keys has {len(request.keys)} bytes, {KEY_BYTES} a key")
        if pool is None:
            self._refuse(reply, request.op, "not_ready", "no engine has attached yet")
            return
        if count > MAX_BLOCKS_PER_MESSAGE or len(self._leases) >= MAX_LEASES:
            limits = f"the limits are {MAX_BLOCKS_PER_MESSAGE} and {MAX_LEASES}"
            reason = f"{count} keys asked and {len(self._leases)} leases given; {limits}"
            self._refuse(reply, request.op, "too_large", reason)
            return
        if request.keys == CANARY_KEY:
            self._lease_canary(request, caller, reply)
            return
        found = pool.lookup(request.keys)
        slots, generations = found.slots.copy(), found.generations.copy()
        has = slots >= 0
        slots[~has] = -1
        generations[~has] = 0
        checksums = np.zeros((count, pool.layout.ranks), np.uint64)
        hashes = np.zeros(count, np.uint64)
        lease_id = 0
        lease_ms = min(max(request.lease_ms, 1), self._max_lease_ms)
        if request.renew:
            caller.leases.discard(request.renew)
        if has.any():
            pool.lease(slots[has], generations[has])
            checksums[has] = pool.checksums(slots[has])
            hashes[has] = pool.engine_hashes(slots[has])
            lease_id = self._grant(slots[has], generations[has], lease_ms, request)
            caller.leases.add(lease_id)
            if request.traceparent:
                self._trace(lease_id, request, int(has.sum()))
        if request.renew:
            # After the new lease: what both name is held throughout.
            self._end(request.renew, "renewed")
        absent = BlockStatus.GONE if request.renew else BlockStatus.MISS
        reply(
            Leased(
                op=request.op,
                incarnation=self._host.incarnation,
                lease_id=lease_id,
                statuses=np.where(has, BlockStatus.OK, absent).astype(np.uint8).tobytes(),
                slots=slots.astype("<i4").tobytes(),
                generations=generations.astype("<u8").tobytes(),
                checksums=checksums.astype("<u8").tobytes(),
                lease_ms=lease_ms,
                engine_hashes=hashes.astype("<u8").tobytes(),
            )
        )
        # The reader waits for none of this.
        if lease_id:
            self._help(lease_id, lease_ms, request)
            pool.touch(slots[has], time.monotonic())

    def _lease_canary(self, request: Lease, caller: Caller, reply: Reply) -> None:
        """It needs no lease to stay; the empty one keeps our NIXL agent progressing while it is read."""
        canary = self._host.canary
        assert canary is not None  # there is a pool
        none = (np.zeros(0, np.int32), np.zeros(0, np.uint64))
        lease_ms = min(max(request.lease_ms, 1), CANARY_LEASE_MS)
        lease_id = self._grant(*none, lease_ms, request)
        caller.leases.add(lease_id)
        reply(
            Leased(
                op=request.op,
                incarnation=self._host.incarnation,
                lease_id=lease_id,
                statuses=bytes([BlockStatus.OK]),
                slots=np.array([canary.slot], "<i4").tobytes(),
                generations=bytes(8),
                checksums=canary.checksums.astype("<u8").tobytes(),
                lease_ms=lease_ms,
            )
        )
        self._help(lease_id, lease_ms, request)

    def _grant(
        self, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64], lease_ms: int, request: Lease
    ) -> int:
        self._last_lease += 1
        lease_id = self._last_lease
        timer = self._loop.later(lease_ms / 1000, lambda: self._end(lease_id, "expired"))
        self._leases[lease_id] = _Lease(slots, generations, timer)
        return lease_id

    def _help(self, lease_id: int, lease_ms: int, request: Lease) -> None:
        """Keep our NIXL agent progressing for a reader that may need it to."""
        if request.transport != "nixl":
            return
        lease, until_s = self._leases[lease_id], time.monotonic() + lease_ms / 1000

        def hold() -> None:
            lease.held = True
            self._host.nixl().hold(lease_id, until_s, quick=not request.by_itself)

        if request.by_itself:
            lease.helping = self._loop.later(ALONE_S, hold)
        else:
            hold()

    def _trace(self, lease_id: int, request: Lease, blocks: int) -> None:
        """Our part in the trace of somebody else's request: from the lease until it is given back."""
        self._leases[lease_id].span = self._tracer.start(
            "kvcr.serve",
            request.traceparent,
            {
                "kvcr.peer": request.name,
                "kvcr.transport": request.transport,
                "kvcr.asked_blocks": len(request.keys) // KEY_BYTES,
                "kvcr.leased_blocks": blocks,
            },
        )

    def _release(self, release: Release, caller: Caller) -> None:
        caller.leases.discard(release.lease_id)
        if (lease := self._leases.get(release.lease_id)) is not None:
            lease.span.end(
                {
                    "kvcr.blocks": release.block_count,
                    "kvcr.bytes": release.byte_count,
                    "kvcr.result": "corrupt" if release.corrupt_slots else "released",
                }
            )
        self._end(release.lease_id, "released")
        known = release.transport in TRANSPORTS or release.transport in self._host.plugins
        if known and release.block_count > 0 and release.byte_count > 0:
            self._meters.served_blocks.inc(release.block_count, transport=release.transport)
            self._meters.served_bytes.inc(release.byte_count, transport=release.transport)
        if release.corrupt_slots:
            self._scrubber.check(i32(release.corrupt_slots), u64(release.corrupt_generations), "source")
        slots, generations = i32(release.used_slots), u64(release.used_generations)
        if len(slots) != len(generations):
            raise ProtocolError(f"Release has {len(slots)} used slots, {len(generations)} generations")
        if len(slots) and (pool := self._host.pool) is not None:
            pool.touch(slots[pool.still(slots, generations)], time.monotonic())

    def _end(self, lease_id: int, how: str) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        lease.timer.cancel()
        self._meters.leases_ended.inc(how=how)
        lease.span.end({"kvcr.result": "ended without a release"})
        if self._host.pool is not None:
            self._host.pool.unlease(lease.slots, lease.generations)
        if lease.helping is not None:
            lease.helping.cancel()
        if lease.held:
            self._host.nixl().drop(lease_id)

    def _discard(self, request: Discard, reply: Reply) -> None:
        if len(request.keys) % KEY_BYTES:
            raise ProtocolError(f"keys has {len(request.keys)} bytes, {KEY_BYTES} a key")
        if request.name == self._host.name:
            self._refuse(reply, request.op, "own_name", f"{request.name} is this guard: nothing was moved")
            return
        count = self._host.discard(request.keys, request.plan_id, request.name)
        reply(Discarded(request.op, self._host.incarnation, count))

    def _snapshot(self, request: Snapshot, reply: Reply) -> None:
        pool = self._host.pool
        heartbeat = self._inventory.heartbeat(pool)
        keys, hashes, positions, next_cursor = b"", b"", b"", -1
        if pool is not None:
            page = pool.snapshot(request.cursor, SNAPSHOT_BLOCKS)
            keys, next_cursor = page.keys, page.next_cursor
            hashes = page.engine_hashes.astype("<u8").tobytes()
            positions = page.positions.astype("<u4").tobytes()
        reply(
            SnapshotChunk(
                op=request.op,
                guard=self._host.name,
                incarnation=self._host.incarnation,
                sequence=heartbeat.sequence,
                keys=keys,
                engine_hashes=hashes,
                positions=positions,
                next_cursor=next_cursor,
                digest=heartbeat.digest,
                count=heartbeat.count,
            )
        )

    def _refuse(self, reply: Reply, op: int, code: str, reason: str) -> None:
        self._meters.peer_refusals.inc(code=code)
        self._rarely.warning("peer request refused, %s: %s", code, reason)
        reply(PeerRefused(op, code, reason))
