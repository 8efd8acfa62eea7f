# SPDX-License-Identifier: Apache-2.0
"""Any process dies or stops at any moment: no committed block is lost, no byte wrong, nothing hangs or leaks.

Two guards with an engine each store chains, and read what the other stored. Into each of these operations
falls one fault: a process is killed, or stopped while a rival may ask for its pool, a random time after the
start, which hits copies, fills that are not committed, commits that are not published, pulls and hand-offs.
``KVCR_CRASH_SEED`` repeats a run's choices.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest
from crew import LAYOUT, OK, Crew, Engine, Guard, Hung
from engine_client import chain, content
from waiting import PATIENCE_S

from kvcr.api import BlockStatus
from kvcr.pool import Pool, SlotState, checksum_parts

# 90 s on two cores with nothing else; where others use them too, it is the machine that is slow.
pytestmark = pytest.mark.timeout(500)

POINTS = 52
SLOTS = 4096
"""More than is ever stored, so that a block that is missing was lost."""
STANDING = 32
STATES = ("free", "granted", "ready", "cooling", "quarantined")


class Site:
    """A guard with its engine, each replaced when it died, and what was committed to the guard's pool."""

    def __init__(self, crew: Crew, name: str) -> None:
        self.crew = crew
        self.name = name
        self.committed: dict[str, int] = {}
        """chain -> blocks of it, from the first on"""
        self.guard = self._guard()
        self.engine = self._engine()

    def _guard(self) -> Guard:
        return self.crew.guard(self.name, "--scrub-bytes-per-s", "64MiB", slots=SLOTS)

    def _engine(self) -> Engine:
        return self.crew.engine(self.guard, standing=STANDING)

    def killed(self, victim: Guard | Engine) -> None:
        """Start the successor, and do not wait for it."""
        if victim is self.guard:
            self.guard = self._guard()
        else:
            self.engine = self._engine()

    def store(self, salt: str, count: int, engine: Engine | None = None) -> Callable[[], None]:
        """Start storing a chain; the result checks it."""
        engine = engine or self.engine
        engine.start("deposit", salt, count)

        def check() -> None:
            statuses = engine.result(PATIENCE_S)
            if statuses is None:
                return
            assert set(statuses) <= {OK, BlockStatus.PENDING, BlockStatus.MISS, BlockStatus.GONE}
            good = next((i for i, status in enumerate(statuses) if status != OK), count)
            if good:
                self.committed[salt] = good

        return check

    def read(self, salt: str, count: int, source: str) -> Callable[[], None]:
        """Start reading a chain, pulling what is missing from ``source``; the result checks it."""
        engine = self.engine
        engine.start("read", salt, count, [source] if source else [])

        def check() -> None:
            answer = engine.result(PATIENCE_S)
            if answer is None:
                return
            statuses, wrong = answer
            assert not wrong, f"site {self.name}, chain {salt}: wrong bytes in blocks {wrong}"
            assert BlockStatus.PENDING not in statuses

        return check


def test_random_crashes_lose_nothing_and_leak_nothing(crew: Crew) -> None:
    seed = int(os.environ.get("KVCR_CRASH_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"KVCR_CRASH_SEED={seed}")
    chance = random.Random(seed)
    sites = [Site(crew, "a"), Site(crew, "b")]
    endpoints = {site.name: site.guard.endpoint for site in sites}
    killed: dict[str, int] = {}

    for point in range(POINTS):
        site, other = chance.sample(sites, 2)
        # A guard that is starting is waited for every other time only: engines must do without one, too.
        for each in sites:
            if point % 2:
                endpoints[each.name] = each.guard.endpoint
        checks = [site.store(f"c{point}", chance.randint(4, 48))]
        if other.committed or site.committed:
            owner = chance.choice([one for one in sites if one.committed])
            salt = chance.choice(list(owner.committed))
            reader = other
            source = endpoints[site.name] if owner is site else ""
            checks.append(reader.read(salt, owner.committed[salt], source))
        victim_site = chance.choice(sites)
        victim = chance.choice([victim_site.guard, victim_site.engine])
        deed = chance.choice(["kill", "kill", "stop", "rival"])
        # Half of them early: an operation on a warm pair takes about 10 ms.
        time.sleep(chance.choice([chance.uniform(0, 0.012), chance.uniform(0, 0.1)]))
        what = f"{deed} {'guard' if victim is victim_site.guard else 'engine'}"
        killed[what] = killed.get(what, 0) + 1
        if deed == "kill":
            victim.kill()
            victim_site.killed(victim)
        else:
            victim.signal(signal.SIGSTOP)
            if deed == "rival":
                # Another engine wants the pool while one is stopped, or a guard is.
                rival = crew.engine(victim_site.guard, standing=STANDING)
                checks.append(victim_site.store(f"rival{point}", 8, rival))
            time.sleep(chance.uniform(0.01, 0.3))
            victim.signal(signal.SIGCONT)
        try:
            for check in checks:
                check()
        except (Hung, AssertionError) as error:
            pytest.fail(f"seed {seed}, point {point} ({what} of site {victim_site.name}): {error}")
        if deed == "rival":
            rival.kill()

    print(f"{POINTS} points: {killed}; committed {[sum(site.committed.values()) for site in sites]}")
    for site in sites:
        assert_survived(site, seed)


def assert_survived(site: Site, seed: int) -> None:
    """After the last fault: everything committed is there, byte for byte; every slot is accounted for."""
    guard, engine = site.guard, site.engine
    assert guard.ready
    # With a live engine: what is granted is what it holds, however often the guard was another.
    guard.wait(
        f"without lost grants (seed {seed})",
        lambda g: engine.ask("connected") and g.slots("granted") == engine.ask("held") > 0,
    )
    engine.kill()
    guard.wait(f"active (seed {seed})", lambda g: g.state == "active")
    # Pulls of a dead engine end within their deadline; what they had is freed then.
    guard.wait(f"free of grants (seed {seed})", lambda g: g.slots("granted") == 0)
    metrics = guard.metrics()
    assert sum(guard.slots(state) for state in STATES) == SLOTS
    assert guard.slots("quarantined") == 0
    assert not [name for name in metrics if name.startswith("kvcr_corrupt_blocks_total")]
    assert not list((guard.pool_dir / "writers").iterdir())
    guard.signal(signal.SIGTERM)
    guard.process.join(PATIENCE_S)
    pool = Pool.attach(guard.pool_dir, guard_incarnation=1)
    pool.check_invariants()
    assert pool.recovery.damaged == pool.recovery.duplicates == 0
    for salt, count in site.committed.items():
        _, keys = chain(count, salt)
        found = pool.lookup(b"".join(keys))
        lost = [index for index, slot in enumerate(found.slots.tolist()) if slot < 0]
        assert not lost, f"seed {seed}: site {site.name} lost blocks {lost} of chain {salt}"
        for key, slot in zip(keys, found.slots.tolist(), strict=True):
            assert (pool.data(0).array[slot, : LAYOUT.part_bytes] == content(key, LAYOUT.part_bytes)).all()
    ready = pool.ready_from(0, SLOTS).slots
    assert len(ready) == pool.counts()[SlotState.READY]
    assert (checksum_parts(pool.data(0).array, ready, LAYOUT.part_bytes) == pool.checksums(ready)[:, 0]).all()
    pool.close()
