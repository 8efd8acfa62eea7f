# SPDX-License-Identifier: Apache-2.0
"""A peer is used once its canary block was read and verified over the transport that pulls will use."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_client import LAYOUT, EngineClient, GuardProcess, chain, guards, statuses
from peer_client import PeerClient
from waiting import PATIENCE_S

from kvcr.pool import DATA, SPARE_ROWS
from kvcr.protocol.engine import BlockStatus, Source
from kvcr.protocol.peer import (
    CANARY_KEY,
    VERSION,
    Lease,
    Leased,
    PeerHello,
    PeerWelcome,
    Snapshot,
    SnapshotChunk,
)
from kvcr.transfer import nixl

needs_nixl = pytest.mark.skipif(bool(nixl.import_error()), reason=nixl.import_error())
SLOTS = 64


@contextlib.contextmanager
def two_guards(
    directory: Path, arguments: Sequence[str] = (), env: dict[str, str] | None = None
) -> Iterator[tuple[GuardProcess, GuardProcess]]:
    """``b`` knows ``a`` from the beginning."""
    with GuardProcess(directory, "a", *arguments, slots=SLOTS, env=env) as a:
        peers = directory / "peers.json"
        record = {"endpoint": a.endpoint, "name": "a", "boot_id": a.ready["boot_id"]}
        peers.write_text(json.dumps([record]))
        with GuardProcess(directory, "b", "--peers", str(peers), *arguments, slots=SLOTS, env=env) as b:
            yield a, b


def wait_ready(guard: GuardProcess, peer: str, ready: float) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    name = f'kvcr_peer_ready{{peer="{peer}"}}'
    while guard.metrics().get(name) != ready and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert guard.metrics().get(name) == ready


def way(guard: GuardProcess) -> str:
    """The labels of the transport chosen for the only peer."""
    return next((name for name in guard.metrics() if name.startswith("kvcr_peer_bytes_per_second")), "")


@pytest.mark.parametrize(
    ("arguments", "env", "transport", "via"),
    [
        ([], None, "shm", ""),
        pytest.param(["--transport", "nixl"], None, "nixl", "cma", marks=needs_nixl),
        pytest.param(["--transport", "nixl"], {"UCX_TLS": "tcp,self"}, "nixl", "tcp", marks=needs_nixl),
    ],
    ids=["shm", "cma", "tcp"],
)
def test_known_peers_are_ready_before_the_first_pull_and_say_why(
    directory: Path, arguments: list[str], env: dict[str, str] | None, transport: str, via: str
) -> None:
    with two_guards(directory, arguments, env) as (a, b), EngineClient(a, "a"), EngineClient(b, "b"):
        wait_ready(b, "a", 1)
        assert b.metrics()[f'kvcr_canaries_total{{transport="{transport}",result="ok"}}'] == 1
        assert f'transport="{transport}",via="{via}",why="' in way(b)
        assert b.metrics()[way(b)] > 0
        pulled = {name: n for name, n in b.metrics().items() if name.startswith("kvcr_pulled_blocks_total")}
        assert not any(pulled.values()), pulled


def test_the_canary_takes_no_slot_and_is_in_no_inventory(directory: Path) -> None:
    with two_guards(directory) as (a, b), EngineClient(a, "a") as source, EngineClient(b, "b"):
        wait_ready(b, "a", 1)
        assert a.metrics()['kvcr_pool_slots{state="free"}'] == SLOTS
        assert not any(source.reader.lookup(CANARY_KEY).slots >= 0)
        with PeerClient(a.endpoint) as client:
            chunk = client.ask(Snapshot(1))
            assert isinstance(chunk, SnapshotChunk)
            assert (chunk.count, chunk.keys, chunk.digest) == (0, b"", 0)
            welcome = client.ask(PeerHello(VERSION, 2, "x", 0, ""))
            assert isinstance(welcome, PeerWelcome)
            assert (welcome.slots, welcome.canary_slot) == (SLOTS, SLOTS)
            leased = client.ask(Lease(3, "x", 0, CANARY_KEY, 1000, "shm"))
            assert isinstance(leased, Leased)
            assert np.frombuffer(leased.slots, "<i4").tolist() == [SLOTS]


def test_a_peer_whose_canary_does_not_verify_is_not_ready_until_it_does(directory: Path) -> None:
    root, keys = chain(12, "tenant")
    with two_guards(directory, ["--transport", "shm"]) as (a, b), EngineClient(a, "a") as source:
        damage(a)
        source.deposit(keys, root)
        with EngineClient(b, "b") as target:
            wait_ready(b, "a", 0)
            lease, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 12)], deadline_ms=5000)
            assert set(statuses(progress)) == {BlockStatus.GONE}
            why = "shm: 1 blocks do not have the checksum their source recorded"
            reason = f"block 0: gone (a: not ready, no transport works ({why}))"
            assert (lease.available, progress.reason) == (0, reason)
            assert b.metrics()['kvcr_canaries_total{transport="shm",result="failed"}'] >= 1
            assert not any(target.right(keys))
            damage(a)
            deadline_s = time.monotonic() + PATIENCE_S
            while set(statuses(progress)) != {BlockStatus.OK} and time.monotonic() < deadline_s:
                time.sleep(0.2)
                _, progress = target.fetch("again", keys, root, [Source(a.endpoint, 0, 12)])
            assert all(target.right(keys))
            wait_ready(b, "a", 1)


@needs_nixl
def test_where_the_pool_cannot_be_mapped_the_next_way_is_taken(directory: Path) -> None:
    root, keys = chain(12, "tenant")
    # With this setting, a's own NIXL has mapped the pool before its file is spoilt.
    with (
        GuardProcess(directory, "a", "--transport", "nixl", slots=SLOTS) as a,
        GuardProcess(directory, "b", slots=SLOTS) as b,
        EngineClient(a, "a") as source,
    ):
        source.deposit(keys, root)
        with PeerClient(a.endpoint) as client:
            told = client.ask(PeerHello(VERSION, 1, "x", 0, "", want_nixl=True))
            assert isinstance(told, PeerWelcome)
            assert told.nixl_metadata
        # Its first bytes say what it is: b, which opens it now, finds no pool there. a has it open already.
        with (a.pool_dir / "meta").open("r+b") as meta:
            meta.write(b"x")
        with EngineClient(b, "b") as target:
            _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 12)])
            assert (statuses(progress), progress.transport) == ([BlockStatus.OK] * 12, "nixl")
            assert 'via="cma"' in way(b)


def test_a_pull_that_comes_before_the_canary_waits_for_it(directory: Path) -> None:
    root, keys = chain(12, "tenant")
    with guards(directory, "a", "b", slots=SLOTS) as (a, b), EngineClient(a, "a") as source:
        source.deposit(keys, root)
        with EngineClient(b, "b") as target:
            # Nobody told b of a: its first pull is the first contact.
            _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 12)])
            assert statuses(progress) == [BlockStatus.OK] * 12
            assert b.metrics()['kvcr_canaries_total{transport="shm",result="ok"}'] == 1


def damage(guard: GuardProcess) -> None:
    """Flip a bit of its canary block; a second time, back."""
    with open(guard.pool_dir / DATA, "r+b") as file:
        region = file.seek(0, 2)
        assert region >= (SLOTS + SPARE_ROWS) * LAYOUT.slot_part_bytes
        file.seek(SLOTS * LAYOUT.slot_part_bytes + 777)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
