# SPDX-License-Identifier: Apache-2.0
"""Whether a processor is free, as the kernel says it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from kvcr.client.processors import LOOK_S, Processors


def test_none_is_free_while_as_many_run_as_there_are() -> None:
    processors = Processors()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        deadline_s = time.monotonic() + 30
        while processors.free(time.monotonic()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        answers = [processors.free(time.monotonic() + LOOK_S * (look + 1)) for look in range(100)]
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert answers.count(False) >= 95, "each has a thread that wants to run"
    later_s = time.monotonic() + 1000
    assert processors.free(later_s, besides=1_000_000), "that many are not to be counted"
    assert processors.free(later_s + LOOK_S / 2), "the answer holds for a while"
    processors.close()
    processors.close()
    assert not processors.free(later_s + LOOK_S, besides=1_000_000), "nobody says"
