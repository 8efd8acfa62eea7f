# SPDX-License-Identifier: Apache-2.0
"""``kvcr doctor``: outcomes, exit code, JSON; and the clash with NVIDIA's distribution."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcr.cli import doctor, doctor_deployment
from kvcr.cli.doctor import Check, Outcome
from kvcr.cli.main import main


@pytest.fixture
def foreign_environment(tmp_path: Path) -> Path:
    """A directory on the path in which a distribution named ``kvcr`` is installed."""
    metadata = tmp_path / "kvcr-0.1.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcr\nVersion: 0.1.1\n")
    return tmp_path


def python(program: str, *path: Path) -> subprocess.CompletedProcess[str]:
    components = Path(__file__).resolve().parents[2] / "components"
    code = f"import sys; sys.path[:0] = {[str(p) for p in (components, *path)]!r}\n{program}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_this_environment_is_healthy_and_json_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_nixl", lambda: Check("nixl", Outcome.OK, "skipped"))
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert report["versions"]["msgspec"]
    assert {"distribution", "core", "native", "/dev/shm", "CMA", "memlock"} <= {
        c["name"] for c in report["checks"]
    }


def test_a_warning_leaves_the_exit_code_alone_and_a_failure_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_nixl", lambda: Check("nixl", Outcome.WARN, "not installed"))
    assert main(["doctor"]) == 0
    monkeypatch.setattr(doctor, "check_nixl", lambda: Check("nixl", Outcome.FAIL, "no agent starts"))
    assert main(["doctor"]) == 1
    assert "no agent starts" in capsys.readouterr().out


def test_a_missing_core_package_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "xxhash" else "1")
    check = doctor.check_core()
    assert check.outcome is Outcome.FAIL
    assert "pip install xxhash" in check.detail


def test_nvidias_distribution_is_reported_at_import_once(foreign_environment: Path) -> None:
    done = python("import kvcr, importlib; import kvcr.errors", foreign_environment)
    assert done.returncode == 0
    assert done.stderr.count("kvcr: WARNING: NVIDIA's distribution 'kvcr' 0.1.1") == 1
    assert "RuntimeWarning" in done.stderr
    assert "pip uninstall -y kvcr" in done.stderr


def test_nvidias_distribution_fails_the_doctor(foreign_environment: Path) -> None:
    program = "from kvcr.cli import doctor; c = doctor.check_distribution(); print(c.outcome, c.detail)"
    done = python(program, foreign_environment)
    assert done.stdout.startswith("fail NVIDIA's distribution")


def test_without_it_the_import_is_silent() -> None:
    assert python("import kvcr").stderr == ""


def test_import_is_fast() -> None:
    program = "import time; t = time.process_time(); import kvcr; print(time.process_time() - t)"
    assert min(float(python(program).stdout) for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    ("headers", "chains", "unsalted", "outcome", "said"),
    [
        ([""], 0, 0, Outcome.WARN, "all requests are one tenant"),
        ([""], 3, 3, Outcome.WARN, "all requests are one tenant"),
        (["x-dynamo-meta-t", ""], 3, 1, Outcome.WARN, "1 of 3 chains"),
        (["x-dynamo-meta-t"], 3, 1, Outcome.OK, "a gateway's x-dynamo-meta-t"),
        ([], 0, 0, Outcome.OK, "no router of ours"),
        ([], 2, 0, Outcome.OK, "all 2 chains carry a salt"),
        ([], 2, 2, Outcome.WARN, "all requests are one tenant"),
    ],
)
def test_tenants_that_nobody_vouches_for_are_reported(
    headers: list[str], chains: int, unsalted: int, outcome: Outcome, said: str
) -> None:
    routers = {f"router-{n}": {"tenant_header": header} for n, header in enumerate(headers)}
    check = doctor_deployment.check_tenants(routers, chains, unsalted)
    assert (check.outcome, said in check.detail) == (outcome, True), check
    assert (outcome is Outcome.WARN) == ("--tenant-header" in check.detail), "one advice, where it is needed"


def test_a_check_that_takes_too_long_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHILD_TIMEOUT_S", 0.01)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _name: object())
    check = doctor.check_nixl()
    assert (check.outcome, "no answer within 0.01 s" in check.detail) == (Outcome.WARN, True)


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="needs a NIXL wheel")
def test_the_extra_nixl_is_enough_for_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # dynamo-kvcr[nixl] installs nixl-cu12, and no package of the name nixl.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['nixl'] = None\n")
    components = Path(__file__).resolve().parents[2] / "components"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, components))))
    check = doctor.check_nixl()
    assert check.outcome is Outcome.OK, check.detail
    assert "UCX" in check.detail


def test_an_engine_without_a_compiler_is_reported_before_its_first_sampled_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    check = doctor.check_engine()
    assert check.outcome is Outcome.WARN
    assert "/nowhere/g++" in check.detail
    assert "apt install g++" in check.detail
