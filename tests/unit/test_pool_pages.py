# SPDX-License-Identifier: Apache-2.0
"""Huge pages below a pool: asked for on every tmpfs, mapped as such by everybody, and never needed."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcr.cli import doctor
from kvcr.cli.doctor import Outcome
from kvcr.errors import PoolTooSmall
from kvcr.pool import DATA, META, DataRegion, Pool, PoolReader, pages
from tests.unit.pools import content, create, found, key, keys, layout, store

MIB = 1 << 20
PART = 3 * MIB + 4096
"""No multiple of a huge page, so that regions begin anywhere in one."""


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvcr-pages-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(params=["never", "advise", "within_size"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with each option that matters."""
    path = tmp_path / "mount"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size=128m,huge={request.param}", "kvcr-test", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        # Also when a pool that failed a test is still mapped.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of the files made from now on the kernel gave huge pages for; a pool's data is first."""
    given: list[int] = []
    real = pages.make_huge

    def make_huge(fd: int, address: int, nbytes: int) -> int:
        given.append(real(fd, address, nbytes))
        return given[-1]

    monkeypatch.setattr(pages, "make_huge", make_huge)
    return given


def make(dir: Path, slots: int = 8) -> Pool:
    """A pool of two ranks, the second of which begins within a huge page."""
    return Pool.create(dir, layout(ranks=2, part_bytes=PART), slots * 2 * PART, guard_incarnation=1)


def test_a_pool_is_mapped_in_huge_pages_on_any_tmpfs(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pages.huge_page_bytes():
        pytest.skip("this kernel has no huge pages of 32 MiB or less")
    given = allocated(monkeypatch)
    pool = make(mount)
    if given[0] < 32 * MIB:
        pytest.skip(
            f"the kernel gave huge pages for {given[0]} bytes: none free, switched off, or before 6.1"
        )
    reader = PoolReader.open(mount)
    size = pages.huge_page_bytes()
    for rank in range(2):
        with_reader = DataRegion.open(mount, reader, rank, writable=False)
        pool.data(rank).populate()
        for region in (pool.data(rank), with_reader):
            nbytes = pool.data(rank).rows.nbytes
            # All but the two that lie across the region's ends.
            assert pages.huge_mapped_bytes(region.address) >= nbytes - 2 * size
        with_reader.close()
    reader.close()
    pool.close()


@pytest.mark.parametrize("huge", [True, False])
def test_what_is_written_to_a_region_is_in_its_part_of_the_file(
    shm: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    if not huge:
        monkeypatch.setattr(pages, "huge_page_bytes", lambda: 0)
    pool = make(shm)
    for rank in range(2):
        for slot in range(pool.slots):
            pool.part(rank, slot)[:] = content(key(rank * 100 + slot), PART)
    stride = pool.slot_part_bytes
    region_bytes = (shm / DATA).stat().st_size // 2
    with open(shm / DATA, "rb") as file:
        for rank in range(2):
            for slot in range(pool.slots):
                found = os.pread(file.fileno(), PART, rank * region_bytes + slot * stride)
                assert found == content(key(rank * 100 + slot), PART)
    pool.close()


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOMEM])
def test_a_kernel_without_huge_pages_to_give_gives_small_ones(
    shm: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    asked: list[int] = []

    def refuse(address: int, nbytes: int) -> int:
        asked.append(nbytes)
        return refusal

    monkeypatch.setattr(pages, "_collapse", refuse)
    monkeypatch.setattr(pages, "_AT_ONCE", 2 * MIB)
    given = allocated(monkeypatch)
    pool = make(shm)
    assert given[0] == 0
    if pages.huge_page_bytes() == 2 * MIB:
        # It is not asked for ever.
        assert len(asked) == {errno.EINVAL: 1, errno.ENOMEM: 8}[refusal]
    status = (shm / DATA).stat()
    assert status.st_blocks * 512 >= status.st_size
    pool.part(1, 7)[:] = content(key(7), PART)
    pool.close()


def test_a_mount_that_fills_up_meanwhile_says_so(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr.pool.files._check_space", lambda *_args, **_options: None)
    with pytest.raises(PoolTooSmall, match="docker --shm-size"):
        make(mount, slots=40)
    assert not (mount / DATA).exists()
    assert not (mount / f"{DATA}.new").exists()


def test_a_directory_of_several_huge_pages_is_read_where_it_is_written(shm: Path) -> None:
    store(pool := create(shm, 60_000, part_bytes=64), 0, 1)
    assert pool.dir.joinpath(META).stat().st_size > 2 * pages.huge_page_bytes()
    reader = PoolReader.open(shm)
    assert reader.lookup(keys(0, 1, 2)).slots.tolist() == [0, 1, -1]
    pool.close()
    again = Pool.attach(shm, guard_incarnation=2)
    again.check_invariants()
    assert found(again, 0, 1, 2) == [True, True, False]
    reader.close()
    again.close()


def test_a_mapping_outlives_its_region_while_somebody_looks_at_it(shm: Path) -> None:
    pool = make(shm)
    pool.part(0, 0)[:] = content(key(1), PART)
    view = np.frombuffer(pool.part(0, 0), np.uint8)
    pool.close(unlink=True)
    assert view.tobytes() == content(key(1), PART)


def test_the_doctor_tries_and_leaves_nothing(mount: Path, tmp_path: Path) -> None:
    check = doctor.check_huge_pages(str(mount))
    assert check.outcome in (Outcome.OK, Outcome.WARN)
    assert ("get pages of" in check.detail) == (check.outcome is Outcome.OK)
    assert list(mount.iterdir()) == []
    assert "cannot be tried" in doctor.check_huge_pages(str(tmp_path / "absent")).detail


def test_the_doctor_says_what_to_do_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "huge_mapped_bytes", lambda address: 0)
    check = doctor.check_huge_pages()
    assert check.outcome is Outcome.WARN
    assert "huge=within_size" in check.detail
    monkeypatch.setattr(pages, "huge_page_bytes", lambda: 0)
    assert "no transparent ones" in doctor.check_huge_pages().detail
