# SPDX-License-Identifier: Apache-2.0
"""What runs first in the processes that vLLM starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcr.vllm

SITE = Path(kvcr.vllm.__file__).with_name("child_site") / "sitecustomize.py"


def test_the_finder_before_torchvision_has_no_other_finder_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("child_site", SITE)
    assert spec is not None
    assert spec.loader is not None
    asked: list[str] = []

    class Next:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            asked.append(name)

    monkeypatch.setattr(sys, "meta_path", [Next(), *sys.meta_path])
    monkeypatch.setattr("kvcr.vllm.torchvision_ops.declare_missing_operators", lambda: None)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    importlib.util.find_spec("torchvision")
    assert "torchvision" in asked


@pytest.mark.parametrize(
    "code",
    [
        "from kvcr.vllm.torchvision_ops import declare_missing_operators as go; go(); import torchvision",
        "import torchvision; from kvcr.vllm.torchvision_ops import declare_missing_operators as go; go()",
        "import sys; sys.modules['torch'] = None; import importlib.util as u; u.find_spec('torchvision')",
    ],
    ids=["asked for first", "imported first", "without torch"],
)
def test_it_runs_in_every_process_of_the_environment(code: str) -> None:
    pytest.importorskip("torch")
    path = os.pathsep.join([str(SITE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
