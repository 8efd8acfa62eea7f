# SPDX-License-Identifier: Apache-2.0
"""Console script ``kvcr``. What takes long to import comes when Ctrl-C is already an end like any other."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""What a shell reports for Ctrl-C; only before a graph starts, which ends with 0 on Ctrl-C."""

_LONGEST_WORD = 200
_OUTPUT_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit code: 0 done, 1 failed, 2 a setting is wrong."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        from kvcr.cli import commands
        from kvcr.errors import ConfigError, KvcrError

        try:
            code = commands.run(given)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
        except KvcrError as error:
            _complain(given, str(error))
            return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except BrokenPipeError:
        # Whoever reads has seen enough, as `kvcr ls | head` has. Nothing may be written when Python ends.
        _forget_output()
        return EXIT_FAILED
    except OSError as error:
        # Of a file that was named, the network, or a full disk. Others are faults of ours, to be seen whole.
        if error.filename is None and error.errno not in _OUTPUT_FAILS:
            raise
        _complain(given, f"{error.filename or 'cannot write'}: {error.strerror}")
        if error.filename is None:
            _forget_output()
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _complain(given: Sequence[str], told: str) -> None:
    """On stderr, with what somebody gave by mistake, such as a whole prompt for a name, cut short."""
    words = (word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}..." for word in told.split(" "))
    print(f"kvcr {given[0] if given else ''}: {' '.join(words)}", file=sys.stderr)


def _forget_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
