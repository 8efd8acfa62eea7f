# SPDX-License-Identifier: Apache-2.0
"""The load of the failover scene, and what its report makes of what was seen."""

from __future__ import annotations

import http.server
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo import __main__ as command
from demo import failover_report
from demo.client import Answer
from demo.failover_report import figures, phase_of, quantiles
from demo.graph import PIN_HEADER, Graph, Worker
from demo.load import Load, Outcome, Request, Session
from demo.observe import Seen
from demo.scenes.failover import Failover

Write = Callable[[bytes], None]


def worker(label: str, instance_id: int = 7) -> Worker:
    return Worker(label, f"worker-{label}", 1, "http://w", instance_id, "guard", "http://g", Path("/x"))


A, B = worker("A", 71), worker("B", 72)

TEXT = b'data: {"id": "r", "choices": [{"delta": {"content": "word "}}]}\n\n'
END = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
BROKEN = b'data: {"error": {"message": "the worker went away"}}\n\n'


@contextmanager
def serving(answers: list[Callable[[Write], None]]) -> Iterator[tuple[str, list[tuple[str | None, int]]]]:
    """A frontend that gives these answers, then the last one for ever; and who asked: pin, messages."""
    seen: list[tuple[str | None, int]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.headers.get(PIN_HEADER), len(body["messages"])))
            self.send_response(200)
            self.end_headers()
            answers[min(len(seen), len(answers)) - 1](self.wfile.write)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def good(write: Write) -> None:
    write(TEXT)
    write(TEXT)
    write(END)


def broken(write: Write) -> None:
    write(TEXT)
    write(BROKEN)


def played(url: str, silence_s: float, until: Callable[[Session], bool]) -> Session:
    graph = Graph(Path("/run"), 3, url, "smol", "dynamo", "nats://x", "http://r", (A, B), 32)
    session = Session(
        1, graph, A, variant=1, words=5, max_tokens=2, on_end=lambda _r: None, silence_s=silence_s
    )
    session.start()
    deadline_s = time.monotonic() + 20
    while not until(session) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    Load([session]).stop()
    assert until(session)
    return session


def test_a_broken_stream_is_counted_and_asked_again_wherever_the_router_likes() -> None:
    with serving([broken, good]) as (url, seen):
        session = played(url, 10.0, lambda s: sum(r.outcome is Outcome.OK for r in s.requests) >= 2)
    first, second, third = session.requests[:3]
    assert (first.outcome, len(first.text_s), first.retry) == (Outcome.FAILED, 1, False)
    assert "went away" in first.words
    assert (second.outcome, second.turn, second.retry) == (Outcome.OK, 0, True)
    assert (third.turn, third.retry) == (1, False)
    # The first try is pinned to its home; then the question again, then the chat with its answer.
    assert seen[:3] == [(str(A.instance_id), 1), (None, 1), (None, 3)]


def test_silence_is_not_an_error_but_a_hang() -> None:
    over = threading.Event()

    def silent(write: Write) -> None:
        write(TEXT)
        over.wait(60.0)

    with serving([silent, good]) as (url, _):
        session = played(url, 0.3, lambda s: len(s.requests) >= 1)
        over.set()
    assert session.requests[0].outcome is Outcome.HUNG


ANSWER = Answer("x", 0.5, 1.0, 500, 480, 10, "r")
SEEN = Seen(A, ANSWER, 480, 0, 0, 0, 0.0, "", None, 0, 0, 0)


def request(
    sent_s: float,
    *,
    ttft_s: float | None = 0.5,
    session: int = 1,
    home: str = "A",
    outcome: Outcome = Outcome.OK,
    ended_s: float | None = None,
) -> Request:
    text_s = () if ttft_s is None else (sent_s + ttft_s, sent_s + ttft_s + 0.1)
    answer = ANSWER if outcome is Outcome.OK else None
    return Request(session, home, 1, False, sent_s, text_s, ended_s or sent_s + 1, outcome, "", answer)


def seen(*requests: Request, guarded: bool = True) -> Failover:
    """Loaded at 100, killed at 110, back at 130, ended at 140."""
    return Failover(
        guarded, A, requests, 100.0, 110.0, 110.04, 110.05 if guarded else None, 130.0, 140.0, 1000, 15, 1,
        SEEN, SEEN, SEEN,
    )  # fmt: skip


def test_a_request_counts_for_the_phase_it_was_sent_in_and_a_broken_one_for_the_fault() -> None:
    whole = seen()
    assert phase_of(request(99), whole) == ""
    assert phase_of(request(109.5, ended_s=111), whole) == "before"
    assert phase_of(request(109.5, ended_s=110.2, outcome=Outcome.FAILED), whole) == "during"
    assert phase_of(request(110), whole) == "during"
    assert phase_of(request(130), whole) == "after"


def test_figures_of_a_failover() -> None:
    report = figures(
        seen(
            request(90, ttft_s=9.0),  # computes the document: not counted
            request(101, ttft_s=0.2),
            request(102, ttft_s=0.4, session=2, home="B"),
            request(109.8, outcome=Outcome.FAILED, ttft_s=0.15, ended_s=110.1),
            request(110.2, ttft_s=3.0),
            request(111, ttft_s=0.3, session=2, home="B"),
            request(120, ttft_s=0.5),
            request(131, ttft_s=0.6),
            request(132, ttft_s=None, outcome=Outcome.HUNG, session=2, home="B"),
        )
    )
    assert report["kvcr"] == "on"
    assert report["ttft_s"]["before"] == {"p50": 0.2, "p90": 0.4, "p95": 0.4, "requests": 2}
    assert report["ttft_s"]["during"]["requests"] == 4
    assert report["ttft_s"]["during"]["p95"] == 3.0
    assert report["moved_sessions_ttft_s"] == {"p50": 3.0, "p90": 3.0, "p95": 3.0, "requests": 1}
    assert report["moved_sessions_computed_tokens"] == 20
    assert report["requests"] == {"ok": 6, "failed": 1, "hung": 1}
    assert report["requests_by_phase"]["after"] == {"ok": 1, "failed": 0, "hung": 1}
    assert report["output_tokens_per_s"] == {"before": 0.5, "during": 0.35, "after": 0.2}
    assert (report["serves_again_s"], report["processes_gone_s"], report["active_s"]) == (20.0, 0.04, 0.05)
    assert report["served_from_dead_pool"] == {"bytes": 1000, "blocks": 15, "transfers": 1}
    assert report["returned"]["computed_tokens"] == 20
    assert report["home"] == {
        "went_home": True,
        "own_tokens": 480,
        "pulled_tokens": 0,
        "computed_tokens": 20,
    }


def test_the_pause_of_a_stream_is_the_silence_around_the_kill() -> None:
    cut = request(108, ttft_s=1.0)  # text at 109 and 109.1
    migrated = Request(1, "A", 1, False, 108, (109.0, 109.5, 113.0), 114, Outcome.OK, "", ANSWER)
    assert cut.pause_s(110.0) is None
    assert migrated.pause_s(110.0) == 3.5
    assert figures(seen(cut, migrated))["stall_s"] == {"p50": 3.5, "p90": 3.5, "p95": 3.5, "requests": 1}


@pytest.mark.parametrize(
    ("count", "expected"), [(0, (None, None, None)), (1, (0, 0, 0)), (20, (9, 17, 18)), (100, (49, 89, 94))]
)
def test_quantiles_are_samples_that_were_seen(count: int, expected: tuple[int | None, ...]) -> None:
    found = quantiles([float(i) for i in reversed(range(count))])
    assert (found["p50"], found["p90"], found["p95"]) == expected
    assert found["requests"] == count


def test_the_table_shows_both_runs_also_when_one_has_no_guard() -> None:
    out = io.StringIO()
    failover_report.show(
        {"KVCR on": figures(seen(request(111))), "KVCR off": figures(seen(guarded=False))}, out
    )
    page = out.getvalue()
    for words in ("KVCR on", "KVCR off", "500 ms / 500 ms / 500 ms  (1)", "no guard", "no pool", "20.0 s"):
        assert words in page
    assert "1.0 kB, 15 blocks in 1 transfers" in page


@pytest.mark.parametrize(("guarded", "title"), [(True, "KVCR on"), (False, "KVCR off")])
def test_a_graph_that_runs_already_is_reported_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, guarded: bool, title: str
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys, "argv", ["demo", "--scene", "failover", "--run-dir", "/run"])
    monkeypatch.setattr(command.graphs, "load", lambda run_dir: None)
    monkeypatch.setattr(command, "warm_up", lambda *_: None)
    monkeypatch.setattr(command, "failover", lambda *_: seen(request(111), guarded=guarded))
    monkeypatch.setattr(failover_report, "show", shown.extend)
    assert command._failover(command._parse()) == 0
    assert shown == [title]


def test_failover_keeps_no_graph_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--scene", "failover", "--keep"])
    with pytest.raises(SystemExit) as ended:
        command._parse()
    assert ended.value.code == 2
    assert "failover runs two graphs, one after the other, and keeps neither" in capsys.readouterr().err
