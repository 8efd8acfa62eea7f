# SPDX-License-Identifier: Apache-2.0
"""The demo's measurement: time to first token of a long prompt, computed and pulled, on real engines.

Several distinct documents, each computed on one worker and then pulled by the other. The workers take
turns as the holder, so that a slower one does not tilt the ratio.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench._common import run, say, summary
from demo.document import prompt
from demo.graph import Graph, serving
from demo.observe import Seen, observe
from demo.scenes.share import MAX_TOKENS, warm_up
from demo.table import print_table, seconds, size, waiting

DOCUMENTS = 12
QUICK_DOCUMENTS = 3
"""On two slow cores a document takes 15 s to compute; the quick run should end within a minute."""


def measure(quick: bool) -> Mapping[str, Any]:
    """Start the graph of the demo, measure, take it down."""
    say("starting the graph")
    with serving(Path(tempfile.mkdtemp(prefix="kvcr-bench-"))) as graph:
        warm_up(graph, waiting)
        count = QUICK_DOCUMENTS if quick else DOCUMENTS
        pairs = [_pair(graph, variant, count) for variant in range(1, count + 1)]
    _print(pairs)
    return _figures(pairs, graph.block_size)


def _pair(graph: Graph, variant: int, count: int) -> tuple[Seen, Seen]:
    """One document, computed on one worker and pulled by the other."""
    holder, other = graph.workers[:: 1 if variant % 2 else -1]
    messages = prompt(variant)
    with waiting(f"document {variant} of {count}"):
        cold = observe(graph, messages, max_tokens=MAX_TOKENS, worker=holder)
        pulled = observe(graph, messages, max_tokens=MAX_TOKENS, worker=other)
    say(
        f"document {variant} of {count}: {seconds(cold.answer.ttft_s)} computed on {holder.label}, "
        f"{seconds(pulled.answer.ttft_s)} pulled by {other.label}"
    )
    return cold, pulled


def _figures(pairs: list[tuple[Seen, Seen]], block_size: int) -> dict[str, Any]:
    cold_s = [cold.answer.ttft_s for cold, _ in pairs]
    pulled_s = [pulled.answer.ttft_s for _, pulled in pairs]
    ratios = [c / p for c, p in zip(cold_s, pulled_s, strict=True)]
    pulled = [seen for _, seen in pairs]
    return {
        "model": "smollm2-135m-instruct",
        "dtype": "float32",
        "block_size": block_size,
        "documents": len(pairs),
        "prompt_tokens": statistics.median(seen.answer.prompt_tokens for seen in pulled),
        "ttft_cold_s": statistics.median(cold_s),
        "ttft_pulled_s": statistics.median(pulled_s),
        "ttft_cold_over_pulled": statistics.median(ratios),
        "pulled_token_share": statistics.median(
            seen.pulled_tokens / seen.answer.prompt_tokens for seen in pulled
        ),
        "pulled_blocks": sum(seen.pulled_blocks for seen in pulled),
        "pulled_bytes": sum(seen.pulled_bytes for seen in pulled),
        "pull_s": statistics.median(seen.pull_s for seen in pulled),
        "transports": sorted({seen.transport for seen in pulled}),
        "answers_identical": all(c.answer.text == p.answer.text for c, p in pairs),
        "counters_agree": all(
            (seen.pulled_blocks, seen.pulled_bytes) == (seen.served_blocks, seen.served_bytes)
            for seen in pulled
        ),
        "spread": {
            "ttft_cold_s": summary(cold_s),
            "ttft_pulled_s": summary(pulled_s),
            "ttft_cold_over_pulled": summary(ratios),
        },
    }


def _print(pairs: list[tuple[Seen, Seen]]) -> None:
    columns = (
        "document",
        "computed on",
        "prompt",
        "pulled",
        "bytes",
        "pull",
        "cold",
        "pulled",
        "ratio",
        "same",
    )
    rows = [
        (
            str(number),
            cold.worker.label,
            str(pulled.answer.prompt_tokens),
            str(pulled.pulled_tokens),
            size(pulled.pulled_bytes),
            seconds(pulled.pull_s),
            seconds(cold.answer.ttft_s),
            seconds(pulled.answer.ttft_s),
            f"{cold.answer.ttft_s / pulled.answer.ttft_s:.1f}",
            "yes" if cold.answer.text == pulled.answer.text else "NO",
        )
        for number, (cold, pulled) in enumerate(pairs, start=1)
    ]
    print_table("Time to first token, computed and pulled", columns, rows, sys.stderr)


if __name__ == "__main__":
    sys.exit(run("e2e", measure, __doc__))
