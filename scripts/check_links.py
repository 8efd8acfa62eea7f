# SPDX-License-Identifier: Apache-2.0
"""Check that every relative link in the project's Markdown files leads to a file, and to a heading there.

Usage: ``python scripts/check_links.py``. Looks at no network address.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The fragment names that GitHub gives to the headings of a document."""
    names: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(words)
    return names


def broken_links(document: Path) -> list[str]:
    """One message for each link of ``document`` that leads nowhere."""
    found: list[str] = []
    for target in _LINK.findall(_FENCE.sub("", document.read_text())):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        if not file.exists():
            found.append(f"{document.relative_to(ROOT)}: {target}: no such file")
        elif fragment and file.suffix == ".md" and fragment not in anchors(file.read_text()):
            found.append(f"{document.relative_to(ROOT)}: {target}: no such heading")
    return found


def main() -> None:
    """Exit with 1 and a line per broken link."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    documents = [ROOT / name for name in names if (ROOT / name).exists()]
    problems = [problem for document in documents for problem in broken_links(document)]
    for problem in problems:
        print(problem)
    print(f"{len(documents)} documents, {len(problems)} broken links")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
