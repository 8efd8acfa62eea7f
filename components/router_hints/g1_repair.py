# SPDX-License-Identifier: Apache-2.0
"""Reads the view of engine memory when a router starts, and again when messages were lost. One event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from kvcr.errors import ProtocolError
from router_hints.g1 import EngineMemory
from router_hints.kv_events import G1Change
from router_hints.metrics import Metrics

log = logging.getLogger(__name__)

LOOK_S = 1.0
BEFORE_DUMP_S = 1.0
"""How long ``KvRouter`` may take to know what its engines said: it lags by 1 ms, 0.2 s at most (measured)."""
BETWEEN_S = 10.0
"""A dump is everything: not more often than this, whatever is lost."""


async def keep_repaired(
    memory: EngineMemory, dump: Callable[[], Awaitable[Iterable[G1Change]]], metrics: Metrics
) -> None:
    """Until cancelled."""
    complained, was_missing = "", False
    while True:
        await asyncio.sleep(LOOK_S)
        # What is missing twice in a row is not late but lost.
        missing = memory.missing()
        if missing and was_missing and not memory.wants_repair:
            memory.wants_repair = "a message was lost"
        was_missing = missing
        if not memory.wants_repair:
            continue
        reason = memory.wants_repair
        memory.begin_repair()
        try:
            await asyncio.sleep(BEFORE_DUMP_S)
            memory.repair(await dump())
        except ProtocolError as error:
            memory.abort_repair(reason)
            if complained != str(error):
                complained = str(error)
                log.warning("engine memory cannot be read again (%s): %s", reason, error)
        else:
            metrics.g1_repairs.inc()
            log.info("engine memory: %d blocks known, read again for: %s", len(memory), reason)
            was_missing = False
        await asyncio.sleep(BETWEEN_S)
