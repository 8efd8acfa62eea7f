# SPDX-License-Identifier: Apache-2.0
"""What `scripts/test.sh` says at its end, and that every test module can be named in one call of pytest."""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Says what pytest would have said of that stage, and as a library does, something more when it ends.
PYTEST = r"""#!/usr/bin/env bash
case "${@: -1}" in
tests/unit) echo '====== 3 passed in 0.10s ======' ;;
tests/integration) case $* in *"--half 2"*) echo '====== 5 passed in 9.00s ======' && exit; esac ;;&
*) cat <<'END'
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


def test_the_last_lines_name_what_failed(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "lint.sh").write_text("printf 'a.py:1 is too long\\n\\n'; exit 3\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTEST)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "scripts/test.sh", "unit", "integration", "lint"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    end = done.stdout.partition("==== summary ====\n")[2].splitlines()
    assert [re.sub(r"\s+(\d+ s\s+)?", " ", line) for line in end] == [
        "unit passed 3 passed in 0.10s",
        "integration FAILED (1) 1 failed, 7 passed, 1 error in 61.20s (0:01:01); 5 passed in 9.00s",
        "lint FAILED (3) a.py:1 is too long",
        "",
        "---- failed: integration ----",
        "FAILED tests/integration/test_a.py::test_one - assert 1 == 2",
        "ERROR tests/integration/test_b.py::test_two - RuntimeError: no",
        "",
        "---- failed: lint ----",
        "a.py:1 is too long",
    ]


def test_no_two_test_modules_have_one_name() -> None:
    names = collections.Counter(path.name for path in (ROOT / "tests").glob("*/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == [], "pytest cannot import both in one call"
