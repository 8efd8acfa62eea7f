# SPDX-License-Identifier: Apache-2.0
"""Labels of our metrics have few values, whatever clients send."""

from __future__ import annotations

import re
from pathlib import Path

from router_hints.heat import HotPrefix
from router_hints.metrics import Metrics

REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"
FEW = {
    "action", "code", "estimate", "field", "how", "input", "kind", "message", "outcome", "rank", "rate",
    "reason", "result", "state", "status", "tier", "transport", "via", "where", "why",
}  # fmt: skip
"""Words that our code chooses."""
FLEET = {"guard", "peer", "worker"}
"""As many as there are guards or workers."""


def test_every_label_is_a_word_of_ours_or_a_part_of_the_fleet() -> None:
    rows = re.findall(r"^\| `((?:vllm:)?kvcr_\w+)` \| ([^|]*) \|", REFERENCE.read_text(), re.MULTILINE)
    assert len(rows) > 80
    for name, labels in rows:
        assert set(re.findall(r"`(\w+)`", labels)) <= FEW | FLEET, name


def test_names_that_a_client_makes_up_are_no_labels() -> None:
    metrics = Metrics()
    for number in range(1000):
        metrics.refused("header", f"field{number}")
    metrics.refused("header", "isl")
    lines = [
        line for line in metrics.render().splitlines() if line.startswith("kvcr_router_signals_refused_total")
    ]
    assert sorted(lines) == [
        'kvcr_router_signals_refused_total{field="isl",input="header"} 1.0',
        'kvcr_router_signals_refused_total{field="unknown",input="header"} 1000.0',
    ]


def test_hot_prefixes_are_told_by_rank_and_forgotten_when_they_cool() -> None:
    metrics = Metrics()
    metrics.show_hot([(HotPrefix(bytes(range(16)), 8, 2.5), 3), (HotPrefix(bytes(16), 4, 1.0), 0)])
    text = metrics.render()
    assert 'kvcr_router_hot_prefix_requests_per_second{rank="01"} 2.5' in text
    (key,) = re.findall(r'^kvcr_router_hot_prefix_key\{rank="01"\} (\S+)$', text, re.MULTILINE)
    assert float(key) == 0x000102030405
    assert 'kvcr_router_hot_prefix_guards{rank="02"} 0.0' in text
    metrics.show_hot([])
    assert 'rank="' not in metrics.render()
