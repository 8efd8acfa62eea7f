# SPDX-License-Identifier: Apache-2.0
"""The demo's measurement: time to first token of a long prompt, computed and pulled, on real engines.

Several distinct documents, each computed on one worker and then pulled by the other. The workers take
turns as the holder, so that a slower one does not tilt the ratio. Then with prefixes of 4,096 tokens.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._common import run, say, summary
from demo.document import QUESTION, document, prompt
from demo.graph import Graph, serving
from demo.observe import Seen, observe
from demo.scenes.share import MAX_TOKENS, warm_up
from demo.table import print_table, seconds, size, waiting

DOCUMENTS = 12
QUICK_DOCUMENTS = 3
"""On two slow cores a document takes 15 s to compute; the quick run should end within a minute."""

LONG_TOKENS = 4096
"""Tokens of the prefix that is measured on its own: what a coding agent's turn brings along, or more."""
LONG_DOCUMENTS = 4
QUICK_LONG_DOCUMENTS = 1
_MARGIN_TOKENS = 180
"""On top, for the question and for words that are not all as many tokens; the engine takes 4,608."""


def measure(quick: bool) -> Mapping[str, Any]:
    """Start the graph of the demo, measure, take it down."""
    say("starting the graph")
    with serving(Path(tempfile.mkdtemp(prefix="kvcr-bench-"))) as graph:
        warm_up(graph, waiting)
        count = QUICK_DOCUMENTS if quick else DOCUMENTS
        pairs = [_pair(graph, variant, count, prompt(variant)) for variant in range(1, count + 1)]
        tokens_a_word = statistics.median(cold.answer.prompt_tokens for cold, _ in pairs) / len(
            document().split()
        )
        words = int((LONG_TOKENS + _MARGIN_TOKENS) / tokens_a_word)
        long_count = QUICK_LONG_DOCUMENTS if quick else LONG_DOCUMENTS
        say(f"prefixes of {LONG_TOKENS} tokens")
        long_pairs = [
            _pair(graph, variant, long_count, long_prompt(variant, words))
            for variant in range(1, long_count + 1)
        ]
    _print(pairs, "Time to first token, computed and pulled")
    _print(long_pairs, f"The same with a prefix of {LONG_TOKENS} tokens")
    return {**_figures(pairs, graph.block_size), **_long_figures(long_pairs, graph.block_size)}


def long_prompt(variant: int, words: int) -> list[Mapping[str, str]]:
    """Several of the documents, cut to so many words, and the question."""
    texts = " ".join(document(1000 * part + variant) for part in range(1, 5))
    return [{"role": "user", "content": f"{' '.join(texts.split()[:words])}\n{QUESTION}"}]


def _pair(graph: Graph, variant: int, count: int, messages: Sequence[Mapping[str, str]]) -> tuple[Seen, Seen]:
    """One document, computed on one worker and pulled by the other."""
    holder, other = graph.workers[:: 1 if variant % 2 else -1]
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


def _long_figures(pairs: list[tuple[Seen, Seen]], block_size: int) -> dict[str, Any]:
    """The same figures of the long prefixes. Raises RuntimeError where a prefix is shorter than promised."""
    figures = _figures(pairs, block_size)
    if figures["prompt_tokens"] < LONG_TOKENS + block_size:
        raise RuntimeError(f"a prompt has {figures['prompt_tokens']} tokens, {LONG_TOKENS} were to be pulled")
    wanted = (
        "documents",
        "prompt_tokens",
        "ttft_cold_s",
        "ttft_pulled_s",
        "ttft_cold_over_pulled",
        "pulled_token_share",
        "pulled_bytes",
        "pull_s",
        "answers_identical",
    )
    return {f"ttft_{LONG_TOKENS}_{name.removeprefix('ttft_')}": figures[name] for name in wanted}


def _print(pairs: list[tuple[Seen, Seen]], title: str) -> None:
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
    print_table(title, columns, rows, sys.stderr)


if __name__ == "__main__":
    sys.exit(run("e2e", measure, __doc__))
