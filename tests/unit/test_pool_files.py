# SPDX-License-Identifier: Apache-2.0
"""The pool's files: created whole or not at all, attached to only when they can be trusted."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvcr.errors import ConfigError, LayoutMismatch, PoolBusy, PoolCorrupt, PoolTooSmall
from kvcr.pool import DATA, META, SPARE_ROWS, DataRegion, Pool, PoolReader, SlotState, recovery
from kvcr.pool.locks import GUARD_LOCK
from kvcr.pool.meta import Geometry, next_incarnation, superblock_page
from tests.unit.pools import commit, content, create, found, key, keys, layout, store

pytestmark = pytest.mark.usefixtures("backend_name")


def reattach(pool: Pool, **options: int) -> Pool:
    pool.close()
    again = Pool.attach(pool.dir, guard_incarnation=options.get("guard_incarnation", 2))
    again.check_invariants()
    return again


@contextmanager
def another_guard(dir: Path) -> Iterator[int]:
    """A process that holds the guard's lock of ``dir``; its pid."""
    code = (
        "import sys; from pathlib import Path; from kvcr.pool import FileLock\n"
        "FileLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(dir / GUARD_LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
    finally:
        process.communicate(timeout=10)


def test_a_new_pool_is_reserved_shared_with_the_group_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    pool = create(tmp_path / "new" / "pool", 64, preallocate=True)
    assert sorted(path.name for path in pool.dir.iterdir()) == [DATA, GUARD_LOCK, META, "writers"]
    for name in (META, DATA, GUARD_LOCK):
        assert stat.S_IMODE((pool.dir / name).stat().st_mode) == 0o660
    data = (pool.dir / DATA).stat()
    assert data.st_blocks * 512 >= data.st_size == -(-(64 + SPARE_ROWS) * 4096 // 65536) * 65536
    assert pool.counts()[SlotState.FREE] == 64


def test_a_pool_has_as_many_slots_as_fit(tmp_path: Path) -> None:
    shape = layout(ranks=2, part_bytes=5000)
    assert Pool.create(tmp_path, shape, 100_000, guard_incarnation=1).slots == 100_000 // (2 * 8192)


def test_a_size_that_holds_no_block_names_the_size_of_one(tmp_path: Path) -> None:
    with pytest.raises(PoolTooSmall, match=r"one needs 16384 bytes \(2 ranks of 8192\); raise --pool-bytes"):
        Pool.create(tmp_path, layout(ranks=2, part_bytes=5000), 10_000, guard_incarnation=1)


def test_a_mount_without_room_names_needed_available_and_fix_and_keeps_the_old_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(old := create(tmp_path, 4), 0)
    old.close()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(PoolTooSmall) as caught:
        create(tmp_path, 1000, preallocate=True)
    for part in (
        "needs 42",
        "1000 slots of 4096 bytes",
        "are available",
        "docker --shm-size",
        "--pool-bytes",
    ):
        assert part in str(caught.value)
    monkeypatch.undo()
    assert found(Pool.attach(tmp_path, guard_incarnation=2), 0) == [True]


def test_memory_that_runs_out_half_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(PoolTooSmall, match="docker --shm-size"):
        create(tmp_path, 8, preallocate=True)
    assert [path.name for path in tmp_path.iterdir()] == [GUARD_LOCK]
    monkeypatch.undo()
    create(tmp_path, 8, preallocate=True)


def test_a_layout_that_does_not_fit_the_superblock_is_refused_by_name(tmp_path: Path) -> None:
    shape = layout(model="m" * 5000)
    with pytest.raises(ConfigError, match="model identity, which has 5000 characters"):
        Pool.create(tmp_path, shape, 1 << 20, guard_incarnation=1)


def test_a_second_guard_is_refused_and_told_who_holds_the_pool(tmp_path: Path) -> None:
    create(tmp_path, 4).close()
    with another_guard(tmp_path) as pid:
        for attempt in (lambda: Pool.attach(tmp_path, guard_incarnation=2), lambda: create(tmp_path, 4)):
            with pytest.raises(PoolBusy, match=f"held by pid {pid}; stop that process"):
                attempt()
    Pool.attach(tmp_path, guard_incarnation=2)


def test_a_second_handle_in_the_same_process_is_refused(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    with pytest.raises(PoolBusy, match=f"held by this process \\(pid {os.getpid()}\\)"):
        Pool.attach(tmp_path, guard_incarnation=2)
    pool.close()
    Pool.attach(tmp_path, guard_incarnation=2)


def test_a_guard_whose_clock_was_set_back_still_comes_after_the_one_before_it(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path, 7) == 7
    pool = create(tmp_path, 1)
    reattach(pool, guard_incarnation=10_000_000).close()
    assert next_incarnation(tmp_path, 20_000_000) == 20_000_000
    assert next_incarnation(tmp_path, 7) == 11_000_000
    with (tmp_path / META).open("r+b") as file:
        file.truncate(20)
    assert next_incarnation(tmp_path, 7) == 7


def test_attach_goes_on_where_the_guard_before_ended(tmp_path: Path) -> None:
    pool = create(tmp_path, 16, ranks=2, part_bytes=5000)
    granted = store(pool, *range(6), now_s=1.0)
    ours, theirs = pool.allocate(1, 1.0), pool.allocate(2, 1.0, engine_id="engine-1")
    pool.evict(granted.slots[:1], 1.0, "test")
    pool.quarantine(granted.slots[1:2], granted.generations[1:2])
    pool.raise_epoch()
    digest, before = pool.digest, pool.counts()

    pool = reattach(pool, guard_incarnation=5)

    assert (pool.epoch, pool.incarnation, pool.digest, pool.counts()) == (2, 5, digest, before)
    assert pool.recovery == (4, 3, 1, 1, 0, 0, 0)
    assert found(pool, *range(6)) == [False, False, True, True, True, True]
    assert bytes(pool.part(1, int(granted.slots[3]))) == content(key(3), 5000)
    assert pool.writers() == ["engine-1"]
    assert pool.grants("engine-1").slots.tolist() == theirs.slots.tolist()
    assert pool.grants().slots.tolist() == ours.slots.tolist()
    assert pool.drain_changes().stored_keys == b""
    assert commit(pool, theirs, [7, 8], 3.0).committed.all()
    assert pool.requalify(granted.slots[1:2], granted.generations[1:2]) == 1


def test_what_was_cooling_cools_for_two_more_seconds_after_attach(tmp_path: Path) -> None:
    pool = create(tmp_path, 1)
    pool.evict(store(pool, 0).slots, 100.0, "test")
    pool = reattach(pool)
    assert pool.tick(1000.0) == 0
    assert pool.tick(1001.9) == 0
    assert pool.tick(1002.0) == 1
    pool.check_invariants()


def test_leases_and_pins_end_with_their_guard(tmp_path: Path) -> None:
    pool = create(tmp_path, 1)
    granted = store(pool, 0)
    pool.lease(*granted)
    pool.pin(keys(0), 1e9)
    pool = reattach(pool)
    pool.allocate(1, 1.0)
    assert found(pool, 0) == [False]


def test_a_record_that_does_not_match_its_seal_is_quarantined_at_attach(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    granted = store(pool, 0, 1)
    geometry = PoolReader.open(tmp_path).geometry
    pool.close()
    with open(tmp_path / META, "r+b") as file:
        file.seek(geometry.offsets["checksums"] + 8 * int(granted.slots[1]))
        file.write(b"damaged!")
    pool = Pool.attach(tmp_path, guard_incarnation=2)
    assert (pool.recovery.ready, pool.recovery.damaged) == (1, 1)
    assert found(pool, 0, 1) == [True, False]
    assert pool.requalify(granted.slots[1:], granted.generations[1:]) == 1
    pool.check_invariants()


def test_an_unknown_state_and_a_doubled_key_are_taken_out_at_attach(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    store(pool, 0, 1, 2)
    meta = pool._meta
    meta.control[0] = np.uint64(9 << 56)
    for column in (meta.keys, meta.parents, meta.engine_hashes, meta.positions, meta.checksums, meta.seals):
        column[2] = column[1]
    pool = reattach(pool)
    assert (pool.recovery.ready, pool.recovery.damaged, pool.recovery.duplicates) == (1, 1, 1)
    assert pool.lookup(keys(1)).slots.tolist() == [1]


def damage(path: Path, offset: int, raw: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(raw)


@pytest.mark.parametrize(
    ("offset", "raw", "complaint"),
    [
        (0, b"NOTAPOOL", "is not a pool: magic is"),
        (8, b"\x09", "is a pool of version 9, this program knows version 2"),
        (16, b"\xff\xff\xff", "does not fit 4096"),
        (16, b"\x05\x00", "does not match its digest"),
        (80, b"\x00", "does not match its digest"),
    ],
)
def test_a_damaged_superblock_is_refused_with_the_fix(
    tmp_path: Path, offset: int, raw: bytes, complaint: str
) -> None:
    create(tmp_path, 4).close()
    damage(tmp_path / META, offset, raw)
    for opening in (
        lambda: Pool.attach(tmp_path, guard_incarnation=2),
        lambda: PoolReader.open(tmp_path),
        lambda: DataRegion.open(tmp_path, layout(), 0, writable=False),
    ):
        with pytest.raises(PoolCorrupt, match=complaint) as caught:
            opening()
        assert "remove the pool's directory to start cold" in str(caught.value)
    create(tmp_path, 4)


@pytest.mark.parametrize(("name", "size"), [(META, 100), (META, 8192), (DATA, 4096)])
def test_a_file_of_the_wrong_size_is_refused_before_it_is_touched(
    tmp_path: Path, name: str, size: int
) -> None:
    create(tmp_path, 64).close()
    os.truncate(tmp_path / name, size)
    with pytest.raises(PoolCorrupt, match=f"{name} has {size} bytes"):
        Pool.attach(tmp_path, guard_incarnation=2)


def test_a_pool_of_another_boot_or_key_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path, 4).close()
    monkeypatch.setattr(recovery, "boot_id", lambda: "another-boot")
    with pytest.raises(PoolCorrupt, match="this process has another-boot"):
        Pool.attach(tmp_path, guard_incarnation=2)
    monkeypatch.undo()
    body = msgspec.structs.replace(PoolReader.open(tmp_path).geometry.body, key_version=99)
    damage(tmp_path / META, 0, superblock_page(body, epoch=1, incarnation=1))
    with pytest.raises(PoolCorrupt, match="block keys of version 99, expected 1"):
        PoolReader.open(tmp_path)


def test_no_pool_is_file_not_found(tmp_path: Path) -> None:
    for opening in (
        lambda: Pool.attach(tmp_path / "missing", guard_incarnation=1),
        lambda: PoolReader.open(tmp_path),
        lambda: DataRegion.open(tmp_path, layout(), 0, writable=True),
    ):
        with pytest.raises(FileNotFoundError):
            opening()


def test_a_region_is_not_mapped_for_another_layout(tmp_path: Path) -> None:
    create(tmp_path, 4)
    with pytest.raises(LayoutMismatch, match="block_size: the pool has 16, the caller has 32"):
        DataRegion.open(tmp_path, layout(block_size=32), 0, writable=False)


def test_a_replaced_pool_stays_readable_to_who_has_it_open(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    granted = store(pool, 0)
    reader = PoolReader.open(tmp_path)
    region = DataRegion.open(tmp_path, reader, 0, writable=False)
    pool.close()
    create(tmp_path, 8)
    assert reader.still(*granted).all()
    assert bytes(region.part(int(granted.slots[0]))) == content(key(0), 4096)
    assert PoolReader.open(tmp_path).lookup(keys(0)).slots.tolist() == [-1]


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    create(tmp_path, 4)
    reader = PoolReader.open(tmp_path)
    region = DataRegion.open(tmp_path, reader, 0, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        region.array[0, 0] = 1
    with pytest.raises(TypeError):
        region.part(0)[0] = 1


def test_closing_with_unlink_leaves_nothing(tmp_path: Path) -> None:
    pool = create(tmp_path, 4)
    view = pool.part(0, 0)
    (tmp_path / "writers" / "engine-1.0").touch()
    pool.close(unlink=True)
    assert list(tmp_path.iterdir()) == []
    assert view[0] == 0


def test_attaching_to_200_000_blocks_takes_less_than_a_second(tmp_path: Path) -> None:
    blocks = 200_000
    pool = create(tmp_path, blocks)
    names = np.random.default_rng(1).bytes(16 * blocks)
    granted = pool.allocate(blocks, 0.0)
    zeros = np.zeros(blocks, np.uint64)
    committed = pool.commit(
        granted.slots, granted.generations, names, names, zeros, zeros.astype(np.uint32), zeros, 0.0
    ).committed
    assert committed.all()
    pool.close()
    # Of processor time, so that a busy machine does not fail the test: the scan waits for nothing.
    started = time.process_time()
    pool = Pool.attach(tmp_path, guard_incarnation=2)
    taken_s = time.process_time() - started
    assert pool.recovery.ready == blocks
    assert taken_s < 1.0, f"attach took {taken_s:.2f} s"


def test_an_index_has_twice_the_entries_of_its_slots() -> None:
    for slots in (1, 7, 8, 9, 1000, 4096, 200_000):
        entries = 8 * Geometry.plan(layout(), slots).body.buckets
        assert 2 * slots <= entries <= max(16, 4 * slots)
