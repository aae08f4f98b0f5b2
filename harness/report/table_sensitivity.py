"""The smallest change that would have given another verdict: seeds, margin, budget unit, metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from harness.report.load import MANY, Experiment
from harness.report.scores import Metric, TestScores
from harness.report.table_exchange import LABELS, UNITS, gaps_at
from harness.report.table_verdict import points
from harness.report.tables import NOTHING, Table
from harness.report.verdicts import Judged, Terms, all_terms, judged, paired_gaps
from harness.stats.sensitivity import Sensitivity, sensitivity
from harness.stats.verdict import judge_family

Key = tuple[str, str, str]  # test, arm, control


class Family:
    """A declared family of comparisons, to be judged again under another choice."""

    def __init__(self, experiment: Experiment, scores: Sequence[TestScores], terms: Terms) -> None:
        self.experiment, self.scores, self.terms = experiment, scores, terms
        self.unit = str(experiment.spec["budget"]["unit"])
        self.labels = cache(self._labels)

    @property
    def keys(self) -> list[Key]:
        tests = self.terms.tests or tuple(test.name for test in self.scores)
        return [(test, arm, control) for test in tests for arm, control in self.terms.pairs]

    def by_seed(self, key: Key, unit: str, metric: Metric) -> dict[int, float]:
        """Each seed's mean difference; empty where the runs do not tell."""
        name, arm, control = key
        test = next((t for t in self.scores if t.name == name), None)
        if test is None:
            return {}
        if unit != self.unit:
            found = gaps_at(self.experiment, name, unit, metric, arm, control)
            return {s: gap for s, gap in found.items() if s in self.terms.seeds}
        gaps = paired_gaps(test, arm, control, self.terms, metric)
        if gaps is None:
            return {}
        ours, theirs = test.arms[arm].seeds, test.arms[control].seeds
        shared = [s for s in self.terms.seeds if s in ours and s in theirs]
        return dict(zip(shared, gaps.mean(axis=1).tolist(), strict=True))

    def _labels(
        self, dropped: frozenset[int], margin: float, unit: str, metric: Metric
    ) -> dict[Key, str]:
        left: dict[str, Any] = {}
        for key in self.keys:
            found = self._cached(key, unit, metric)
            kept = [gap for seed, gap in found.items() if seed not in dropped]
            left["/".join(key)] = np.array(kept or [0.0])
        verdicts = judge_family(left, margin, self.terms.alpha)
        return {key: verdicts["/".join(key)].label for key in self.keys}

    def _cached(self, key: Key, unit: str, metric: Metric) -> dict[int, float]:
        known = self.__dict__.setdefault("_known", {})
        if (key, unit, metric) not in known:
            known[key, unit, metric] = self.by_seed(key, unit, metric)
        return known[key, unit, metric]

    def vary(self, one: Judged) -> Sensitivity:
        """What changes the label that the p-values give this comparison."""
        key, metric = (one.test, one.arm, one.control), self.terms.metric
        test = next(t for t in self.scores if t.name == one.test)
        units = [u for u in UNITS if u != self.unit and self._cached(key, u, metric)]
        largest = max((m.k for m in test.metrics if m.k is not None), default=None)
        metrics = [m for m in test.metrics if m != metric and m.k in (None, largest)]

        def analyse(dropped: frozenset[int], margin: float, choices: Mapping[str, Any]) -> str:
            return self.labels(dropped, margin, choices["unit"], choices["metric"])[key]

        return sensitivity(
            analyse, sorted(self._cached(key, self.unit, metric)), self.terms.margin,
            settings={"unit": self.unit, "metric": metric},
            alternatives={"unit": units, "metric": metrics},
        )  # fmt: skip


def sensitivity_table(experiment: Experiment, scores: Sequence[TestScores]) -> Table:
    """A row for each declared comparison, of the declaration that stands first."""
    terms = all_terms(experiment)[0]
    family, rows, records = Family(experiment, scores, terms), [], []
    verdicts = judged(experiment, scores, terms)
    for one in verdicts if len(verdicts) <= MANY else ():
        if one.found.seeds < 2:
            continue
        found = family.vary(one)
        test = next(t for t in scores if t.name == one.test)
        nearest = found.nearest_margin(terms.margin)
        rows.append([one.test, one.name, found.label, _seeds(found), _margin(found, terms.margin),
                     _settings(found, "unit", test), _settings(found, "metric", test)])  # fmt: skip
        records.append({
            "test": one.test, "arm": one.arm, "control": one.control, "label": found.label,
            "fewest_seeds": found.fewest_seeds, "nearest_margin": nearest,
            "units": " ".join(f.value for f in found.settings if f.name == "unit"),
            "metrics": " ".join(test.label(f.value) for f in found.settings if f.name == "metric"),
            "analyses": found.tried,
        })  # fmt: skip
    return Table(
        name="sensitivity",
        title="What would have changed the verdict",
        note="One change at a time, of the label that the p-values give (before anything is "
        "withheld): the fewest seeds left out, the nearest margin, the same runs at equal budgets "
        "in another unit (interpolated, by the samples along the way), another metric. A verdict "
        "that one seed overturns rests on that seed. This is no menu to choose an analysis from. "
        "Another grader is not tried: a run keeps its verdicts, not all its completions.",
        columns=("test set", "comparison", "label", "without seeds", "at margin", "in another unit",
                 "by another metric"),
        rows=rows,
        records=records,
        labels=7,
        sources=[c.folder for a in experiment.arms for c in experiment.seed_cells(a)],
    )  # fmt: skip


def _seeds(found: Sensitivity) -> str:
    if not found.seeds:
        return f"the same without any {found.dropped_up_to}"
    first, *rest = found.seeds
    gone = " and ".join(str(seed) for seed in first.dropped)
    also = f", or {len(rest)} other choice{'s' * (len(rest) != 1)}" if rest else ""
    return f"without {gone}: {first.label}{also}"


def _margin(found: Sensitivity, declared: float) -> str:
    nearest = found.nearest_margin(declared)
    if nearest is None:
        return "the same from a tenth to ten times"
    flip = next(f for f in found.margins if f.margin == nearest)
    side, label = ("below", flip.below) if nearest < declared else ("above", flip.above)
    return f"{side} {points(nearest)}: {label}"


def _settings(found: Sensitivity, name: str, test: TestScores) -> str:
    flips = [flip for flip in found.settings if flip.name == name]
    listed = [
        f"{test.label(f.value) if name == 'metric' else LABELS.get(f.value, f.value)}: {f.label}"
        for f in flips
    ]
    return "; ".join(listed) or NOTHING
