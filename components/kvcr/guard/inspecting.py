# SPDX-License-Identifier: Apache-2.0
"""What a pool says of itself and of single blocks, for people. JSON-ready."""

from __future__ import annotations

from typing import Any

from kvcr.keys import KEY_BYTES
from kvcr.pool import Pool

MAX_INSPECT_KEYS = 2048
"""That a guard answers for at once."""


def facts_of(pool: Pool, linger_s: float) -> dict[str, Any]:
    """``linger_s``: how long its guard waits for an engine; 0: for ever."""
    lifetime = "outlives the engine; ends with its tmpfs mount"
    if linger_s:
        lifetime += f", or {linger_s:.0f} s without an engine"
    return {
        "dir": str(pool.dir),
        "epoch": pool.epoch,
        "slots": pool.slots,
        "slot_part_bytes": pool.slot_part_bytes,
        "ranks": pool.layout.ranks,
        "layout_digest": pool.layout.digest(),
        "counts": {state.name: count for state, count in pool.counts().items()},
        "lifetime": lifetime,
    }


def blocks_of(pool: Pool, keys: bytes) -> list[dict[str, Any]]:
    """Facts about each of these blocks; ``tier`` is None where it is not here."""
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
