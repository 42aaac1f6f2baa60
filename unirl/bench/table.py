"""A table on the terminal in colour, or as plain columns that grep and cut understand."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], bold: int = -1) -> None:
    """Print it on standard output. The first column, and those without a name, are text.

    bold: the row that stands out on a terminal.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        print("\n".join(plain_lines(columns, rows)))
        return
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        is_text = _is_text(index, name)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not index)
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index == bold else "")
    Console().print(table)


def plain_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The same as lines."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = []
    for row in (columns, *rows):
        cells = [
            f"{cell:<{width}}" if _is_text(index, columns[index]) else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _is_text(index: int, name: str) -> bool:
    return not index or not name
