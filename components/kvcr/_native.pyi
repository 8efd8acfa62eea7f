# SPDX-License-Identifier: Apache-2.0
"""Types of the C extension; :class:`kvcr.pool.native.Backend` says what the functions do."""

import numpy as np
import numpy.typing as npt

def load_words(
    words: npt.NDArray[np.uint64], indices: npt.NDArray[np.int32], out: npt.NDArray[np.uint64]
) -> None: ...
def store_words(
    words: npt.NDArray[np.uint64], indices: npt.NDArray[np.int32], values: npt.NDArray[np.uint64]
) -> None: ...
def lookup(
    keys: bytes | npt.NDArray[np.uint64],
    buckets: npt.NDArray[np.uint64],
    control: npt.NDArray[np.uint64],
    key_column: npt.NDArray[np.uint64],
    out_slots: npt.NDArray[np.int32],
    out_generations: npt.NDArray[np.uint64],
) -> None: ...
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
