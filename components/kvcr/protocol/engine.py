# SPDX-License-Identifier: Apache-2.0
"""Engine process and guard, over a Unix seqpacket socket. Version 1.

An engine is several processes that share one ``engine_id``: a scheduler, which reserves slots and
submits hints, and one worker per rank, which fills slots and loads from them. Each opens its own
connection and says ``Hello``. Engine processes never wait for a send: a full socket means the guard
is slow, and the engine goes cold.
"""

from __future__ import annotations

import enum

import msgspec

from kvcr.layout import Layout
from kvcr.protocol.codec import Codec, Message

VERSION = 1


class Role(enum.StrEnum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


class BlockStatus(enum.IntEnum):
    """What became of one block of an operation. Everything but PENDING is final."""

    PENDING = 0
    OK = 1
    MISS = 2
    """Nobody asked has it."""
    FAILED = 3
    """It was there, but the copy failed or did not verify."""
    GONE = 4
    """It was evicted, or its owner went away, in mid-operation."""
    TOO_SLOW = 5
    """Recomputing is faster, or the deadline passed."""


class Hello(Message, frozen=True):
    """Engine to guard, first message of a connection; answered by Welcome or Rejected.

    Comes with a pidfd of its process, if the kernel has such: the guard's wake-up when that process ends.

    A worker takes its writer lock (:mod:`kvcr.pool.locks`) after Welcome and before mapping ``data``.
    """

    version: int
    role: Role
    engine_id: str
    """Same for all processes of one engine incarnation, never reused."""
    rank: int
    """0 for the scheduler; 0..layout.ranks-1 for workers."""
    pid: int
    layout: Layout
    namespace: str
    """Namespace part of the key space; the router needs it to compute the same keys."""
    probe: bytes = b""
    """:func:`kvcr.keys.probe_key` as this engine computes it; empty: not checked"""


class Welcome(Message, frozen=True):
    epoch: int
    guard: str
    incarnation: int
    pool_dir: str
    slots: int
    slot_part_bytes: int
    control_endpoint: str
    """Where peers reach this guard, e.g. ``tcp://10.0.0.5:7100``."""
    heartbeat_s: float = 0.0
    """How often a worker should say Alive, as a guard fences engines that are silent. 0: not at all."""


class Rejected(Message, frozen=True):
    """The connection is closed after this. ``code``: version | keys | layout | fail | busy | pool.

    ``fail``: another layout, and the guard's ``on_mismatch`` says that the engine must not start.
    """

    code: str
    reason: str


class Reserve(Message, frozen=True):
    """Scheduler to guard: grant me ``count`` more slots."""

    epoch: int
    count: int


class Granted(Message, frozen=True):
    """Guard to scheduler: slots this engine may fill. May be fewer than asked, or none."""

    epoch: int
    slots: bytes
    """int32 each"""
    generations: bytes
    """uint64 each"""


class Return(Message, frozen=True):
    """Scheduler or worker to guard: granted slots that were not (all) filled."""

    epoch: int
    slots: bytes
    generations: bytes


class Filled(Message, frozen=True):
    """Worker to guard: this rank's part of these granted slots now holds these blocks.

    Idempotent. The guard commits a block when every rank has said so.
    """

    epoch: int
    rank: int
    slots: bytes
    generations: bytes
    keys: bytes
    """16 bytes each"""
    parents: bytes
    """16 bytes each: the key before it in its chain, or the chain's root"""
    engine_hashes: bytes
    """uint64 each: the engine's own 64-bit block hash, the join with Dynamo's events"""
    positions: bytes
    """uint32 each: index of the block in its chain"""
    drops: int = 0
    """``drop_id`` of the last DropG1 that was carried out before the request of these blocks began"""
    checksums: bytes = b""
    """uint64 each: xxh3-64 of this rank's part, hashed as it was stored; empty: the guard hashes"""


class Committed(Message, frozen=True):
    """Guard to the worker that sent the last part: these fills are done with (committed or dropped)."""

    epoch: int
    slots: bytes
    generations: bytes


class Use(Message, frozen=True):
    """Scheduler to guard: a request uses these resident blocks; counts as a use for eviction."""

    epoch: int
    keys: bytes


class Source(msgspec.Struct, frozen=True, array_like=True):
    """One holder of a run of a request's blocks."""

    endpoint: str
    """Control endpoint, e.g. ``tcp://10.0.0.6:7100``."""
    first: int
    """Position of the first block it should give."""
    count: int
    guard: str = ""
    """Name of the guard, when the router knows it."""


class Fetch(Message, frozen=True):
    """Scheduler to guard: a hint says these blocks are worth copying here, for this request.

    Answered by FetchLease, again when a late source adds to it, and by FetchProgress until ``final``; when
    it is over at once, by a final FetchProgress alone.
    """

    epoch: int
    request_id: str
    first: int
    """Position in the chain of the first key below."""
    parent: bytes
    """Key before the first one (16 bytes)."""
    keys: bytes
    engine_hashes: bytes
    """uint64 each; 0: take it from the source, as engines of one version and seed have the same"""
    sources: list[Source]
    give_up_ms: float
    """The planner's estimate for recomputing; a pull that would end later is stopped. 0: no estimate."""
    deadline_ms: float
    plan_id: str = ""
    no_retain: bool = False
    """Into transit slots: never published, freed when the engine has loaded them."""
    move: bool = False
    """The source drops each block once it is committed here."""
    action_id: str = ""
    """of the hint's action, for the result; empty when the fetch came from no hint"""
    local_estimate: bool = False
    """``give_up_ms`` is the engine's own, from its measured prefill speed, and no planner's."""
    traceparent: str = ""
    """Place of the request in its trace, see :mod:`kvcr.tracing`; empty: in none."""


class Act(Message, frozen=True):
    """Scheduler to guard: actions other than a fetch that rode on a request, as they came."""

    epoch: int
    request_id: str
    envelope: bytes
    """the JSON of a ``kv_hint`` envelope"""


class DropG1(Message, frozen=True):
    """Guard to scheduler: forget these blocks in G1. Those in use lose their hash now, and are free later.

    Answered by DroppedG1 when it is done, which on an idle engine is before its next request.
    """

    drop_id: int
    engine_hashes: bytes
    """uint64 each: the engine's own 64-bit block hash"""
    keys: bytes = b""
    """of further blocks, of which the sender does not know that hash"""


class DroppedG1(Message, frozen=True):
    """Scheduler to guard: that many of them were in G1 and are not any more."""

    drop_id: int
    count: int


class FetchLease(Message, frozen=True):
    """Guard to scheduler, first answer to a Fetch: what the load may count on.

    ``available``: blocks from ``first`` on, contiguous, that are here or leased at a source.
    """

    request_id: str
    first: int
    available: int
    reason: str = ""
    """Why fewer than asked, for logs and ``explain``; empty when all are available."""


class FetchProgress(Message, frozen=True):
    """Guard to every process of the engine: state of a Fetch changed.

    Blocks with status OK are in the directory and found by key.
    """

    request_id: str
    statuses: bytes
    """uint8 :class:`BlockStatus` for each key of the Fetch"""
    final: bool
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""
    first: int = 0
    """``first`` of the Fetch, to tell the parts of a split one apart."""
    reason: str = ""
    """Of a final one: why it did not bring all; empty when it did, or when it is not final."""


class Handed(Message, frozen=True):
    """Guard to every process of the engine: where blocks of a no-retain Fetch are. Before the FetchProgress
    that calls them OK; workers answer with Taken.

    They are in no directory. Without ``pool_dir`` they are in transit slots of our pool, which are granted to
    the guard; with it they are READY in that other guard's pool, to be read in place.
    """

    request_id: str
    first: int
    """``first`` of the Fetch"""
    indices: bytes
    """int32 each: which blocks of the Fetch"""
    slots: bytes
    """int32 each"""
    generations: bytes
    """uint64 each"""
    checksums: bytes
    """uint64 for each block and rank, block-major: xxh3-64 of that rank's part"""
    pool_dir: str = ""
    incarnation: int = 0
    """Of the guard whose pool that is."""


class Taken(Message, frozen=True):
    """Worker to guard: these blocks of a Handed are in its engine memory, or will not be read any more."""

    request_id: str
    first: int
    indices: bytes
    """int32 each"""
    copied: bool = True
    unreachable: bool = False
    """This process cannot read the other guard's pool."""
    corrupt: bytes = b""
    """int32 each: blocks, of another guard's pool, that did not verify"""


class Finish(Message, frozen=True):
    """Scheduler to guard: the request is over; drop its hint, pulls and leases."""

    request_id: str


class LoadBegin(Message, frozen=True):
    """Worker to guard, without waiting: these slots are about to be read; do not reuse them."""

    request_id: str
    slots: bytes
    generations: bytes


class LoadEnd(Message, frozen=True):
    """Worker to guard: the loads of this request are over. ``corrupt_slots`` failed their checksum."""

    request_id: str
    block_count: int
    byte_count: int
    seconds: float
    failed_blocks: int = 0
    corrupt_slots: bytes = b""
    corrupt_generations: bytes = b""


class Pin(Message, frozen=True):
    """Keep these blocks from eviction for ``ttl_s`` seconds (a duration, from receipt)."""

    epoch: int
    keys: bytes
    ttl_s: float
    pin_id: str


class Unpin(Message, frozen=True):
    pin_id: str


class Holding(Message, frozen=True):
    """Every process to the guard, after Welcome and before any Reserve: the grants it knows of.

    The scheduler lists what it keeps and what it gave to workers and was not filled yet; a worker lists fills
    under way or not confirmed. A worker that has sent it writes to no slot of an earlier epoch any more. Once
    the scheduler and every rank have sent theirs, the guard frees the grants that nobody listed: those whose
    Granted or Return was lost with a connection. In parts, of which the last has ``final``.
    """

    epoch: int
    slots: bytes
    generations: bytes
    final: bool = True


class Alive(Message, frozen=True):
    """Worker to guard, every ``heartbeat_s`` of the Welcome: this process still runs."""


class Leaving(Message, frozen=True):
    """Scheduler to guard, last of all: this engine ends in good order. One that hangs up without it died."""


ToGuard = (
    Hello
    | Reserve
    | Return
    | Filled
    | Use
    | Fetch
    | Finish
    | LoadBegin
    | LoadEnd
    | Pin
    | Unpin
    | Holding
    | Alive
    | Act
    | DroppedG1
    | Taken
    | Leaving
)
ToEngine = Welcome | Rejected | Granted | Committed | FetchLease | FetchProgress | DropG1 | Handed

to_guard: Codec[ToGuard] = Codec(ToGuard)
to_engine: Codec[ToEngine] = Codec(ToEngine)
