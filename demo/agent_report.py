# SPDX-License-Identifier: Apache-2.0
"""What the agent scene shows at its end: a line for each decision."""

from __future__ import annotations

from collections.abc import Sequence

from demo.scenes.agent import Decision
from demo.table import print_table, seconds

_COLUMNS = ("signal", "plan", "what moved", "first token", "computing saved")


def show(decisions: Sequence[Decision]) -> None:
    """Print the table."""
    print_table(
        "What the router decided, and what it saved",
        _COLUMNS,
        [
            (
                each.signal,
                each.plan,
                each.moved,
                "-" if each.ttft_s is None else seconds(each.ttft_s),
                "-" if each.saved_s is None else seconds(each.saved_s),
            )
            for each in decisions
        ],
    )
