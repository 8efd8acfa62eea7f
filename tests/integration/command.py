# SPDX-License-Identifier: Apache-2.0
"""``kvcr ... --json`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMPONENTS = Path(__file__).parents[2] / "components"


def kvcr(environment: Mapping[str, str], *words: str, code: int = 0) -> dict[str, Any]:
    """What it prints, with ``environment`` over ours; under ``error`` what it says when it prints nothing.
    It must end with ``code``."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcr.cli", *words, "--json"],
        env={**os.environ, "PYTHONPATH": str(COMPONENTS), **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr}
    return report
