# SPDX-License-Identifier: Apache-2.0
"""What a peer, which may be of another release or out of order, may say of a lease."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvcr.errors import ProtocolError
from kvcr.guard.grants import LEASE_MARGIN_S, grant_of
from kvcr.protocol.engine import BlockStatus
from kvcr.protocol.peer import Leased

GOOD = Leased(
    op=1,
    incarnation=1,
    lease_id=7,
    statuses=bytes([BlockStatus.OK, BlockStatus.MISS]),
    slots=np.array([3, -1], "<i4").tobytes(),
    generations=np.array([5, 0], "<u8").tobytes(),
    checksums=np.array([11, 0], "<u8").tobytes(),
    lease_ms=4000,
)


def test_a_lease_may_be_shorter_than_asked_for() -> None:
    grant = grant_of(GOOD, keys=2, ranks=1, rows=4, lease_ms=5000, asked_s=100.0)
    assert (grant.lease_id, grant.slots.tolist()) == (7, [3, -1])
    assert grant.usable_until_s == pytest.approx(104.0 - LEASE_MARGIN_S)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lease_id": -1}, "lease has the number -1"),
        ({"lease_id": 2**63}, f"lease has the number {2**63}"),
        ({"lease_ms": 5001}, "lease is for 5001 ms, 5000 were asked for"),
        ({"lease_ms": 0}, "lease is for 0 ms, 5000 were asked for"),
        ({"slots": np.array([4, -1], "<i4").tobytes()}, "a slot outside of 0..3"),
        ({"checksums": b""}, "for 2 keys and 1 ranks has other lengths"),
    ],
)
def test_what_cannot_be_a_lease_is_refused(changes: dict[str, object], reason: str) -> None:
    reply = msgspec.structs.replace(GOOD, **changes)
    with pytest.raises(ProtocolError, match=reason):
        grant_of(reply, keys=2, ranks=1, rows=4, lease_ms=5000, asked_s=100.0)
