# SPDX-License-Identifier: Apache-2.0
"""Reads the view of engine memory when a router starts, and again when messages were lost. One event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from kvcr.errors import ProtocolError
from router_hints.g1 import EngineMemory
from router_hints.kv_events import G1Change
from router_hints.metrics import Metrics

log = logging.getLogger(__name__)

LOOK_S = 1.0
BEFORE_DUMP_S = 1.0
"""How long ``KvRouter`` may take to know what its engines said: it lags by 1 ms, 0.2 s at most (measured)."""
SHARE = 0.05
"""Of the time, at most, that dumps may take, whatever is lost: one is everything."""


async def keep_repaired(
    memory: EngineMemory, dump: Callable[[], Awaitable[Iterable[G1Change]]], metrics: Metrics
) -> None:
    """Until cancelled.

    What was lost is asked for twice: on a machine that is too busy the first dump may not have it either.
    """
    complained, was_missing, sure, rest_s = "", False, False, LOOK_S
    while True:
        await asyncio.sleep(rest_s)
        rest_s = LOOK_S
        # What is missing twice in a row is not late but lost.
        missing = memory.missing()
        if missing and was_missing and not memory.wants_repair:
            memory.wants_repair = "a message was lost"
        was_missing = missing
        reason = memory.wants_repair or ("" if sure else "to be sure")
        if not reason:
            continue
        sure = not memory.wants_repair
        memory.begin_repair()
        try:
            await asyncio.sleep(BEFORE_DUMP_S)
            began_s = time.monotonic()
            memory.repair(await dump())
            rest_s = max(LOOK_S, (time.monotonic() - began_s) / SHARE)
        except ProtocolError as error:
            memory.abort_repair(reason)
            if complained != str(error):
                complained = str(error)
                log.warning("engine memory cannot be read again (%s): %s", reason, error)
        else:
            metrics.g1_repairs.inc()
            log.info("engine memory: %d blocks known, read again for: %s", len(memory), reason)
            was_missing = False
