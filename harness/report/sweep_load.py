"""A sweep's results folder as values: its cases, and which of them differ in one thing alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.report.load import Experiment, load_experiment
from harness.report.scores import TestScores, final_scores
from harness.store import SWEEP_FILE


@dataclass(frozen=True, eq=False)
class CaseResults:
    """One case of a sweep as it stands on disk."""

    name: str
    sets: Mapping[str, Any]
    experiment: Experiment

    @cached_property
    def scores(self) -> dict[str, TestScores]:
        return {test.name: test for test in final_scores(self.experiment)}

    @property
    def state(self) -> str:
        """What its certificate says."""
        certificate = self.experiment.certificate
        if certificate is None:
            return "not audited"
        return "certified" if certificate.get("certified") is True else "NOT certified"

    @property
    def certified(self) -> bool:
        return self.state == "certified"


@dataclass(frozen=True, eq=False)
class Change:
    """Two cases that differ in one path of the grid alone; in ``case`` where there is no grid.

    ``start`` has the first value of that path.
    """

    path: str
    start: CaseResults
    end: CaseResults

    def value(self, case: CaseResults) -> Any:
        return case.sets.get(self.path, case.name)

    @property
    def held(self) -> dict[str, Any]:
        """The other paths of the grid, with the value that both cases have."""
        both = {p: v for p, v in self.end.sets.items() if p != self.path}
        return both if self.path in self.end.sets else {}


@dataclass(frozen=True, eq=False)
class SweepResults:
    """A sweep's folder.

    Attributes:
        axes: the grid's paths with their values, in the order of the file; empty without a grid.
        cases: those that have begun, in order.
        missing: names of those that have not.
    """

    path: Path
    name: str
    question: str
    axes: Mapping[str, Sequence[Any]]
    cases: tuple[CaseResults, ...]
    missing: tuple[str, ...]

    @property
    def certified(self) -> bool:
        return not self.missing and all(case.certified for case in self.cases)

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms of any case, in order."""
        return tuple(dict.fromkeys(a for case in self.cases for a in case.experiment.arms))

    @property
    def shown(self) -> tuple[str, ...]:
        """Controls, then arms."""
        controls = dict.fromkeys(a for case in self.cases for a in case.experiment.controls)
        return (*controls, *self.arms)

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(case.experiment.baseline for case in self.cases))

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for case in self.cases for name in case.scores))

    @property
    def paths(self) -> tuple[str, ...]:
        """Whatever the cases set, those of the grid first."""
        return tuple(dict.fromkeys([*self.axes, *(p for case in self.cases for p in case.sets)]))

    def changes(self) -> Iterator[Change]:
        """Every case against the one that differs in a path's first value alone."""
        if not self.axes:
            yield from (Change("case", self.cases[0], case) for case in self.cases[1:])
        for path, values in self.axes.items():
            for end in self.cases:
                origin = {**end.sets, path: values[0]}
                start = next((c for c in self.cases if dict(c.sets) == origin), None)
                if start is not None and start is not end:
                    yield Change(path, start, end)


def load_sweep_results(folder: Path) -> SweepResults:
    """Read a sweep's results folder.

    Raises:
        InputError: no ``sweep.json``, or no case that has begun.
    """
    file = folder / SWEEP_FILE
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        cases = [(str(case["name"]), dict(case["sets"])) for case in made["cases"]]
        name, question, axes = made["name"], made["question"], dict(made["axes"])
        axes = {path: axes[path] for path in made.get("order", axes)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); run the sweep again") from error
    begun = [(n, sets) for n, sets in cases if (folder / n / "spec.lock.yaml").is_file()]
    if not begun:
        raise InputError(f"{folder}: no case of the sweep has begun; run it first")
    found = tuple(CaseResults(n, sets, load_experiment(folder / n)) for n, sets in begun)
    missing = tuple(n for n, _ in cases if n not in {n for n, _ in begun})
    return SweepResults(folder, str(name), str(question), axes, found, missing)


def leaf(path: str, among: Sequence[str]) -> str:
    """The last word of a path, or all of it where another path ends alike."""
    last = path.rpartition(".")[2]
    return path if sum(p.rpartition(".")[2] == last for p in among) > 1 else last
