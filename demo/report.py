# SPDX-License-Identifier: Apache-2.0
"""The demo's last page: a table, three lines that explain it, and what to try next."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from demo.document import FOLLOW_UP, QUESTION
from demo.graph import Graph
from demo.observe import Seen
from demo.scenes.share import Shared
from demo.table import print_table, print_text, seconds, size

_COLUMNS = ("request", "prompt", "computed", "own cache", "pulled", "first token", "speed-up")


def show(graph: Graph, result: Shared, out: TextIO = sys.stdout) -> None:
    """Print everything a person should see of :class:`Shared`."""
    cold_s = result.cold.answer.ttft_s
    rows = [
        _row("document", result.cold, None),
        _row("follow-up", result.follow_up, cold_s),
        _row("document", result.pulled, cold_s),
    ]
    print(file=out)
    print_table("Where the tokens of each prompt came from, and the time to first token", _COLUMNS, rows, out)
    yes_no = {True: "yes", False: "NO"}
    print(f"Answers of the two workers identical: {yes_no[result.identical]}", file=out)
    print(f"Source and destination count the same blocks and bytes: {yes_no[result.sides_agree]}", file=out)
    print(f"  Q: {QUESTION}\n  A: {_one_line(result.pulled.answer.text)}", file=out)
    print(f"  Q: {FOLLOW_UP}\n  A: {_one_line(result.follow_up.answer.text)}", file=out)
    print("\nWhat you saw", file=out)
    for number, line in enumerate(_explain(graph, result), start=1):
        print_text(f"  {number}. {line}", out, indent=5)


def _row(title: str, seen: Seen, cold_s: float | None) -> tuple[str, ...]:
    pulled = f"{seen.pulled_tokens} from {seen.source.label}" if seen.source and seen.pulled_tokens else "-"
    return (
        f"{title} on {seen.worker.label}",
        str(seen.answer.prompt_tokens),
        str(seen.computed_tokens),
        str(seen.own_tokens) if seen.own_tokens else "-",
        pulled,
        seconds(seen.answer.ttft_s),
        f"{cold_s / seen.answer.ttft_s:.1f}x" if cold_s else "-",
    )


def _explain(graph: Graph, result: Shared) -> list[str]:
    cold, pulled = result.cold, result.pulled
    first = (
        f"Worker {cold.worker.label} computed the document once: {cold.computed_tokens} tokens, "
        f"{seconds(cold.answer.ttft_s)}. Its blocks of {graph.block_size} tokens went into its guard's pool."
    )
    if not pulled.pulled_blocks:
        return [
            first,
            f"Worker {pulled.worker.label} should have pulled them and did not: nothing was shared.",
            f"Look at the logs in {graph.run_dir}.",
        ]
    return [
        first,
        f"Worker {pulled.worker.label} had never seen it. With the router's hint its guard pulled "
        f"{pulled.pulled_blocks} blocks ({size(pulled.pulled_bytes)}, {pulled.transport}, "
        f"{seconds(pulled.pull_s)}); {pulled.computed_tokens} tokens were left to compute.",
        f"First token after {seconds(pulled.answer.ttft_s)} instead of {seconds(cold.answer.ttft_s)}, "
        f"and {'the same answer' if result.identical else 'ANOTHER ANSWER'}.",
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "(empty)"


def curl_line(graph: Graph) -> str:
    """A command that asks the running graph something."""
    messages = [{"role": "user", "content": "Who keeps a lighthouse?"}]
    body = {"model": graph.model, "max_tokens": 24, "messages": messages}
    return (
        f"curl -s {graph.frontend_url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )
