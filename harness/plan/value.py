"""A plan as a value: what an experiment will do, use and take, and what that rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.plan.cost import Amount

SMALL_P = 0.05


@dataclass(frozen=True)
class CellPlan:
    """Cells of one arm that cost alike.

    Attributes:
        kind: ``trial`` or ``seed``.
        cells: how many of them.
        limit: the budget of each, in the spec's unit; None for the control without training.
        steps: expected training steps of each, critic warm-up included.
        warmup_steps: those of them on which only the critic learns.
        training: what one cell spends, which its budget is charged for.
        evaluations: how often it is evaluated.
        evaluation: what its evaluations cost; not charged.
        seconds: expected duration of one cell, evaluations included.
    """

    kind: str
    cells: int
    limit: float | None
    steps: int
    warmup_steps: int
    training: Amount
    evaluations: int
    evaluation: Amount
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "cells": self.cells, "limit": self.limit, "steps": self.steps,
            "warmup_steps": self.warmup_steps, "training": self.training.to_json(),
            "evaluations": self.evaluations, "evaluation": self.evaluation.to_json(),
            "seconds": round(self.seconds, 1),
        }  # fmt: skip


@dataclass(frozen=True)
class ArmPlan:
    """An arm or a control.

    Attributes:
        name: as in the spec, ``base`` or ``placebo``.
        origin: where the arm comes from, or ``control``.
        critic: whether it trains one.
        completion: mean completion length that the costs assume, tokens.
        resampling: completions drawn for each one used.
        step: a full step; None without training.
        cells: its cells, trials first.
        memory: predicted items and peak, bytes; None without training.
        space: what tuning may set: path -> range, and the default that trial 0 tries.
        knobs: how many of those are the arm's own.
    """

    name: str
    origin: str
    critic: bool
    completion: int
    resampling: float
    step: Amount | None
    cells: tuple[CellPlan, ...]
    memory: Mapping[str, Any] | None
    space: Mapping[str, Any]
    knobs: int

    @property
    def total(self) -> Amount:
        """Training of all its cells."""
        return sum((c.training * c.cells for c in self.cells), Amount())

    @property
    def evaluation(self) -> Amount:
        return sum((c.evaluation * c.cells for c in self.cells), Amount())

    @property
    def seconds(self) -> float:
        return sum(c.seconds * c.cells for c in self.cells)

    def cell(self, kind: str) -> CellPlan | None:
        return next((c for c in self.cells if c.kind == kind), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "origin": self.origin, "critic": self.critic,
            "completion_tokens_assumed": self.completion, "resampling": round(self.resampling, 3),
            "step": self.step.to_json() if self.step else None,
            "cells": [c.to_json() for c in self.cells],
            "total_training": self.total.to_json(), "total_evaluation": self.evaluation.to_json(),
            "memory": self.memory, "tuning": {"space": self.space, "own_knobs": self.knobs},
        }  # fmt: skip


@dataclass(frozen=True)
class SplitPlan:
    """A split of the data: what it is, how long its prompts are, what of it is in training."""

    name: str
    problems: int
    source: str
    sha256: str
    file_sha256: str | None
    revision: str | None
    prompt_mean: float
    prompt_longest: int
    prompt_counted: bool
    notes: tuple[str, ...]
    contamination: Mapping[str, Any] | None


@dataclass(frozen=True)
class TimePlan:
    """Expected time: of all cells together, and of the whole at some numbers of cells at once."""

    basis: str
    measured: bool
    unit: str  # "core-hours" or "GPU-hours"
    hours: float
    wall_hours: Mapping[int, float]


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found.

    Attributes:
        model: name, revision, parameters, context, and where these were learnt.
        budget: unit, limit and the shares at which runs are evaluated.
        smallest_p: of an exact two-sided sign-flip test with this many paired seeds: 2 / 2^n.
        assumptions: everything that was not known and had to be assumed.
        warnings: what a reader of the results would object to, one line each.
    """

    name: str
    question: str
    model: Mapping[str, Any]
    budget: Mapping[str, Any]
    seeds: int
    arms: tuple[ArmPlan, ...]
    data: tuple[SplitPlan, ...]
    memory_available: tuple[int, str]
    time: TimePlan
    smallest_p: float
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def cells(self) -> int:
        return sum(c.cells for arm in self.arms for c in arm.cells)

    @property
    def training(self) -> Amount:
        return sum((arm.total for arm in self.arms), Amount())

    @property
    def evaluation(self) -> Amount:
        return sum((arm.evaluation for arm in self.arms), Amount())

    @property
    def biggest(self) -> ArmPlan | None:
        """The arm with the largest predicted peak memory."""
        trained = [arm for arm in self.arms if arm.memory is not None]
        return max(trained, key=lambda a: a.memory["peak"], default=None)  # type: ignore[index]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON. Only ``time`` and ``memory_available`` differ from machine to machine."""
        biggest = self.biggest
        return {
            "format": 1,
            "name": self.name,
            "question": self.question,
            "model": dict(self.model),
            "budget": dict(self.budget),
            "cells": self.cells,
            "seeds": self.seeds,
            "arms": [arm.to_json() for arm in self.arms],
            "data": [asdict(split) for split in self.data],
            "totals": {
                "training": self.training.to_json(),
                "evaluation": self.evaluation.to_json(),
            },
            "biggest_memory": {"arm": biggest.name, "peak": biggest.memory["peak"]}  # type: ignore[index]
            if biggest
            else None,
            "memory_available": {
                "bytes": self.memory_available[0],
                "of": self.memory_available[1],
            },
            "time": asdict(self.time),
            "smallest_p": self.smallest_p,
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }
