# SPDX-License-Identifier: Apache-2.0
"""The agent scene on a whole graph whose engines compute nothing: everything else in it is real."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.graph import load, serve
from demo.scenes.agent import Scale, agent
from demo.scenes.share import warm_up
from tests.integration.test_demo_failover import graph_file, quiet

pytestmark = pytest.mark.timeout(300)

__all__ = ["graph_file"]


def test_each_signal_leads_to_the_plan_that_its_situation_calls_for(
    graph_file: Path,
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    # The others must not push out what sleeps.
    running = serve(tmp_path / "run", graph_file, ["--Guard.pool-bytes=64MiB"], quiet=True)
    try:
        graph = load(tmp_path / "run")
        warm_up(graph, quiet)
        decisions = agent(graph, lines.append, quiet, scale=Scale(main_words=400, short_words=150))
    finally:
        running.stop()
    page = "\n".join(lines)
    assert [each.signal.split()[0] for each in decisions] == [
        "fork",
        "next",
        "one-off",
        "sleeper",
        "sub-agent",
        "compaction",
    ]
    assert all(each.expected for each in decisions), page
    assert all(each.blocks > 0 for each in decisions), page
    for each in decisions[:4]:
        assert each.ttft_s is not None
        assert each.saved_s is not None
        assert each.saved_s > 0, page
    assert len(lines) == 1 + len(decisions), "a line for each decision"
