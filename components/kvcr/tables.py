# SPDX-License-Identifier: Apache-2.0
"""Plain tables for people."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

_GAP = "  "
_LEAST_WIDTH = 40


def width_of_output() -> int:
    """Columns of the terminal; without limit for a pipe or a file, whose reader wants a line for each row."""
    if sys.stdout is None or not sys.stdout.isatty():
        return sys.maxsize
    return max(_LEAST_WIDTH, shutil.get_terminal_size().columns)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Iterable[int | str] = (),
    width: int | None = None,
) -> str:
    """Columns as wide as needed, two blanks between. ``right``: those right-aligned, e.g. ``"345"``.

    Where that is more than ``width``, by default that of the terminal, a row has several lines: the columns
    that do not fit stand below, indented.
    """
    flush = {int(column) for column in right}
    limit = width_of_output() if width is None else width
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    groups = _fold(widths, limit)
    lines = []
    for row in cells:
        for number, group in enumerate(groups):
            indent = _GAP if number else ""
            parts = [
                row[column].rjust(widths[column]) if column in flush else row[column].ljust(widths[column])
                for column in group
            ]
            line = indent + _GAP.join(parts).rstrip()
            if len(line) > limit:
                # One column alone, of text.
                lines += textwrap.wrap(line.strip(), limit, initial_indent=indent, subsequent_indent=_GAP)
            elif line.strip() or not number:
                lines.append(line)
    return "\n".join(lines)


def _fold(widths: Sequence[int], limit: int) -> list[list[int]]:
    """Numbers of the columns that stand on each line of a row."""
    groups: list[list[int]] = [[]]
    used = -len(_GAP)
    for column, width in enumerate(widths):
        if groups[-1] and used + len(_GAP) + width > limit:
            groups.append([])
            used = 0  # the indent is as wide as a gap
        used += len(_GAP) + width
        groups[-1].append(column)
    return groups


def paragraph(label: str, text: str) -> str:
    """A label, and beside it text that is wrapped at the width of the terminal."""
    limit = width_of_output()
    if len(label) + len(text) <= limit:
        return label + text
    return textwrap.fill(text, limit, initial_indent=label, subsequent_indent=" " * len(label))


def size(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
