# SPDX-License-Identifier: Apache-2.0
"""Prompts that are being computed, and who finds their blocks when its turn comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from signal_desk import BLOCK, Router, World, tokens_of

from router_hints.chains import common_blocks
from router_hints.underway import KEPT, Underway

RANKS = [(1, 0), (2, 0), (2, 1)]
PATHS = st.lists(st.integers(0, 2), max_size=5).map(tuple)


def keys(path: tuple[int, ...]) -> bytes:
    """A key names all that is before it."""
    return b"".join(repr(path[: n + 1]).encode().ljust(16)[-16:] for n in range(len(path)))


@given(st.lists(st.tuples(st.sampled_from(RANKS), PATHS), max_size=KEPT), PATHS)
def test_each_rank_has_the_longest_of_what_it_was_sent(
    sent: list[tuple[tuple[int, int], tuple[int, ...]]], path: tuple[int, ...]
) -> None:
    underway = Underway()
    for number, (rank, each) in enumerate(sent):
        underway.begin(f"{number}", rank, keys(each))
    expected: dict[tuple[int, int], int] = {}
    for rank, each in sent:
        if (common := common_blocks(keys(each), keys(path))) > 0:
            expected[rank] = max(common, expected.get(rank, 0))
    assert underway.leading(keys(path)) == expected
    for number in range(len(sent)):
        underway.end(f"{number}")
        underway.end(f"{number}")
    assert (len(underway), underway.leading(keys(path))) == (0, {})


def test_what_is_remembered_of_one_rank_is_bounded() -> None:
    underway = Underway()
    for number in range(3 * KEPT):
        underway.begin(f"{number}", (1, 0), keys((0, number)))
    assert len(underway) == KEPT
    assert underway.leading(keys((0, 0))) == {(1, 0): 1}, "the first ones went"
    assert underway.leading(keys((0, 3 * KEPT - 1))) == {(1, 0): 2}


@pytest.mark.parametrize("known", [True, False])
async def test_a_request_queues_behind_the_prompt_it_begins_like(known: bool) -> None:
    """An idle worker beside it would compute the same once more."""
    router = Router(World(2))
    head = tokens_of(16_000, 5)
    first, placed = await router.turn("one", head, pin="g1", leave=False)
    router.ledger.book("one", placed.plan.rank, prefill_tokens=16_000, blocks=1000, copies={})
    if known:
        router.underway.begin(placed.plan.plan_id, placed.plan.rank, placed.keys)
    _, second = await router.turn("two", [*head[: 990 * BLOCK], *tokens_of(160, 6)])
    assert second.target is not None
    assert second.target.name == ("g1" if known else "g2")
    assert second.plan.chosen.g1_blocks == (990 if known else 0)
    router.visits.leave(first)
