"""Which checkpoint counts: the last, the best by validation, or (too good to be true) by test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.report.load import Cell, Experiment
from harness.report.scores import AVG, curve, final_line, per_problem
from harness.report.tables import Table, fixed, percent, signed

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Choices:
    """An arm's mean score on one test set, over seeds, by how each seed's checkpoint is chosen.

    Attributes:
        last: at the end of the budget.
        by_validation: where the cell's own validation is best; None where it has none.
        by_test: where the test set itself is best: no estimate of anything.
        moments: how many evaluations there were to choose from.
        moved: seeds whose best test evaluation is not the last.
    """

    last: float
    by_validation: float | None
    by_test: float
    seeds: int
    moments: int
    moved: int

    @property
    def optimism(self) -> float:
        return self.by_test - self.last


def choices(cells: Sequence[Cell], test: str) -> Choices | None:
    """From the evaluations that the cells have; None where no cell has a final one."""
    last, by_validation, by_test, moments, moved = [], [], [], [], 0
    for cell in cells:
        lines = curve(cell, f"test.{test}")
        final = final_line(cell, f"test.{test}")
        if final is None:
            continue
        scores = [_avg(line) for line in lines]
        last.append(_avg(final))
        by_test.append(max(scores))
        moved += max(scores) > _avg(final)
        moments.append(len(lines))
        found = _by_validation(cell, lines)
        if found is not None:
            by_validation.append(_avg(found))
    if not last:
        return None
    whole = len(by_validation) == len(last)
    return Choices(
        last=float(np.mean(last)),
        by_validation=float(np.mean(by_validation)) if whole else None,
        by_test=float(np.mean(by_test)),
        seeds=len(last),
        moments=min(moments),
        moved=moved,
    )


def _avg(line: Line) -> float:
    return float(np.mean(list(per_problem(line, AVG).values())))


def _by_validation(cell: Cell, lines: Sequence[Line]) -> Line | None:
    """The test evaluation at the moment of the cell's best validation; the first of equals."""
    judged = curve(cell, "validation")
    tested = {line["at"]: line for line in lines}
    judged = [line for line in judged if line["at"] in tested]
    return tested[max(judged, key=_avg)["at"]] if judged else None


def checkpoints_table(experiment: Experiment) -> Table:
    """Last against best, side by side, with the size of what choosing by test would add."""
    rows, records = [], []
    for test in experiment.spec["data"]["test"]:
        for arm in experiment.shown:
            if arm == "base":
                continue
            cells = experiment.seed_cells(arm)
            found = choices(cells, test)
            if found is None or found.moments < 2:
                continue
            rows.append([
                test, arm, str(found.seeds), str(found.moments), percent(found.last),
                "not evaluated" if found.by_validation is None else percent(found.by_validation),
                percent(found.by_test), signed(100 * found.optimism),
                f"{found.moved} of {found.seeds}",
            ])  # fmt: skip
            records.append({"test": test, "arm": arm} | vars(found) | {"optimism": found.optimism})
    evaluation = experiment.spec["evaluation"]
    return Table(
        name="checkpoints",
        title="Which checkpoint: the last, or the best",
        note="Avg in percent, mean over seeds. All other tables use the last, which the budget "
        "chooses. Best on test picks, for each seed, its highest evaluation on the test set "
        "itself: it is optimistic, by the last but one column, and no estimate of anything. It "
        f"also picks the luckiest noise: along the way there are {evaluation['curve_samples']} "
        f"samples a problem, at the end {evaluation['samples']}. "
        + (
            "Runs evaluate the test set along the way and validation in tuning trials only, so "
            "what validation would have picked is not known."
            if all(r["by_validation"] is None for r in records)
            else "By validation: where the same run's validation score is highest."
        ),
        columns=("test set", "arm", "seeds", "evaluations", "last", "best by validation",
                 "best on test (optimistic)", "optimism", "best is not last"),
        rows=rows,
        records=records,
        labels=2,
        sources=[c.folder for a in experiment.shown for c in experiment.seed_cells(a)],
    )  # fmt: skip


def selected_checkpoints(experiment: Experiment) -> Iterator[str]:
    """A warning for each final score that is not of the run's last step."""
    for cell in experiment.cells:
        if cell.kind != "seed" or cell.status != "done" or not cell.steps:
            continue
        last = cell.steps[-1]["step"]
        for name in experiment.spec["data"]["test"]:
            line = final_line(cell, f"test.{name}")
            if line is not None and line["step"] != last:
                better = max((_avg(e) for e in curve(cell, f"test.{name}")), default=0.0)
                chosen = ", the best of its evaluations on test" if _avg(line) >= better else ""
                yield (
                    f"The final score of {cell.folder} on {name} is of step {line['step']}"
                    f"{chosen}, not of its last, {last}: it looks selected, and is not comparable "
                    f"({fixed(100 * _avg(line))} %)."
                )
