# SPDX-License-Identifier: Apache-2.0
"""What a pull costs when something does not do its part: paused peers, NIXL processes that hang or die."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_client import LAYOUT, EngineClient, GuardProcess, a_pair, chain, guards, statuses
from waiting import BUSY_S, until

from kvcr.keys import BlockKey
from kvcr.protocol.engine import BlockStatus, FetchProgress, Granted, Reserve, Source
from kvcr.transfer import nixl

OK = BlockStatus.OK
TCP = {"UCX_TLS": "tcp,self"}
GRANTED = 'kvcr_pool_slots{state="granted"}'
QUARANTINED = 'kvcr_pool_slots{state="quarantined"}'

needs_nixl = pytest.mark.skipif(bool(nixl.import_error()), reason=nixl.import_error())
every_transport = pytest.mark.parametrize(
    ("transport", "env"),
    [
        ("shm", None),
        pytest.param("nixl", None, marks=needs_nixl),
        pytest.param("nixl", TCP, marks=needs_nixl),
    ],
    ids=["shm", "cma", "tcp"],
)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def fetched_whole(target: EngineClient, keys: Sequence[BlockKey], root: bytes, sources: list[Source]) -> bool:
    number = time.monotonic_ns()
    _, progress = target.fetch(f"try-{number}", keys, root, sources)
    return set(statuses(progress)) == {OK}


def assert_slots_are_back(guard: GuardProcess) -> None:
    until(lambda: guard.metrics()[GRANTED] == guard.metrics()[QUARANTINED] == 0, "every slot is back")


# --- a peer that pauses ------------------------------------------------------------------------------


@every_transport
def test_a_paused_peer_costs_one_deadline_is_skipped_and_used_again(
    directory: Path, transport: str, env: dict[str, str] | None
) -> None:
    with a_pair(directory, 40, ["--transport", transport], env, contact=True) as (
        source,
        target,
        root,
        keys,
        sources,
    ):
        wanted = keys[:30]
        with contextlib.ExitStack() as paused:
            for pid in (source.guard.pid, *source.guard.children()):
                paused.enter_context(stopped(pid))
            started_s = time.monotonic()
            _, progress = target.fetch("first", wanted, root, sources, deadline_ms=1500)
            assert time.monotonic() - started_s < 1.5 + BUSY_S
            assert set(statuses(progress)[1:]) <= {BlockStatus.GONE, BlockStatus.TOO_SLOW}
            # From now on nobody waits for it, however much time there would be.
            for number in range(5):
                started_s = time.monotonic()
                _, progress = target.fetch(f"next-{number}", wanted, root, sources, deadline_ms=60_000)
                assert time.monotonic() - started_s < BUSY_S
                assert set(statuses(progress)[1:]) == {BlockStatus.GONE}
        # Found out by a hello that waited at the peer: no pull has to try.
        until(lambda: fetched_whole(target, wanted, root, sources), "the peer is used again")
        assert all(target.right(wanted))
        assert_slots_are_back(target.guard)


@needs_nixl
def test_over_tcp_nothing_lands_after_the_deadline(directory: Path) -> None:
    """The source's NIXL process is stopped with our reads in its queue, and goes on after we gave up."""
    with a_pair(directory, 200, ["--transport", "nixl"], TCP, contact=True) as (
        source,
        target,
        root,
        keys,
        sources,
    ):
        with stopped(source.guard.nixl_pid()):
            _, progress = target.fetch("r", keys, root, sources, deadline_ms=1200)
            assert set(statuses(progress)[1:]) <= {BlockStatus.TOO_SLOW, BlockStatus.GONE}
            quarantined = "kvcr_quarantined_slots_total"
            until(lambda: target.guard.metrics()[quarantined] > 0, "slots are taken out of use")
            taken = target.guard.metrics()[quarantined]
            # Its end is the agent's, and needs nothing from the source.
            assert target.guard.wait_metric("kvcr_requalified_slots_total", taken) == taken
            assert_slots_are_back(target.guard)
            # The freed slots are somebody else's now.
            target.send(target.scheduler, Reserve(target.welcome.epoch, 300))
            slots = np.frombuffer(target.receive(target.scheduler, Granted).slots, "<i4")
            assert len(slots) == 300
            target.region.array[slots] = 0xA5
        # The source answers the reads it has, if there is anybody to answer.
        time.sleep(2.0)
        assert (target.region.array[slots] == 0xA5).all()
        until(lambda: fetched_whole(target, keys, root, sources), "the peer is used again")
        assert (target.region.array[slots] == 0xA5).all()


# --- a request that ends while its blocks come -------------------------------------------------------


@every_transport
def test_pulls_cancelled_at_any_moment_give_every_slot_back(
    directory: Path, transport: str, env: dict[str, str] | None
) -> None:
    """Two at a time of the same blocks, each ended at a moment of its own between its first message and its
    last: also one that waits for the blocks of the other."""
    chains, count = 12, 60
    with (
        guards(directory, "a", "b", arguments=["--transport", transport], env=env, slots=900) as (a, b),
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        pick = random.Random(4)
        sources = [Source(a.endpoint, 0, count)]
        stored = [chain(count, f"tenant-{number}") for number in range(chains)]
        for root, keys in stored:
            source.deposit(keys, root)
        assert fetched_whole(target, stored[0][1], stored[0][0], sources)
        for number, (root, keys) in enumerate(stored[1:]):
            for name in ("first", "second"):
                target.start_fetch(f"{name}-{number}", keys, root, sources)
            for name in pick.sample(["first", "second"], 2):
                time.sleep(pick.uniform(0.0, 0.004))
                target.finish(f"{name}-{number}")
        assert_slots_are_back(b)
        # And no key is taken to be on its way for ever.
        for root, keys in stored[1:]:
            assert fetched_whole(target, keys, root, sources)
            assert all(target.right(keys))
        assert_slots_are_back(b)


# --- a NIXL process that hangs or dies ---------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize("env", [None, TCP], ids=["cma", "tcp"])
def test_a_hung_nixl_process_blocks_nobody_and_is_replaced(
    directory: Path, env: dict[str, str] | None
) -> None:
    """As if destroying an agent hung, with Python's lock held: nothing in that process goes on."""
    with a_pair(directory, 200, ["--transport", "nixl"], env, contact=True) as (
        _,
        target,
        root,
        keys,
        sources,
    ):
        hung = target.guard.nixl_pid()
        with stopped(hung):
            target.start_fetch("r", keys, root, sources, deadline_ms=3000)
            served = 0
            while target.guard.children() == [hung]:
                other_root, others = chain(4, f"tenant-{served}")
                target.deposit(others, other_root)
                served += 1
                time.sleep(0.2)
            # Not only when the process was ended, 4 s after it hung.
            assert served > 1
        until(lambda: fetched_whole(target, keys, root, sources), "the peer is used again")
        assert all(target.right(keys))
        assert_slots_are_back(target.guard)


@needs_nixl
def test_a_killed_nixl_process_is_replaced_on_either_side(directory: Path) -> None:
    with a_pair(directory, 100, ["--transport", "nixl"], contact=True) as (
        source,
        target,
        root,
        keys,
        sources,
    ):
        for side, stop in ((target, 40), (source, 70)):
            os.kill(side.guard.nixl_pid(), signal.SIGKILL)
            until(
                lambda stop=stop: fetched_whole(target, keys[:stop], root, sources),
                "the peer is used again",
            )
        assert all(target.right(keys[:70]))
        assert_slots_are_back(target.guard)


@needs_nixl
def test_the_nixl_process_ends_with_its_guard(directory: Path) -> None:
    with a_pair(directory, 4, ["--transport", "nixl"], contact=True) as (source, target, *_):
        children = [source.guard.nixl_pid(), target.guard.nixl_pid()]
        source.guard.process.kill()
        source.guard.process.wait()
        target.guard.process.terminate()
        target.guard.process.wait()
        until(
            lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in children),
            "the NIXL processes ended",
        )


def test_pulls_do_not_wait_for_each_other(directory: Path) -> None:
    """A pull of one step ends long before one of many that began before it."""
    layout = LAYOUT
    with (
        guards(directory, "a", "b", slots=6000) as (a, b),
        EngineClient(a, "engine-a", layout) as source,
        EngineClient(b, "engine-b", layout) as target,
    ):
        root, keys = chain(2000, "big")
        for start in range(0, 2000, 500):
            source.deposit(keys[start : start + 500], keys[start - 1] if start else root, first=start)
        small_root, small = chain(9, "small")
        source.deposit(small, small_root)
        sources = [Source(a.endpoint, 0, 2000)]
        target.fetch("contact", keys[:1], root, sources)
        target.start_fetch("big", keys, root, sources)
        target.start_fetch("small", small, small_root, sources)
        order = []
        while len(order) < 2:
            progress = target.receive(target.scheduler, FetchProgress)
            if progress.final:
                order.append(progress.request_id)
                assert set(statuses(progress)) == {OK}
        assert order == ["small", "big"]
