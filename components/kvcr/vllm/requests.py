# SPDX-License-Identifier: Apache-2.0
"""What the connector in the scheduler remembers of each request, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvcr.vllm.chain import UNBOUNDED, RequestChain


@dataclass
class RequestState:
    """From ``on_new_request`` to ``request_finished``. State only: the scheduler's parts change it."""

    request: Any
    chain: RequestChain
    deadline_ms: float
    lease_wait_s: float
    saved: int = 0
    """Blocks before this one are saved, being saved, or were in the pool when looked at."""
    jobs: set[int] = field(default_factory=set)
    """Save jobs that workers have not finished."""
    queried: bool = False
    drops: int = 0
    """Number of the last drop in G1 that was carried out before this request began."""
    keep: int = UNBOUNDED
    """Blocks from here on are not saved, and leave G1 with the request: all blocks of a one-off turn, and
    those from an invalidated one on."""
    one_off: bool = False
    g1_hits: int | None = None
    """Blocks from the start that were in G1 when it was first scheduled: others' too."""
    offer: tuple[int, int] = (0, 0)
    """First block and number of blocks of the last answer to ``get_num_new_matched_tokens``."""
    loading_into: frozenset[int] = frozenset()
    """G1 blocks of a running load."""
    load_failed: bool = False
    spent: bool = False
    """Blocks that came for this request alone were loaded once, and are nowhere any more."""


@dataclass
class SchedulerCounters:
    """Since the last :meth:`kvcr.vllm.scheduler.ConnectorScheduler.take_counters`."""

    queried_blocks: int = 0
    asked_blocks: int = 0
    local_blocks: int = 0
    fetched_blocks: int = 0
    fetches: int = 0
    lease_timeouts: int = 0
    keyless_blocks: int = 0
    short_of_slots: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Hints and parts of hints that were not used, by reason"""
