# SPDX-License-Identifier: Apache-2.0
"""The demo's client and its reading of Prometheus pages."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from demo.client import RequestFailed, ask
from demo.document import document
from demo.metrics import growth, parse


@contextmanager
def serving(lines: list[tuple[float, bytes]], status: int = 200) -> Iterator[str]:
    """A server that answers every POST with these lines, each after its delay in seconds."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            for delay_s, line in lines:
                time.sleep(delay_s)
                self.wfile.write(line)
                self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event(id="r1", choices=[{"delta": {"content": text}}])


MESSAGES = [{"role": "user", "content": "hello"}]


def test_time_to_first_token_ends_at_the_first_text_not_at_the_first_event() -> None:
    role = event(id="r1", choices=[{"delta": {"role": "assistant", "content": ""}}])
    usage = event(
        choices=[],
        usage={"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}},
    )
    lines = [(0.0, role), (0.2, piece("one ")), (1.0, piece("two")), (0.0, usage), (0.0, b"data: [DONE]\n\n")]
    with serving(lines) as url:
        answer = ask(url, "m", MESSAGES, max_tokens=2)
    assert answer.text == "one two"
    assert answer.ttft_s >= 0.2
    assert answer.total_s - answer.ttft_s > 0.3
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (40, 32, 2)
    assert answer.request_id == "r1"


def test_a_refusal_carries_the_words_of_the_server() -> None:
    with (
        serving([(0.0, b"no such model")], status=404) as url,
        pytest.raises(RequestFailed, match=r"404.*no such"),
    ):
        ask(url, "m", MESSAGES, max_tokens=2)


def test_a_stream_cut_short_is_an_error_not_a_short_answer() -> None:
    with serving([(0.0, piece("half"))]) as url, pytest.raises(RequestFailed, match=r"without .DONE."):
        ask(url, "m", MESSAGES, max_tokens=2)


def test_an_error_inside_the_stream_is_an_error() -> None:
    with (
        serving([(0.0, event(error={"message": "worker died"}))]) as url,
        pytest.raises(RequestFailed, match="worker died"),
    ):
        ask(url, "m", MESSAGES, max_tokens=2)


def test_an_event_that_is_no_json_is_an_error_and_does_not_end_the_thread_that_asked() -> None:
    with serving([(0.0, b"data: {half\n\n")]) as url, pytest.raises(RequestFailed, match="broke"):
        ask(url, "m", MESSAGES, max_tokens=2)


def test_nobody_listening_is_an_error_that_names_the_address() -> None:
    with pytest.raises(RequestFailed, match=r"127\.0\.0\.1:9"):
        ask("http://127.0.0.1:9", "m", MESSAGES, max_tokens=2)


PAGE = """
# HELP kvcr_pulled_blocks_total Blocks pulled
# TYPE kvcr_pulled_blocks_total counter
kvcr_pulled_blocks_total{transport="shm"} 62
kvcr_pulled_blocks_total{transport="nixl"} 3 1730000000000
escaped{path="a\\"b,c=\\"d\\"",x="1"} 1.5e3
up 1
broken line here
not_a_number{a="b"} spam
nothing NaN
"""


def test_samples_are_summed_over_the_labels_not_asked_for() -> None:
    page = parse(PAGE)
    assert page.total("kvcr_pulled_blocks_total") == 65
    assert page.total("kvcr_pulled_blocks_total", transport="shm") == 62
    assert page.by_label("kvcr_pulled_blocks_total", "transport") == {"shm": 62, "nixl": 3}
    assert page.total("escaped", x="1") == 1500
    assert page.total("absent") == 0
    assert "broken" not in page.names()


def test_growth_has_new_samples_and_leaves_out_what_stood_still() -> None:
    before = parse('a{k="1"} 5\nb 2\n')
    after = parse('a{k="1"} 7\na{k="2"} 1\nb 2\n')
    delta = growth(before, after)
    assert delta.total("a") == 3
    assert delta.names() == {"a"}


def test_documents_differ_from_their_first_line_and_have_about_the_same_length() -> None:
    texts = [document(variant) for variant in range(4)]
    heads = [text[:12] for text in texts]
    assert len(set(heads)) == 4
    assert len(set(texts)) == 4
    assert max(map(len, texts)) - min(map(len, texts)) < 40
    assert document(2) == texts[2]
