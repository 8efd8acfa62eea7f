# SPDX-License-Identifier: Apache-2.0
"""What a lease at a peer says, checked: where it holds the blocks, and until when they may be read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError
from kvcr.protocol.codec import i32, u8, u64
from kvcr.protocol.engine import BlockStatus
from kvcr.protocol.peer import Leased
from kvcr.transfer.nixl_messages import STALL_S

LEASE_MARGIN_S = STALL_S + 0.2
"""A read begins no later than this before its lease ends, for it to be over by then."""

_MAX_ID = 2**63 - 1
"""What :attr:`kvcr.guard.active.Active.lease_of` holds."""


class Grant(NamedTuple):
    """A lease at a peer: what it holds of the keys asked for. ``slots`` is -1 where it has none."""

    lease_id: int
    slots: npt.NDArray[np.int32]
    generations: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    """[keys, ranks]"""
    engine_hashes: npt.NDArray[np.uint64]
    """0 where it has none, or does not say"""
    gone: npt.NDArray[np.bool_]
    """Where it had a key under the lease that was renewed, and has it no more."""
    usable_until_s: float
    """A read under the lease must have begun by then."""


def grant_of(reply: Leased, *, keys: int, ranks: int, rows: int, lease_ms: int, asked_s: float) -> Grant:
    """The answer to a lease on ``keys`` keys of a pool with ``rows`` rows, asked for at ``asked_s`` and for
    ``lease_ms``: the source may make that shorter.

    Raises ProtocolError when it cannot be one.
    """
    slots = i32(reply.slots).copy()
    generations, checksums = u64(reply.generations), u64(reply.checksums)
    statuses = u8(reply.statuses)
    if not len(slots) == len(generations) == len(statuses) == keys or len(checksums) != keys * ranks:
        raise ProtocolError(f"lease for {keys} keys and {ranks} ranks has other lengths")
    hashes = u64(reply.engine_hashes) if reply.engine_hashes else np.zeros(keys, np.uint64)
    if len(hashes) != keys:
        raise ProtocolError(f"lease for {keys} keys has {len(hashes)} engine hashes")
    if len(slots) and (int(slots.min()) < -1 or int(slots.max()) >= rows):
        raise ProtocolError(f"lease names a slot outside of 0..{rows - 1}")
    if not 0 <= reply.lease_id <= _MAX_ID:
        raise ProtocolError(f"lease has the number {reply.lease_id}, it must be within 0..{_MAX_ID}")
    if not 0 < reply.lease_ms <= lease_ms:
        raise ProtocolError(f"lease is for {reply.lease_ms} ms, {lease_ms} were asked for")
    # On our clock, from when we asked: never later than the source counts. A read that begins must end.
    lease_s = reply.lease_ms / 1000
    usable_until_s = asked_s + lease_s - min(LEASE_MARGIN_S, lease_s / 2)
    return Grant(
        reply.lease_id,
        slots,
        generations,
        checksums.reshape(keys, ranks),
        hashes,
        statuses == BlockStatus.GONE,
        usable_until_s,
    )
