# SPDX-License-Identifier: Apache-2.0
"""Who does a handle's work: its own thread, or a caller that would otherwise wait for that thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

LINGER_S = 0.05
"""The thread rests this long after a caller gave the work back, so that a row of calls wakes it once."""


class Turns:
    """Handing a job to a thread and its result back costs two switches, 20 to 100 us each on a busy machine.

    One thread works at a time, under :attr:`lock`. ``idle`` says whether nothing is left to do but to listen.
    """

    def __init__(self, idle: Callable[[], bool]) -> None:
        self.lock = threading.Lock()
        self._idle = idle
        self._changed = threading.Condition()
        self._borrower: int | None = None
        self._rest_until_s = 0.0

    def borrowed(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread works, and the handle's own does not. May be nested."""
        if self._borrower == threading.get_ident():
            return _NESTED
        return _Borrowed(self)

    def take(self) -> None:
        """What :meth:`borrowed` begins with."""
        self._borrower = threading.get_ident()
        self.lock.acquire()

    def give_back(self) -> None:
        """What :meth:`borrowed` ends with."""
        self.lock.release()
        self._rest_until_s = time.monotonic() + LINGER_S
        self._borrower = None
        # After that: what another thread submits now, it calls for, or is seen here.
        if not self._idle():
            self._end_rest()

    def await_own(self) -> None:
        """The handle's own thread: wait until the work is its own again."""
        if self._borrower is None and not self._rest_until_s:
            return
        with self._changed:
            while True:
                left_s = self._rest_until_s - time.monotonic()
                if self._borrower is None and left_s <= 0.0:
                    self._rest_until_s = 0.0
                    return
                # Timed while borrowed too: a row of short calls then need not wake it after each.
                self._changed.wait(LINGER_S if self._borrower is not None else left_s)

    def call(self) -> bool:
        """There is work; from any thread. False when whoever works now will see it by itself."""
        if self._borrower == threading.get_ident():
            return False
        if self._rest_until_s:
            self._end_rest()
        return True

    def _end_rest(self) -> None:
        with self._changed:
            self._rest_until_s = 0.0
            self._changed.notify()


class _Borrowed:
    """A class, as a generator takes five times as long to enter and to leave."""

    __slots__ = ("_turns",)

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.give_back()


_NESTED = contextlib.nullcontext()
