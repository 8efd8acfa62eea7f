# SPDX-License-Identifier: Apache-2.0
"""Which chains a pool's blocks form, and what is counted for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcr.guard.listing import chains
from kvcr.keys import KeySpace, extend_chain, pack_keys
from kvcr.pool import Listing

BLOCK_BYTES = 100
SPACE = KeySpace("dynamo", "m")


def listing(*paths: list[int], **columns: Any) -> Listing:
    """Blocks of chains over one token a block; what chains share is there once. ``columns`` by position of
    the block in the order it is first named."""
    root = SPACE.root()
    seen: dict[bytes, tuple[bytes, int]] = {}
    for path in paths:
        before = bytes(root)
        for position, key in enumerate(extend_chain(root, np.array(path, np.uint32), 1)):
            seen.setdefault(bytes(key), (before, position))
            before = bytes(key)
    count = len(seen)
    pairs = {
        "keys": np.frombuffer(b"".join(seen), "<u8").reshape(count, 2),
        "parents": np.frombuffer(b"".join(parent for parent, _ in seen.values()), "<u8").reshape(count, 2),
        "positions": np.array([position for _, position in seen.values()], np.uint32),
        "idle_s": np.arange(count, dtype=np.float64),
        "age_s": np.arange(count, dtype=np.float64) + 10,
        "leased": np.zeros(count, bool),
        "pinned": np.zeros(count, bool),
    }
    return Listing(**{**pairs, **columns})


def tail(path: list[int]) -> str:
    return pack_keys(extend_chain(SPACE.root(), np.array(path, np.uint32), 1)[-1:]).hex()


def without(given: Listing, index: int) -> Listing:
    return Listing(*(np.delete(column, index, axis=0) for column in given))


def test_what_two_chains_share_is_counted_once_for_the_one_that_goes_furthest() -> None:
    found = chains(listing([1, 2, 3, 4], [1, 2, 7]), BLOCK_BYTES, 10)
    assert (found["blocks"], found["bytes"], found["chains"]) == (5, 500, 2)
    by_tail = {row["tail"]: row for row in found["rows"]}
    long, short = by_tail[tail([1, 2, 3, 4])], by_tail[tail([1, 2, 7])]
    assert (long["blocks"], short["blocks"]) == (4, 1)
    assert (long["first"], long["last"], short["last"]) == (0, 3, 2)
    assert long["tenant"] == short["tenant"] == SPACE.root().hex()


def test_leases_pins_and_times_are_those_of_its_blocks() -> None:
    given = listing([1, 2, 3])
    given = given._replace(leased=np.array([1, 1, 0], bool), pinned=np.array([0, 0, 1], bool))
    (row,) = chains(given, BLOCK_BYTES, 10)["rows"]
    assert (row["leased"], row["pinned"], row["idle_s"], row["age_s"]) == (2, 1, 0.0, 12.0)


def test_a_chain_without_its_beginning_has_no_tenant() -> None:
    (row,) = chains(without(listing([1, 2, 3]), 0), BLOCK_BYTES, 10)["rows"]
    assert (row["first"], row["last"], row["blocks"], row["tenant"]) == (1, 2, 2, "")


def test_those_used_last_come_first_and_no_more_than_asked() -> None:
    paths = [[n] for n in range(5)]
    given = listing(*paths, idle_s=np.array([5.0, 1.0, 4.0, 2.0, 3.0]))
    found = chains(given, BLOCK_BYTES, 3)
    assert [row["idle_s"] for row in found["rows"]] == [1.0, 2.0, 3.0]
    assert found["chains"] == 5


def test_an_empty_pool_has_none() -> None:
    found = chains(without(listing([1]), 0), BLOCK_BYTES, 10)
    assert found == {"blocks": 0, "bytes": 0, "chains": 0, "rows": []}


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.data())
def test_every_block_is_counted_once_whatever_is_missing(paths: list[list[int]], data: st.DataObject) -> None:
    given = listing(*paths)
    for _ in range(data.draw(st.integers(0, len(given.keys)))):
        given = without(given, data.draw(st.integers(0, len(given.keys) - 1)))
    found = chains(given, BLOCK_BYTES, 1000)
    assert sum(row["blocks"] for row in found["rows"]) == found["blocks"] == len(given.keys)
    assert len(found["rows"]) == found["chains"]
