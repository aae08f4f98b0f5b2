"""Several experiments side by side: what each found, and in what they differ.

Arms of one certified experiment are matched; arms of different ones are not. So nothing here is
subtracted across experiments: every difference is to the baseline of the same experiment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import InputError, counted
from harness.report.compare_specs import COLUMNS, specs_table
from harness.report.load import Experiment, load_experiment
from harness.report.scores import AVG, final_line
from harness.report.sweep_load import CaseResults
from harness.report.table_scores import final_table, paired_table
from harness.report.table_verdict import points, verdict_table
from harness.report.tables import NOTHING, Table, budget, fixed, interval, signed
from harness.store import write_text

NOT_MATCHED = (
    "Arms of different experiments are not matched: each certificate is about the arms of one "
    "experiment. What differs across experiments may come from anything in the table of "
    "differences, or from the machine; only the differences to an experiment's own baseline are "
    "controlled, and only where it is certified."
)
Record = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Comparison:
    """What is known of several experiments.

    Attributes:
        notes: what a reader must know first; the first of them is ``NOT_MATCHED``.
        tables: ``compare_experiments``, ``compare_scores``, ``compare_paired``,
            ``compare_verdicts`` and ``compare_specs``, each with its records.
    """

    notes: tuple[str, ...]
    tables: tuple[Table, ...]

    def to_json(self) -> dict[str, Any]:
        """The records of all tables, for programs; a number without bound is None."""
        found = {t.name.removeprefix("compare_"): _finite(t.records or ()) for t in self.tables}
        return {"matched_across": False, "notes": list(self.notes), **found}

    def markdown(self) -> str:
        """Notes, then tables."""
        notes = [f"> **Note.** {note}\n" for note in self.notes]
        return "\n".join(["# Experiments compared\n", *notes, *(t.markdown() for t in self.tables)])


def compare(folders: Sequence[Path]) -> Comparison:
    """Read results folders, each of one experiment, and put them side by side.

    Whatever they are, they are shown; what makes them hard to compare is said in the notes.

    Raises:
        InputError: a folder that is no results folder, or a stored file that cannot be read.
    """
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    loaded = [load_experiment(path) for path in paths]
    cases = [
        CaseResults(label, {}, one) for label, one in zip(_labels(loaded), loaded, strict=True)
    ]
    tables = (
        _experiments(cases), _scores(cases), _paired(cases), _verdicts(cases), specs_table(cases)
    )  # fmt: skip
    return Comparison(tuple(_notes(cases, tables[-1])), tables)


def write_comparison(made: Comparison, out: Path) -> tuple[Path, ...]:
    """Write ``COMPARE.md`` and ``tables/compare_*`` (CSV, Markdown, LaTeX); what was written.

    Raises:
        InputError: ``out`` is a results folder, which holds its own report alone.
    """
    if (out / "spec.lock.yaml").exists():
        raise InputError(f"--out {out} is a results folder; name another folder")
    texts = {out / "COMPARE.md": made.markdown()}
    for table in made.tables:
        stem = out / "tables" / table.name
        texts |= {
            stem.with_suffix(".csv"): table.csv(),
            stem.with_suffix(".md"): table.markdown(),
            stem.with_suffix(".tex"): table.latex(),
        }
    for path, text in texts.items():
        write_text(path, text)
    return tuple(texts)


def _labels(experiments: Sequence[Experiment]) -> list[str]:
    """Names; where two are alike, the folders below the one that all share."""
    names = [one.name for one in experiments]
    if len(set(names)) == len(names):
        return names
    shared = os.path.commonpath([one.path.parent for one in experiments])
    return [one.path.relative_to(shared).as_posix() for one in experiments]


def _experiments(cases: Sequence[CaseResults]) -> Table:
    records = [_experiment(case) for case in cases]
    columns = {
        "experiment": "experiment", "certificate": "certificate", "violations": "violations",
        "baseline": "baseline", "budget": "budget", "seeds": "seeds", "cells": "cells done",
        "amendments": "amendments after cells ran",
    }  # fmt: skip
    return Table(
        "compare_experiments",
        "The experiments",
        "certified: the audit found that the arms within the experiment differ only in what they "
        "declare.",
        tuple(columns.values()),
        [[str(record[key]) for key in columns] for record in records],
        records,
        labels=4,
    )


def _experiment(case: CaseResults) -> dict[str, Any]:
    one = case.experiment
    done = sum(cell.status == "done" for cell in one.cells)
    return {
        "experiment": case.name, "folder": one.path.as_posix(), "certificate": case.state,
        "violations": len((one.certificate or {}).get("violations") or ()),
        "baseline": one.baseline, "budget": budget(one.spec), "seeds": len(one.seeds),
        "cells": f"{done} of {len(one.cells)}", "amendments": len(one.amendments),
        "arms": " ".join(one.arms),
    }  # fmt: skip


def _scores(cases: Sequence[CaseResults]) -> Table:
    """Arm x experiment: the mean of all samples at the end, which is pass@1."""
    names = _test_names(cases)
    records: list[dict[str, Any]] = [
        {"experiment": case.name, "test_set": names[case.name, r["test"]], **r}
        for case in cases
        for r in final_table(case.experiment, list(case.scores.values())).records or ()
    ]
    shown = {(r["test_set"], r["arm"], r["experiment"]): r for r in records if _is_avg(r)}
    keys = list(dict.fromkeys((test, arm) for test, arm, _ in shown))
    tests = list(dict.fromkeys(test for test, _ in keys))
    keys.sort(key=lambda key: tests.index(key[0]))
    wide = len(cases) <= COLUMNS
    if wide:
        rows = [[*key, *(_score(shown.get((*key, case.name))) for case in cases)] for key in keys]
    else:
        rows = [
            [*key, case.name, _score(shown[*key, case.name])]
            for key in keys
            for case in cases
            if (*key, case.name) in shown
        ]
    return Table(
        "compare_scores",
        "Final score of each arm in each experiment",
        "Average accuracy (pass@1) at the end of the experiment's own budget, in percent, with the "
        "95 % t interval over seeds and problems. One arm's scores in two experiments are "
        "no matched comparison. Test sets of one name with other problems stand apart. The CSV has "
        "every metric.",
        ("test set", "arm", *([case.name for case in cases] if wide else ["experiment", "score"])),
        rows,
        records,
        labels=2 if wide else 3,
    )


def _score(record: Record | None) -> str:
    if record is None:
        return NOTHING
    low, high = record["low"], record["high"]
    shown = "" if low is None else f" {interval(low, high)}"
    return f"{fixed(100 * record['mean'])}{shown}, {counted(record['seeds'], 'seed')}"


def _paired(cases: Sequence[CaseResults]) -> Table:
    """Each arm less the baseline of its own experiment; the same arm's rows stand together."""
    names = _test_names(cases)
    records: list[dict[str, Any]] = []
    for case in cases:
        one = case.experiment
        others = [arm for arm in one.shown if arm not in (one.baseline, "base")]
        found = paired_table("paired", "", list(case.scores.values()), one.baseline, others)
        records += [
            {"experiment": case.name, "certificate": case.state}
            | {"test_set": names[case.name, r["test"]], **r}
            for r in found.records or ()
        ]
    rows = [
        [
            r["test_set"], f"{r['arm']} − {r['control']}", r["experiment"], r["certificate"],
            str(r["seeds"]), signed(100 * r["mean"]), interval(r["low"], r["high"], sign=True),
            interval(r["t_low"], r["t_high"], sign=True), fixed(r["p_sign_flip"], 4),
        ]
        for r in filter(_is_avg, records)
    ]  # fmt: skip
    first = {tuple(row[:2]): place for place, row in reversed(list(enumerate(rows)))}
    return Table(
        "compare_paired",
        "Paired differences to the baseline of the same experiment",
        "Points of a hundred, average accuracy, paired by seed and problem. Intervals: 95 %, over "
        "seeds and problems, and over seeds alone. p: sign flips over seeds, not corrected.",
        ("test set", "comparison", "experiment", "certificate", "seeds", "difference",
         "interval", "seeds only", "p"),
        sorted(rows, key=lambda row: first[tuple(row[:2])]),
        records,
        labels=4,
    )  # fmt: skip


def _verdicts(cases: Sequence[CaseResults]) -> Table:
    names = _test_names(cases)
    records: list[dict[str, Any]] = [
        {"experiment": case.name, "certificate": case.state}
        | {"test_set": names[case.name, r["test"]], **r}
        for case in cases
        for r in verdict_table(case.experiment, list(case.scores.values())).records or ()
    ]
    rows = [
        [
            r["experiment"], r["certificate"], r["test_set"], f"{r['arm']} − {r['control']}",
            f"{r['metric']}{'' if r['k'] is None else '@' + str(r['k'])}", points(r["margin"]),
            r["label"], f"{r['by_p_values']}: {r['withheld']}" if r["withheld"] else NOTHING,
            r["status"], signed(100 * r["difference"]), interval(r["low"], r["high"], sign=True),
        ]
        for r in records
    ]  # fmt: skip
    return Table(
        "compare_verdicts",
        "The verdicts of each experiment",
        "Each by its own experiment's metric, margin, level and family. A verdict of an experiment "
        "that is not certified is not about matched arms. Two verdicts that differ do not show "
        "that two experiments differ.",
        ("experiment", "certificate", "test set", "comparison", "metric", "margin", "verdict",
         "withheld", "declared", "difference", "interval"),
        rows,
        records,
        labels=9,
    )  # fmt: skip


def _notes(cases: Sequence[CaseResults], specs: Table) -> Iterator[str]:
    yield NOT_MATCHED
    kinds = dict.fromkeys(str(r["kind"]) for r in specs.records or ())
    if len(cases) < 2:
        yield "One experiment alone: there is nothing to compare it with."
    elif kinds:
        yield f"The experiments differ in: {', '.join(kinds)}."
    else:
        yield "No setting, part or hash differs; they may still have run on other machines."
    for case in cases:
        one = case.experiment
        if not case.certified:
            yield f"{case.name}: {case.state}. Nothing shows that its arms were matched."
        if one.amendments:
            times = counted(len(one.amendments), "time")
            yield f"{case.name} was amended {times} after cells had run: see its own report."
        undone = sum(cell.status != "done" for cell in one.cells)
        if undone:
            yield f"{case.name}: {undone} of {counted(len(one.cells), 'cell')} not done."
    for name in dict.fromkeys(test for case in cases for test in case.scores):
        if len({_problems(case, name) for case in cases if name in case.scores}) > 1:
            yield f"Test set {name} has other problems in some experiments: other scores to beat."
    for ours, theirs in combinations(cases, 2):
        if same := _same_numbers(ours, theirs):
            yield (
                f"{ours.name} and {theirs.name} hold the same scores of {', '.join(same)}, problem "
                "by problem: the same runs, or runs repeated exactly. That replicates nothing."
            )


def _same_numbers(ours: CaseResults, theirs: CaseResults) -> list[str]:
    """The trained arms whose scores are equal on every problem, seed by seed."""
    same: dict[str, bool] = {}
    for test in ours.scores.keys() & theirs.scores.keys():
        mine, its = ours.scores[test], theirs.scores[test]
        for arm in (mine.arms.keys() & its.arms.keys()) - {"base"}:
            a, b = mine.arms[arm], its.arms[arm]
            equal = a.seeds == b.seeds and np.array_equal(a.values, b.values)
            same[arm] = same.get(arm, True) and equal
    return [arm for arm in ours.experiment.shown if same.get(arm)]


def _test_names(cases: Sequence[CaseResults]) -> dict[tuple[str, str], str]:
    """(experiment, test set) -> its name, with what tells its problems from others of the name."""
    keys = {(case.name, test): _problems(case, test) for case in cases for test in case.scores}
    found = {}
    for (case, test), problems in keys.items():
        alike = len({p for (_, name), p in keys.items() if name == test}) == 1
        found[case, test] = test if alike else f"{test} (problems {problems or 'unknown'})"
    return found


def _problems(case: CaseResults, test: str) -> str:
    """Of the problems that were answered, the first digits of their hash."""
    one = case.experiment
    lines = [final_line(c, f"test.{test}") for arm in one.shown for c in one.seed_cells(arm)]
    hashes = {str(line.get("problems_sha256", ""))[:8] for line in lines if line is not None}
    return " ".join(sorted(hashes))


def _is_avg(record: Record) -> bool:
    return record["metric"] == AVG.name


def _finite(records: Sequence[Record]) -> list[dict[str, Any]]:
    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{key: plain(value) for key, value in record.items()} for record in records]
