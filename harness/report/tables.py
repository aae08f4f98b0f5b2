"""A table as a value, and its three spellings: CSV for machines, Markdown and LaTeX to read."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.stats.effects import Difference, Estimate

NOTHING = "–"
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "≠": r"$\neq$",
    "≥": r"$\geq$",
    "×": r"$\times$",
    "–": "--",
    "−": "$-$",
    "→": r"$\to$",
    "±": r"$\pm$",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


@dataclass(frozen=True)
class Table:
    """What is shown (text, formatted) and what is recorded (numbers, one fact a row).

    Attributes:
        name: the files' stem.
        note: how to read it; stands below the table.
        rows: the cells as text; the first ``labels`` columns are row labels.
        records: rows of the CSV file; the shown rows where None.
        measured: it depends on the machine, so two equal runs differ in it.
    """

    name: str
    title: str
    note: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    records: Sequence[Mapping[str, Any]] | None = None
    labels: int = 1
    measured: bool = False
    sources: Sequence[str] = field(default=())

    def csv(self) -> str:
        """The records; floats to 10 significant digits, so that summation order cannot show."""
        records = self.records
        if records is None:
            records = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        columns = list(dict.fromkeys(key for record in records for key in record))
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns or self.columns)
        for record in records:
            writer.writerow([_plain(record.get(c)) for c in columns])
        return out.getvalue()

    def markdown(self) -> str:
        """A pipe table with its title and note."""
        rule = ["---"] * self.labels + ["---:"] * (len(self.columns) - self.labels)
        lines = [self.columns, rule, *self.rows]
        body = "\n".join("| " + " | ".join(_pipe(c) for c in line) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n\n{self.note}\n"

    def latex(self) -> str:
        """A ``tabular`` of the booktabs package in a float."""
        align = "l" * self.labels + "r" * (len(self.columns) - self.labels)
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex(self.title)}. {latex(self.note)}}}",
            rf"\label{{tab:{self.name}}}",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            " & ".join(latex(c) for c in self.columns) + r" \\",
            r"\midrule",
            *(" & ".join(latex(c) for c in row) + r" \\" for row in self.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"


def by_arm(table: Table, arms: Sequence[str], name: Callable[[Sequence[str]], str]) -> Table:
    """A table with a column for each arm turned: a row for each, a column for each old row.

    Args:
        table: its first column is the test set, its last columns are the arms.
        name: the new column of an old row.
    """
    columns = list(dict.fromkeys(name(row) for row in table.rows))
    cells = {
        (row[0], arm, name(row)): cell
        for row in table.rows
        for arm, cell in zip(arms, row[-len(arms) :], strict=True)
    }
    tests = dict.fromkeys(row[0] for row in table.rows)
    rows = [
        [test, arm, *(cells.get((test, arm, column), NOTHING) for column in columns)]
        for test in tests
        for arm in arms
    ]
    return replace(table, columns=(table.columns[0], "arm", *columns), rows=rows, labels=2)


def latex(text: str) -> str:
    """Text with LaTeX's own characters escaped."""
    return "".join(_LATEX.get(c, c) for c in text)


def percent(share: float | None, digits: int = 1) -> str:
    """A share in [0, 1] in percent, without the sign."""
    return NOTHING if share is None else fixed(100 * share, digits)


def fixed(value: float | None, digits: int = 1) -> str:
    """A number with fixed decimals; float noise is cut first, so that ties round alike."""
    if value is None:
        return NOTHING
    text = f"{round(value, 9):.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def signed(value: float | None, digits: int = 1) -> str:
    text = fixed(value, digits)
    return f"+{text}" if value is not None and text[0].isdigit() and float(text) else text


def number(value: float | None, significant: int = 3) -> str:
    """A number to so many significant digits, or a whole number below a million in full."""
    if value is None:
        return NOTHING
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    text = f"{value:.{significant}g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def interval(low: float | None, high: float | None, scale: float = 100, sign: bool = False) -> str:
    if low is None or high is None:
        return NOTHING
    show = signed if sign else fixed
    return f"[{show(scale * low)}, {show(scale * high)}]"


def in_percent(e: Estimate | None) -> str:
    """``41.2 [38.0, 44.1]``."""
    if e is None:
        return NOTHING
    return percent(e.mean) + ("" if e.low is None else f" {interval(e.low, e.high)}")


def in_points(d: Difference) -> str:
    """A difference in percentage points."""
    return signed(100 * d.estimate.mean)


def budget(spec: Mapping[str, Any]) -> str:
    """The budget of a run with its unit: ``1e12 FLOPs``."""
    unit = spec["budget"]["unit"]
    return f"{number(float(spec['budget']['limit']), 4)} {'FLOPs' if unit == 'flops' else unit}"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def setting(value: Any) -> str:
    """A setting as a reader would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, (list, tuple)):
        return ", ".join(setting(v) for v in value) or "none"
    return str(value)


def _pipe(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{round(value, 12):.10g}"
    return str(value)
