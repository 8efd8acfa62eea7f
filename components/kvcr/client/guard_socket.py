# SPDX-License-Identifier: Apache-2.0
"""Where an engine finds its guard."""

from __future__ import annotations

from kvcr.config import EngineConfig


def find_socket(config: EngineConfig) -> str:
    """Path of the guard's socket. Without a configured one, a guard of our own is started if none runs.

    May take a second; called from connecting threads only. Raises GuardUnavailable, ConfigError.
    """
    if config.socket:
        return config.socket
    # Imported here: an engine beside a deployed guard never loads the guard's code.
    from kvcr.guard.spawn import ensure_guard

    return str(ensure_guard(config))
