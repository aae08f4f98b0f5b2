"""From a spec to its plan; what cannot run is refused here, before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.arms import FoundArm
from harness.cost.shape import ModelShape
from harness.data import load_split, splits
from harness.errors import InputError, suggest
from harness.grading import check_reward
from harness.job import PLACEBO, Context
from harness.lock import contamination
from harness.matrix import Matrix
from harness.plan.cards import Architecture, find_architecture
from harness.plan.cost import resamples
from harness.plan.lengths import PromptLengths, check_context, prompt_lengths
from harness.plan.planner import Planner
from harness.plan.speed import (
    NODE_GPUS,
    Measured,
    Speed,
    assumed_speed,
    measure,
    memory_available,
    wants_gpu,
)
from harness.plan.value import ArmPlan, Plan, SplitPlan, TimePlan
from harness.plan.wall import Job, wall_seconds
from harness.plan.warn import never_refreshed, warnings_of
from harness.rewards.steps import step_grader
from harness.samplers import check_engine
from harness.spec.schema import ExperimentSpec
from harness.tasks.loading import LoadedSplit
from harness.tune import check_settings, space


def make_plan(context: Context, width: int | None = None) -> Plan:
    """What an experiment will do, use and take. Reads data; needs neither weights nor the hub.

    Args:
        context: the spec, and its results folder, whose cells (if any) tell real speeds.
        width: cells at once, for the time on the clock; 1 when None.

    Raises:
        InputError: an unknown tuning path, a batch that does not divide, an arm that rewards
            steps on a task that cannot judge them, data that is missing or
            not what the spec pins, prompts or completions longer than the model holds, or a
            budget that does not pay for one step.
    """
    spec, found = context.spec, context.arms()
    imitated = context.imitated(found)
    _check_arms(spec, found)
    model = find_architecture(spec.model)
    check_context(spec, model.context)
    loaded = {name: load_split(f"data.{name}", split) for name, split in splits(spec).items()}
    prompts = prompt_lengths(spec, loaded, model)
    measured = measure(context.results, spec)
    planner = Planner(spec, model, prompts, loaded, measured, _speed(spec, measured))
    arms = planner.all_arms(found, _counts(context), imitated)
    data = _data(spec, loaded, prompts)
    width = width or 1
    plan = Plan(
        name=spec.name,
        question=spec.question,
        model=_model(spec, model),
        budget=spec.budget.model_dump(mode="json"),
        seeds=len(spec.seeds),
        arms=arms,
        data=data,
        memory_available=memory_available(spec),
        time=_time(spec, planner.speed, arms, imitated, width),
        smallest_p=2 / 2 ** len(spec.seeds),
        assumptions=planner.assumptions(any(resamples(a.arm) for a in found.values())),
        warnings=(),
    )
    refresh = {name: a.arm.kl.refresh.every for name, a in found.items() if a.arm.kl.refresh}
    warnings = (*warnings_of(spec, plan, width), *never_refreshed(plan, refresh))
    return replace(plan, warnings=warnings)


def _check_arms(spec: ExperimentSpec, found: Mapping[str, FoundArm]) -> None:
    """Refuse groups that do not fit the batch, steps that no task judges, unknown tuning paths."""
    sampling = spec.sampling
    batch = sampling.prompts_per_step * sampling.completions_per_prompt
    for named, arm in zip(spec.arms, found.values(), strict=True):
        check_settings(arm.arm, spec.settings.get(named, {}))
    for name, arm in found.items():
        arm.arm.check(sampling.completions_per_prompt)
        size = arm.arm.group_size(sampling.completions_per_prompt)
        if batch % size:
            raise InputError(
                f"arm {name!r}: its group of {size} does not divide the batch of {batch} "
                f"completions (sampling.prompts_per_step {sampling.prompts_per_step} x "
                f"completions_per_prompt {sampling.completions_per_prompt}); change one of them"
            )
        step_grader(spec, arm.arm)
        check_reward(spec, arm.arm)
        check_engine(spec, arm.arm)
        if spec.tuning is not None:
            space(spec, arm.arm)
    for name in spec.tuning.arms if spec.tuning else ():
        if name not in found:
            raise InputError(
                f"tuning.arms: {name!r} is no arm of this experiment.{suggest(name, found)}"
            )


def _counts(context: Context) -> dict[str, dict[str, int]]:
    """Cells by arm and kind, as the matrix will have them."""
    counts: dict[str, dict[str, int]] = {}
    for arm, name in Matrix(context).expected():
        kind = name.partition("-")[0]
        kinds = counts.setdefault(arm, {})
        kinds[kind] = kinds.get(kind, 0) + 1
    return counts


def _speed(spec: ExperimentSpec, measured: Measured | None) -> Speed:
    if measured is None:
        return assumed_speed(spec)
    device = "gpu" if wants_gpu(spec) else "cpu"
    return Speed(measured.rates, True, device, f"measured on {measured.cells} cells of this spec")


def _model(spec: ExperimentSpec, model: Architecture) -> dict[str, Any]:
    shape = ModelShape.from_config(model.config)
    return {
        "name": spec.model.name,
        "revision": spec.model.revision,
        "parameters": shape.parameters,
        "context": model.context,
        "dtype": spec.model.dtype,
        "known_from": model.source,
        "tokenizer_here": model.tokenizer is not None,
    }


def _data(
    spec: ExperimentSpec,
    loaded: Mapping[str, LoadedSplit],
    prompts: Mapping[str, PromptLengths],
) -> tuple[SplitPlan, ...]:
    overlaps = contamination(spec, dict(loaded))
    return tuple(
        SplitPlan(
            name=name,
            problems=len(data.problems),
            source=data.description,
            sha256=data.sha256,
            file_sha256=data.file_sha256,
            revision=data.revision,
            prompt_mean=round(prompts[name].mean, 1),
            prompt_longest=prompts[name].longest,
            prompt_counted=prompts[name].counted,
            notes=data.notes,
            contamination=overlaps.get(name),
        )
        for name, data in loaded.items()
    )


def _time(
    spec: ExperimentSpec, speed: Speed, arms: Sequence[ArmPlan], imitated: str | None, width: int
) -> TimePlan:
    gpu = speed.device == "gpu"
    jobs = _jobs(spec, arms, imitated)
    widths = sorted({width, NODE_GPUS} if gpu else {width})
    held = 1 if gpu else spec.runtime.threads
    return TimePlan(
        basis=speed.basis,
        measured=speed.measured,
        unit="GPU-hours" if gpu else "core-hours",
        hours=round(sum(arm.seconds for arm in arms) * held / 3600, 3),
        wall_hours={w: round(wall_seconds(jobs, w) / 3600, 3) for w in widths},
    )


def _jobs(spec: ExperimentSpec, arms: Sequence[ArmPlan], imitated: str | None) -> list[Job]:
    """Every cell in the order in which the matrix offers them: trials first, arms interleaved."""
    trials: dict[str, list[str]] = {}
    ranked: list[tuple[int, int, int, Job]] = []
    one_by_one = spec.tuning is not None and spec.tuning.sampler == "tpe"
    for column, arm in enumerate(arms):
        cell = arm.cell("trial")
        names = [f"{arm.name}/trial-{i}" for i in range(cell.cells if cell else 0)]
        trials[arm.name] = names
        for i, name in enumerate(names):
            before = frozenset(names[i - 1 : i]) if one_by_one else frozenset[str]()
            ranked.append((0, i, column, Job(name, cell.seconds if cell else 0.0, before)))
    for column, arm in enumerate(arms):
        cell = arm.cell("seed")
        like = str(imitated) if arm.name == PLACEBO else arm.name
        for i in range(cell.cells if cell else 0):
            job = Job(f"{arm.name}/seed-{i}", cell.seconds if cell else 0.0,
                      frozenset(trials[like]))  # fmt: skip
            ranked.append((1, i, column, job))
    return [job for *_, job in sorted(ranked, key=lambda item: item[:3])]
