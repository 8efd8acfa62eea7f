# SPDX-License-Identifier: Apache-2.0
"""Warnings about what strangers send: whoever can send much must not be able to fill the log."""

from __future__ import annotations

import logging
import time

EVERY_S = 1.0


class Rarely:
    """Logs at most one warning in :data:`EVERY_S` seconds, and says how many it kept back. One thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last_s = -EVERY_S
        self._kept_back = 0

    def warning(self, message: str, *arguments: object) -> None:
        """As :meth:`logging.Logger.warning`."""
        now_s = time.monotonic()
        if now_s - self._last_s < EVERY_S:
            self._kept_back += 1
            return
        more = f" (and {self._kept_back} like it before)" if self._kept_back else ""
        self._last_s, self._kept_back = now_s, 0
        self._log.warning(message + more, *arguments)
