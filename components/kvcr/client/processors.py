# SPDX-License-Identifier: Apache-2.0
"""Whether the machine has a processor to spare: who spins without one only keeps others from running."""

from __future__ import annotations

import os

LOOK_S = 0.01
"""How long an answer holds: to ask the kernel takes up to 10 us of a process that has just been woken."""


class Processors:
    """For one thread at a time."""

    def __init__(self) -> None:
        self._count = len(os.sched_getaffinity(0))
        self._free = False
        self._look_s = 0.0
        try:
            self._load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._load = -1

    def free(self, now_s: float, besides: int = 0) -> bool:
        """Whether there are more processors than threads that run or want to, the caller among them.

        ``besides``: threads that are not to be counted. False where the kernel does not say.
        """
        if now_s >= self._look_s and self._load >= 0:
            # "0.20 0.18 0.12 1/80 11206": the fourth begins with how many want to run.
            runnable = int(os.pread(self._load, 64, 0).split()[3].split(b"/")[0])
            self._free = runnable - besides < self._count
            self._look_s = now_s + LOOK_S
        return self._free

    def close(self) -> None:
        """Idempotent; from then on none is free."""
        if self._load >= 0:
            os.close(self._load)
        self._load, self._free = -1, False
