"""The same runs at an equal budget in another unit: what was measured, interpolated, ranked anew.

Between two evaluations of a run the score is taken to move in a straight line; beyond the last one
nothing is said. The common budget of a unit is therefore the largest that every run reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from harness.report.load import Cell, Experiment
from harness.report.scores import AVG, Metric, TestScores, curve, final_line, per_problem
from harness.report.table_machine import memory_by_role, training_seconds
from harness.report.tables import NOTHING, Table, in_percent, number, size
from harness.stats.effects import UNIT, Estimate, Floats, estimate

UNITS = ("completions", "tokens", "flops")
MEASURED = ("seconds",)
LABELS = {"flops": "FLOPs", "seconds": "training seconds"}
RESAMPLES = 2000  # of the bootstrap beside the interval shown
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Exchange:
    """The arms at one common budget.

    Attributes:
        limit: the largest that every run of these arms reached.
        found: arm -> its score there; None where a run was not evaluated on both sides of it.
    """

    unit: str
    limit: float
    found: Mapping[str, Estimate | None]

    @property
    def ranking(self) -> tuple[str, ...]:
        """Best first; arms without a score are left out."""
        known = {arm: e.mean for arm, e in self.found.items() if e is not None}
        return tuple(sorted(known, key=lambda arm: -known[arm]))


def exchange(
    experiment: Experiment, test: str, unit: str, metric: Metric = AVG, arms: Sequence[str] = ()
) -> Exchange | None:
    """The arms at the largest common budget in a unit; None where the runs do not tell."""
    base = {c.seed: final_line(c, f"test.{test}") for c in experiment.seed_cells("base")}
    runs = {
        arm: [found for c in experiment.seed_cells(arm)
              if (found := _trajectory(c, test, unit, base.get(c.seed), metric))]
        for arm in arms or compared(experiment)
    }  # fmt: skip
    runs = {arm: found for arm, found in runs.items() if found}
    if len(runs) < 2:
        return None
    limit = min(run[-1][0] for found in runs.values() for run in found)
    return Exchange(unit, limit, {arm: _at(limit, found) for arm, found in runs.items()})


def gaps_at(
    experiment: Experiment, test: str, unit: str, metric: Metric, arm: str, control: str
) -> dict[int, float]:
    """Seed -> difference between two arms at their largest common budget; empty if unknown."""
    base = {c.seed: final_line(c, f"test.{test}") for c in experiment.seed_cells("base")}
    runs = [
        {c.seed: found for c in experiment.seed_cells(name) if c.seed is not None
         if (found := _trajectory(c, test, unit, base.get(c.seed), metric))}
        for name in (arm, control)
    ]  # fmt: skip
    if not all(runs):
        return {}
    limit = min(run[-1][0] for by_seed in runs for run in by_seed.values())
    found = {}
    for seed in sorted(runs[0].keys() & runs[1].keys()):
        ours, theirs = (_interpolated(limit, by_seed[seed]) for by_seed in runs)
        if ours and theirs:
            found[seed] = float(np.mean([ours[i] - theirs[i] for i in ours if i in theirs]))
    return found


def compared(experiment: Experiment) -> list[str]:
    """The arms that are exchanged: those that sentences name."""
    return [arm for arm in experiment.drawn if arm in experiment.arms]


def _trajectory(
    cell: Cell, test: str, unit: str, start: Line | None, metric: Metric
) -> list[tuple[float, dict[str, float]]]:
    """(spent, problem -> score) at each evaluation, rising; the untrained base at 0."""
    points: dict[float, dict[str, float]] = {}
    if start is not None:
        points[0.0] = per_problem(start, metric)
    for line in curve(cell, f"test.{test}"):
        x = training_seconds(cell, line["step"]) if unit in MEASURED else line["spent"].get(unit)
        if x is not None and _tells(line, metric):
            points[float(x)] = per_problem(line, metric)  # of two at one moment the final one
    return sorted(points.items(), key=lambda point: point[0])


def _tells(line: Line, metric: Metric) -> bool:
    """Whether the line has what the metric needs: a greedy answer, or K samples."""
    if metric.name == "greedy":
        return all(p.get("greedy") is not None for p in line["problems"])
    return metric.k is None or all(p["n"] >= metric.k for p in line["problems"])


def _at(limit: float, runs: Sequence[Sequence[tuple[float, dict[str, float]]]]) -> Estimate | None:
    """The score of an arm's runs where each has spent ``limit``."""
    rows = [_interpolated(limit, run) for run in runs]
    if any(row is None for row in rows):
        return None
    known = [row for row in rows if row is not None]
    shared = [name for name in known[0] if all(name in row for row in known)]
    values: Floats = np.array([[row[name] for name in shared] for row in known])
    return estimate(values, RESAMPLES, UNIT)


def _interpolated(
    limit: float, run: Sequence[tuple[float, dict[str, float]]]
) -> dict[str, float] | None:
    for (x0, before), (x1, after) in pairwise(run):
        if x0 <= limit <= x1:
            share = (limit - x0) / (x1 - x0)
            return {
                name: (1 - share) * before[name] + share * after[name]
                for name in before
                if name in after
            }
    return None


def exchange_table(
    experiment: Experiment, scores: Sequence[TestScores], *, measured: bool = False
) -> Table:
    """A row for each unit: every arm's score at the largest common budget, with its rank."""
    arms, rows, records = compared(experiment), [], []
    for test in scores:
        for unit in MEASURED if measured else UNITS:
            found = exchange(experiment, test.name, unit)
            if found is None:
                continue
            label = f"{LABELS.get(unit, unit)} {number(found.limit)}"
            rows.append([test.name, label, *(_ranked(found, arm) for arm in arms)])
            records += _records(test.name, found)
        if not measured:
            rows += _memory_rows(experiment, test, arms, records)
    return Table(
        name="exchange_measured" if measured else "exchange",
        title="The same runs at equal budgets in other units",
        note="Avg in percent with its 95 % interval over seeds and problems, and the rank by the "
        "mean in brackets: ranks of arms whose difference is not shown mean nothing. Each row is "
        "at the largest budget that all these runs reached, interpolated between a run's "
        "evaluations (the base is at 0) and never beyond."
        + (
            " Seconds depend on the machine."
            if measured
            else " Memory is no sum: a row is for machines "
            "that hold so much, predicted, and has the arms that fit, at the end of their budget."
        )
        + _changes(experiment, scores, measured),
        columns=("test set", "equal", *arms),
        rows=rows,
        records=records,
        labels=2,
        measured=measured,
        sources=[c.folder for arm in arms for c in experiment.seed_cells(arm)],
    )


def _ranked(found: Exchange, arm: str) -> str:
    e = found.found.get(arm)
    return NOTHING if e is None else f"{in_percent(e)} ({found.ranking.index(arm) + 1})"


def _records(test: str, found: Exchange) -> list[dict[str, Any]]:
    return [
        {
            "test": test, "unit": found.unit, "budget": found.limit, "arm": arm,
            "rank": None if e is None else found.ranking.index(arm) + 1,
            "mean": None if e is None else e.mean, "low": None if e is None else e.low,
            "high": None if e is None else e.high,
        }
        for arm, e in found.found.items()
    ]  # fmt: skip


def memory_exchanges(
    experiment: Experiment, test: TestScores, arms: Sequence[str]
) -> list[Exchange]:
    """For each arm's predicted peak: which arms fit into so much, and their scores at the end."""
    roles = memory_by_role(experiment, "predicted")
    held = {arm: sum(parts.values()) for arm, parts in roles.items()}
    peaks = {arm: held[arm] for arm in arms if arm in held and arm in test.arms}
    return [
        Exchange(
            "memory",
            limit,
            {a: test.arms[a].estimates[AVG] if peaks[a] <= limit else None for a in peaks},
        )
        for limit in sorted(set(peaks.values()))
    ]


def _memory_rows(
    experiment: Experiment, test: TestScores, arms: Sequence[str], records: list[dict[str, Any]]
) -> list[list[str]]:
    rows = []
    for found in memory_exchanges(experiment, test, arms):
        fits = {arm: _ranked(found, arm) for arm in arms}
        shown = [text if text != NOTHING else "does not fit" for text in fits.values()]
        rows.append([test.name, f"memory {size(found.limit)}", *shown])
        records += _records(test.name, found)
    return rows


def _changes(experiment: Experiment, scores: Sequence[TestScores], measured: bool) -> str:
    """Whether the order of the arms depends on the unit."""
    told = []
    for test in scores:
        units = ("flops", *MEASURED) if measured else UNITS
        found = {u: e for u in units if (e := exchange(experiment, test.name, u)) is not None}
        orders = {u: e.ranking for u, e in found.items() if len(e.ranking) > 1}
        if len(set(orders.values())) > 1:
            listed = "; ".join(
                f"at equal {LABELS.get(u, u)} {', '.join(order)}" for u, order in orders.items()
            )
            told.append(f" On {test.name} the order changes with the unit: {listed}.")
        elif orders:
            told.append(f" On {test.name} the order is the same in each unit.")
    return "".join(told)
