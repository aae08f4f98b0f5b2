"""Tables of what the arms scored: at matched budget, paired by seed, by level and subject."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.report.load import MANY, Experiment
from harness.report.scores import AVG, ArmScores, Metric, TestScores, paired
from harness.report.tables import (
    NOTHING,
    Table,
    budget,
    by_arm,
    fixed,
    in_percent,
    in_points,
    interval,
)
from harness.stats.effects import Difference, Estimate

INTERVAL_NOTE = (
    "Mean over seeds and problems in percent, with the 95 % t interval over seeds and "
    "problems, cut at 0 and 100."
)


def score_tables(experiment: Experiment, scores: Sequence[TestScores]) -> list[Table]:
    """``final``, ``paired``, ``gain`` and ``levels``."""
    baseline = experiment.baseline
    others = [a for a in experiment.shown if a not in (baseline, "base")]
    trained = [a for a in experiment.shown if a != "base"]
    paired = paired_table(
        "paired",
        f"Paired differences to {baseline}, by seed",
        scores,
        baseline,
        others,
    )
    gain = paired_table("gain", "Gain over the untrained base, by seed", scores, "base", trained)
    tables = [final_table(experiment, scores), paired]
    if "base" in experiment.controls:
        tables.append(gain)
    return [*tables, levels_table(experiment, scores)]


def final_table(experiment: Experiment, scores: Sequence[TestScores]) -> Table:
    """Every metric of every arm at the end of the budget."""
    rows, records = [], []
    for test in scores:
        for metric in test.metrics:
            row = [test.name, test.label(metric)]
            for arm in experiment.shown:
                found = test.arms[arm].estimates[metric] if arm in test.arms else None
                row.append(in_percent(found))
                if found is not None:
                    records.append(_record(test, metric, arm, found))
            rows.append(row)
        seeds = [str(len(test.arms[a].seeds)) if a in test.arms else "0" for a in experiment.shown]
        rows.append([test.name, "seeds", *seeds])
    table = Table(
        name="final",
        title=f"Score at a matched budget of {budget(experiment.spec)}",
        note=f"{INTERVAL_NOTE} Avg@n is the mean over n samples of each problem, which is pass@1. "
        "base is the untrained model, placebo is trained on shuffled verdicts.",
        columns=("test set", "metric", *experiment.shown),
        rows=rows,
        records=records,
        labels=2,
        sources=_folders(scores),
    )
    many = len(experiment.arms) > MANY
    return by_arm(table, experiment.shown, lambda row: row[1]) if many else table


def paired_table(
    name: str,
    title: str,
    scores: Sequence[TestScores],
    control: str,
    arms: Sequence[str],
) -> Table:
    rows, records = [], []
    for test in scores:
        shown = set(_headline(test.metrics))
        for metric in test.metrics:
            for arm in arms:
                found = _difference(test, arm, control, metric)
                if found is not None:
                    records.append(_paired_record(test, metric, arm, control, found))
                if metric in shown:
                    label = [test.name, test.label(metric), f"{arm} − {control}"]
                    rows.append([*label, *_paired_row(found)])
    return Table(
        name=name,
        title=title,
        note="Percentage points, paired by seed and problem over the seeds that both finished. "
        "Two 95 % t intervals: over seeds and problems, and over the seeds' means, which asks only "
        "whether other seeds would agree on these problems. p: exact two-sided sign-flip test over "
        "seeds; with n of them it cannot fall below the last column (5: 0.0625, 6: 0.0312). "
        "No correction for many comparisons. The CSV holds every K.",
        columns=(
            "test set",
            "metric",
            "comparison",
            "seeds",
            "difference",
            "interval",
            "seeds only",
            "p",
            "smallest p",
        ),
        rows=rows,
        records=records,
        labels=3,
        sources=_folders(scores),
    )


def _difference(test: TestScores, arm: str, control: str, metric: Metric) -> Difference | None:
    if arm not in test.arms or control not in test.arms:
        return None
    return paired(test, arm, control).get(metric)


def _paired_row(found: Difference | None) -> list[str]:
    if found is None:
        return ["0", *[NOTHING] * 5]
    low, high = found.estimate.low, found.estimate.high
    return [
        str(found.estimate.seeds),
        in_points(found),
        interval(low, high, sign=True),
        interval(found.t_low, found.t_high, sign=True),
        fixed(found.p, 4),
        fixed(found.smallest_p, 4),
    ]


def _paired_record(
    test: TestScores, metric: Metric, arm: str, control: str, found: Difference
) -> dict[str, Any]:
    return _record(test, metric, arm, found.estimate) | {
        "control": control,
        "t_low": found.t_low,
        "t_high": found.t_high,
        "p_sign_flip": found.p,
        "smallest_p": found.smallest_p,
        "by_seed": " ".join(f"{round(d, 12):.6g}" for d in found.by_seed),
    }


def levels_table(experiment: Experiment, scores: Sequence[TestScores]) -> Table:
    """Avg@n by level and by subject of the problems."""
    rows, records = [], []
    for test in scores:
        for key, name, places in _groups(test):
            shown = name if name.lower().startswith(key) else f"{key} {name}"
            row = [test.name, shown, str(len(places))]
            for arm in experiment.shown:
                found = _only(test.arms.get(arm), places)
                row.append(in_percent(found))
                if found is not None:
                    record = _record(test, AVG, arm, found)
                    records.append(record | {"by": key, "group": name})
            rows.append(row)
    label = scores[0].label(AVG) if scores else "Avg"
    table = Table(
        name="levels",
        title=f"{label} by level and subject",
        note=INTERVAL_NOTE,
        columns=("test set", "group", "problems", *experiment.shown),
        rows=rows,
        records=records,
        labels=2,
        sources=_folders(scores),
    )
    many = len(experiment.arms) > MANY
    return by_arm(table, experiment.shown, lambda row: f"{row[1]} ({row[2]})") if many else table


def _groups(test: TestScores) -> Iterator[tuple[str, str, list[int]]]:
    for key in ("level", "subject"):
        for name, places in test.groups(key).items():
            yield key, name, places


def _only(arm: ArmScores | None, places: Sequence[int]) -> Estimate | None:
    if arm is None:
        return None
    first = ArmScores(arm.metrics[:1], arm.seeds, arm.values[:1], arm.folders)
    return first.only(places).estimates[AVG]


def _headline(metrics: Sequence[Metric]) -> Iterator[Metric]:
    """Avg, greedy, and pass and maj at the largest K: what is shown; the CSV has all."""
    largest = max((m.k for m in metrics if m.k is not None), default=None)
    return (m for m in metrics if m.k in (None, largest))


def _record(test: TestScores, metric: Metric, arm: str, found: Estimate) -> dict[str, Any]:
    return {
        "test": test.name,
        "metric": metric.name,
        "k": metric.k,
        "samples": test.samples,
        "arm": arm,
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "seeds": found.seeds,
        "problems": found.problems,
    }


def _folders(scores: Sequence[TestScores]) -> list[str]:
    arms: list[Mapping[str, ArmScores]] = [test.arms for test in scores]
    return list(dict.fromkeys(f for found in arms for arm in found.values() for f in arm.folders))
