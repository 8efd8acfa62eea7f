# SPDX-License-Identifier: Apache-2.0
"""docs/security.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs/security.md").read_text().splitlines()
    if re.search(r"`test_|`tests/", line)
]


@pytest.mark.parametrize("row", ROWS)
def test_every_test_that_the_page_names_exists(row: str) -> None:
    file = ""
    for name in re.findall(r"`((?:tests/|test_\w+\.py|::)[^`]*)`", row):
        module, _, test = name.partition("::")
        file = module or file
        found = [ROOT / file] if file.startswith("tests/") else list((ROOT / "tests").rglob(file))
        assert any(path.exists() for path in found), f"no {file}"
        if test:
            assert any(f"def {test}(" in path.read_text() for path in found), f"no {test} in {file}"
