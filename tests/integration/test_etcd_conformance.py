# SPDX-License-Identifier: Apache-2.0
"""Both etcd backends pass the same scenarios; etcd3 0.12.0 does so in the environment of its own pins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvcr.graph import infra
from tests.integration import etcd_scenarios

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def etcd3_python() -> str:
    """Python of the environment with etcd3 0.12.0, built when it is missing; failing to is a failure."""
    built = subprocess.run(
        ["bash", str(ROOT / "scripts" / "etcd3-env.sh")], capture_output=True, text=True, timeout=110
    )
    if built.returncode:
        pytest.fail(f"scripts/etcd3-env.sh ended with {built.returncode}:\n{built.stderr}")
    return built.stdout.split()[-1]


@pytest.mark.parametrize("scenario", etcd_scenarios.SCENARIOS)
def test_aio(scenario: str, tmp_path: Path) -> None:
    etcd_scenarios.run("aio", scenario, tmp_path)


@pytest.mark.parametrize("scenario", etcd_scenarios.SCENARIOS)
def test_etcd3(scenario: str, tmp_path: Path, etcd3_python: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "components"), str(ROOT)]),
        # Its environment has no server; it finds this one's.
        "PATH": os.pathsep.join([str(infra.etcd_binary().parent), os.environ["PATH"]]),
    }
    ran = subprocess.run(
        [etcd3_python, str(Path(etcd_scenarios.__file__)), "etcd3", scenario, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
