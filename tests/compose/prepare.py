# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.compose.prepare``: what the stage needs from the network, once, before it has none."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from kvcr.errors import KvcrError
from kvcr.graph.models import SMOLLM2, cache_dir, ensure_model

PACKAGES = (
    *("ca-certificates", "python3.11-venv", "python3-distutils", "python3.11-dev"),
    # For the image that the Dockerfile builds on.
    *("g++", "libc6-dev"),
    # What the Dockerfile installs, which it cannot without a network.
    "libnuma1",
)
"""of the stand-ins for the images that ours is made from"""
PROMETHEUS = "prometheus"
"""Debian's own, for its stand-in"""
DEBOOTSTRAP_TIMEOUT_S = 600


def root_filesystem() -> Path:
    """Where :func:`main` leaves a Debian 12 with :data:`PACKAGES` and :data:`PROMETHEUS`."""
    digest = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()
    return cache_dir() / "compose" / f"debian-12-{digest[:8]}"


def main() -> int:
    try:
        ensure_model(SMOLLM2)
    except KvcrError as error:
        print(error, file=sys.stderr)
        return 1
    root = root_filesystem()
    if root.exists():
        return 0
    print(f"a Debian for the images: debootstrap into {root}, once", file=sys.stderr, flush=True)
    part = root.with_name(root.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    include = ",".join((*PACKAGES, PROMETHEUS))
    command = ["debootstrap", "--variant=minbase", f"--include={include}", "bookworm", str(part)]
    with (root.parent / "debootstrap.log").open("wb") as log:
        # Its last step, configuring, may fail for packages that are only unpacked here and never started.
        subprocess.run(command, stdout=log, stderr=log, timeout=DEBOOTSTRAP_TIMEOUT_S, check=False)
    missing = [name for name in ("python3.11", "g++", "prometheus") if not (part / "usr/bin" / name).exists()]
    if missing:
        print(f"debootstrap left no {', '.join(missing)}; see {log.name}", file=sys.stderr)
        return 1
    shutil.rmtree(part / "var/cache/apt")
    part.rename(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
