# SPDX-License-Identifier: Apache-2.0
"""A guard whose pool is full of blocks that peers read: it says so at once, and goes on when one is done."""

from __future__ import annotations

import time
from pathlib import Path

import zmq
from engine_client import EngineClient, GuardProcess, chain
from waiting import PATIENCE_S

from kvcr.keys import BlockKey, pack_keys
from kvcr.protocol.engine import Granted, Reserve
from kvcr.protocol.peer import Lease, Leased, Release, to_client, to_server

HALF = 16


def granted(engine: EngineClient, count: int) -> int:
    engine.send(engine.scheduler, Reserve(engine.welcome.epoch, count))
    return len(engine.receive(engine.scheduler, Granted).slots) // 4


def lease(sock: zmq.Socket[bytes], op: int, keys: list[BlockKey]) -> Leased:
    sock.send(to_server.encode(Lease(op, "reader", op, pack_keys(keys), 60_000, "shm")))
    reply = to_client.decode(sock.recv())
    assert isinstance(reply, Leased)
    assert set(reply.statuses) == {1}
    return reply


def test_a_pool_full_of_leased_blocks_answers_at_once_and_goes_on_when_one_lease_ends(shm_dir: Path) -> None:
    with (
        GuardProcess(shm_dir, "g0", "--lease-ms", "60000", slots=2 * HALF) as guard,
        EngineClient(guard, "engine") as engine,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as sock,
    ):
        sock.linger = 0
        sock.rcvtimeo = 20_000
        sock.connect(guard.endpoint)
        (first_root, first), (second_root, second) = chain(HALF, "first"), chain(HALF, "second")
        engine.deposit(first, first_root)
        # Leased before the rest is granted, or the guard makes room ahead.
        one = lease(sock, 1, first)
        engine.deposit(second, second_root)
        other = lease(sock, 2, second)
        # An answer each time, and the same one: there is nothing, and nobody loses what is being read.
        for _ in range(5):
            assert granted(engine, 4) == 0
        assert all(engine.right([*first, *second]))
        assert guard.metrics().get('kvcr_evicted_blocks_total{reason="space"}', 0) == 0

        sock.send(to_server.encode(Release(one.lease_id)))
        deadline_s = time.monotonic() + PATIENCE_S
        while not (got := granted(engine, 4)):
            assert time.monotonic() < deadline_s, "no progress after a lease ended"
            time.sleep(0.1)
        assert got >= 1
        assert all(engine.right(second)), "what is still leased stays"
        assert not all(engine.right(first))
        sock.send(to_server.encode(Release(other.lease_id)))
