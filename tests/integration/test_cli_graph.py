# SPDX-License-Identifier: Apache-2.0
"""``kvcr`` beside a graph of ``kvcr serve`` whose engines compute nothing, as its user has it: with nothing
but the variable of the cache, on a terminal of 80 columns, and with mistakes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from demo.graph import Graph, load, serve
from tests.integration.test_demo_failover import graph_file

pytestmark = pytest.mark.timeout(300)

__all__ = ["graph_file"]

COMPONENTS = Path(__file__).parents[2] / "components"
TOKEN = "0123456789-of-the-tests"
SESSION = "3300bace-660c-4f21-979c-7f2b12345678"


class Cli:
    def __init__(self, cache: Path) -> None:
        unset = ("ETCD_ENDPOINTS", "NATS_SERVER", "DYN_NAMESPACE", "COLUMNS", "KVCR_ROUTER_URL")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        self.environment = {**kept, "PYTHONPATH": str(COMPONENTS), "KVCR_CACHE": str(cache)}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvcr.cli", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def json(self, *words: str, code: int = 0) -> Any:
        done = self(*words, "--json")
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def on_terminal(self, *words: str) -> list[str]:
        """The lines on one whose width nobody set: 80 columns."""
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "kvcr.cli", *words]
        with subprocess.Popen(command, env=self.environment, stdout=theirs, stderr=subprocess.PIPE) as kvcr:
            os.close(theirs)
            shown = b""
            while True:
                try:
                    part = os.read(ours, 1 << 16)
                except OSError:  # how a terminal says that the other side is closed
                    break
                if not part:
                    break
                shown += part
            assert kvcr.stderr is not None
            told = kvcr.stderr.read().decode().splitlines()
            assert not [line for line in told if not line.startswith(f"kvcr {words[0]}: waiting for ")], told
        os.close(ours)
        assert kvcr.returncode == 0, shown
        return shown.decode().splitlines()


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def graph(graph_file: Path, cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    """Where one session has run."""
    run_dir = tmp_path_factory.mktemp("graph") / "run"
    tokens = run_dir.parent / "tokens"
    tokens.write_text(f"{TOKEN}\nanother-token-of-acme acme\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCR_CACHE", cli.environment["KVCR_CACHE"])
        running = serve(
            run_dir,
            graph_file,
            ["--Guard.pool-bytes=64MiB", f"--Router.signals-token-file={tokens}"],
            quiet=True,
        )
    try:
        graph = load(run_dir)
        _ask(graph)
        until(lambda: cli("ls").returncode == 0, "the blocks are listed")
        yield graph
    finally:
        running.stop()


def _ask(graph: Graph) -> None:
    message = {"role": "user", "content": "A prompt of some blocks. " * 30}
    body = {"model": graph.model, "max_tokens": 4, "messages": [message]}
    headers = {"content-type": "application/json", "x-dynamo-session-id": SESSION}
    url = f"{graph.frontend_url}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60):
        pass


@pytest.mark.parametrize(
    "words",
    [["status"], ["ls"], ["explain"], ["mode"], ["doctor"], ["top", "--count", "1", "--every", "0.2"]],
    ids=lambda words: words[0],
)
def test_it_fits_a_terminal_of_80_columns(cli: Cli, graph: Graph, words: list[str]) -> None:
    lines = cli.on_terminal(*words)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80, lines


def test_what_is_on_a_pipe_has_a_line_for_each_row(cli: Cli, graph: Graph) -> None:
    (row,) = [line for line in cli("ls").stdout.splitlines() if SESSION in line]
    assert {"guard-0", "guard-1"} & set(row.split())


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (None, "give its token with --token-file"),
        ("wrong-token", "it knows another than that in"),
        ("another-token-of-acme", "no session"),
        ("two words", "must have one token and nothing else; it has 2 words"),
        ("", "it has 0 words"),
    ],
)
def test_the_signals_api_says_nothing_to_who_has_no_token_of_this_tenant(
    cli: Cli, graph: Graph, tmp_path: Path, tokens: str | None, told: str
) -> None:
    (tmp_path / "token").write_text(tokens or "")
    done = cli("pin", SESSION, *(() if tokens is None else ("--token-file", str(tmp_path / "token"))))
    assert done.returncode in (1, 2)
    assert (done.stdout, told in done.stderr) == ("", True), done.stderr
    assert TOKEN not in done.stderr


def test_blocks_that_stay_are_no_success(cli: Cli, graph: Graph, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    token = ("--token-file", str(tmp_path / "token"))
    pinned = cli.json("pin", SESSION, *token)
    (holder,) = {action["guard"] for action in pinned["actions"]}
    dropped = cli.json("invalidate", SESSION, *token, code=1)
    assert {a["guard"]: a["result"] for a in dropped["actions"]}[holder] == "partial"
    both = cli("move", SESSION, "--to", holder, "--source", holder, *token)
    assert (both.returncode, both.stderr) == (
        2,
        f"kvcr move: --to and --source are both {holder!r}: name two guards\n",
    )
    cli("unpin", pinned["plan_id"])


def test_a_drained_worker_is_shown_with_how_to_end_it(cli: Cli, graph: Graph) -> None:
    assert cli("drain", "guard-1").returncode == 0
    worker = cli.json("status")["draining"]
    assert list(worker.values()) == ["guard-1"]
    assert f"worker {next(iter(worker))} is drained" in cli("status").stdout
    assert cli("drain", "guard-1", "--undo").returncode == 0
    assert "drained" not in cli("status").stdout


def test_a_prompt_that_is_too_short_to_be_kept_is_told(cli: Cli, graph: Graph) -> None:
    done = cli("where", "short", "--raw")
    assert done.returncode == 1
    assert "the prompt has 5 tokens; what is shorter than a block (32) is not kept" in done.stderr


def test_a_secret_of_another_deployment_finds_nobody(cli: Cli, graph: Graph, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("another secret, as long as any other")
    done = cli("ls", "--secret-file", str(tmp_path / "secret"))
    assert done.returncode == 1
    assert "2 guard(s) registered in namespace dynamo, none is believed" in done.stderr
    assert "--secret-file" in done.stderr


def test_a_graph_that_has_ended_is_told(cli: Cli, tmp_path: Path) -> None:
    state = {"id": "agg-123456", "state": "stopped", "pid": os.getpid(), "etcd": "http://127.0.0.1:9"}
    (tmp_path / "graph.json").write_text(json.dumps(state))
    done = cli("status", "--run-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"--run-dir {tmp_path}: its graph, agg-123456, has ended" in done.stderr
