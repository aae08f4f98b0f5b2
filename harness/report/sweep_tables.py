"""Tables of a sweep: scores and paired differences by case, and what a change of case does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from harness.report.scores import AVG, ArmScores, Metric, TestScores, paired
from harness.report.sweep_load import CaseResults, Change, SweepResults, leaf
from harness.report.tables import NOTHING, Table, in_percent, in_points, interval, setting
from harness.stats.effects import Difference, Estimate, Floats, differences

MARK = " †"
UNCERTIFIED = " † This case is not certified."
Entry = tuple[str, dict[str, Any]]


def cases_table(sweep: SweepResults) -> Table:
    """What each case sets, how far it came, and whether it is certified."""
    rows = []
    for case in sweep.cases:
        cells = case.experiment.cells
        done = f"{sum(c.status == 'done' for c in cells)} of {len(cells)}"
        rows.append([case.name, *_sets(sweep, case), done, case.state])
    none = [NOTHING] * len(sweep.paths)
    rows += [[name, *none, "0", "not begun"] for name in sweep.missing]
    return Table(
        "cases",
        "The cases of the sweep",
        "Each is an experiment with a lock, a certificate and a report of its own, in the folder "
        "of its name.",
        ("case", *sweep.paths, "cells done", "certificate"),
        rows,
        sources=_reports(sweep),
    )


def metric_tables(sweep: SweepResults, test: str) -> list[Table]:
    """For each metric that is shown: the scores of all cases, and differences to the baseline."""
    shown: dict[Metric, str] = {}
    for case in sweep.cases:
        if test in case.scores:
            for metric in headline(case.scores[test].metrics):
                shown.setdefault(metric, case.scores[test].label(metric))
    found = []
    for metric, label in shown.items():
        stem = "" if metric == AVG else f"_{metric.name}{metric.k or ''}"
        found += [
            _scores_table(sweep, test, metric, label, f"sweep_{test}{stem}"),
            _paired_table(sweep, test, metric, label, f"sweep_paired_{test}{stem}"),
        ]
    return [table for table in found if table.rows]


def headline(metrics: Sequence[Metric]) -> list[Metric]:
    """Avg, greedy, and pass and maj at the largest K."""
    largest = max((m.k for m in metrics if m.k is not None), default=None)
    return [m for m in metrics if m.k in (None, largest)]


def _scores_table(sweep: SweepResults, test: str, metric: Metric, label: str, name: str) -> Table:
    def cell(case: CaseResults, arm: str) -> Entry | None:
        found = _of(case, test, arm)
        if found is None or metric not in found.estimates:
            return None
        one = found.estimates[metric]
        return in_percent(one), _numbers(one)

    note = (
        "Mean over seeds and problems in percent, with the 95 % t interval over seeds and "
        "problems, cut at 0 and 100."
    )
    return _by_case(
        sweep, name, f"{label} on {test} at the end, by case", note, sweep.shown, metric, cell
    )


def _paired_table(sweep: SweepResults, test: str, metric: Metric, label: str, name: str) -> Table:
    def cell(case: CaseResults, arm: str) -> Entry | None:
        baseline = case.experiment.baseline
        if arm == baseline or None in (_of(case, test, arm), _of(case, test, baseline)):
            return None
        found = paired(case.scores[test], arm, baseline).get(metric)
        return None if found is None else (_with_interval(found), _record(found, baseline))

    baselines = sweep.baselines
    what = f"less {baselines[0]}" if len(baselines) == 1 else "less the case's baseline"
    note = (
        f"Percentage points, each arm {what}, paired by seed and problem, with the 95 % t interval "
        "over seeds and problems. The intervals are not corrected for how many there are."
    )
    arms = [arm for arm in sweep.shown if any(arm != b for b in baselines)]
    title = f"{label} on {test}: paired differences to the baseline, by case"
    return _by_case(sweep, name, title, note, arms, metric, cell)


def _by_case(
    sweep: SweepResults,
    name: str,
    title: str,
    note: str,
    arms: Sequence[str],
    metric: Metric,
    cell: Callable[[CaseResults, str], Entry | None],
) -> Table:
    """A row for each case, a column for each arm."""
    rows, records = [], []
    labels = [leaf(path, sweep.paths) for path in sweep.axes] or ["case"]
    for case in sweep.cases:
        made = {arm: entry for arm in arms if (entry := cell(case, arm)) is not None}
        if not made:
            continue
        mark = "" if case.certified else MARK
        own = [setting(case.sets[path]) for path in sweep.axes] or [case.name]
        rows.append(
            [*own[:-1], own[-1] + mark, *(made[a][0] if a in made else NOTHING for a in arms)]
        )
        records += [
            {"case": case.name, "certified": case.certified, **case.sets, "arm": arm,
             "metric": metric.name, "k": metric.k, **numbers}
            for arm, (_, numbers) in made.items()
        ]  # fmt: skip
    return Table(
        name, title, note + _warning(sweep), (*labels, *arms), rows,
        records=records, labels=len(labels), sources=_reports(sweep),
    )  # fmt: skip


# -- what a change of case does -------------------------------------------------------------------


def change_table(sweep: SweepResults, test: str) -> Table:
    """Average accuracy of a case less that of the case that differs in one thing alone."""
    arms = sweep.shown
    rows, records = [], []
    others = [a for a in sweep.arms if any(a != b for b in sweep.baselines)]
    for change in sweep.changes():
        row, made = _change_row(sweep, test, change, arms, others)
        if made:
            rows.append(row)
            records += made
    what = sweep.baselines[0] if len(sweep.baselines) == 1 else "baseline"
    return Table(
        f"sweep_change_{test}",
        f"What each change does to average accuracy on {test}",
        "Percentage points: the case with the second value less the one with the first, all else "
        "equal, paired by seed and problem over those that both have, with the 95 % t interval "
        f"over seeds and problems. The columns less {what} say how much more an arm gains by the "
        "change than the baseline does (loses less, where both lose). The intervals are not "
        "corrected for how many there are." + _warning(sweep),
        ("change", "held", *arms, *(f"{arm} − {what}" for arm in others)),
        rows,
        records=records,
        labels=2,
        sources=_reports(sweep),
    )


def _change_row(
    sweep: SweepResults, test: str, change: Change, arms: Sequence[str], others: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    start, end, paths = change.start, change.end, list(sweep.axes)
    mark = "" if start.certified and end.certified else MARK
    values = " to ".join(setting(change.value(case)) for case in (start, end))
    held = ", ".join(f"{leaf(p, paths)} {setting(v)}" for p, v in change.held.items())
    row = [f"{leaf(change.path, paths)} {values}{mark}", held or NOTHING]
    about = {
        "path": change.path, "from": change.value(start), "to": change.value(end), **change.held,
        "certified": not mark,
    }  # fmt: skip
    records: list[dict[str, Any]] = []
    found = {arm: _moved(start, end, test, arm) for arm in arms}
    baseline = end.experiment.baseline
    same = baseline == start.experiment.baseline
    wanted = [(arm, found[arm], None) for arm in arms]
    wanted += [
        (arm, found[arm], found.get(baseline))
        for arm in others
        if same and arm != baseline and found[arm] and found.get(baseline)
    ]
    made: dict[tuple[str, bool], str] = {}
    for arm, mine, theirs in wanted:
        gap = _gap(mine, theirs)
        if gap is not None:
            made[arm, theirs is not None] = _with_interval(gap)
            control = baseline if theirs is not None else ""
            records.append({**about, "arm": arm, "less": control, **_record(gap)})
    row += [made.get((arm, False), NOTHING) for arm in arms]
    return row + [made.get((arm, True), NOTHING) for arm in others], records


Moved = tuple[dict[int, Floats], tuple[str, ...]]  # seed -> change by problem; the problems


def _moved(start: CaseResults, end: CaseResults, test: str, arm: str) -> Moved | None:
    """An arm's change between two cases, by seed and problem, over what both have."""
    before, after = _of(start, test, arm), _of(end, test, arm)
    if before is None or after is None:
        return None
    ids = [[str(p["id"]) for p in case.scores[test].problems] for case in (start, end)]
    shared = [i for i in ids[0] if i in set(ids[1])]
    seeds = [s for s in before.seeds if s in after.seeds]
    if not shared or not seeds:
        return None
    old, new = (
        {seed: dict(zip(names, found.values[0, row], strict=True))
         for row, seed in enumerate(found.seeds)}
        for names, found in zip(ids, (before, after), strict=True)
    )  # fmt: skip
    moved = {s: np.array([new[s][i] - old[s][i] for i in shared]) for s in seeds}
    return moved, tuple(shared)


def _gap(mine: Moved | None, theirs: Moved | None) -> Difference | None:
    """A change, or how much more of it there is than of another, over the same seeds."""
    if mine is None:
        return None
    (moved, problems), seeds = mine, list(mine[0])
    if theirs is not None:
        if theirs[1] != problems:
            return None
        seeds = [seed for seed in seeds if seed in theirs[0]]
    if not seeds:
        return None
    treatment = np.array([[moved[s] for s in seeds]])
    control = np.zeros_like(treatment)
    if theirs is not None:
        control = np.array([[theirs[0][s] for s in seeds]])
    return differences(treatment, control)[0]


# -- small things ---------------------------------------------------------------------------------


def _of(case: CaseResults, test: str, arm: str) -> ArmScores | None:
    scores: TestScores | None = case.scores.get(test)
    return scores.arms.get(arm) if scores is not None else None


def _with_interval(found: Difference) -> str:
    low, high = found.estimate.low, found.estimate.high
    return in_points(found) + ("" if low is None else f" {interval(low, high, sign=True)}")


def _numbers(e: Estimate) -> dict[str, Any]:
    return {"mean": e.mean, "low": e.low, "high": e.high, "seeds": e.seeds, "problems": e.problems}


def _record(found: Difference, control: str | None = None) -> dict[str, Any]:
    named = {} if control is None else {"control": control}
    return named | _numbers(found.estimate) | {
        "t_low": found.t_low, "t_high": found.t_high, "p_sign_flip": found.p,
        "smallest_p": found.smallest_p,
        "by_seed": " ".join(f"{round(d, 12):.6g}" for d in found.by_seed),
    }  # fmt: skip


def _sets(sweep: SweepResults, case: CaseResults) -> Iterator[str]:
    return (setting(case.sets[p]) if p in case.sets else NOTHING for p in sweep.paths)


def _warning(sweep: SweepResults) -> str:
    return "" if all(case.certified for case in sweep.cases) else UNCERTIFIED


def _reports(sweep: SweepResults) -> list[str]:
    return [f"{case.name}/report.html" for case in sweep.cases]
