# SPDX-License-Identifier: Apache-2.0
"""Bookings: made at plan time, released in two steps, corrected by what workers report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_hints.ledger import REPORT_TTL_S, Ledger, Load, Loads

A, B = (1, 0), (2, 0)


def book(ledger: Ledger, request_id: str, rank: tuple[int, int] = A, **copies: int) -> None:
    ledger.book(request_id, rank, prefill_tokens=100, blocks=7, copies=copies)


def now(ledger: Ledger, at_s: float) -> tuple[int, int, int]:
    load = ledger.loads(at_s).of(A)
    return load.prefill_tokens, load.requests, load.blocks


def test_a_booking_counts_from_the_plan_to_the_end() -> None:
    ledger = Ledger()
    book(ledger, "r1", g1=1000)
    assert ledger.loads(0.0) == Loads({A: Load(100, 1, 7, head_tokens=100)}, {"g1": 1000})
    assert ledger.first_output("r1") is not None
    assert ledger.loads(0.0) == Loads({A: Load(0, 1, 7)}, {})
    assert ledger.first_output("r1") is None
    ledger.release("r1")
    assert ledger.loads(0.0) == Loads({}, {})
    ledger.release("r1")
    assert ledger.first_output("r1") is None


def test_a_copy_is_its_sources_load_until_it_should_be_over() -> None:
    """And not until the request that asked for it has had its turn."""
    ledger = Ledger()
    for name, byte_count, by_s in (("r1", 1000, 12.0), ("r2", 500, 13.0)):
        copies = {"g1": byte_count}
        ledger.book(name, A, prefill_tokens=100, blocks=7, copies=copies, copied_by_s=by_s)
    assert [ledger.loads(at_s).outgoing_bytes for at_s in (11.9, 12.0, 13.0)] == [
        {"g1": 1500},
        {"g1": 500},
        {},
    ]
    assert ledger.loads(13.0).of(A).prefill_tokens == 200


def test_a_replanned_request_moves() -> None:
    ledger = Ledger()
    book(ledger, "r1", A, g1=1000)
    book(ledger, "r1", B)
    assert ledger.loads(0.0) == Loads({B: Load(100, 1, 7, head_tokens=100)}, {})


def test_the_request_whose_turn_it_is_makes_progress() -> None:
    ledger = Ledger()
    ledger.book("r1", A, prefill_tokens=300, blocks=7, copies={})
    ledger.loads(10.0)
    ledger.book("r2", A, prefill_tokens=200, blocks=7, copies={})
    load = ledger.loads(12.0).of(A)
    assert (load.prefill_tokens, load.head_tokens, load.head_s) == (500, 300, 2.0)
    ledger.first_output("r1")
    ledger.loads(13.0)
    load = ledger.loads(14.0).of(A)
    assert (load.prefill_tokens, load.head_tokens, load.head_s) == (200, 200, 1.0)


def test_a_long_request_stays_booked_for_as_long_as_it_runs() -> None:
    ledger = Ledger()
    book(ledger, "r1")
    assert ledger.loads(600.0).of(A).requests == 1


def test_reports_add_only_what_others_sent_and_are_forgotten() -> None:
    ledger = Ledger()
    book(ledger, "r1")
    ledger.report(A, prefill_tokens=100, blocks=7, now_s=0.0)
    assert now(ledger, 1.0) == (100, 1, 7)
    ledger.report(A, prefill_tokens=900, blocks=57, now_s=1.0)
    assert now(ledger, 1.0) == (900, 1, 57)
    ledger.release("r1")
    assert now(ledger, 2.0) == (800, 0, 50)
    assert now(ledger, 1.0 + REPORT_TTL_S) == (0, 0, 0)


def test_a_worker_that_left_reports_no_more() -> None:
    ledger = Ledger()
    ledger.report(A, prefill_tokens=900, blocks=57, now_s=0.0)
    ledger.forget_worker(1)
    assert ledger.loads(0.0).of(A) == Load()


@given(
    st.lists(
        st.tuples(st.sampled_from(["book", "first", "release"]), st.integers(0, 5), st.sampled_from([A, B])),
        max_size=50,
    )
)
def test_loads_are_the_sum_of_what_is_open(steps: list[tuple[str, int, tuple[int, int]]]) -> None:
    ledger = Ledger()
    open_requests: dict[str, tuple[tuple[int, int], bool]] = {}
    for verb, number, rank in steps:
        name = f"r{number}"
        if verb == "book":
            book(ledger, name, rank, g1=10)
            open_requests[name] = (rank, True)
        elif verb == "first":
            ledger.first_output(name)
            if name in open_requests:
                open_requests[name] = (open_requests[name][0], False)
        else:
            ledger.release(name)
            open_requests.pop(name, None)
    loads = ledger.loads(0.0)
    for rank in (A, B):
        mine = [prefilling for where, prefilling in open_requests.values() if where == rank]
        found = loads.of(rank)
        assert (found.prefill_tokens, found.requests, found.blocks) == (
            100 * sum(mine),
            len(mine),
            7 * len(mine),
        )
    assert loads.outgoing_bytes.get("g1", 0) == 10 * sum(p for _, p in open_requests.values())
    assert len(ledger) == len(open_requests)


def test_a_newcomer_shares_the_trend_of_those_who_were_there() -> None:
    """Or all would be sent to it for as long as the averages remember that the others were alone."""
    ledger, c = Ledger(), (3, 0)
    ledger.loads(0.0)
    for request_id, rank in (("r1", A), ("r2", B), ("r3", B)):
        book(ledger, request_id, rank)
    before = ledger.loads(120.0)
    assert before.of(B).slow_tokens > 100.0
    ledger.admit([c], [A, B])
    after = ledger.loads(120.0)
    for rank in (A, B):
        assert after.of(rank).slow_tokens == pytest.approx(before.of(rank).slow_tokens * 2 / 3)
        assert after.of(rank).tokens_per_s == pytest.approx(before.of(rank).tokens_per_s * 2 / 3)
        # What is queued is queued.
        assert after.of(rank).prefill_tokens == before.of(rank).prefill_tokens
    for name in ("slow_tokens", "tokens_per_s"):
        total = sum(getattr(before.of(rank), name) for rank in (A, B))
        assert getattr(after.of(c), name) == pytest.approx(total / 3)
    assert (after.of(c).prefill_tokens, after.of(c).requests) == (0, 0)


def test_the_first_workers_share_nothing() -> None:
    ledger = Ledger()
    ledger.admit([A, B], [])
    ledger.admit([], [])
    assert ledger.loads(0.0) == Loads({}, {})
