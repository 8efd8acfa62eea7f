# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcr.vllm.worker_main [flags of dynamo.vllm]``: stock ``dynamo.vllm``, importable on a CPU.

Declares torchvision's operators where they cannot load (see :mod:`kvcr.vllm.torchvision_ops`), then runs
``dynamo.vllm`` as ``__main__`` with the same arguments. Child processes of vLLM get the same through the
``vllm.general_plugins`` entry point; they never re-import this module, because multiprocessing does not
re-run a ``__main__`` of a package.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Replace this module by ``dynamo.vllm`` in the running process."""
    from kvcr.vllm.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    sys.argv[0] = "dynamo.vllm"
    runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
