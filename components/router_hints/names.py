# SPDX-License-Identifier: Apache-2.0
"""What Dynamo's KV events call the blocks of engine memory, computed from tokens. Pure.

An event names a block twice: by a hash that only the engine can compute, and by the hash of the block's own
tokens. Chained, those name the block and all tokens before it, as our keys do: the join between the two.

The arithmetic is Dynamo's (1.6.1): ``tokens_hash = xxh3_64(little-endian u32 tokens, seed)``, and the name of
a block that follows another is ``xxh3_64(name before, tokens_hash; seed 1337)``. A tenant's salt is in the
seed. ``tests/unit/test_g1.py`` compares with ``dynamo.llm.compute_block_hash_for_seq``.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import xxhash

NAME_BYTES = 8
_SEED = 1337
_SALT_SEED = 1
_WORD = 0xFFFFFFFFFFFFFFFF
_pair = struct.Struct("<QQ").pack


def follow(before: int | None, tokens_hash: int) -> int:
    """Name of the block with these tokens after the one named ``before``; None for the first of a prompt."""
    if before is None:
        return tokens_hash
    return xxhash.xxh3_64_intdigest(_pair(before, tokens_hash), _SEED)


def extend_names(before: int | None, tokens: npt.NDArray[np.uint32], block_size: int, salt: str) -> bytes:
    """Names of the full blocks of ``tokens`` after the block ``before``, uint64 each."""
    seed = _SEED if not salt else (_SEED + xxhash.xxh3_64_intdigest(salt.encode(), _SALT_SEED)) & _WORD
    raw = memoryview(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
    step, digest, names = 4 * block_size, xxhash.xxh3_64_intdigest, []
    # 0.3 us a block: 1.1 ms for the first turn of 65,536 tokens; later turns hash only what is new.
    for at in range(0, len(raw) - step + 1, step):
        before = follow(before, digest(raw[at : at + step], seed))
        names.append(before)
    return np.array(names, dtype="<u8").tobytes()


def unpack(names: bytes | bytearray) -> list[int]:
    """The names in a blob."""
    unpacked: list[int] = np.frombuffer(names, dtype="<u8").tolist()
    return unpacked
