# SPDX-License-Identifier: Apache-2.0
"""Guard and guard, and router and guard: the control conversation. Version 1.

Over ZMQ (DEALER to ROUTER, CURVE when the deployment has a secret) between hosts, over a Unix
seqpacket socket on one host. Every request carries an ``op`` that its reply repeats. The destination
of blocks asks, reads the bytes itself, verifies and commits; the source only says where they are.
"""

from __future__ import annotations

import msgspec

from kvcr.layout import Layout
from kvcr.protocol.codec import Codec, Message

VERSION = 1
MAX_CONTROL_BYTES = 1 << 18
"""The largest message is a chunk of 150,000 bytes of a lease, a replay or a snapshot."""

CANARY_KEY = b"kvcr canary v1\0\0"
"""A Lease for this key alone is answered by every guard that has a pool, with a block of known bytes outside
of its directory. Who reads and verifies it knows that the way to this peer works."""


class PeerHello(Message, frozen=True):
    version: int
    op: int
    name: str
    """Guard (or router) that asks."""
    incarnation: int
    layout_digest: str
    """Empty for a router."""
    nixl_metadata: bytes = b""
    want_nixl: bool = False
    """Start your NIXL agent if need be and tell me about it; without this the welcome may lack it."""
    want_offer: str = ""
    """Name of a transport plugin: tell me what I need to read from you by it."""


class PeerWelcome(Message, frozen=True):
    """``layout`` is None while no engine has attached yet: "not ready", which is not a miss."""

    op: int
    name: str
    incarnation: int
    epoch: int
    layout: Layout | None
    boot_id: str
    pool_dir: str
    unix_socket: str
    slots: int
    nixl_agent: str = ""
    nixl_metadata: bytes = b""
    region_addresses: tuple[int, ...] = ()
    """Address of each rank's data region in the serving process; NIXL READ needs it."""
    canary_slot: int = -1
    """Row of the regions that holds the block for :data:`CANARY_KEY`; no slot of the directory."""
    pid: int = 0
    """Of the process with these addresses, in the PID namespace of the next field."""
    pid_namespace: int = 0
    net_namespace: int = 0
    rdma_ports: tuple[str, ...] = ()
    """RDMA ports of its host that are up."""
    plugins: tuple[str, ...] = ()
    """Names of the transport plugins it has loaded."""
    offer: bytes = b""
    """Of the plugin that was asked for."""


class PeerRefused(Message, frozen=True):
    """``code``: version | layout | not_ready | unknown_lease | too_large | busy"""

    op: int
    code: str
    reason: str


class Lease(Message, frozen=True):
    """Hold what you have of these keys for ``lease_ms`` so that I can read it."""

    op: int
    name: str
    incarnation: int
    keys: bytes
    lease_ms: int
    transport: str
    """``shm`` or ``nixl``: with ``nixl`` the source keeps its agent progressing while the lease lives"""
    renew: int = 0
    """A lease on these keys that is over or about to be. It ends; what is here no more is GONE, no MISS."""
    traceparent: str = ""
    """Place of this question in the trace of a request, see :mod:`kvcr.tracing`; empty: in none."""
    by_itself: bool = False
    """With ``nixl``: I am connected, and copy between the processes (CMA); your agent has little to do."""


class Leased(Message, frozen=True):
    op: int
    incarnation: int
    lease_id: int
    statuses: bytes
    """uint8 BlockStatus for each key: OK, MISS, or GONE where the lease that was to be renewed had it"""
    slots: bytes
    """int32 for each key, -1 where missing"""
    generations: bytes
    """uint64 for each key"""
    checksums: bytes
    """uint64 for each key and rank, key-major: xxh3-64 of that rank's part"""
    lease_ms: int
    engine_hashes: bytes = b""
    """uint64 for each key, 0 where missing: the engine's own block hash, for who asked without it"""


class Release(Message, frozen=True):
    """No reply. ``corrupt_slots`` did not verify at the reader: the source checks and quarantines them.

    ``block_count`` and ``byte_count`` say what the reader read under the lease, so that both sides'
    counters agree.
    """

    lease_id: int
    block_count: int = 0
    byte_count: int = 0
    transport: str = ""
    corrupt_slots: bytes = b""
    corrupt_generations: bytes = b""
    used_slots: bytes = b""
    """int32 each: blocks that were read without a lease, which is a use for eviction as a lease is"""
    used_generations: bytes = b""
    """uint64 each"""


class Snapshot(Message, frozen=True):
    """Router to guard: the whole inventory from slot ``cursor`` on, in chunks."""

    op: int
    cursor: int = 0


class SnapshotChunk(Message, frozen=True):
    """``next_cursor`` is -1 in the last chunk; ``sequence`` is the event sequence the chunk is true at."""

    op: int
    guard: str
    incarnation: int
    sequence: int
    keys: bytes
    engine_hashes: bytes
    positions: bytes
    next_cursor: int
    digest: int = 0
    count: int = 0


class Replay(Message, frozen=True):
    """Router to guard: inventory events ``first..last`` again; answered by Replayed or PeerRefused."""

    op: int
    first: int
    last: int


class Replayed(Message, frozen=True):
    """``batches`` are encoded :class:`kvcr.protocol.events.Inventory` messages, in sequence."""

    op: int
    batches: list[bytes]


class Discard(Message, frozen=True):
    """The end of a move: the caller has committed these blocks, so drop yours, in every tier and in G1."""

    op: int
    name: str
    incarnation: int
    plan_id: str
    keys: bytes


class Discarded(Message, frozen=True):
    op: int
    incarnation: int
    count: int
    """of the keys that were here and are dropped; leased or pinned ones are not"""


class Probe(Message, frozen=True):
    """Try and measure every way by which you might read from this guard; fields as in a peer record."""

    op: int
    endpoint: str
    name: str = ""
    unix_socket: str = ""
    boot_id: str = ""
    net_namespace: int = 0
    curve_key: str = ""


class ProbedWay(msgspec.Struct, frozen=True, array_like=True):
    """One that was tried."""

    way: str
    """E.g. ``nixl over tcp``."""
    why: str
    """Why it came into question."""
    error: str = ""
    """Why it does not work; empty when it does, and then the rest counts."""
    first_s: float = 0.0
    """The first read of one block, contact included."""
    bytes_per_s: float = 0.0
    """Of the best of some reads of ``nbytes``, verified."""
    nbytes: int = 0


class Probed(Message, frozen=True):
    """``error`` is set when the guard could not even be spoken to."""

    op: int
    reader: str
    source: str
    error: str = ""
    interface: str = ""
    """Network interface by which the reader reaches the source, and its own address there."""
    address: str = ""
    ucx_devices: str = ""
    """``UCX_NET_DEVICES`` of the reader; empty: UCX takes any."""
    round_trip_s: float = 0.0
    """Median of control messages."""
    chosen: str = ""
    """The way that pulls would take; empty: none."""
    ways: tuple[ProbedWay, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    """(way, why) of those that were not tried."""


ToServer = PeerHello | Lease | Release | Snapshot | Replay | Discard | Probe
ToClient = PeerWelcome | PeerRefused | Leased | SnapshotChunk | Replayed | Discarded | Probed

to_server: Codec[ToServer] = Codec(ToServer, max_bytes=MAX_CONTROL_BYTES)
to_client: Codec[ToClient] = Codec(ToClient, max_bytes=MAX_CONTROL_BYTES)
