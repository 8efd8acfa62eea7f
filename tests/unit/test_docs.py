# SPDX-License-Identifier: Apache-2.0
"""What the documents name is there: commands with their flags, metrics, benchmarks, tests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcr.cli.commands import _split_overrides, parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "reference" not in path.parts),
]
every_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)).removeprefix("docs/")
)
OTHERS = {"--shm-size", "--no-deps", "--kvcr", "--no-password"}
"""Flags of Docker, pip and etcd, and the switch of a graph."""
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")


def commands(text: str, program: str) -> Iterator[list[str]]:
    """Words of each call of ``program`` in the code blocks; ``\\`` at the end of a line continues it."""
    for block in _FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s&&\s|;\s|\s\|\s", line.removeprefix("$ ")):
                part = re.sub(r"\s#\s.*|…", "", part).strip()
                if part.startswith(program + " "):
                    yield shlex.split(part.removeprefix(program))


def spans(text: str) -> list[str]:
    return _SPAN.findall(_FENCE.sub("", text))


@every_document
def test_every_kvcr_command_is_one(path: Path) -> None:
    for words in commands(path.read_text(), "kvcr"):
        plain, _ = _split_overrides(words) if words[0] == "serve" else (words, [])
        # Exits with the error of argparse.
        parser().parse_args(plain)
    helps = parser().format_help()
    for span in spans(path.read_text()):
        if span.startswith("kvcr ") and "|" not in span:
            name = span.split()[1]
            assert re.search(rf"^    {name}\b", helps, re.MULTILINE), f"{span}: no command {name}"


@every_document
def test_every_flag_is_one(path: Path) -> None:
    tables = [
        *(ROOT / "docs/reference").glob("cli.md"),
        *(ROOT / "components/kvcr/graph/flags").glob("*.txt"),
    ]
    known = set(re.findall(r"--[a-zA-Z][\w-]+", "\n".join(table.read_text() for table in tables))) | OTHERS
    text = path.read_text()
    for program in ("python -m kvcr.guard", "python -m router_hints"):
        for words in commands(text, program):
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert flags <= known, f"{program}: {flags - known}"
    # Flags of other programs are told as such: etcd's `--name`.
    for span in re.findall(r"(?<!'s )`(--[^`\n]+)`", _FENCE.sub("", text)):
        flag = re.split(r"[ =.]", span)[0]
        assert flag in known, f"{span}; if it is another program's, say so: etcd's `{flag}`"


@every_document
def test_every_metric_exists(path: Path) -> None:
    reference = (ROOT / "docs/reference/metrics.md").read_text()
    known = set(re.findall(r"`((?:vllm:)?kvcr_\w+)`", reference))
    for span in spans(path.read_text()):
        for name in re.findall(r"(?:vllm:)?(?<![.\w])kvcr_[a-z0-9_]+", span):
            bare = re.sub(r"_(bucket|count|sum)$", "", name)
            assert {name, bare} & known, f"{name} is no metric"


@every_document
def test_every_benchmark_and_every_file_of_ours_exists(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\bNAME=(\w+)", text) + re.findall(r"python -m bench\.(\w+)", text):
        assert (ROOT / f"bench/{name}.py").exists() or name == "x", f"bench {name}"
    for span in spans(text):
        if re.fullmatch(r"(?:tests|scripts|deploy|components|demo|docs|bench)/[\w./-]+", span):
            assert (ROOT / span).exists(), f"{span} is not there"
        elif re.fullmatch(r"test_\w+\.py", span):
            assert list((ROOT / "tests").rglob(span)), f"{span} is not there"


def test_every_picture_is_small_and_shown_somewhere() -> None:
    shown = "\n".join(path.read_text() for path in DOCUMENTS)
    pictures = sorted((ROOT / "docs").rglob("*.svg"))
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < 300_000, picture
        assert f"{picture.name})" in shown, f"{picture} is in no document"
