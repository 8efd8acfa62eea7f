# SPDX-License-Identifier: Apache-2.0
"""What the person at the terminal sees: progress while waiting, a table at the end."""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

_SILENT_S = 2.0
"""A wait shorter than this shows nothing."""
_GAP = "  "


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
    """One table. The first column is text, the others are numbers or short words."""
    print(f"\x1b[1m{title}\x1b[0m" if out.isatty() else title, file=out)
    widths = _fit([max(map(len, column)) for column in zip(columns, *rows, strict=True)], _width(out))
    for row in (columns, ["─" * width for width in widths], *rows):
        # At a terminal too narrow for it a cell goes on below itself, between words.
        cells = [textwrap.wrap(text, width) or [""] for text, width in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            first, *others = (f"{text:{'>' if i else '<'}{widths[i]}}" for i, text in enumerate(line))
            print(_GAP.join((first, *others)).rstrip(), file=out)
    print(file=out)


def print_text(text: str, out: TextIO = sys.stdout, indent: int = 2) -> None:
    """``text`` broken between words where the terminal ends; its later lines are indented."""
    width = _width(out)
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent) if width else [text]
    print("\n".join(lines), file=out)


def _width(out: TextIO) -> int | None:
    """Columns of the terminal; None for a file, and for a terminal that does not know."""
    return (os.get_terminal_size(out.fileno()).columns or None) if out.isatty() else None


def _fit(widths: list[int], total: int | None) -> list[int]:
    """``widths`` with the widest made narrower until the line has at most ``total`` characters."""
    while total is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > total and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    return widths


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
