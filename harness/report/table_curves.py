"""Shapes of curves: a sigmoid through each arm's learning curve, and where the base overtakes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.report.load import Experiment
from harness.report.scores import TestScores, curve, final_line, score_matrix
from harness.report.tables import NOTHING, Table, fixed, interval, number, percent
from harness.stats.curves import Crossover, Interval, NoFit, SigmoidFit, fit_sigmoid, pass_crossover

UNIT = "flops"
HALF = 2  # Pass@K is looked at up to the samples over this: beyond, it is noisy


def sigmoid_table(experiment: Experiment, scores: Sequence[TestScores]) -> Table:
    """Asymptote, midpoint and rate of every arm that a sigmoid describes; of the rest why not."""
    rows, records = [], []
    for test in scores:
        for arm in experiment.drawn:
            fit = None if arm == "base" else arm_sigmoid(experiment, test.name, arm)
            if fit is None:
                continue
            record: dict[str, object] = {"test": test.name, "arm": arm}
            if isinstance(fit, NoFit):
                rows.append([test.name, arm, f"none: {fit.reason}", *[NOTHING] * 5])
                records.append(record | {"no_fit": fit.reason})
                continue
            rows.append([test.name, arm, "yes", _percent(fit.asymptote), _number(fit.midpoint),
                         _number(fit.rate), fixed(fit.r2, 2), fixed(fit.reached)])  # fmt: skip
            records.append(record | {"no_fit": ""} | _parameters(fit))
    return Table(
        name="sigmoid",
        title="Learning curves as sigmoids of FLOPs",
        note="score = start + (asymptote − start)/(1 + (midpoint/FLOPs)^rate), fitted to the mean "
        "over seeds, with 95 % t intervals from resampled seeds; start is the base's score. "
        "Reached: the FLOPs spent as a multiple of the midpoint; under about 3 the asymptote is "
        "extrapolated, and nothing should be concluded from it.",
        columns=("test set", "arm", "fit", "asymptote, %", "midpoint, FLOPs", "rate", "R²",
                 "reached"),
        rows=rows,
        records=records,
        labels=3,
        sources=[c.folder for a in experiment.drawn for c in experiment.seed_cells(a)],
    )  # fmt: skip


def arm_sigmoid(experiment: Experiment, test: str, arm: str) -> SigmoidFit | NoFit | None:
    """The fit to an arm's finished seeds; None where they or the base were not evaluated."""
    starts = [final_line(c, f"test.{test}") for c in experiment.seed_cells("base")]
    runs = []
    for cell in experiment.seed_cells(arm):
        lines = {line["at"]: line for line in curve(cell, f"test.{test}") if line["at"] > 0}
        if lines:
            runs.append(lines)
    known = [line for line in starts if line is not None]
    if not runs or not known:
        return None
    moments = sorted(set.intersection(*(set(run) for run in runs)))
    if not moments:
        return None
    spent = [[run[at]["spent"][UNIT] for run in runs] for at in moments]
    x = np.array(spent, dtype=np.float64).mean(axis=1)
    values = np.array([[float(score_matrix([run[at]]).mean()) for at in moments] for run in runs])
    rising = np.flatnonzero(np.diff(x, prepend=0.0) > 0)  # two moments may fall on one step
    return fit_sigmoid(x[rising], values[:, rising], float(score_matrix(known).mean()))


def _parameters(fit: SigmoidFit) -> dict[str, object]:
    found: dict[str, object] = {"start": fit.start, "r2": fit.r2, "reached": fit.reached}
    for name in ("asymptote", "midpoint", "rate"):
        value: Interval = getattr(fit, name)
        found |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
    return found


def _percent(value: Interval) -> str:
    ends = "" if value.low is None else f" {interval(value.low, value.high)}"
    return percent(value.value) + ends


def _number(value: Interval) -> str:
    ends = "" if value.low is None else f" [{number(value.low)}, {number(value.high)}]"
    return number(value.value) + ends


def crossover_table(experiment: Experiment, scores: Sequence[TestScores]) -> Table:
    """For each arm the K from which the untrained base passes more problems."""
    rows, records = [], []
    for test in scores:
        for arm in experiment.drawn:
            found = None if arm == "base" else arm_crossover(experiment, test, arm)
            if found is None:
                continue
            rows.append([test.name, arm, *_crossing(found)])
            records.append({"test": test.name, "arm": arm, "k": found.k, "low": found.low,
                            "high": found.high, "largest": found.largest})  # fmt: skip
    return Table(
        name="crossover",
        title="The K at which the base overtakes in Pass@K",
        note="From this K on the base passes more problems: what training gained is then in "
        "choosing an answer rather than in finding one. 95 % interval from that of the "
        "difference in Pass@K over seeds and problems. K is looked at up to half the samples; "
        "arms that are not above the base at K = 1 are left out.",
        columns=("test set", "arm", "base overtakes at K", "interval"),
        rows=rows,
        records=records,
        labels=2,
        sources=[c.folder for a in experiment.drawn for c in experiment.seed_cells(a)],
    )


def arm_crossover(experiment: Experiment, test: TestScores, arm: str) -> Crossover | None:
    """Over the seeds that arm and base both finished, where all have the same samples."""
    ids = [problem["id"] for problem in test.problems]
    counts, sizes = [], set()
    lines = {
        name: {c.seed: line for c in experiment.seed_cells(name)
               if (line := final_line(c, f"test.{test.name}")) is not None}
        for name in (arm, "base")
    }  # fmt: skip
    seeds = sorted(s for s in lines[arm].keys() & lines["base"].keys() if s is not None)
    for name in (arm, "base"):
        tables = [{p["id"]: p for p in lines[name][seed]["problems"]} for seed in seeds]
        counts.append(np.array([[t[i]["correct"] for i in ids] for t in tables], dtype=np.int64))
        sizes |= {t[i]["n"] for t in tables for i in ids}
    if not seeds or len(sizes) != 1:
        return None
    (samples,) = sizes
    if samples < HALF or not ids:
        return None
    trained, base = counts
    return pass_crossover(trained, base, samples, range(1, samples // HALF + 1))


def _crossing(found: Crossover) -> tuple[str, str]:
    beyond = f"> {found.largest}"
    low, high = (beyond if k is None else str(k) for k in (found.low, found.high))
    shown = NOTHING if low == high == beyond else f"[{low}, {high}]"
    return beyond if found.k is None else str(found.k), shown
