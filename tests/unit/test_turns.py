# SPDX-License-Identifier: Apache-2.0
"""Who works: the handle's thread or a caller that borrowed the work, one at a time, and never nobody."""

from __future__ import annotations

import threading
import time

from kvcr.client.turns import LINGER_S, Turns

WAIT_S = 20.0


class Worker:
    """A thread that works whenever it is its turn, and notes it."""

    def __init__(self, idle: bool = True) -> None:
        self.turns = Turns(lambda: idle)
        self.worked = threading.Event()
        self.waiting = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self.waiting.set()
            self.turns.await_own()
            with self.turns.lock:
                self.worked.set()
            time.sleep(0.001)

    def works_again(self, timeout_s: float = WAIT_S) -> bool:
        self.worked.clear()
        return self.worked.wait(timeout_s)

    def close(self) -> None:
        self._stop = True
        self._thread.join(WAIT_S)


def test_the_thread_rests_while_the_work_is_borrowed_and_works_afterwards() -> None:
    worker = Worker()
    assert worker.works_again()
    with worker.turns.borrowed():
        assert not worker.works_again(0.05)
    assert worker.works_again()
    worker.close()


def test_a_call_wakes_a_resting_thread_at_once() -> None:
    worker = Worker()
    with worker.turns.borrowed():
        worker.waiting.clear()
    assert worker.turns.call()
    assert worker.works_again()
    worker.close()


def test_a_call_of_the_borrower_wakes_nobody() -> None:
    worker = Worker()
    with worker.turns.borrowed():
        assert not worker.turns.call()
        other = []
        thread = threading.Thread(target=lambda: other.append(worker.turns.call()))
        thread.start()
        thread.join()
        assert other == [True]
    worker.close()


def test_the_thread_does_not_rest_when_something_was_left_to_do() -> None:
    worker = Worker(idle=False)
    with worker.turns.borrowed():
        assert not worker.works_again(0.01)
    assert worker.turns._rest_until_s == 0.0
    assert worker.works_again()
    worker.close()


def test_an_idle_row_of_calls_wakes_the_thread_once_it_is_over() -> None:
    worker = Worker()
    for _ in range(5):
        with worker.turns.borrowed():
            time.sleep(LINGER_S / 10)
    started_s = time.monotonic()
    assert worker.works_again()
    assert time.monotonic() - started_s >= LINGER_S / 2
    worker.close()


def test_borrowing_twice_is_giving_back_once() -> None:
    worker = Worker()
    with worker.turns.borrowed():
        with worker.turns.borrowed():
            assert not worker.works_again(0.01)
        assert not worker.works_again(0.01)
    assert worker.works_again()
    worker.close()
