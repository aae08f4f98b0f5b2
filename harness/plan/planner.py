"""Expected steps, work, memory and time of every arm's cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from harness.arm import Arm
from harness.arms import FoundArm
from harness.cost.shape import ModelShape
from harness.errors import InputError
from harness.footprint import predicted_memory
from harness.job import BASE, PLACEBO
from harness.plan.cards import Architecture
from harness.plan.cost import (
    Amount,
    evaluation_amount,
    resamples,
    shapes_of,
    step_amount,
    steps_within,
)
from harness.plan.lengths import CompletionLength, PromptLengths, assumed_completion
from harness.plan.speed import Measured, Speed
from harness.plan.value import ArmPlan, CellPlan
from harness.plugins import recorded_origin
from harness.spec.schema import ExperimentSpec
from harness.tasks.loading import LoadedSplit
from harness.tune import defaults, space


@dataclass(frozen=True)
class Planner:
    """What all arms' plans are computed from."""

    spec: ExperimentSpec
    model: Architecture
    prompts: Mapping[str, PromptLengths]
    loaded: Mapping[str, LoadedSplit]
    measured: Measured | None
    speed: Speed

    def all_arms(
        self,
        found: Mapping[str, FoundArm],
        counts: Mapping[str, Mapping[str, int]],
        imitated: str | None,
    ) -> tuple[ArmPlan, ...]:
        """The controls and the arms, in the order of the tables.

        Args:
            found: the arms by name.
            counts: cells by arm and kind.
            imitated: the arm whose parts the placebo takes.
        """
        plans = []
        if BASE in counts:
            plans.append(self._base(counts[BASE]["seed"]))
        for name, arm in found.items():
            plans.append(self._arm(name, arm.arm, recorded_origin(arm.origin), counts[name]))
        if imitated is not None:
            plans.append(self._arm(PLACEBO, found[imitated].arm, "control", counts[PLACEBO]))
        return tuple(plans)

    def _length(self, name: str) -> CompletionLength:
        if self.measured is not None and name in self.measured.completion:
            tokens = max(1, round(self.measured.completion[name]))
            return CompletionLength(tokens, "measured on earlier cells")
        return assumed_completion(self.spec, self.model)

    def _base(self, cells: int) -> ArmPlan:
        length = self._length(BASE)
        shape = ModelShape.from_config(self.model.config, trained=False)
        tests = [name for name in self.loaded if name.startswith("test.")]
        cost = self._evaluation(shape, tests, length.tokens, self.spec.evaluation.samples)
        cell = CellPlan("seed", cells, None, 0, 0, Amount(), 1, cost, self.speed.seconds(cost))
        return ArmPlan(BASE, "control", False, length.tokens, 1.0, None, (cell,), None, {}, 0)

    def _arm(self, name: str, arm: Arm, origin: str, counts: Mapping[str, int]) -> ArmPlan:
        spec, length = self.spec, self._length(name)
        shapes = shapes_of(spec, arm, self.model.config)
        resampling = 1.0
        if self.measured is not None and resamples(arm):
            resampling = max(1.0, self.measured.resampling.get(name, 1.0))
        full, warm = (
            step_amount(
                spec, arm, shapes, self.prompts["train"], length.tokens,
                warmup=warmup, resampling=resampling,
            )
            for warmup in (False, True)
        )  # fmt: skip
        cells = [
            self._cells(name, arm, kind, count, shapes["policy"], length.tokens, full, warm)
            for kind, count in sorted(counts.items(), reverse=True)  # trials first
        ]
        ranges = {} if spec.tuning is None or origin == "control" else space(spec, arm)
        first = defaults(spec, arm, ranges)
        return ArmPlan(
            name=name,
            origin=origin,
            critic=arm.critic is not None,
            completion=length.tokens,
            resampling=resampling,
            step=full,
            cells=tuple(cells),
            memory=predicted_memory(spec, shapes),
            space={path: asdict(r) | {"default": first[path]} for path, r in ranges.items()},
            knobs=sum(not path.startswith("optimizer.") for path in ranges),
        )

    def _cells(
        self,
        name: str,
        arm: Arm,
        kind: str,
        count: int,
        policy: ModelShape,
        completion: int,
        full: Amount,
        warm: Amount,
    ) -> CellPlan:
        """The trials, or the seeds, of an arm."""
        spec, limit = self.spec, self.spec.budget.limit
        if kind == "trial":
            assert spec.tuning is not None
            limit *= spec.tuning.budget_fraction
        costs = [self._in_unit(amount) for amount in (warm, full)]
        self._check_budget(name, arm, kind, limit, costs, completion)
        steps = steps_within(limit, arm.critic_warmup_steps, *costs)
        warmups = min(arm.critic_warmup_steps, steps)
        training = warm * warmups + full * (steps - warmups)
        if kind == "trial":
            assert spec.tuning is not None
            times = 1
            judged = self._evaluation(policy, ["validation"], completion, spec.tuning.samples)
        else:
            tests = [n for n in self.loaded if n.startswith("test.")]
            times = min(len(spec.budget.evaluate_at), steps)
            judged = self._evaluation(policy, tests, completion, spec.evaluation.samples)
            if times > 1:
                curve = spec.evaluation.curve_samples
                judged += self._evaluation(policy, tests, completion, curve) * (times - 1)
        seconds = self.speed.seconds(training) + self.speed.seconds(judged)
        return CellPlan(kind, count, limit, steps, warmups, training, times, judged, seconds)

    def _evaluation(
        self, policy: ModelShape, names: list[str], completion: int, samples: int
    ) -> Amount:
        reference = ModelShape.from_config(self.model.config, trained=False)
        problems = {name: len(self.loaded[name].problems) for name in names}
        return evaluation_amount(
            self.spec, policy, reference, problems, self.prompts, completion, samples
        )

    def _in_unit(self, amount: Amount) -> float:
        unit = self.spec.budget.unit
        return self.speed.seconds(amount) if unit == "seconds" else amount.in_unit(unit)

    def _check_budget(
        self, name: str, arm: Arm, kind: str, limit: float, costs: list[float], completion: int
    ) -> None:
        warm, full = costs
        needed = arm.critic_warmup_steps * warm + full
        if limit >= needed:
            return
        share = "" if kind == "seed" else f" x tuning.budget_fraction for a {kind}"
        first = ""
        if arm.critic_warmup_steps:
            first = f"{arm.critic_warmup_steps} critic warm-up steps and "
        unit = self.spec.budget.unit
        raise InputError(
            f"budget.limit{share}: {limit:.4g} {unit} does not pay for {first}one step of arm "
            f"{name!r}, {needed:.4g} {unit} at {completion} tokens a completion; raise the limit "
            "or make steps smaller (sampling.prompts_per_step)"
        )

    def assumptions(self, resampling_arms: bool) -> tuple[str, ...]:
        """Everything that was not known, in words."""
        lines = []
        guess = assumed_completion(self.spec, self.model)
        if self.measured is None:
            lines.append(f"completions of {guess.tokens} tokens on average ({guess.basis})")
            if resampling_arms:
                lines.append(
                    "dynamic sampling drops no group (resampling factor 1.0): what it drops is "
                    "charged, so arms that do it get fewer steps than shown"
                )
        else:
            lines.append("completion lengths and resampling as measured on earlier cells")
        if self.model.tokenizer is None:
            lines.append(
                "prompt lengths of characters / 3.5, as the model's tokenizer is not on this "
                "machine"
            )
        lines.append(f"model dimensions from {self.model.source}")
        lines.append(f"speed {self.speed.basis}")
        lines.append("start-up, building or loading the base, and checkpoints take no time")
        return tuple(lines)
