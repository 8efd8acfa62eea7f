# SPDX-License-Identifier: Apache-2.0
"""Types of the C extension; :class:`kvcr.pool.native.Backend` says what the functions do."""

import numpy as np
import numpy.typing as npt

from kvcr.pool.native import Directory

def load_words(
    words: npt.NDArray[np.uint64], indices: npt.NDArray[np.int32], out: npt.NDArray[np.uint64]
) -> None: ...
def store_words(
    words: npt.NDArray[np.uint64], indices: npt.NDArray[np.int32], values: npt.NDArray[np.uint64]
) -> None: ...
def grant(
    control: npt.NDArray[np.uint64],
    owners: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    out_generations: npt.NDArray[np.uint64],
    owner: int,
) -> None: ...
def all_new(
    control: npt.NDArray[np.uint64],
    buckets: npt.NDArray[np.uint64],
    key_column: npt.NDArray[np.uint64],
    slots: bytes | npt.NDArray[np.int32],
    generations: bytes | npt.NDArray[np.uint64],
    keys: bytes | npt.NDArray[np.uint64],
) -> bool: ...
def lookup(
    keys: bytes | npt.NDArray[np.uint64],
    buckets: npt.NDArray[np.uint64],
    control: npt.NDArray[np.uint64],
    key_column: npt.NDArray[np.uint64],
    out_slots: npt.NDArray[np.int32],
    out_generations: npt.NDArray[np.uint64],
) -> int: ...
def find(
    keys: bytes | npt.NDArray[np.uint64],
    buckets: npt.NDArray[np.uint64],
    control: npt.NDArray[np.uint64],
    key_column: npt.NDArray[np.uint64],
    checksum_column: npt.NDArray[np.uint64],
    hash_column: npt.NDArray[np.uint64],
    out_slots: npt.NDArray[np.int32],
    out_generations: npt.NDArray[np.uint64],
    out_checksums: npt.NDArray[np.uint64],
    out_hashes: npt.NDArray[np.uint64],
) -> int: ...
def still(
    control: npt.NDArray[np.uint64],
    slots: npt.NDArray[np.int32],
    generations: npt.NDArray[np.uint64],
    out: npt.NDArray[np.bool_],
) -> None: ...
def insert(
    buckets: npt.NDArray[np.uint64],
    keys: bytes | npt.NDArray[np.uint64],
    slots: npt.NDArray[np.int32],
    out: npt.NDArray[np.bool_],
) -> None: ...
def remove(
    buckets: npt.NDArray[np.uint64], keys: bytes | npt.NDArray[np.uint64], slots: npt.NDArray[np.int32]
) -> int: ...
def seals(
    generations: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
    parents: npt.NDArray[np.uint64],
    engine_hashes: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.uint32],
    checksums: npt.NDArray[np.uint64],
    out: npt.NDArray[np.uint64],
) -> None: ...
def publish(
    columns: Directory,
    slots: bytes | npt.NDArray[np.int32],
    generations: bytes | npt.NDArray[np.uint64],
    new_keys: bytes | npt.NDArray[np.uint64],
    new_parents: bytes | npt.NDArray[np.uint64],
    new_hashes: bytes | npt.NDArray[np.uint64],
    new_positions: bytes | npt.NDArray[np.uint32],
    new_checksums: bytes | npt.NDArray[np.uint64],
    out: npt.NDArray[np.bool_],
    now_s: float,
) -> tuple[int, int]: ...
def hash_rows(
    array: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int32],
    out: npt.NDArray[np.uint64],
    width: int,
    widest: int,
) -> None: ...
def copy_rows(
    source: npt.NDArray[np.uint8],
    source_rows: npt.NDArray[np.int32],
    target: npt.NDArray[np.uint8],
    target_rows: npt.NDArray[np.int32],
    out: npt.NDArray[np.uint64],
    width: int,
    widest: int,
) -> None: ...
def gather_rows(
    segments: tuple[npt.NDArray[np.uint8], ...],
    blocks: npt.NDArray[np.int32],
    target: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int32],
    out: npt.NDArray[np.uint64],
    widest: int,
) -> None: ...
