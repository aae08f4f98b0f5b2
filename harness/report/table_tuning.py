"""Tuning effort: the score that n trials can be expected to reach, and who leads at each n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from harness.report.load import Cell, Experiment
from harness.report.style import legend_below, looks, panels
from harness.report.table_design import validation_score
from harness.report.tables import Table, number, percent
from harness.stats.tuning import TuningPoint, ranking, tuning_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIVERGED = 0.0  # what a trial that went out of bounds counts as: none of its answers is right


@dataclass(frozen=True)
class Effort:
    """An arm's trials in their order: mean validation score over tuning seeds, and FLOPs."""

    scores: tuple[float, ...]
    costs: tuple[float, ...]

    @property
    def curve(self) -> list[TuningPoint]:
        return tuning_curve(self.scores, self.costs)


def efforts(experiment: Experiment) -> dict[str, Effort]:
    """Arms of which every trial has ended; the others have no curve yet."""
    found = {}
    for arm in experiment.arms:
        trials: dict[int, list[Cell]] = {}
        for cell in experiment.trial_cells(arm):
            trials.setdefault(cell.trial or 0, []).append(cell)
        scores = [[_score(cell) for cell in trials[n]] for n in sorted(trials)]
        known = [[s for s in row if s is not None] for row in scores]
        if scores and known == scores:
            costs = [sum(c.spent.get("flops", 0.0) for c in trials[n]) for n in sorted(trials)]
            found[arm] = Effort(tuple(float(np.mean(row)) for row in known), tuple(costs))
    return found


def _score(cell: Cell) -> float | None:
    if cell.status != "done":
        return None
    return DIVERGED if cell.done.get("status") == "diverged" else validation_score(cell)


def effort_table(experiment: Experiment) -> Table:
    """A row for each number of trials: the expected best of so many, and the order of the arms."""
    found = efforts(experiment)
    curves = {arm: effort.curve for arm, effort in found.items()}
    rows, records = [], []
    for n in range(1, 1 + min((len(c) for c in curves.values()), default=0)):
        points = {arm: curve[n - 1] for arm, curve in curves.items()}
        cells = [f"{percent(p.mean)} ± {percent(p.sd)}" for p in points.values()]
        rows.append([str(n), *cells, ", ".join(sorted(points, key=lambda a: -points[a].mean))])
        records += [_record(experiment, found, arm, point) for arm, point in points.items()]
    base = experiment.baseline
    return Table(
        name="effort",
        title="Tuning effort: expected best validation score of n trials",
        note="In percent: the mean over all choices of n of the trials that were run, and ± how "
        "much the best of n varies with the choice (standard deviation; 0 for all of them, where "
        "there is one choice). A diverged trial counts as 0. The order is by the means"
        f"{f'; the CSV has the chance that an arm leads {base} at each n' if base in found else ''}"
        ". Where the order changes along the rows, it depends on the effort of tuning.",
        columns=("trials", *curves, "order"),
        rows=rows,
        records=records,
        sources=[c.folder for arm in curves for c in experiment.trial_cells(arm)],
    )


def _record(
    experiment: Experiment, found: Mapping[str, Effort], arm: str, point: TuningPoint
) -> dict[str, object]:
    base = experiment.baseline
    ahead = None
    if base in found and arm != base:
        ahead = ranking(found[arm].scores, found[base].scores, point.n).ahead
    return {
        "trials": point.n, "arm": arm, "mean": point.mean, "sd": point.sd, "error": point.error,
        "flops": point.cost, "chance_to_lead_baseline": ahead,
    }  # fmt: skip


def effort_sentence(experiment: Experiment) -> str | None:
    """Whether who leads on validation depends on how much was tuned."""
    curves = {arm: effort.curve for arm, effort in efforts(experiment).items()}
    most = min((len(c) for c in curves.values()), default=0)
    if len(curves) < 2 or not most:
        return None
    leaders = [max(curves, key=lambda arm: curves[arm][n].mean) for n in range(most)]
    if len(set(leaders)) == 1:
        return f"On validation {leaders[0]} leads after any number of trials from 1 to {most}."
    told = [f"{leaders[0]} after 1 trial"]
    told += [
        f"{now} from {number(n)}"
        for n, (before, now) in enumerate(pairwise(leaders), start=2)
        if now != before
    ]
    return f"Who leads on validation depends on the effort of tuning: {', '.join(told)}."


def effort_figure(experiment: Experiment) -> Figure | None:
    """Expected best validation score against trials and against the FLOPs that they take."""
    found = efforts(experiment)
    drawn: Sequence[str] = [arm for arm in experiment.drawn if arm in found]
    if not drawn or max(len(found[arm].scores) for arm in drawn) < 2:
        return None
    figure, axes = panels(2)
    style = looks(experiment)
    for arm in drawn:
        curve = found[arm].curve
        mean, sd = (100 * np.array([getattr(p, key) for p in curve]) for key in ("mean", "sd"))
        trials = np.array([p.n for p in curve], dtype=np.float64)
        spent = np.array([p.cost or 0.0 for p in curve])
        for panel, xs in ((axes[0], trials), (axes[1], spent)):
            panel.plot(xs, mean, label=arm, **style[arm].curve)
            panel.fill_between(xs, mean - sd, mean + sd, color=style[arm].colour, alpha=0.08, lw=0)
    for panel, label in zip(axes, ("trials", "FLOPs of the trials"), strict=True):
        panel.set_xlabel(label)
        panel.set_ylabel("expected best on validation, %")
    legend_below(figure, axes[0], experiment.drawn)
    return figure
