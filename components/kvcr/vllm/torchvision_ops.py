# SPDX-License-Identifier: Apache-2.0
"""Make torchvision importable when its compiled operators do not fit the installed torch.

The torchvision wheel on PyPI is linked against CUDA. Beside a CPU-only torch its library does not load,
and ``import torchvision`` then fails while attaching shape functions to two operators nobody declared.
vLLM and Dynamo import torchvision through transformers' image processors without ever calling those
operators, so declaring them is enough. Nothing happens where the library loads, and a call to a declared
operator still ends in torchvision's own "Couldn't load custom C++ ops".

Entry point ``kvcr_torchvision`` in the group ``vllm.general_plugins`` and :mod:`kvcr.vllm.worker_main`, in
front of ``dynamo.vllm``, run it; the processes vLLM starts then do so by themselves.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

# Schemas as torchvision's own library declares them.
_DECLARATIONS = {
    name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
}

# torch drops the declarations when the Library object goes away.
_keep: list[Any] = []


def declare_missing_operators() -> bool:
    """Declare torchvision's operators if they cannot be loaded; True when this call declared them.

    Must run before the first ``import torchvision`` of a process. Cheap when torch is already imported,
    imports torch otherwise. Safe to call again, from any thread that holds the import of vLLM.
    """
    if _keep or "torchvision" in sys.modules:
        return False
    spec = importlib.util.find_spec("torchvision")
    # Looking for it is what the finder of child_site waits for: it has been here by now.
    if _keep or spec is None or not spec.submodule_search_locations:
        return False

    try:
        import torch
    except ImportError:
        return False
    if _library_loads(torch, Path(next(iter(spec.submodule_search_locations)))):
        return False
    library = torch.library.Library("torchvision", "DEF")
    for schema in _DECLARATIONS.values():
        library.define(schema)
    _keep.append(library)
    _tell_children()
    return True


def _tell_children() -> None:
    """Have processes started from here do the same before they import torchvision.

    vLLM's children (engine core and workers, which are spawned on a CPU, and the interpreter that inspects
    model classes) import torchvision while unpickling their arguments, long before any plugin runs. So the
    path they inherit starts with a ``sitecustomize``.
    """
    site = str(Path(__file__).with_name("child_site"))
    path = os.environ.get("PYTHONPATH", "")
    if site not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, path]))


def _library_loads(torch: Any, package: Path) -> bool:
    """Load torchvision's operator library the way torchvision does, and say whether it worked."""
    for library in sorted(package.glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))
        except (OSError, ImportError):
            continue
        return True
    return False
