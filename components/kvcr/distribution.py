# SPDX-License-Identifier: Apache-2.0
"""Who owns the import name ``kvcr`` in this environment.

This project is distributed as ``dynamo-kvcr`` and imported as ``kvcr``. NVIDIA publishes another project
as ``kvcr``, with the same import name. Installed side by side the two overwrite each other's files, and
which one a process gets depends on the order of installation; so the clash is reported, never ignored.
"""

from __future__ import annotations

import os
import sys
import warnings

DISTRIBUTION = "dynamo-kvcr"
FOREIGN_DISTRIBUTION = "kvcr"


def foreign_version() -> str | None:
    """Version of NVIDIA's ``kvcr`` distribution when it is installed here, else None."""
    # As importlib.metadata would find it, without the 50 ms that importing it takes: every process that
    # imports this package comes by here, and a guard that restarts is waited for.
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for name in names:
            project, separator, version = name.removesuffix(".dist-info").partition("-")
            if separator and name.endswith(".dist-info") and project == FOREIGN_DISTRIBUTION:
                return version
    return None


def clash_message(foreign: str) -> str:
    """What a user has to know and do when both are installed."""
    return (
        f"NVIDIA's distribution 'kvcr' {foreign} is installed beside '{DISTRIBUTION}'. Both own the import "
        f"name 'kvcr' and overwrite each other's files, so this process may run a mixture of the two. "
        f"Keep one: pip uninstall -y kvcr && pip install --force-reinstall --no-deps {DISTRIBUTION}"
    )


def warn_about_clash() -> None:
    """Once per process, at ``import kvcr``: a RuntimeWarning for tools, a line on stderr for people."""
    foreign = foreign_version()
    if foreign is None:
        return
    message = clash_message(foreign)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
    print(f"kvcr: WARNING: {message}", file=sys.stderr, flush=True)
