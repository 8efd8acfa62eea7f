# SPDX-License-Identifier: Apache-2.0
"""The guard and its NIXL process, over a seqpacket socket pair. Both are of one version: no negotiation.

Times are of ``time.monotonic``, which all processes of a host share.
"""

from __future__ import annotations

import msgspec

from kvcr.protocol.codec import Codec, Message
from kvcr.protocol.engine import BlockStatus

LOCK = "nixl.lock"
"""In the pool's directory, held by the process while it may write to the pool. A guard that attaches waits
until nobody holds it: reads of the guard before it may still be landing."""

STALL_S = 1.0
"""A read that takes longer is given up, so that another source can be asked within the deadline. 8 MiB in
1 s is 67 Mbit/s, below which recomputing wins."""

CONTACT_S = 5.0
"""The same for the first read from a peer: UCX connects with it, for which both processes need CPU time.
10 ms, and where engines are being loaded a second and more."""

MAX_BYTES = 150_000
"""A Read of 8,192 blocks is 64 kB, a Landed of 8,192 parts too; a seqpacket message fails above 212 kB."""


class Settings(msgspec.Struct, frozen=True):
    """On the command line of the process, as JSON."""

    name: str
    """Prefix of its agents' names."""
    fd: int
    parent: int
    """Pid of the guard; 0 when that is in no way to be checked."""
    pool_dir: str
    incarnation: int
    """Of the guard that made or attached the pool: the one to map."""
    backend: str
    """of NIXL, for all agents"""
    params: dict[str, str]


class Serve(Message, frozen=True):
    """Make the agent that peers read from, if need be; answered by Serving."""


class WarmUp(Message, frozen=True):
    """Make the agents that any use needs, ahead of it: making one takes 0.5 s and more."""


class Hold(Message, frozen=True):
    """Progress the serving agent until then, or Drop: TCP reads and a reader's first contact need it."""

    lease_id: int
    until_s: float
    quick: bool
    """The reader waits for each step of ours; otherwise it copies without us, and at most connects."""


class Drop(Message, frozen=True):
    lease_id: int


class Peer(Message, frozen=True):
    """A peer that may be read from. Comes before its first Read; answered by Met."""

    peer_id: int
    label: str
    metadata: bytes
    addresses: tuple[int, ...]
    slots: int
    own_agent: bool
    tls: str
    """Holds an agent of its own to some of UCX's transports, as ``UCX_TLS`` would; empty: to none."""


class Met(Message, frozen=True):
    """The agent for a peer is made: a Read begins at once. Or why it cannot be."""

    peer_id: int
    reason: str


class Forget(Message, frozen=True):
    """Reads from this peer under way end as GONE."""

    peer_id: int


class Read(Message, frozen=True):
    """Read blocks of a peer into our slots; answered by Landed or Lost."""

    number: int
    peer_id: int
    local_slots: bytes
    """int32 each"""
    remote_slots: bytes
    deadline_s: float


class Serving(Message, frozen=True):
    """``metadata`` is empty when NIXL cannot serve; ``addresses`` are of this process."""

    agent: str
    metadata: bytes
    addresses: tuple[int, ...]


class ServerLost(Message, frozen=True):
    """The serving agent broke: what peers know of it is worth nothing any more."""

    reason: str


class Landed(Message, frozen=True):
    """All bytes are in the slots, hashed and not compared."""

    number: int
    seconds: float
    synchronous: bool
    """It was over when it was posted: copied between the processes (CMA)."""
    checksums: bytes
    """uint64 for each block and rank, block-major: xxh3-64 of that rank's part."""


class Lost(Message, frozen=True):
    """A read that will not be completed."""

    number: int
    status: BlockStatus
    reason: str
    seconds: float
    in_flight: bool
    """Bytes may still land; Quiet follows once none can."""


class Quiet(Message, frozen=True):
    """The agent of these reads is gone: nothing writes to their slots any more."""

    numbers: list[int]


ToProcess = Serve | WarmUp | Hold | Drop | Peer | Forget | Read
ToGuard = Serving | ServerLost | Met | Landed | Lost | Quiet

to_process: Codec[ToProcess] = Codec(ToProcess, max_bytes=MAX_BYTES)
to_guard: Codec[ToGuard] = Codec(ToGuard, max_bytes=MAX_BYTES)
