# SPDX-License-Identifier: Apache-2.0
"""When a guard has nothing to do, it compares the pool's directory with what it believes."""

from __future__ import annotations

import logging
import time

from kvcr.errors import PoolCorrupt
from kvcr.guard.meters import Meters
from kvcr.pool import Pool

log = logging.getLogger(__name__)

QUIET_S = 5.0
"""Checked once in each period as quiet as this: 53 ms of the authority thread for 200,000 blocks."""


class SelfCheck:
    """Belongs to the authority thread."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._busy_s = time.monotonic()
        self._done = False

    def busy(self) -> None:
        """Something happened: the quiet period begins anew."""
        self._busy_s = time.monotonic()
        self._done = False

    def tick(self, pool: Pool, now_s: float) -> None:
        if self._done or now_s - self._busy_s < QUIET_S:
            return
        self._done = True
        try:
            pool.check_invariants()
        except PoolCorrupt as error:
            # Told and not acted upon: every block is still verified before anybody uses it.
            log.critical("self-check: %s", error)
            self._meters.self_checks.inc(result="broken")
        else:
            self._meters.self_checks.inc(result="ok")
