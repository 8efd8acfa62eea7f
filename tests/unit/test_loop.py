# SPDX-License-Identifier: Apache-2.0
"""The authority thread's loop: when it sleeps, and when it asks instead."""

from __future__ import annotations

import time

from kvcr.guard.loop import Loop


def test_a_loop_that_stays_awake_asks_instead_of_sleeping_and_then_sleeps_again() -> None:
    loop = Loop()
    began_s = time.monotonic()
    loop.stay_awake(0.05)
    loop.run_once(30.0)
    assert time.monotonic() - began_s < 10.0, "it slept though it was to stay awake"
    time.sleep(0.06)
    began_s = time.monotonic()
    loop.run_once(0.1)
    assert time.monotonic() - began_s >= 0.09, "it was to sleep until its time was over"
    loop.close()


def test_what_is_posted_to_a_loop_that_stays_awake_runs() -> None:
    loop = Loop()
    ran: list[int] = []
    loop.stay_awake(60.0)
    loop.run_once(30.0)
    loop.post(lambda: ran.append(1))
    loop.run_once(30.0)
    assert ran == [1]
    loop.close()
