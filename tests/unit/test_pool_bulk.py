# SPDX-License-Identifier: Apache-2.0
"""Copying and hashing rows: the extension, whatever vectors it uses, its numpy twin, and XXH3 agree."""

from __future__ import annotations

import threading
import time
from types import ModuleType

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.pool import checksum_parts, copy_parts, fallback, native
from kvcr.pool.native import Backend
from kvcr.pool.state import I32, U8

_native: ModuleType = pytest.importorskip("kvcr._native")
BACKENDS = [pytest.param(_native, id="native"), pytest.param(fallback, id="fallback")]
WIDEST = [0, 256, 512]

# XXH3 of the bytes i * 167 mod 251: whole blocks of 1,024 bytes, whole stripes of 64, one more and one less.
GOLDEN = {
    241: 0x4D35E2C72D2B0E11,
    256: 0x18FEFB70D882CB06,
    257: 0x580D2BE4882A6CE6,
    1024: 0x2DAACAE92B95ED3F,
    1025: 0xD009800FAA11E5B5,
    1088: 0xEB7EAC2849E80AE7,
    1089: 0xC14DAAB5C91D3F0D,
    2048: 0x9BF124E2923FAA6B,
    65024: 0xC4138C9F8ECBE8BD,
    262144: 0x0893D75A756B0948,
}


def content(rows: int, stride: int, seed: int = 0) -> U8:
    return np.random.default_rng(seed).integers(0, 256, (rows, stride), dtype=np.uint8)


def slots(*values: int) -> I32:
    return np.array(values, np.int32)


@pytest.mark.parametrize(("width", "expected"), GOLDEN.items())
@pytest.mark.parametrize("widest", WIDEST)
def test_golden_hashes(width: int, expected: int, widest: int) -> None:
    row = (np.arange(width) * 167 % 251).astype(np.uint8)[None, :]
    out = np.empty(1, np.uint64)
    for backend in (_native, fallback):
        backend.hash_rows(row, slots(0), out, width, widest)
        assert int(out[0]) == expected


@settings(max_examples=150, deadline=None)
@given(
    width=st.integers(native.SHORTEST_ROW, 5000),
    padding=st.integers(0, 130),
    shift=st.integers(0, 130),
    widest=st.sampled_from(WIDEST),
    seed=st.integers(0, 1000),
)
def test_a_copy_is_exact_stays_in_its_row_and_is_hashed(
    width: int, padding: int, shift: int, widest: int, seed: int
) -> None:
    source = content(3, width + padding, seed)
    # Both aligned targets, which are streamed to, and others.
    memory = np.full(shift + 4 * (width + padding), 0xA5, np.uint8)
    target = memory[shift:].reshape(4, width + padding)
    out = np.empty(2, np.uint64)
    _native.copy_rows(source, slots(2, 0), target, slots(3, 1), out, width, widest)
    assert out.tolist() == [xxhash.xxh3_64_intdigest(source[row, :width]) for row in (2, 0)]
    expected = np.full_like(memory, 0xA5)
    rows = expected[shift:].reshape(4, width + padding)
    rows[3, :width], rows[1, :width] = source[2, :width], source[0, :width]
    np.testing.assert_array_equal(memory, expected)
    again = np.empty(2, np.uint64)
    _native.hash_rows(target, slots(3, 1), again, width, widest)
    assert again.tolist() == out.tolist()


@pytest.mark.parametrize("width", [1, 16, 128, 240, 241, 4096, 65_024, 262_144])
def test_rows_of_every_size_in_use(width: int, backend_name: str) -> None:
    source, target = content(3, width + 8), np.zeros((2, width), np.uint8)
    sums = copy_parts(source, slots(1, 2), target, slots(0, 1), width)
    np.testing.assert_array_equal(target, source[1:, :width])
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(row) for row in target]
    assert checksum_parts(target, slots(0, 1)).tolist() == sums.tolist()
    assert checksum_parts(source, slots(1, 2), width).tolist() == sums.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("read", "written"), [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_row_outside_of_its_array_is_refused_and_nothing_is_copied(
    backend: Backend, read: int, written: int
) -> None:
    source, target = content(3, 300), np.zeros((2, 300), np.uint8)
    with pytest.raises(IndexError):
        backend.copy_rows(
            source, slots(0, read), target, slots(1, written), np.empty(2, np.uint64), 300, native.WIDEST
        )
    assert not target.any()
    if read:
        with pytest.raises(IndexError):
            backend.hash_rows(source, slots(read), np.empty(1, np.uint64), 300, native.WIDEST)


@pytest.mark.parametrize("width", [0, native.SHORTEST_ROW - 1, 301, -5])
def test_the_extension_refuses_widths_that_a_row_does_not_have(width: int) -> None:
    array = content(2, 300)
    with pytest.raises(ValueError, match="width"):
        _native.hash_rows(array, slots(0), np.empty(1, np.uint64), width, native.WIDEST)
    with pytest.raises(ValueError, match="dimensions"):
        _native.hash_rows(array.ravel(), slots(0), np.empty(1, np.uint64), 300, native.WIDEST)
    with pytest.raises(ValueError, match="out"):
        _native.hash_rows(array, slots(0), np.empty(2, np.uint64), 300, native.WIDEST)
    with pytest.raises(TypeError):
        _native.hash_rows(array, slots(0), np.empty(1, np.uint64))


def test_a_hash_is_of_what_was_written_while_the_source_changes() -> None:
    width = 1 << 20
    source, target = np.zeros((1, width), np.uint8), np.zeros((1, width), np.uint8)
    stop = threading.Event()

    def change() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 256
            source[0, ::64] = value

    writer = threading.Thread(target=change)
    writer.start()
    try:
        torn = copies = 0
        deadline_s = time.monotonic() + 60
        # On a busy machine the writer may not run at the same time for a while.
        while copies < 200 or not torn:
            assert time.monotonic() < deadline_s, "the source never changed under a copy: this shows nothing"
            copies += 1
            (found,) = copy_parts(source, slots(0), target, slots(0), width).tolist()
            assert found == xxhash.xxh3_64_intdigest(target[0])
            torn += len(np.unique(target[0, ::64])) > 1
    finally:
        stop.set()
        writer.join()


@settings(max_examples=100, deadline=None)
@given(
    stripes=st.lists(st.integers(1, 40), min_size=1, max_size=6).filter(lambda counts: sum(counts) >= 4),
    apart=st.integers(0, 70),
    shift=st.integers(0, 70),
    widest=st.sampled_from(WIDEST),
    seed=st.integers(0, 1000),
)
def test_pieces_are_gathered_into_a_row_and_hashed_as_one(
    stripes: list[int], apart: int, shift: int, widest: int, seed: int
) -> None:
    segments = tuple(
        content(3, 64 * count + apart, seed + index)[:, : 64 * count] for index, count in enumerate(stripes)
    )
    width = 64 * sum(stripes)
    memory = np.full(shift + 3 * (width + 64), 0xA5, np.uint8)
    target = memory[shift:].reshape(3, width + 64)
    rows = [np.concatenate([segment[block] for segment in segments]) for block in (2, 0)]
    expected = np.full_like(target, 0xA5)
    expected[1, :width], expected[2, :width] = rows
    for backend in (_native, fallback):
        target[:], out = 0xA5, np.empty(2, np.uint64)
        backend.gather_rows(segments, slots(2, 0), target, slots(1, 2), out, widest)
        np.testing.assert_array_equal(target, expected)
        assert out.tolist() == [xxhash.xxh3_64_intdigest(row) for row in rows]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("block", "row"), [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_no_piece_is_gathered_from_or_to_a_row_that_is_not_there(
    backend: Backend, block: int, row: int
) -> None:
    segments, target = (content(3, 128), content(3, 192)), np.zeros((2, 320), np.uint8)
    with pytest.raises(IndexError):
        backend.gather_rows(segments, slots(block), target, slots(row), np.empty(1, np.uint64), 512)
    assert not target.any()


@pytest.mark.parametrize(
    ("segments", "width"),
    [((content(3, 100),), 320), ((content(3, 640)[:, ::2],), 320), ((content(3, 384),), 320)],
    ids=["no multiple of 64", "bytes apart", "longer than the row"],
)
def test_segments_that_do_not_fit_are_refused(segments: tuple[U8, ...], width: int) -> None:
    with pytest.raises(ValueError, match=r"segment|width"):
        _native.gather_rows(
            segments, slots(0), np.zeros((2, width), np.uint8), slots(0), np.empty(1, np.uint64), 512
        )
