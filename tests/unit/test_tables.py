# SPDX-License-Identifier: Apache-2.0
"""Tables for people: a line for each row where there is room, folded where there is not."""

from __future__ import annotations

import pytest

from kvcr.tables import paragraph, table

HEADER = ("GUARD", "BLOCKS", "DETAIL")
ROWS = (("guard-0", 3, "-"), ("guard-1", 12345, "some blocks are pinned and stay where they are"))


def test_a_pipe_gets_one_line_for_each_row() -> None:
    assert table(HEADER, ROWS, right="1").splitlines() == [
        "GUARD    BLOCKS  DETAIL",
        "guard-0       3  -",
        "guard-1   12345  some blocks are pinned and stay where they are",
    ]


def test_columns_that_do_not_fit_stand_below_and_text_is_wrapped() -> None:
    assert table(HEADER, ROWS, right=[1], width=40).splitlines() == [
        "GUARD    BLOCKS",
        "  DETAIL",
        "guard-0       3",
        "  -",
        "guard-1   12345",
        "  some blocks are pinned and stay where",
        "  they are",
    ]


@pytest.mark.parametrize("width", [40, 41, 57, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    header = [f"COLUMN-{number}" for number in range(12)]
    rows = [["x" * (number * 5) for number in range(12)], ["long " * 30] * 12]
    lines = table(header, rows, right=range(3, 12), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("long") for line in lines) == 12 * 30


def test_a_paragraph_is_indented_below_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr.tables.width_of_output", lambda: 30)
    assert paragraph("warn  clocks  ", "they differ from this host's") == (
        "warn  clocks  they differ from\n              this host's"
    )
    assert paragraph("ok    ", "short") == "ok    short"
