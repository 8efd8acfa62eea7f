# SPDX-License-Identifier: Apache-2.0
"""What is on its way to guards, and what of it a prompt may wait for."""

from __future__ import annotations

from kvcr.keys import KeySpace, extend_chain, pack_keys
from router_hints.arrivals import OVERDUE_S, Arrivals

BLOCK = 4
ROOT = KeySpace("dynamo", "m").root()


def keys_of(tokens: list[int]) -> bytes:
    return pack_keys(extend_chain(ROOT, tokens, BLOCK))


def test_a_prompt_with_the_same_beginning_waits_for_the_part_it_shares() -> None:
    arrivals = Arrivals()
    moved = list(range(40))
    arrivals.begin("p1", "g2", 2, keys_of(moved), 103.0)
    (arriving,) = arrivals.of(keys_of([*moved, 90, 91, 92, 93]), 100.0)
    assert (arriving.guard, arriving.first, arriving.count, arriving.ready_in_s) == ("g2", 2, 8, 3.0)
    (part,) = arrivals.of(keys_of([*moved[:20], 7, 7, 7, 7]), 100.0)
    assert (part.first, part.count) == (2, 3)
    assert arrivals.of(keys_of([*moved[:8], 7, 7, 7, 7]), 100.0) == (), "it shares nothing that is moved"
    assert arrivals.of(keys_of([5, 5, 5, 5]), 100.0) == ()
    assert arrivals.of(b"", 100.0) == ()


def test_what_arrived_failed_or_is_overdue_is_not_waited_for() -> None:
    arrivals = Arrivals()
    keys = keys_of(list(range(40)))
    arrivals.begin("p1", "g2", 0, keys, 100.0)
    arrivals.begin("p1", "g3", 0, keys, 100.0)
    assert [each.guard for each in arrivals.of(keys, 99.0)] == ["g3"], "a plan has one target"
    arrivals.end("p1")
    arrivals.end("p1")
    assert arrivals.of(keys, 99.0) == ()
    arrivals.begin("p2", "g2", 0, keys, 100.0)
    arrivals.forget_guard("g2")
    assert len(arrivals) == 0
    arrivals.begin("p3", "g2", 0, keys, 100.0)
    assert arrivals.of(keys, 100.0 + OVERDUE_S + 1) == ()
    arrivals.expire(100.0 + OVERDUE_S + 1)
    assert len(arrivals) == 0
    arrivals.begin("p4", "g2", 10, keys, 100.0)
    assert len(arrivals) == 0, "nothing is moved"
