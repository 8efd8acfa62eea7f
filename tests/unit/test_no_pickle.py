# SPDX-License-Identifier: Apache-2.0
"""Nothing that runs what it reads is used for anything that comes from outside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

COMPONENTS = Path(__file__).resolve().parents[2] / "components"
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "yaml.load", "torch.load"}


@pytest.mark.parametrize(
    "path", sorted(COMPONENTS.rglob("*.py")), ids=lambda path: str(path.relative_to(COMPONENTS))
)
def test_no_module_unpickles_or_evaluates(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in CALLS, f"{path}:{node.lineno}: {called}"
            assert called.rpartition(".")[2] not in ("recv_pyobj", "send_pyobj")
            continue
        else:
            continue
        assert not names & MODULES, f"{path}:{node.lineno}: {names & MODULES}"
