"""Marks in every table what was not promised before the first cell: arms and seeds added since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.errors import counted, shown
from harness.report.load import Experiment
from harness.report.tables import Table

MARK = " ‡"  # behind an arm that was added
# What does not depend on which seeds there are: what was planned, or single trials.
NOT_OF_SEEDS = ("arms", "controls", "data", "tuning", "verdict", "failures")


def added_arms(experiment: Experiment) -> tuple[str, ...]:
    """The arms that were added after a cell had begun, by their own names."""
    named = dict(zip(experiment.spec["arms"], experiment.arms, strict=False))
    before = experiment.declared.get("arms", experiment.spec["arms"])
    return tuple(own for name, own in named.items() if name not in before)


def added_seeds(experiment: Experiment) -> tuple[int, ...]:
    """The seeds that were added after a cell had begun."""
    before = experiment.declared.get("seeds", experiment.spec["seeds"])
    return tuple(seed for seed in experiment.seeds if seed not in before)


def marked(experiment: Experiment, tables: Sequence[Table]) -> list[Table]:
    """The tables with added arms marked, and a note where added seeds enter."""
    arms, seeds = added_arms(experiment), added_seeds(experiment)
    if not arms and not seeds:
        return list(tables)
    return [_marked(table, arms, seeds) for table in tables]


def _marked(table: Table, arms: Sequence[str], seeds: Sequence[int]) -> Table:
    columns = tuple(_with_mark(column, arms) for column in table.columns)
    rows = [
        [_with_mark(cell, arms) if i < table.labels else cell for i, cell in enumerate(row)]
        for row in table.rows
    ]
    notes = []
    if columns != table.columns or rows != [list(row) for row in table.rows]:
        notes.append("‡ exploratory: the arm was added after cells had run.")
    if seeds and table.name not in NOT_OF_SEEDS:
        what = counted(len(seeds), "seed")
        notes.append(f"Exploratory: {what} ({shown(list(seeds))}) added after cells had run.")
    if not notes:
        return table
    records = table.records
    if records is not None:
        late = bool(seeds) and table.name not in NOT_OF_SEEDS
        records = [r | {"exploratory": late or _names(r, arms)} for r in map(dict, records)]
    note = " ".join([table.note, *notes])
    return replace(table, columns=columns, rows=rows, note=note, records=records)


def _with_mark(text: str, arms: Sequence[str]) -> str:
    """A name, or a difference of two, with its mark."""
    words = text.split(" − ")
    if not any(word in arms for word in words):
        return text
    return " − ".join(word + MARK if word in arms else word for word in words)


def _names(record: Mapping[str, Any], arms: Sequence[str]) -> bool:
    return any(record.get(key) in arms for key in ("arm", "control"))


def amendment_sentences(experiment: Experiment) -> Iterator[str]:
    """Each amendment made since cells began: when, why, and what."""
    for amendment in experiment.amendments:
        changes = "; ".join(
            f"{path} is {shown(change['new'], 40)}, was {shown(change['old'], 40)}"
            for path, change in amendment["changes"].items()
        )
        yield (
            f"Amendment {amendment['number']} of {amendment['time']}, when "
            f"{counted(amendment['cells_begun'], 'cell')} had begun and {amendment['cells_done']} "
            f"had ended: {changes}. Reason given: {amendment['why'].rstrip('.')}. What it touches "
            "is exploratory."
        )
