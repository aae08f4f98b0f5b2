"""What the lock promises: which cells, with which parts, controls and budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from harness.certificate.compare import with_settings
from harness.certificate.evidence import BASE, PLACEBO, Cell, Evidence
from harness.certificate.records import Lock, Run, Step
from harness.spec.schema import ExperimentSpec, OptimizerSpec, RangeSpec, SamplingSpec

CONTROL_SECTIONS = ("model", "data", "reward", "sampling", "optimizer", "evaluation")


@dataclass(frozen=True)
class Design:
    """The experiment as it was locked before anything ran."""

    lock: Lock
    spec: ExperimentSpec

    @classmethod
    def of(cls, evidence: Evidence) -> Design | None:
        """None where there is no readable lock: nothing can then be proven."""
        if evidence.lock is None or evidence.spec is None:
            return None
        return cls(evidence.lock, evidence.spec)

    @cached_property
    def arm_names(self) -> dict[str, str]:
        """An arm as the spec writes it (``module:NAME``) -> as the results call it."""
        names = {arm.named: name for name, arm in self.lock.arms.items() if arm.named}
        names |= {name: name for name in self.spec.arms if name in self.lock.arms}
        others = [name for name in self.spec.arms if name not in names]
        left = [name for name in self.lock.arms if name not in names.values()]
        for name in others:  # a lock that does not say
            module = name.partition(":")[0]
            origins = (f"module {module}", f"entry point {name}")
            fits = [arm for arm in left if self.lock.arms[arm].origin in origins]
            fits = fits or [arm for arm in left if arm == name.rpartition(":")[2]]
            if fits:
                names[name] = fits[0]
                left.remove(fits[0])
        return names

    @property
    def baseline(self) -> str | None:
        return self.arm_names.get(self.spec.baseline_arm)

    @property
    def placebo_arm(self) -> str | None:
        """The arm that the placebo imitates."""
        placebo = self.spec.controls.placebo
        return None if placebo is None else self.arm_names.get(placebo, placebo)

    def arm_of(self, cell: Cell) -> str:
        """The arm whose parts a cell must have."""
        return (self.placebo_arm or PLACEBO) if cell.arm == PLACEBO else cell.arm

    @cached_property
    def cells(self) -> frozenset[tuple[str, str]]:
        """Exactly the cells of the matrix."""
        arms = list(self.lock.arms)
        found = {(arm, f"seed-{seed}") for arm in arms for seed in self.spec.seeds}
        controls = [BASE] if self.spec.controls.base else []
        controls += [PLACEBO] if self.spec.controls.placebo else []
        found |= {(arm, f"seed-{seed}") for arm in controls for seed in self.spec.seeds}
        tuning = self.spec.tuning
        if tuning is not None:
            found |= {
                (arm, f"trial-{trial:03d}-seed-{seed}")
                for arm in arms
                for trial in range(tuning.trials)
                for seed in tuning.seeds
            }
        return frozenset(found)

    @cached_property
    def shared(self) -> frozenset[str]:
        """Paths of controls that tuning may set for every arm."""
        return frozenset(self.spec.tuning.shared if self.spec.tuning else ())

    @cached_property
    def controls(self) -> dict[str, Any]:
        """What every cell's controls are before tuning set any."""
        tree = self.spec.model_dump(mode="json")
        return {name: tree[name] for name in CONTROL_SECTIONS} | {"entropy_coef": 0.0}

    def controls_of(self, run: Run) -> dict[str, Any]:
        """The controls of a cell, with its settings of shared paths applied."""
        return with_settings(self.controls, self.shared_settings(run))

    def sampling(self, run: Run) -> SamplingSpec:
        """How a cell samples; the spec's own where its settings are no valid ones."""
        return self._sections(run)[0]

    def optimizer(self, run: Run) -> OptimizerSpec:
        """How a cell learns; the spec's own where its settings are no valid ones."""
        return self._sections(run)[1]

    def _sections(self, run: Run) -> tuple[SamplingSpec, OptimizerSpec]:
        shared = self.shared_settings(run)
        key = repr(sorted(shared.items()))
        if key not in self._known:
            controls = with_settings(self.controls, shared)
            try:
                self._known[key] = (
                    SamplingSpec.model_validate(controls["sampling"]),
                    OptimizerSpec.model_validate(controls["optimizer"]),
                )
            except ValidationError:
                self._known[key] = (self.spec.sampling, self.spec.optimizer)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[str, tuple[SamplingSpec, OptimizerSpec]]:
        """Sections by shared settings: each step of a cell asks for its own."""
        return {}

    def spaces(self, arm: str) -> dict[str, RangeSpec]:
        """The ranges that tuning may draw from for an arm, as far as the lock tells them."""
        tuning = self.spec.tuning
        if tuning is None:
            return {}
        locked = self.lock.arms[arm].knobs or {}
        own = {path: r for path, r in locked.items() if r is not None}
        return own | dict(tuning.arms.get(arm, {})) | dict(tuning.shared)

    def set_by_hand(self, arm: str) -> dict[str, Any]:
        """What the spec itself sets of an arm."""
        named = {name: written for written, name in self.arm_names.items()}
        return dict(self.spec.settings.get(named.get(arm, arm), {}))

    def shared_settings(self, run: Run) -> dict[str, Any]:
        return {path: v for path, v in run.settings.items() if path in self.shared}

    def own_settings(self, run: Run) -> dict[str, Any]:
        return {path: v for path, v in run.settings.items() if path not in self.shared}

    def limit_of(self, cell: Cell) -> float:
        """The budget of a cell, in the spec's unit."""
        if cell.trial is None or self.spec.tuning is None:
            return self.spec.budget.limit
        return self.spec.tuning.budget_fraction * self.spec.budget.limit

    def locked_parts(self, cell: Cell) -> Mapping[str, Any]:
        """The arm's parts as locked; what a cell says of itself is compared, never trusted."""
        locked = self.lock.arms.get(self.arm_of(cell))
        return {} if locked is None else locked.parts

    def parts_of(self, cell: Cell, run: Run) -> dict[str, Any]:
        """The parts that a cell must have run: the locked ones with its settings applied."""
        return with_settings(self.locked_parts(cell), self.own_settings(run))

    def is_offline(self, cell: Cell) -> bool:
        """Whether a cell's arm learns from preference pairs, and samples nothing."""
        return is_offline(self.locked_parts(cell))

    def sampling_cells(self, evidence: Evidence) -> Iterator[tuple[Cell, Run, tuple[Step, ...]]]:
        """The trained cells of arms that sample."""
        return (found for found in evidence.trained() if not self.is_offline(found[0]))

    def offline_cells(self, evidence: Evidence) -> Iterator[tuple[Cell, Run, tuple[Step, ...]]]:
        """The trained cells of arms that learn from pairs."""
        return (found for found in evidence.trained() if self.is_offline(found[0]))

    @property
    def learned(self) -> bool:
        """Whether scores come from a reward model."""
        return self.spec.reward.learned is not None

    def models_of(self, cell: Cell) -> set[str]:
        """The roles that a cell needs beside the policy."""
        parts = self.locked_parts(cell)
        told = parts.get("reward") or is_offline(parts)
        scores = {REWARD_MODEL} if self.learned and not told else set()
        return models_beside_the_policy(parts) | scores

    def group_size(self, cell: Cell, run: Run) -> int:
        """Completions per prompt: the arm's own, or the control."""
        own = part(self.locked_parts(cell), "sampling").get("group_size")
        return (
            own if isinstance(own, int) and own > 0 else (self.sampling(run).completions_per_prompt)
        )

    def batch(self, run: Run) -> int:
        """Completions that a full step uses, whatever the group size."""
        s = self.sampling(run)
        return s.prompts_per_step * s.completions_per_prompt


REWARD_MODEL = "reward_model"
SHARED_HEAD = "SharedHead"  # values without a model of their own


def part(parts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One part, or one inside another; empty where the arm has none."""
    found = parts.get(name)
    return found if isinstance(found, Mapping) else {}


def is_offline(parts: Mapping[str, Any]) -> bool:
    """Whether an arm of these parts learns from preference pairs."""
    return bool(part(parts, "preference"))


def models_beside_the_policy(parts: Mapping[str, Any]) -> set[str]:
    """The roles that an arm's parts ask for: a reference for a KL, a critic for an advantage."""
    roles = set() if part(parts, "kl").get("part") == "NoKL" else {"reference"}
    value = part(part(parts, "advantage"), "critic").get("part")
    return roles | ({"critic"} if value not in (None, SHARED_HEAD) else set())
