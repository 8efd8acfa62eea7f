# SPDX-License-Identifier: Apache-2.0
"""Looking again and again, for what nobody tells us of."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.05


async def poll(look: Callable[[], Any], timeout_s: float = math.inf) -> Any:
    """The first true value of ``look``, a function or a coroutine function; when there is none in time, the
    last one."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = look()
        if inspect.isawaitable(value):
            value = await value
        if value or time.monotonic() >= deadline_s:
            return value
        await asyncio.sleep(POLL_S)
