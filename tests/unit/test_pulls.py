# SPDX-License-Identifier: Apache-2.0
"""The pull state machine: what it asks, moves, and ends with, without any I/O."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.guard.pulls import Phase, Pull, Span
from kvcr.protocol.engine import BlockStatus

OK, MISS, FAILED, GONE, TOO_SLOW = (
    BlockStatus.OK,
    BlockStatus.MISS,
    BlockStatus.FAILED,
    BlockStatus.GONE,
    BlockStatus.TOO_SLOW,
)


def a_pull(count: int, *spans: tuple[int, int], first: int = 0, give_up_s: float | None = None) -> Pull:
    return Pull(
        count=count,
        ranks=1,
        first=first,
        spans=[Span(*span) for span in spans],
        started_s=0.0,
        deadline_s=2.0,
        give_up_s=give_up_s,
    )


def lease(
    pull: Pull,
    source: int,
    indices: np.ndarray,
    missing: tuple[int, ...] = (),
    until_s: float = 9.0,
    gone: bool = False,
) -> None:
    slots = np.array([-1 if index in missing else 100 + index for index in indices.tolist()], np.int32)
    pull.leased(
        source,
        indices,
        slots,
        np.full(len(indices), 7, np.uint64),
        np.zeros((len(indices), 1), np.uint64),
        until_s,
        gone=(slots < 0) if gone else None,
    )


def move(pull: Pull, most: int, status: BlockStatus = OK) -> list[int]:
    step = pull.next_move(most)
    assert step is not None
    pull.moved(step.indices, np.full(len(step.indices), status, np.uint8), 0.0)
    return step.indices.tolist()


def names(pull: Pull) -> list[str]:
    return [BlockStatus(status).name for status in pull.statuses.tolist()]


def test_resident_blocks_are_not_asked_for() -> None:
    pull = a_pull(4, (0, 4))
    pull.resident(np.array([True, True, False, False]))
    (ask,) = pull.ask()
    assert ask.indices.tolist() == [2, 3]
    assert pull.available() == 2


def test_everything_resident_is_done_at_once() -> None:
    pull = a_pull(2, (0, 2))
    pull.resident(np.array([True, True]))
    assert pull.ask() == []
    assert pull.done
    assert pull.reason() == ""


def test_without_a_source_blocks_are_misses() -> None:
    pull = a_pull(3)
    assert pull.ask() == []
    assert names(pull) == ["MISS"] * 3


def test_sources_are_asked_for_their_own_spans_of_the_chain() -> None:
    pull = a_pull(6, (10, 3), (13, 3), first=10)
    asks = pull.ask()
    assert [(ask.source, ask.indices.tolist()) for ask in asks] == [(0, [0, 1, 2]), (1, [3, 4, 5])]


def test_blocks_move_in_prefix_order_in_bounded_steps_of_one_source() -> None:
    pull = a_pull(5, (0, 3), (3, 2))
    for ask in pull.ask():
        lease(pull, ask.source, ask.indices)
    assert pull.ready_to_answer
    assert pull.available() == 5
    assert [move(pull, 2), move(pull, 2), move(pull, 2)] == [[0, 1], [2], [3, 4]]
    assert pull.done
    assert names(pull) == ["OK"] * 5


def test_a_miss_at_one_source_is_asked_of_the_next() -> None:
    pull = a_pull(3, (0, 3), (0, 3))
    (ask,) = pull.ask()
    lease(pull, ask.source, ask.indices, missing=(1,))
    (second,) = pull.ask()
    assert (second.source, second.indices.tolist()) == (1, [1])
    lease(pull, 1, second.indices, missing=(1,))
    assert pull.ask() == []
    assert pull.available() == 1
    assert "block 1: miss" in pull.reason()


def test_a_failing_source_is_replaced_within_the_pull() -> None:
    pull = a_pull(4, (0, 4), (2, 2))
    (ask,) = pull.ask()
    lease(pull, 0, ask.indices)
    pull.source_failed(0, GONE, "died")
    (second,) = pull.ask()
    assert (second.source, second.indices.tolist()) == (1, [2, 3])
    assert names(pull) == ["GONE", "GONE", "PENDING", "PENDING"]
    lease(pull, 1, second.indices)
    assert move(pull, 9) == [2, 3]
    assert names(pull) == ["GONE", "GONE", "OK", "OK"]


def test_a_corrupt_block_in_the_middle_does_not_stop_the_rest() -> None:
    pull = a_pull(4, (0, 4))
    (ask,) = pull.ask()
    lease(pull, 0, ask.indices)
    step = pull.next_move(4)
    assert step is not None
    pull.moved(step.indices, np.array([OK, FAILED, OK, OK], np.uint8), 0.0)
    assert pull.ask() == []
    assert names(pull) == ["OK", "FAILED", "OK", "OK"]


def test_steps_under_way_outlive_a_failed_source() -> None:
    pull = a_pull(2, (0, 2))
    (ask,) = pull.ask()
    lease(pull, 0, ask.indices)
    step = pull.next_move(1)
    assert step is not None
    pull.source_failed(0, GONE, "died")
    assert pull.ask() == []
    assert not pull.done
    pull.moved(step.indices, np.array([OK], np.uint8), 0.0)
    assert names(pull) == ["OK", "GONE"]


def test_the_deadline_ends_everything_and_late_news_changes_nothing() -> None:
    pull = a_pull(3, (0, 3), (0, 3))
    (ask,) = pull.ask()
    lease(pull, 0, ask.indices)
    step = pull.next_move(2)
    assert step is not None
    pull.stop(TOO_SLOW, moving_too=True)
    assert pull.done
    pull.moved(step.indices, np.array([OK, FAILED], np.uint8), 0.0)
    lease(pull, 0, ask.indices)
    assert names(pull) == ["TOO_SLOW"] * 3
    assert pull.ask() == []


def test_a_joined_block_follows_the_other_pull_or_is_wanted_again() -> None:
    pull = a_pull(2, (0, 2))
    pull.join([0, 1])
    assert pull.ask() == []
    assert pull.ready_to_answer
    assert pull.available() == 2
    pull.leave(0, OK)
    pull.leave(1, GONE)
    (ask,) = pull.ask()
    assert ask.indices.tolist() == [1]


def test_recomputing_is_preferred_when_the_projected_end_is_later() -> None:
    pull = a_pull(10, (0, 10), give_up_s=1.0)
    (ask,) = pull.ask()
    lease(pull, 0, ask.indices)
    assert not pull.too_slow(pull.project(0.1, [None]))
    assert not pull.too_slow(pull.project(0.1, [100.0]))
    projection = pull.project(0.1, [5.0])
    assert (projection.left, projection.finish_s, projection.own) == (10, 2.1, False)
    assert pull.too_slow(projection)
    move(pull, 5)
    # 5 blocks in 0.2 s: the own rate counts, and 5 more fit.
    projection = pull.project(0.2, [1.0])
    assert (projection.left, projection.blocks_per_s, projection.own) == (5, 25.0, True)
    assert not pull.too_slow(projection)
    assert pull.too_slow(pull.project(1.0, [1e9]))


def test_the_projection_adds_up_sources_which_are_read_one_after_the_other() -> None:
    pull = a_pull(10, (0, 6), (6, 4))
    for ask in pull.ask():
        lease(pull, ask.source, ask.indices)
    projection = pull.project(1.0, [6.0, 2.0])
    assert (projection.finish_s, projection.blocks_per_s) == (1.0 + 1.0 + 2.0, 10 / 3)


def test_without_an_estimate_nothing_is_too_slow() -> None:
    pull = a_pull(1, (0, 1))
    assert not pull.too_slow(pull.project(1e9, [0.001]))


def test_a_lease_that_is_over_is_renewed_at_the_same_source_and_what_went_is_gone() -> None:
    pull = a_pull(4, (0, 4), (0, 4))
    (ask,) = pull.ask()
    lease(pull, 0, ask.indices, until_s=1.0)
    assert move(pull, 1) == [0]
    assert not pull.expire(0.9)
    assert pull.expire(1.0)
    assert pull.next_move(9) is None
    (again,) = pull.ask()
    assert (again.source, again.indices.tolist()) == (0, [1, 2, 3])
    lease(pull, 0, again.indices, missing=(2,), gone=True)
    (other,) = pull.ask()
    assert (other.source, other.indices.tolist()) == (1, [2])
    lease(pull, 1, other.indices, missing=(2,))
    assert pull.ask() == []
    assert [move(pull, 9), names(pull)] == [[1, 3], ["OK", "OK", "GONE", "OK"]]


def test_a_move_that_could_not_begin_is_the_next_one_again() -> None:
    pull = a_pull(3, (0, 3))
    (ask,) = pull.ask()
    lease(pull, 0, ask.indices)
    step = pull.next_move(2)
    assert step is not None
    pull.unmove(step.indices[1:])
    assert pull.leased_blocks == 2
    assert move(pull, 9) == [1, 2]


@settings(deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4),
    outcomes=st.lists(st.sampled_from(["lease", "miss", "fail", OK, FAILED, GONE]), max_size=60),
    width=st.integers(1, 5),
)
def test_every_pull_ends_whatever_its_sources_do(spans: list, outcomes: list, width: int) -> None:
    pull = a_pull(12, *spans)
    news = iter([*outcomes, *["miss"] * 400])
    for _ in range(400):
        for ask in pull.ask():
            match next(news):
                case "lease":
                    lease(pull, ask.source, ask.indices)
                case "fail":
                    pull.source_failed(ask.source, GONE, "died")
                case _:
                    lease(pull, ask.source, ask.indices, missing=tuple(range(12)))
        step = pull.next_move(width)
        if step is not None:
            outcome = next(news)
            status = outcome if isinstance(outcome, BlockStatus) else GONE
            pull.moved(step.indices, np.full(len(step.indices), status, np.uint8), 0.0)
        if pull.done:
            break
    assert pull.done
    assert BlockStatus.PENDING not in pull.tally()
    assert (pull.phase == Phase.FINAL).all()
