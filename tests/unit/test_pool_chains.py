# SPDX-License-Identifier: Apache-2.0
"""Finding the blocks after a block, from the columns of the directory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.pools import ROOT, create, keys


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], set[int], set[int]]:
    """Parents of blocks 0..n-1 (-1: a root), which of them are here, and which are named."""
    parents = [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(1, 24)))]
    numbers = st.sets(st.integers(0, len(parents) - 1))
    return parents, draw(numbers), draw(numbers)


@given(forest=forests())
@settings(max_examples=60, deadline=None)
def test_through_finds_the_blocks_named_and_what_comes_after_them_as_far_as_it_is_here(
    tmp_path_factory: pytest.TempPathFactory, forest: tuple[list[int], set[int], set[int]]
) -> None:
    parents, here, named = forest
    pool = create(tmp_path_factory.mktemp("pool"), 32)
    order = sorted(here)
    granted = pool.allocate(len(order), 0.0)
    pool.commit(
        granted.slots,
        granted.generations,
        keys(*order),
        b"".join(keys(parents[each]) if parents[each] >= 0 else ROOT for each in order),
        np.array(order, np.uint64),
        np.array(order, np.uint32),
        np.zeros((len(order), 1), np.uint64),
        0.0,
    )

    def hit(block: int) -> bool:
        parent = parents[block]
        return block in named or parent in named or (parent in here and hit(parent))

    record = pool.record(pool.through(keys(*named)))
    assert sorted(record.engine_hashes.tolist()) == [block for block in order if hit(block)]
    pool.close()
