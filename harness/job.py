"""What is to be run: a cell of the matrix, and what all cells of an experiment share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.arm import Arm
from harness.arms import FoundArm, find_arms
from harness.knobs import turn
from harness.spec.schema import ExperimentSpec

BASE, PLACEBO = "base", "placebo"


@dataclass(frozen=True)
class Cell:
    """What is to be run. ``arm`` may also be ``base`` or ``placebo``."""

    arm: str
    kind: str  # "seed" or "trial"
    seed: int
    limit: float
    settings: tuple[tuple[str, Any], ...] = ()
    trial: int | None = None

    @property
    def name(self) -> str:
        if self.kind == "trial":
            return f"trial-{self.trial:03d}-seed-{self.seed}"
        return f"seed-{self.seed}"


@dataclass(frozen=True)
class Context:
    """What all cells of an experiment share."""

    spec: ExperimentSpec
    root: Path  # the folder that the spec's plugin paths are relative to
    results: Path
    spec_sha256: str | None = None  # of the spec as first locked, where it was amended since

    @property
    def plugin_files(self) -> list[Path]:
        return [self.root / path for path in self.spec.plugins]

    def arms(self) -> dict[str, FoundArm]:
        return find_arms(self.spec.arms, self.plugin_files)

    def imitated(self, found: Mapping[str, FoundArm]) -> str | None:
        """The name of the arm that the placebo imitates; the spec may say ``module:NAME``."""
        placebo = self.spec.controls.placebo
        return dict(zip(self.spec.arms, found, strict=True))[placebo] if placebo else None


def configured(
    spec: ExperimentSpec, arm: Arm, settings: Mapping[str, Any]
) -> tuple[ExperimentSpec, Arm]:
    """Spec and arm with tuned settings put in: controls by spec path, knobs by part path."""
    for path, value in settings.items():
        head = path.partition(".")[0]
        if head in ("optimizer",):
            name = path.partition(".")[2]
            merged = spec.optimizer.model_dump() | {name: value}
            spec = spec.model_copy(update={"optimizer": type(spec.optimizer)(**merged)})
        else:
            arm = turn(arm, path, value)
    return spec, arm
