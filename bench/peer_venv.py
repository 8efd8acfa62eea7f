# SPDX-License-Identifier: Apache-2.0
"""The environment of NVIDIA's kvcr, which benchmarks run beside ours: its own interpreter and its own NIXL.

It pins other versions than we do, so it never shares our ``.venv``. Built at first use, with network and
pip, under the user's cache directory; used again afterwards.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from bench._common import say

VERSION = "0.1.1"
PINS = ("nixl==1.5.0", "nixl-cu12==1.5.0", "numpy", "msgspec", "pyzmq<28", f"kvcr=={VERSION}")
"""Installed with ``--no-deps``: the nixl wheels declare torch, and need none."""

_PIP_S = 900.0


class PeerUnavailable(Exception):
    """The environment could not be built; the message says why, and belongs beside the missing figures."""


def interpreter() -> Path:
    """The Python that has NVIDIA's kvcr; builds its environment when there is none yet (about a minute).

    Safe from several processes at a time: the first builds, the others wait. Raises
    :class:`PeerUnavailable`.
    """
    home = _cache() / f"kvcr-{VERSION}-py{sys.version_info[0]}.{sys.version_info[1]}"
    python, stamp = home / "bin/python", home / ".built-from"
    wanted = hashlib.sha256("\n".join(PINS).encode()).hexdigest()
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with open(home.with_suffix(".lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not (python.exists() and stamp.exists() and stamp.read_text() == wanted):
                _build(home, python)
                stamp.write_text(wanted)
    except OSError as error:
        raise PeerUnavailable(f"no environment for kvcr {VERSION} in {home}: {error}") from error
    return python


def environment() -> dict[str, str]:
    """Variables for its processes: ours, without our paths, and with NIXL's chatter off."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {"NIXL_LOG_LEVEL": "ERROR"} | {k: v for k, v in os.environ.items() if k not in dropped}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcr/bench"


def _build(home: Path, python: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    say(f"building the environment of NVIDIA kvcr {VERSION} in {home} (once, about a minute)")
    venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", *PINS]
    try:
        done = subprocess.run(pip, stdout=sys.stderr, timeout=_PIP_S, env=environment(), check=False)
    except subprocess.TimeoutExpired as error:
        raise PeerUnavailable(f"{' '.join(pip)} took more than {_PIP_S:g} s; is there a network?") from error
    if done.returncode:
        raise PeerUnavailable(f"{' '.join(pip)} ended with {done.returncode}; its words are on stderr")


if __name__ == "__main__":
    print(interpreter())
