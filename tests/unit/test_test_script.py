# SPDX-License-Identifier: Apache-2.0
"""What `scripts/test.sh` says at its end, and that every test module can be named in one call of pytest."""

from __future__ import annotations

import collections
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.waiting import until

ROOT = Path(__file__).resolve().parents[2]

# Says what pytest would have said of that stage, and as a library does, something more when it ends.
PYTEST = r"""#!/usr/bin/env bash
case "${@: -1}" in
tests/unit) echo '====== 3 passed in 0.10s ======' ;;
*) mkdir "${@: -2:1}/first" 2>/dev/null || { echo '====== 5 passed in 9.00s ======' && exit; }
cat <<'END'
E   ERROR is a word of the output
=========================== short test summary info ============================
FAILED tests/integration/test_a.py::test_one - assert 1 == 2
ERROR tests/integration/test_b.py::test_two - RuntimeError: no
============= 1 failed, 7 passed, 1 error in 61.20s (0:01:01) =============
END
esac
echo '2026-01-01 WARN library: goodbye'
[ "${@: -1}" = tests/unit ]
"""

# Ends at Ctrl-C in its own way, as pytest does.
PATIENT = """#!/usr/bin/env bash
sleep 60 &
trap 'kill $!; exit 2' INT
touch begun-$$
wait
"""


def put_scripts(directory: Path, python: str) -> None:
    """The script, and what it takes for the environment's Python."""
    (directory / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test.sh", directory / "scripts")
    (directory / "scripts" / "lint.sh").write_text("printf 'a.py:1 is too long\\n\\n'; exit 3\n")
    path = directory / ".venv" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(python)
    path.chmod(0o755)


def test_ctrl_c_ends_every_call_and_begins_no_other_stage(tmp_path: Path) -> None:
    put_scripts(tmp_path, PATIENT)
    with subprocess.Popen(
        ["bash", "scripts/test.sh", "unit", "lint"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "both calls have begun")
        os.killpg(run.pid, signal.SIGINT)
        # The pipe ends with the last process that holds it.
        said, _ = run.communicate(timeout=30)
    assert (run.returncode, "stage 2/2" in said) == (130, False)


def test_the_last_lines_name_what_failed(tmp_path: Path) -> None:
    put_scripts(tmp_path, PYTEST)
    done = subprocess.run(
        ["bash", "scripts/test.sh", "unit", "integration", "lint"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    end = done.stdout.partition("==== summary ====\n")[2].splitlines()
    unit, integration, *rest = [re.sub(r"\s+(\d+ s\s+)?", " ", line) for line in end]
    assert unit == "unit passed 3 passed in 0.10s; 3 passed in 0.10s"
    # Any of the three calls may have been the one that failed.
    assert sorted(integration.removeprefix("integration FAILED (1) ").split("; ")) == [
        "1 failed, 7 passed, 1 error in 61.20s (0:01:01)",
        "5 passed in 9.00s",
        "5 passed in 9.00s",
    ]
    assert rest == [
        "lint FAILED (3) a.py:1 is too long",
        "",
        "---- failed: integration ----",
        "FAILED tests/integration/test_a.py::test_one - assert 1 == 2",
        "ERROR tests/integration/test_b.py::test_two - RuntimeError: no",
        "",
        "---- failed: lint ----",
        "a.py:1 is too long",
    ]


def test_calls_that_share_run_each_module_once(tmp_path: Path) -> None:
    tests, claims = tmp_path / "tests", tmp_path / "claims"
    tests.mkdir()
    claims.mkdir()
    (tests / "test_begun_elsewhere.py").write_text("def test_fails():\n    assert False\n")
    (tests / "test_left.py").write_text("def test_one():\n    pass\n\ndef test_two():\n    pass\n")
    (claims / "test_begun_elsewhere.py").touch()
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--share", str(claims), str(tests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout
    assert (claims / "test_left.py").exists()


def test_no_two_test_modules_have_one_name() -> None:
    names = collections.Counter(path.name for path in (ROOT / "tests").glob("*/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == [], "pytest cannot import both in one call"
