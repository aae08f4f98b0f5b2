"""A sweep: one file, several matched experiments, each with a lock and a certificate of its own.

The cases of a sweep differ from each other in what the sweep names; within a case everything is
equal for all arms, as in any experiment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from harness.errors import InputError, shown
from harness.spec.load import SWEEP as KEY
from harness.spec.load import check_spec, merge, read_tree
from harness.spec.schema import ExperimentSpec
from harness.spec.strict import Strict

CASE = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class SweepSpec(Strict):
    """The cases: every combination of ``grid``, or those of ``cases`` by name.

    ``grid`` maps a path of the spec to its values; ``cases`` a name to what it lays over the spec.
    ``completions_per_step`` holds the batch constant where a grid changes its group size:
    prompts_per_step is then that number over completions_per_prompt.
    """

    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    cases: dict[str, dict[str, Any]] = Field(default_factory=dict)
    completions_per_step: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_kind(self) -> SweepSpec:
        if bool(self.grid) == bool(self.cases):
            raise ValueError("give grid or cases")
        for path, values in self.grid.items():
            if len(values) != len({repr(v) for v in values}) or not values:
                raise ValueError(f"grid.{path}: give one or more values, each once")
        for name in self.cases:
            if not re.match(CASE, name):
                raise ValueError(f"cases: {name!r} cannot name a folder; use letters, digits, _.-")
        return self


@dataclass(frozen=True)
class Case:
    """One experiment of a sweep.

    Attributes:
        name: also of its folder in the sweep's results.
        sets: path of the spec -> value, where it differs from the other cases.
        spec: the experiment.
    """

    name: str
    sets: Mapping[str, Any]
    spec: ExperimentSpec


@dataclass(frozen=True)
class Sweep:
    """A sweep and its cases, in order; ``axes`` are the grid's paths with their values."""

    name: str
    question: str
    axes: Mapping[str, Sequence[Any]]
    cases: tuple[Case, ...]

    def to_json(self) -> dict[str, Any]:
        """What ``sweep.json`` says."""
        return {
            "format": 1, "name": self.name, "question": self.question,
            "axes": {path: list(values) for path, values in self.axes.items()},
            "order": list(self.axes),  # JSON is written with its keys sorted
            "cases": [{"name": c.name, "sets": dict(c.sets)} for c in self.cases],
        }  # fmt: skip


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep | None:
    """The sweep of a file; None where the file is one experiment.

    Raises:
        InputError: a bad sweep, or a case that is no valid experiment.
    """
    tree = read_tree(path, overrides)
    if KEY not in tree:
        return None
    where = f"{path} (with --set)" if overrides else str(path)
    try:
        plan = SweepSpec.model_validate(tree.pop(KEY))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(p) for p in (KEY, *problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}: {place}: {message}") from error
    cases = []
    for name, sets, laid_over in _cases(plan):
        merged = merge(tree, laid_over)
        _hold(merged, plan.completions_per_step, f"{where}, case {name}")
        merged["name"] = f"{tree.get('name', path.stem)}.{name}"
        cases.append(Case(name, sets, check_spec(merged, f"{where}, case {name}")))
    names = [case.name for case in cases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"{where}: two cases would have the folder {twice[0]!r}; name them under sweep.cases"
        )
    return Sweep(str(tree.get("name")), cases[0].spec.question, plan.grid, tuple(cases))


def _cases(plan: SweepSpec) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, what is set, and the tree that sets it."""
    for name, tree in plan.cases.items():
        yield name, dict(_leaves(tree)), tree
    for values in itertools.product(*plan.grid.values()) if plan.grid else ():
        sets = dict(zip(plan.grid, values, strict=True))
        tree: dict[str, Any] = {}
        for path, value in sets.items():
            tree = merge(tree, _nested(path, value))
        name = "-".join(f"{path.rpartition('.')[2]}_{_word(v)}" for path, v in sets.items())
        yield name, sets, tree


def _nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", shown(value)).strip("_") or "none"


def _hold(tree: dict[str, Any], completions: int | None, where: str) -> None:
    """Derive prompts_per_step from the completions of a step."""
    if completions is None:
        return
    size = tree.get("sampling", {}).get("completions_per_prompt")
    if not isinstance(size, int) or size < 1 or completions % size:
        raise InputError(
            f"{where}: sampling.completions_per_prompt {shown(size)} does not divide "
            f"sweep.completions_per_step {completions}; change one of them"
        )
    tree["sampling"] = {**tree["sampling"], "prompts_per_step": completions // size}
