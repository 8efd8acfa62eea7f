# SPDX-License-Identifier: Apache-2.0
"""The ``kvcr`` command line: overrides of graph keys, entries in the manner of ``dynamo serve``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcr.cli.commands import _split_overrides
from kvcr.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def test_overrides_are_taken_in_both_spellings_wherever_they_stand() -> None:
    words, pairs = _split_overrides(
        [
            "serve",
            "--Common.model=/m",
            "-f",
            "x.yaml",
            "--VllmWorker.ServiceArgs.workers",
            "4",
            "--print-plan",
        ]
    )
    assert words == ["serve", "-f", "x.yaml", "--print-plan"]
    assert pairs == [("Common.model", "/m"), ("VllmWorker.ServiceArgs.workers", "4")]


def test_a_value_may_have_blanks_and_equals_signs() -> None:
    _, pairs = _split_overrides(["serve", '--VllmWorker.kv-events-config={"a": "b = c"}'])
    assert pairs == [("VllmWorker.kv-events-config", '{"a": "b = c"}')]


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(SystemExit, match="has no value"):
        _split_overrides(["serve", "--Frontend.http-port"])


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(SystemExit) as error:
        main(["serve", "-f", "x.yaml", "--no-such-option"])
    assert error.value.code == 2


def test_a_graph_can_be_named_as_for_dynamo_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["serve", "graphs.agg:Frontend", "--print-plan"]) == 0
    assert "-m dynamo.frontend" in capsys.readouterr().out


def test_an_entry_that_the_graph_does_not_have_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["serve", "graphs.agg:Processor", "-f", "deploy/graphs/agg.yaml", "--print-plan"]) == 2
    assert "no component Processor" in capsys.readouterr().err


def test_a_missing_graph_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-f", "/no/such/graph.yaml"]) == 2
    assert "/no/such/graph.yaml does not exist" in capsys.readouterr().err


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["top", "--every", "nan"], "0.2 or more"),
        (["top", "--every", "0"], "0.2 or more"),
        (["top", "--count", "-1"], "0 or more"),
        (["ls", "--limit", "0"], "1 or more"),
        (["pin", "s", "--ttl-s", "-5"], "1 or more"),
        (["pin", "s", "--timeout-s", "inf"], "0.1 or more"),
        (["drain", "w", "--wait-s", "x"], "0 or more"),
        (["explain", "--last", "1.5"], "1 or more"),
    ],
    ids=" ".join,
)
def test_a_number_beyond_its_limit_is_named_with_the_limit(
    words: list[str], limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2
    told = capsys.readouterr().err
    assert f"argument {words[-2]}: {words[-1]!r}" in told
    assert limit in told


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    graph = str(ROOT / "deploy/graphs/agg.yaml")
    assert main(["graph", "render", "--to", "compose", graph, "-o", "/nowhere/compose.yaml"]) == 1
    assert capsys.readouterr().err == "kvcr graph: /nowhere/compose.yaml: No such file or directory\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "kvcr.cli", "config", "show"]
    kvcr = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert kvcr.stdout is not None
    kvcr.stdout.close()
    assert kvcr.stderr is not None
    assert kvcr.stderr.read() == ""
    kvcr.stderr.close()
    assert kvcr.wait() == 1


@pytest.mark.parametrize("words", [["version"], ["config", "show"]], ids=" ".join)
def test_a_full_disk_is_an_error_of_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvcr.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    told = f"kvcr {words[0]}: cannot write: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_long_value_that_is_wrong_is_not_repeated_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "x" * 100_000]) == 2
    assert len(capsys.readouterr().err) < 400


def test_a_pin_longer_than_a_day_is_refused_before_anybody_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["pin", "s", "--ttl-s", "1e9"]) == 2
    assert "--ttl-s is 1e+09; it must be from 1 to 86400 seconds" in capsys.readouterr().err
