# SPDX-License-Identifier: Apache-2.0
"""Waiting for conditions, for as long as a machine may take that is busy with much else.

A test that passes waits for nothing of this; one that hangs fails with what it waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0
"""For what must happen."""

BUSY_S = 10.0
"""What a busy machine may add to a time that has a bound. Where a bound is tested, what would happen without
it takes longer than both together, or never ends."""


def until(
    condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.02
) -> Any:
    """The first true value of ``condition``; fails naming ``what`` when there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)
    return value


async def eventually(look: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The same of a function or a coroutine function, for tests with an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = look()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.02)
