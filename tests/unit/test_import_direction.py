# SPDX-License-Identifier: Apache-2.0
"""Layers point one way. Read from the sources, so that a lazy import inside a function counts too."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPONENTS = Path(__file__).resolve().parents[2] / "components"

# Lower layers know nothing of higher ones. A module of kvcr belongs to the first entry that matches.
LAYERS = {
    "kvcr.pool": 1,
    "kvcr.transfer": 2,
    "kvcr.guard": 3,
    "kvcr.client": 4,
    "kvcr.api": 5,
    "kvcr.dynamo": 6,
    "kvcr.vllm": 6,
    "kvcr.graph": 7,
    "kvcr.cli": 8,
    "kvcr": 0,
}
# The only places of kvcr that may know the engine and the cluster.
OUTSIDERS = {
    "torch": ("kvcr.vllm",),
    "torchvision": ("kvcr.vllm",),
    "transformers": ("kvcr.vllm",),
    "vllm": ("kvcr.vllm",),
    "dynamo": ("kvcr.dynamo",),
    "nats": ("kvcr.dynamo",),
    "etcd3aio": ("kvcr.dynamo",),
    "etcd3": ("kvcr.dynamo",),
    "prometheus_client": ("kvcr.vllm", "kvcr.dynamo"),
    "yaml": ("kvcr.graph",),
}
# The guard loads its cluster thread when it is told to join one, and runs without it otherwise.
ALLOWED_UPWARD = {("kvcr.guard", "kvcr.dynamo")}


def module_name(path: Path) -> str:
    parts = path.relative_to(COMPONENTS).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names a file imports at run time, wherever in the file, with their lines."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            assert node.module is not None
            for alias in node.names:
                submodule = COMPONENTS / Path(*node.module.split("."), alias.name)
                is_module = submodule.is_dir() or submodule.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module, node.lineno


def layer(module: str) -> tuple[str, int]:
    for prefix, level in LAYERS.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return prefix, level
    raise AssertionError(module)


def sources(package: str) -> list[Path]:
    return sorted((COMPONENTS / package).rglob("*.py"))


@pytest.mark.parametrize("path", sources("kvcr"), ids=module_name)
def test_a_module_of_kvcr_imports_only_lower_layers(path: Path) -> None:
    mine = module_name(path)
    own_layer, own_level = layer(mine)
    for name, line in imports_of(path):
        root = name.split(".")[0]
        assert root != "router_hints", f"{path}:{line}: kvcr must not know the router"
        if root in OUTSIDERS:
            assert mine.startswith(OUTSIDERS[root]), f"{path}:{line}: {mine} must not import {root}"
        if root == "kvcr":
            other_layer, other_level = layer(name)
            allowed = other_level <= own_level or (own_layer, other_layer) in ALLOWED_UPWARD
            assert allowed, f"{path}:{line}: {mine} (layer {own_layer}) imports {name} (layer {other_layer})"


@pytest.mark.parametrize("path", sources("router_hints"), ids=module_name)
def test_the_router_knows_no_engine(path: Path) -> None:
    for name, line in imports_of(path):
        assert name.split(".")[0] not in ("torch", "vllm", "transformers"), f"{path}:{line}: imports {name}"
        assert not name.startswith(("kvcr.vllm", "kvcr.graph", "kvcr.cli")), f"{path}:{line}: imports {name}"


def test_importing_the_public_surface_loads_nothing_heavy() -> None:
    program = (
        "import sys, kvcr, kvcr.api, kvcr.pool\n"
        "heavy = {'torch', 'vllm', 'dynamo', 'nats', 'etcd3aio', 'nixl', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_guard_that_starts_imports_nothing_that_its_pool_does_not_need() -> None:
    """Its successor is waited for: what takes long to import comes after the pool is served, or never."""
    slow = {
        "asyncio",
        "dynamo",
        "email",
        "grpc",
        "http.server",
        "importlib.metadata",
        "nats",
        "nixl",
        "uvloop",
    }
    program = "import sys, kvcr.guard.__main__, kvcr.guard.authority; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(COMPONENTS)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert not slow & set(done.stdout.split())
