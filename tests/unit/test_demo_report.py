# SPDX-License-Identifier: Apache-2.0
"""What the demo says about what it saw, also when it saw nothing to be proud of."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
import re
import struct
import termios
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from demo import table
from demo.client import Answer
from demo.graph import Graph, GraphNotUp, Worker
from demo.metrics import Page, parse
from demo.observe import Seen, read_off
from demo.report import curl_line, show
from demo.scenes.failover import Scale, failover
from demo.scenes.share import Shared, share
from demo.table import waiting

BLOCK_SIZE = 32


def worker(label: str) -> Worker:
    return Worker(
        label=label,
        name=f"worker-{label}",
        pid=1,
        metrics_url=f"http://worker-{label}",
        instance_id=7,
        guard=f"guard-{label}",
        guard_metrics_url=f"http://guard-{label}",
        pool_dir=Path("/dev/shm/nowhere"),
    )


A, B = worker("A"), worker("B")
GRAPH = Graph(Path("/run"), 3, "http://127.0.0.1:8000", "smol", "dynamo", "nats://x", "http://r", (A, B), 32)


def answer(text: str, ttft_s: float, cached_tokens: int) -> Answer:
    return Answer(text, ttft_s, ttft_s + 1, 2000, cached_tokens, 8, "id")


def pages(**texts: str) -> dict[str, Page]:
    return {w.guard_metrics_url: parse(texts.get(w.label, "")) for w in (A, B)}


PULLED = {
    "B": 'kvcr_pulled_blocks_total{transport="shm"} 62\nkvcr_pulled_bytes_total{transport="shm"} 91422720\n'
    "kvcr_pull_seconds_sum 0.118\nkvcr_deposited_blocks_total 1\n",
    "A": 'kvcr_served_blocks_total{transport="shm"} 62\nkvcr_served_bytes_total{transport="shm"} 91422720\n',
}


def scene() -> Shared:
    cold = read_off(GRAPH, A, answer("Biscuit.", 5.75, 0), pages(A="kvcr_deposited_blocks_total 62\n"))
    turn = read_off(GRAPH, A, answer("Marigold.", 0.5, 1984), pages())
    pulled = read_off(GRAPH, B, answer("Biscuit.", 0.49, 1984), pages(**PULLED))
    return Shared(cold, turn, pulled)


def shown(result: Shared) -> str:
    out = io.StringIO()
    show(GRAPH, result, out)
    return out.getvalue()


def test_counters_become_tokens_by_where_they_came_from() -> None:
    pulled = scene().pulled
    assert (pulled.computed_tokens, pulled.own_tokens, pulled.pulled_tokens) == (16, 0, 1984)
    assert (pulled.source, pulled.transport, pulled.pull_s) == (A, "shm", 0.118)
    assert scene().sides_agree
    follow_up = scene().follow_up
    assert (follow_up.computed_tokens, follow_up.own_tokens, follow_up.pulled_tokens) == (16, 1984, 0)


def test_the_page_has_every_figure() -> None:
    page = shown(scene())
    for figure in ("1984 from A", "91.4 MB", "5.75 s", "490 ms", "11.7x", "identical: yes", "bytes: yes"):
        assert figure in page
    assert page.count("\n  1. ") == page.count("\n  2. ") == page.count("\n  3. ") == 1


def on_a_terminal(columns: int, write: Callable[[TextIO], None]) -> list[str]:
    """The lines that a terminal of so many columns is sent."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with os.fdopen(theirs, "w") as out:
        write(out)
        out.write("\0")
    text = b""
    while not text.endswith(b"\0"):
        text += os.read(ours, 65536)
    os.close(ours)
    return re.sub(r"\x1b\[\d*m", "", text.decode()[:-1]).splitlines()


def test_a_terminal_of_80_columns_breaks_no_cell_and_no_word() -> None:
    lines = on_a_terminal(80, lambda out: show(GRAPH, scene(), out))
    assert max(map(len, lines)) <= 80
    assert "document on B     2000        16          -  1984 from A       490 ms     11.7x" in lines
    assert " ".join(" ".join(lines).split()) == " ".join(shown(scene()).split())


def test_in_a_narrow_terminal_the_widest_cells_go_on_below_themselves() -> None:
    row = ("a fork of main", "63 blocks to B", "1 s")
    lines = on_a_terminal(24, lambda out: table.print_table("title", ("signal", "moved", "t"), [row], out))
    assert lines[1:] == [
        "signal        moved    t",
        "────────  ─────────  ───",
        "a fork    63 blocks  1 s",
        "of main        to B",
        "",
    ]


def test_another_answer_is_not_hidden() -> None:
    result = scene()
    wrong = dataclasses.replace(result.pulled, answer=answer("Rex.", 0.49, 1984))
    page = shown(dataclasses.replace(result, pulled=wrong))
    assert "identical: NO" in page
    assert "ANOTHER ANSWER" in page


def test_a_pull_that_did_not_happen_is_said() -> None:
    result = scene()
    nothing: Seen = read_off(GRAPH, B, answer("Biscuit.", 5.5, 0), pages())
    page = shown(dataclasses.replace(result, pulled=nothing))
    assert "nothing was shared" in page
    assert "/run" in page


def test_the_curl_line_is_one_shell_command() -> None:
    line = curl_line(GRAPH)
    assert line.startswith("curl -s http://127.0.0.1:8000/v1/chat/completions ")
    assert line.count("'") == 4


@pytest.mark.parametrize("play", [share, failover])
def test_a_scene_on_a_graph_with_one_worker_says_that_it_needs_two(play: Callable[..., object]) -> None:
    alone = dataclasses.replace(GRAPH, workers=(A,))
    arguments = (waiting,) if play is share else (Scale(), print, waiting)
    with pytest.raises(GraphNotUp, match=r"two workers; the graph in /run has 1"):
        play(alone, *arguments)


def test_sizes_and_durations_are_for_people() -> None:
    assert [table.size(n) for n in (12, 1500, 91_422_720, 2e9)] == ["12 B", "1.5 kB", "91.4 MB", "2.0 GB"]
    assert [table.seconds(s) for s in (0.0424, 5.753)] == ["42 ms", "5.75 s"]
