# SPDX-License-Identifier: Apache-2.0
"""What the person at the terminal sees: progress while waiting, a table at the end.

Uses rich when it is installed (a development extra) and plain text when it is not.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError:
    HAVE_RICH = False
else:
    HAVE_RICH = True

_SILENT_S = 2.0
"""A wait shorter than this shows nothing."""


@contextmanager
def waiting(what: str, out: TextIO = sys.stderr) -> Iterator[None]:
    """Say what is being waited for, once the wait is longer than two seconds, and for how long."""
    done = threading.Event()
    started_s = time.monotonic()
    live = out.isatty()

    def show() -> None:
        shown = False
        while not done.wait(_SILENT_S if not shown or not live else 0.5):
            elapsed_s = time.monotonic() - started_s
            if live:
                out.write(f"\r  {what} … {elapsed_s:.0f} s ")
                out.flush()
            elif not shown:
                out.write(f"  {what} …\n")
                out.flush()
            shown = True
        if shown and live:
            out.write("\r\x1b[2K")
            out.flush()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO = sys.stdout
) -> None:
    """One table. The first two columns are text, the others numbers."""
    if not HAVE_RICH:
        _print_plain(title, columns, rows, out)
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width of its own, and a table folded at 80 columns is hard to read.
    console = Console(file=out, width=None if out.isatty() else 132, highlight=False)
    console.print(table)


def _print_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO) -> None:
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    print(title, file=out)
    for row in [list(columns), ["-" * width for width in widths], *rows]:
        cells = [
            text.ljust(width) if index < 2 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), file=out)


def say(line: str, out: TextIO = sys.stdout) -> None:
    """A line above whatever :func:`waiting` shows."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()
    print(line, file=out, flush=True)


def size(byte_count: float) -> str:
    """Bytes for people: ``91.4 MB`` (decimal)."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if byte_count >= factor:
            return f"{byte_count / factor:.1f} {unit}"
    return f"{byte_count:.0f} B"


def seconds(value: float) -> str:
    """A duration for people: ``5.75 s``, or ``142 ms`` below one second."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
