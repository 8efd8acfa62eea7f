# SPDX-License-Identifier: Apache-2.0
"""Runs at the start of every Python process that vLLM starts: see :mod:`kvcr.vllm.torchvision_ops`.

Only puts a finder in front, which acts when torchvision is about to be imported. A ``sitecustomize`` further
down the path is run as if this one were not there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _BeforeTorchvision:
    """Finds nothing; declares torchvision's operators before somebody else finds it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            # A new list: whoever looks for the module right now goes through the old one, and would miss one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            from kvcr.vllm.torchvision_ops import declare_missing_operators

            declare_missing_operators()
        return None


def _run_next_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _BeforeTorchvision())
_run_next_sitecustomize()
