"""From stored evaluations to (metrics x seeds x problems) arrays, arm by arm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from harness.metrics import maj_at_k, pass_at_k
from harness.report.load import Cell, Experiment
from harness.stats.effects import UNIT, Difference, Estimate, Floats, differences, estimates

Problem = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """``avg`` (the mean over samples, which is pass@1), ``greedy``, ``pass`` or ``maj`` at k."""

    name: str
    k: int | None = None

    def label(self, samples: int) -> str:
        if self.name == "avg":
            return f"Avg@{samples}"
        return "Greedy" if self.k is None else f"{self.name.capitalize()}@{self.k}"

    def of(self, problem: Problem) -> float:
        """The metric's value on one problem, in [0, 1]."""
        n, correct = problem["n"], problem["correct"]
        if self.name == "avg":
            return correct / n
        if self.name == "greedy":
            return float(problem["greedy"])
        assert self.k is not None
        return _pass(n, correct, self.k) if self.name == "pass" else _majority(problem, self.k)


AVG, GREEDY = Metric("avg"), Metric("greedy")


@dataclass(frozen=True)
class ArmScores:
    """An arm on one test set: values are (metrics x seeds x problems)."""

    metrics: tuple[Metric, ...]
    seeds: tuple[int, ...]
    values: Floats
    folders: tuple[str, ...]

    @cached_property
    def estimates(self) -> dict[Metric, Estimate]:
        return dict(zip(self.metrics, estimates(self.values, support=UNIT), strict=True))

    def minus(self, other: ArmScores) -> dict[Metric, Difference]:
        """Paired differences over the seeds that both arms finished; empty where there are none."""
        shared = [seed for seed in self.seeds if seed in other.seeds]
        if not shared:
            return {}
        mine = self.values[:, [self.seeds.index(s) for s in shared]]
        theirs = other.values[:, [other.seeds.index(s) for s in shared]]
        return dict(zip(self.metrics, differences(mine, theirs), strict=True))

    def only(self, problems: Sequence[int]) -> ArmScores:
        """The same on some of the problems, by position."""
        return ArmScores(self.metrics, self.seeds, self.values[:, :, list(problems)], self.folders)


@dataclass(frozen=True, eq=False)
class TestScores:
    """Every arm's final evaluation on one test set.

    Attributes:
        problems: the problems that all evaluations share, in order.
        left_out: how many problems some evaluation has and another has not.
        arms: only those with at least one finished seed.
    """

    __test__ = False

    name: str
    samples: int
    metrics: tuple[Metric, ...]
    problems: tuple[Problem, ...]
    left_out: int
    arms: Mapping[str, ArmScores]

    def label(self, metric: Metric) -> str:
        return metric.label(self.samples)

    def groups(self, key: str) -> dict[str, list[int]]:
        """Positions of the problems by ``level`` or ``subject``; empty where none has one."""
        found: dict[str, list[int]] = {}
        for place, problem in enumerate(self.problems):
            if problem.get(key) is not None:
                found.setdefault(str(problem[key]), []).append(place)
        return {name: found[name] for name in sorted(found, key=_natural)}


def final_scores(experiment: Experiment) -> list[TestScores]:
    """The final evaluations of all finished seeds, a value for each test set."""
    found = []
    for name in experiment.spec["data"]["test"]:
        lines = {
            arm: [
                (cell, line)
                for cell in experiment.seed_cells(arm)
                if (line := final_line(cell, f"test.{name}")) is not None
            ]
            for arm in experiment.shown
        }
        lines = {arm: pairs for arm, pairs in lines.items() if pairs}
        if lines:
            found.append(_test_scores(name, lines, experiment.spec["evaluation"]["k"]))
    return found


@lru_cache(maxsize=128)
def paired(test: TestScores, arm: str, control: str) -> Mapping[Metric, Difference]:
    """All metrics' paired differences between two arms that both have finished seeds."""
    return test.arms[arm].minus(test.arms[control])


def final_line(cell: Cell, split: str) -> Mapping[str, Any] | None:
    """The cell's last evaluation on a split at full samples; for ``base``, its only one."""
    lines = [line for line in cell.evals if line["split"] == split]
    final = [line for line in lines if line["purpose"] == "final"]
    if not final and cell.arm == "base":
        final = lines
    return final[-1] if final else None


def curve(cell: Cell, split: str) -> list[Mapping[str, Any]]:
    """The cell's evaluations on a split, in the order of what was spent."""
    return sorted((e for e in cell.evals if e["split"] == split), key=lambda line: line["at"])


def per_problem(line: Mapping[str, Any], metric: Metric = AVG) -> dict[str, float]:
    """Problem id -> the metric's value."""
    return {p["id"]: metric.of(p) for p in line["problems"]}


def score_matrix(lines: Sequence[Mapping[str, Any]], metric: Metric = AVG) -> Floats:
    """(lines x problems) over the problems that all lines share."""
    tables = [per_problem(line, metric) for line in lines]
    shared = [i for i in tables[0] if all(i in t for t in tables)]
    return np.array([[t[i] for i in shared] for t in tables])


def _test_scores(
    name: str, lines: Mapping[str, list[tuple[Cell, Mapping[str, Any]]]], ks: Sequence[int]
) -> TestScores:
    all_lines = [line for pairs in lines.values() for _, line in pairs]
    by_id = [{p["id"]: p for p in line["problems"]} for line in all_lines]
    shared = [i for i in by_id[0] if all(i in t for t in by_id)]
    samples = min(p["n"] for table in by_id for p in table.values())
    metrics = tuple(_metrics(all_lines, ks, samples))
    arms = {}
    for arm, pairs in lines.items():
        tables = [{p["id"]: p for p in line["problems"]} for _, line in pairs]
        values = [[[m.of(t[i]) for i in shared] for t in tables] for m in metrics]
        arms[arm] = ArmScores(
            metrics,
            tuple(int(cell.seed or 0) for cell, _ in pairs),
            np.array(values, dtype=np.float64),
            tuple(cell.folder for cell, _ in pairs),
        )
    every = set().union(*by_id)
    problems = tuple(by_id[0][i] for i in shared)
    return TestScores(name, samples, metrics, problems, len(every) - len(shared), arms)


def _metrics(
    lines: Sequence[Mapping[str, Any]], ks: Sequence[int], samples: int
) -> Iterator[Metric]:
    yield AVG
    if all(p.get("greedy") is not None for line in lines for p in line["problems"]):
        yield GREEDY
    for kind in ("pass", "maj"):
        yield from (Metric(kind, k) for k in ks if k <= samples)


@lru_cache(maxsize=100_000)
def _pass(n: int, correct: int, k: int) -> float:
    return pass_at_k(n, correct, k)


def _majority(problem: Problem, k: int) -> float:
    classes = sorted((count, bool(right)) for _, count, right in problem["answers"])
    return _majority_of(tuple(classes), problem["unparsed"], k)


@lru_cache(maxsize=100_000)
def _majority_of(classes: tuple[tuple[int, bool], ...], unparsed: int, k: int) -> float:
    counts, right = [count for count, _ in classes], [correct for _, correct in classes]
    return maj_at_k(counts, right, unparsed, k)


def _natural(text: str) -> tuple[int, float, str]:
    """Numbers by value, before words."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text
