"""Printing: data as JSON, or as tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 160  # columns where nobody's window says how many there are

console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def say(line: str) -> None:
    """A line on stdout as it is: never wrapped, and brackets in it are not markup."""
    console.print(line, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """JSON on stdout, for programs."""
    print(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout, for people."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    console.print(table)


def _plain(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "" if cell is None else str(cell)


def print_groups(columns: Sequence[str], groups: Mapping[str, Sequence[Sequence[Any]]]) -> None:
    """A table for each heading; its first column is a name and never wraps, other cells may."""
    for heading, rows in groups.items():
        table = Table(title=f"\n{heading}", title_justify="left", header_style="bold", box=None,
                      pad_edge=False, collapse_padding=True)  # fmt: skip
        for at, column in enumerate(columns):
            table.add_column(column, overflow="fold", no_wrap=at == 0)
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        console.print(table)


def short(value: float) -> str:
    """A number with its thousands prefix: 1.2e+12 -> 1.2 T."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
