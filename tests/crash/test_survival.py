# SPDX-License-Identifier: Apache-2.0
"""Which process dies or stops, at which moment, and what must still be true."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crew import OK, Crew, Engine, Guard
from engine_client import LAYOUT, chain, content
from waiting import PATIENCE_S, until

from kvcr.keys import pack_keys
from kvcr.protocol.engine import (
    VERSION,
    BlockStatus,
    Committed,
    Fetch,
    FetchLease,
    FetchProgress,
    Filled,
    Granted,
    Hello,
    Holding,
    Rejected,
    Reserve,
    Role,
    ToEngine,
    ToGuard,
    Welcome,
    to_engine,
    to_guard,
)

GRANTED = "granted"


def connected(crew: Crew, guard: Guard) -> Engine:
    """An engine of which both processes' parts are seated, and that has reserved its slots."""
    engine = crew.engine(guard)
    assert guard.ready
    until(lambda: engine.ask("connected") and engine.ask("held"), "the engine is seated, with slots")
    return engine


def is_active(guard: Guard) -> bool:
    return guard.state == "active"


class Process:
    """One process of an engine, speaking the protocol by hand; holds no writer lock."""

    def __init__(self, guard: Guard, role: Role, engine_id: str = "engine-a") -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(guard.ready["socket"])
        self.send(Hello(VERSION, role, engine_id, 0, os.getpid(), LAYOUT, "test"))
        self.answer = self.receive()

    def send(self, message: ToGuard) -> None:
        self.sock.send(to_guard.encode(message))

    def receive(self) -> ToEngine:
        return to_engine.decode(self.sock.recv(1 << 20))


# --- the guard dies --------------------------------------------------------------------------------


def test_grants_of_before_a_guards_death_are_kept_if_listed_and_freed_if_not(crew: Crew) -> None:
    guard = crew.guard("a")
    engine = connected(crew, guard)
    held = engine.ask("held")
    guard.kill()
    guard = crew.guard("a")
    guard.wait("standby", lambda g: g.state == "standby")
    guard.wait("reconciled", lambda g: g.slots(GRANTED) == engine.ask("held") == held)
    assert engine.ask("deposit", "x", 20) == [OK] * 20


def test_a_grant_whose_message_was_lost_with_the_connection_is_freed(crew: Crew) -> None:
    guard = crew.guard("a")
    scheduler, worker = Process(guard, Role.SCHEDULER), Process(guard, Role.WORKER)
    assert isinstance(scheduler.answer, Welcome)
    epoch = scheduler.answer.epoch
    scheduler.send(Reserve(epoch, 10))
    granted = scheduler.receive()
    assert isinstance(granted, Granted)
    scheduler.sock.close()
    # It comes back and knows of 6: two in its hands, and its worker is filling four.
    scheduler = Process(guard, Role.SCHEDULER)
    scheduler.send(Holding(epoch, granted.slots[: 2 * 4], granted.generations[: 2 * 8]))
    scheduler.send(Reserve(epoch, 5))
    assert isinstance(scheduler.receive(), Granted)
    time.sleep(0.1)
    assert guard.slots(GRANTED) == 15, "a worker that has not spoken may be filling any of them"
    worker.send(Holding(epoch, granted.slots[2 * 4 : 6 * 4], granted.generations[2 * 8 : 6 * 8]))
    guard.wait("freed", lambda g: g.slots(GRANTED) == 11)
    guard.wait("counted", lambda g: g.metrics()["kvcr_lost_grants_total"] == 4)


def test_fills_that_a_dead_guard_did_not_confirm_are_committed_by_the_next_once(crew: Crew) -> None:
    guard = crew.guard("a")
    engine = connected(crew, guard)
    guard.signal(signal.SIGSTOP)
    engine.start("deposit", "x", 20)
    time.sleep(0.2)
    guard.kill()
    guard = crew.guard("a")
    # The deposit may have ended before the guard was back; its fills are confirmed all the same.
    assert set(engine.result()) <= {OK, BlockStatus.PENDING, BlockStatus.GONE}
    guard.wait("told", lambda g: g.slots("ready") == 20)
    assert engine.ask("read", "x", 20, []) == ([OK] * 20, [])
    guard.wait("free of leaks", lambda g: g.slots(GRANTED) == engine.ask("held"))


def test_another_engine_is_refused_by_a_new_guard_until_the_first_is_dead(crew: Crew) -> None:
    guard = crew.guard("a")
    first = connected(crew, guard)
    assert first.ask("deposit", "x", 8) == [OK] * 8
    epoch = guard.metrics()["kvcr_pool_epoch"]
    first.signal(signal.SIGSTOP)
    guard.kill()
    guard = crew.guard("a")
    rejected = Process(guard, Role.SCHEDULER, "engine-b").answer
    assert isinstance(rejected, Rejected)
    assert rejected.code == "busy"
    assert guard.state == "checking"
    first.signal(signal.SIGCONT)
    guard.wait("standby", lambda g: g.state == "standby")
    assert guard.metrics()["kvcr_pool_epoch"] == epoch
    assert first.ask("deposit", "y", 8) == [OK] * 8


# --- the engine dies -------------------------------------------------------------------------------


def test_a_killed_engine_is_proven_dead_at_once_and_leaves_nothing_behind(crew: Crew) -> None:
    guard = crew.guard("a")
    engine = connected(crew, guard)
    assert engine.ask("deposit", "x", 20) == [OK] * 20
    epoch = guard.metrics()["kvcr_pool_epoch"]
    engine.signal(signal.SIGKILL)
    guard.wait("active", is_active)
    metrics = guard.metrics()
    assert metrics["kvcr_pool_epoch"] > epoch
    assert metrics["kvcr_failovers_total"] == 1
    assert metrics["kvcr_failover_seconds_count"] == 1
    assert (guard.slots(GRANTED), guard.slots("ready")) == (0, 20)
    assert not list((guard.pool_dir / "writers").iterdir())
    # Hand-off: the engine comes back and finds its blocks.
    again = connected(crew, guard)
    assert again.ask("read", "x", 20, []) == ([OK] * 20, [])
    assert guard.state == "standby"


def test_a_forked_child_that_keeps_the_sockets_open_does_not_hide_the_death(crew: Crew) -> None:
    guard = crew.guard("a")
    engine = connected(crew, guard)
    child = engine.ask("fork", 20)
    engine.signal(signal.SIGKILL)
    guard.wait("active", is_active, within_s=15.0)
    os.kill(child, signal.SIGKILL)


def test_a_stopped_engine_keeps_its_pool_and_goes_on(crew: Crew) -> None:
    guard = crew.guard("a")
    engine = connected(crew, guard)
    engine.signal(signal.SIGSTOP)
    rejected = Process(guard, Role.SCHEDULER, "engine-b").answer
    assert isinstance(rejected, Rejected)
    assert rejected.code == "busy"
    engine.signal(signal.SIGCONT)
    assert engine.ask("deposit", "x", 20) == [OK] * 20
    assert guard.state == "standby"
    assert guard.metrics()["kvcr_failovers_total"] == 0


def test_peers_read_from_a_dead_engines_pool(crew: Crew) -> None:
    a, b = crew.guard("a"), crew.guard("b")
    source, target = connected(crew, a), connected(crew, b)
    assert source.ask("deposit", "x", 30) == [OK] * 30
    source.kill()
    assert target.ask("read", "x", 30, [a.endpoint]) == ([OK] * 30, [])


def test_messages_of_an_epoch_that_is_over_are_refused_and_counted(crew: Crew) -> None:
    guard = crew.guard("a")
    scheduler, worker = Process(guard, Role.SCHEDULER), Process(guard, Role.WORKER)
    assert isinstance(scheduler.answer, Welcome)
    epoch = scheduler.answer.epoch
    scheduler.send(Reserve(epoch, 1))
    granted = scheduler.receive()
    assert isinstance(granted, Granted)
    root, keys = chain(1, "x")
    scheduler.send(Reserve(epoch - 1, 4))
    assert scheduler.receive() == Granted(epoch, b"", b"")
    scheduler.send(Fetch(epoch - 1, "r", 0, root, pack_keys(keys), bytes(8), [], 0.0, 1000.0))
    lease, progress = scheduler.receive(), scheduler.receive()
    assert isinstance(lease, FetchLease)
    assert lease.available == 0
    assert isinstance(progress, FetchProgress)
    old = Filled(epoch - 1, 0, granted.slots, granted.generations, pack_keys(keys), root, bytes(8), bytes(4))
    worker.send(old)
    while not isinstance(committed := worker.receive(), Committed):
        pass
    assert committed.slots == granted.slots
    metrics = guard.metrics()
    for message in ("Reserve", "Fetch", "Filled"):
        assert metrics[f'kvcr_stale_messages_total{{message="{message}"}}'] == 1
    assert (guard.slots("ready"), guard.slots(GRANTED)) == (0, 1)


def test_a_hung_engine_is_fenced_where_that_is_the_policy(crew: Crew) -> None:
    guard = crew.guard("a", "--fence-after-s", "2")
    engine = connected(crew, guard)
    time.sleep(2.5)
    assert guard.state == "standby", "an idle engine is not a silent one"
    engine.signal(signal.SIGSTOP)
    guard.wait("active", is_active)
    engine.process.join(PATIENCE_S)
    assert engine.process.exitcode == -signal.SIGKILL
    assert guard.metrics()["kvcr_fences_total"] == 1


def test_every_slot_is_accounted_for_after_all_engines_died(crew: Crew) -> None:
    guard = crew.guard("a", slots=64)
    for number in range(3):
        engine = connected(crew, guard)
        engine.start("deposit", f"x{number}", 40)
        time.sleep(0.01 * number)
        engine.kill()
        guard.wait("active", is_active)
    total = sum(guard.slots(state) for state in ("free", "granted", "ready", "cooling", "quarantined"))
    assert (total, guard.slots(GRANTED)) == (64, 0)


# --- the pool goes ----------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(lambda pool: cut(pool / "data"), id="data cut"),
        pytest.param(lambda pool: cut(pool / "meta"), id="meta cut"),
        pytest.param(shutil.rmtree, id="removed"),
    ],
)
def test_a_pool_that_is_lost_under_everybody_costs_its_blocks_and_no_process(
    crew: Crew, lose: Callable[[Path], None]
) -> None:
    guard, peer = crew.guard("a"), crew.guard("b")
    engine, reader = connected(crew, guard), connected(crew, peer)
    assert engine.ask("deposit", "x", 20) == [OK] * 20
    assert reader.ask("read", "x", 4, [guard.endpoint]) == ([OK] * 4, [])
    lose(guard.pool_dir)
    for each in (engine, reader):
        # Whatever of it they get is right; what they do not get they compute.
        assert each.ask("read", "x", 20, [guard.endpoint])[1] == []
    engine.ask("deposit", "y", 20)
    guard.process.join(PATIENCE_S)
    assert guard.process.exitcode == 1
    assert "the pool is lost" in (crew.directory / "a.log").read_text()
    # Its supervisor starts it again: there is a new pool, and engine and peer use it.
    guard = crew.guard("a")
    assert guard.ready
    until(lambda: engine.ask("connected") and engine.ask("held"), "the engine is seated again, with slots")
    assert engine.ask("deposit", "z", 20) == [OK] * 20
    assert reader.ask("read", "z", 20, [guard.endpoint]) == ([OK] * 20, [])
    assert engine.ask("read", "z", 20, []) == ([OK] * 20, [])


# --- bytes rot -------------------------------------------------------------------------------------


def test_a_block_that_rots_unread_is_found_and_taken_out_of_use(crew: Crew) -> None:
    guard = crew.guard("a", "--scrub-bytes-per-s", "16MiB")
    engine = connected(crew, guard)
    assert engine.ask("deposit", "x", 20) == [OK] * 20
    needle = content(chain(20, "x")[1][7], LAYOUT.part_bytes).tobytes()
    with (guard.pool_dir / "data").open("r+b") as file:
        file.seek(file.read().index(needle) + 1000)
        file.write(b"\x00\xff\x00\xff")
    guard.wait("found", lambda g: g.metrics().get('kvcr_corrupt_blocks_total{where="scrub"}') == 1)
    assert (guard.slots("quarantined"), guard.slots("ready")) == (1, 19)
    statuses, wrong = engine.ask("read", "x", 20, [])
    assert (statuses[7], wrong) == (BlockStatus.MISS, [])


@pytest.mark.parametrize("rate", ["0", "8MiB"])
def test_an_idle_guard_checks_itself_and_uses_no_cpu(crew: Crew, rate: str) -> None:
    guard = crew.guard("a", "--scrub-bytes-per-s", rate)
    engine = connected(crew, guard)
    assert engine.ask("deposit", "x", 60) == [OK] * 60
    time.sleep(7.5)

    def used_s(_: Guard) -> float:
        before_s = guard.cpu_s()
        time.sleep(4.0)
        return guard.cpu_s() - before_s

    # 1 % of a core; the clock has ticks of 10 ms. What it did before ends later on a busy machine.
    guard.wait("idle", lambda g: used_s(g) <= 0.04, 20.0)
    metrics = guard.metrics()
    assert metrics['kvcr_self_checks_total{result="ok"}'] >= 1
    assert 'kvcr_self_checks_total{result="broken"}' not in metrics
    assert (metrics["kvcr_scrubbed_bytes_total"] > 0) == (rate != "0")
