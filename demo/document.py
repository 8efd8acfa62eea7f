# SPDX-License-Identifier: Apache-2.0
"""The long prompt of the demo, and as many distinct ones of the same length as a benchmark needs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

QUESTION = "What is the dog called?"
FOLLOW_UP = "What is the supply boat called?"

_TEXT = Path(__file__).with_name("document.txt")


def document(variant: int = 0) -> str:
    """About 2,000 tokens of a lighthouse's logbook.

    Variant 0 is the text as written. Every other variant differs from all of them from its first line on
    (so that no block of one is a prefix of another) and has the days in another order.
    """
    text = _TEXT.read_text()
    if variant == 0:
        return text
    title, *paragraphs = text.strip().split("\n\n")
    random.Random(variant).shuffle(paragraphs)
    return "\n\n".join([f"Copy {variant} of a logbook. {title}", *paragraphs]) + "\n"


def prompt(variant: int = 0, question: str = QUESTION, words: int | None = None) -> list[Mapping[str, str]]:
    """The document (or its first ``words`` words) and a question, as the messages of a chat."""
    text = document(variant) if words is None else " ".join(document(variant).split()[:words])
    return [{"role": "user", "content": f"{text}\n{question}"}]


def follow_up(
    messages: list[Mapping[str, str]], answer: str, question: str = FOLLOW_UP
) -> list[Mapping[str, str]]:
    """The next turn of the same chat."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
