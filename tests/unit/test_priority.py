# SPDX-License-Identifier: Apache-2.0
"""Going first is a wish: what the kernel refuses changes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from kvcr.guard.priority import go_first
if "unprivileged" in sys.argv:
    os.setuid(65534)
go_first(int(sys.argv[1]))
print(os.getpriority(os.PRIO_PROCESS, 0))
if os.path.exists("/proc/self/autogroup"):
    print(open("/proc/self/autogroup").read())
"""


def after(*arguments: str) -> list[str]:
    """What a process in a session of its own says of itself after ``go_first``: its niceness comes first."""
    command = [sys.executable, "-c", CODE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    return done.stdout.split()


def test_zero_leaves_everything() -> None:
    assert int(after("0")[0]) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_higher_value_needs_no_privilege() -> None:
    assert int(after("7")[0]) == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="needs CAP_SYS_NICE")
def test_the_session_goes_first_too() -> None:
    words = after("-3")
    assert words[0] == "-3"
    if len(words) > 1:
        assert words[-1] == "-3"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root first")
def test_without_the_privilege_nothing_happens() -> None:
    assert int(after("-10", "unprivileged")[0]) == os.getpriority(os.PRIO_PROCESS, 0)
