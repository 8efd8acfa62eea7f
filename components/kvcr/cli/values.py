# SPDX-License-Identifier: Apache-2.0
"""What people give a command: numbers within their limits, and files that can be read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from kvcr.errors import ConfigError


def seconds(least: float) -> Callable[[str], float]:
    """For argparse: a time of at least so many seconds."""

    def read(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{word!r} must be a number of seconds, {least:g} or more")
        return value

    return read


def whole(least: int) -> Callable[[str], int]:
    """For argparse: a whole number of at least this."""

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{word!r} must be a whole number, {least} or more")
        return value

    return read


def text_of(path: str, what: str) -> str:
    """The text of a file that was named as ``what``, e.g. ``--token-file``. Raises ConfigError."""
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{what} {path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path!r} is no text in UTF-8: {error.reason}") from error
