# SPDX-License-Identifier: Apache-2.0
"""What a pool says of single blocks, for people."""

from __future__ import annotations

from typing import Any

from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool

MAX_INSPECT_KEYS = 2048
"""That a guard answers for at once."""


def blocks_of(pool: Pool, keys: bytes) -> list[dict[str, Any]]:
    """JSON-ready facts about each of these blocks; ``tier`` is None where it is not here."""
    found = pool.lookup(keys)
    blocks = []
    for index, slot in enumerate(found.slots.tolist()):
        block: dict[str, Any] = {
            "key": keys[KEY_BYTES * index : KEY_BYTES * (index + 1)].hex(),
            "tier": None,
        }
        if slot >= 0:
            record = pool.record(found.slots[index : index + 1])
            block |= {
                "tier": 2,
                "slot": slot,
                "generation": int(found.generations[index]),
                "parent": record.parents.hex(),
                "engine_hash": int(record.engine_hashes[0]),
                "position": int(record.positions[0]),
            }
        blocks.append(block)
    return blocks
