# SPDX-License-Identifier: Apache-2.0
"""Processes of another release: the same program, with other versions in it from its first import on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMPONENTS = Path(__file__).parents[2] / "components"


def environment(folder: Path, constants: Mapping[str, Any]) -> dict[str, str]:
    """For a process in which these hold, e.g. ``{"kvcr.protocol.engine.VERSION": 2}``.

    ``folder`` is written to: Python runs what it finds there before the program.
    """
    lines = ["import importlib"]
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        lines.append(f"setattr(importlib.import_module({module!r}), {constant!r}, {value!r})")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(COMPONENTS)])}
