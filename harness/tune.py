"""Equal tuning for every arm: the same number of trials, drawn by the same rule (optuna).

The only importer of optuna. A study holds no state of its own on disk: it is asked and told again
from the stored trials, so that an interrupted tuning goes on with the same proposals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
)
from optuna.samplers import BaseSampler, TPESampler

from harness.arm import Arm
from harness.errors import InputError, shown, suggest
from harness.identity import stream_seed
from harness.knobs import Range, first_value, knobs, settings
from harness.spec.schema import ExperimentSpec, TuningSpec

optuna.logging.set_verbosity(optuna.logging.WARNING)


def space(spec: ExperimentSpec, arm: Arm) -> dict[str, Range]:
    """What tuning may set for an arm: the shared controls, then the arm's own knobs.

    Raises:
        InputError: a path that names no control or no field of the arm, or an interval for what
            is no fractional number.
    """
    assert spec.tuning is not None
    found: dict[str, Range] = {}
    controls = [f"optimizer.{name}" for name in type(spec.optimizer).model_fields]
    for path, given in spec.tuning.shared.items():
        if path not in controls:
            raise InputError(
                f"tuning.shared: {path!r} is no optimizer setting.{suggest(path, controls)}"
            )
        found[path] = given.range()
    own = own_knobs(spec, arm)
    fields = settings(arm)
    for path, given in spec.tuning.arms.get(arm.name, {}).items():
        if path not in fields:
            raise InputError(
                f"tuning.arms.{arm.name}: {path!r} is no setting of the arm.{suggest(path, fields)}"
            )
        own[path] = given.range()
    found |= own
    declared = fields | {f"optimizer.{k}": v for k, v in spec.optimizer.model_dump().items()}
    for path, values in found.items():
        start = declared[path]
        if values.choices is None and not isinstance(start, float):
            raise InputError(
                f"tuning: {path!r} is {shown(start)} by default, no fractional number: give "
                "choices in place of low and high"
            )
    return found


def own_knobs(spec: ExperimentSpec, arm: Arm) -> dict[str, Range]:
    """The knobs that the arm declares; none on a ladder, whose rungs differ in their axis alone."""
    return {} if spec.ladder else knobs(arm)


def check_settings(arm: Arm, made: Mapping[str, Any]) -> None:
    """Refuse settings by hand that are no knob of an arm, or words where it has a number.

    Raises:
        InputError: naming the path.
    """
    known, declared = knobs(arm), settings(arm)
    for path in made:
        if path not in known:
            raise InputError(
                f"settings.{arm.name}: {path!r} is no knob of the arm.{suggest(path, known)}"
            )
        if isinstance(made[path], str) != isinstance(declared[path], str):
            raise InputError(
                f"settings.{arm.name}.{path}: {shown(made[path])} is not of the kind of its "
                f"default, {shown(declared[path])}"
            )


def defaults(spec: ExperimentSpec, arm: Arm, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Trial 0: what spec and arm say before tuning.

    Where the spec searches a range that leaves an arm's default out (a critic's learning rate for a
    model of another size), trial 0 takes its middle: no arm's first trial is one it could not win.
    """
    declared = settings(arm) | {
        f"optimizer.{name}": value for name, value in spec.optimizer.model_dump().items()
    }
    return {path: first_value(declared[path], values) for path, values in ranges.items()}


class PairedLatinHypercube(BaseSampler):
    """Each dimension cut into as many slices as trials, one draw from each, in shuffled order.

    The draws of a dimension depend on its name, the trial's number and the seed alone, so all arms
    try the same learning rates in the same trials. Proposals do not depend on results.
    """

    def __init__(self, ranges: Mapping[str, Range], trials: int, seed: int) -> None:
        self.ranges, self.trials, self.seed = ranges, trials, seed

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        slices = max(self.trials - 1, 1)  # trial 0 is the defaults
        rng = np.random.default_rng(stream_seed(self.seed, "tuning", param_name))
        order = rng.permutation(slices)
        jitter = rng.random(slices)
        index = (trial.number - 1) % slices
        return self.ranges[param_name].at((order[index] + jitter[index]) / slices)


def propose(
    spec: ExperimentSpec, arm: Arm, results: Sequence[float | None]
) -> list[dict[str, Any]]:
    """The settings of every trial that is determined by the results so far, in order.

    Args:
        spec: the experiment.
        arm: as declared.
        results: validation scores of the finished first trials; None for one that diverged.
    """
    assert spec.tuning is not None
    plan = spec.tuning
    ranges = space(spec, arm)
    study = optuna.create_study(direction="maximize", sampler=_sampler(plan, ranges))
    study.enqueue_trial(defaults(spec, arm, ranges), skip_if_exists=False)
    proposed: list[dict[str, Any]] = []
    for number in range(plan.trials):
        trial = study.ask({path: _distribution(r) for path, r in ranges.items()})
        proposed.append({path: trial.params[path] for path in ranges})
        if number < len(results):
            score = results[number]
            if score is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, score)
        elif plan.sampler == "tpe":
            break  # the next proposal waits for this trial's result
    return proposed


def choose(results: Sequence[float | None]) -> int:
    """The trial with the best validation score; the earliest of equals. Trial 0 if all diverged."""
    best = 0
    for number, score in enumerate(results):
        held = results[best]
        if score is not None and (held is None or score > held):
            best = number
    return best


def _sampler(plan: TuningSpec, ranges: Mapping[str, Range]) -> BaseSampler:
    if plan.sampler == "tpe":
        return TPESampler(seed=plan.sampler_seed, n_startup_trials=max(2, plan.trials // 3))
    return PairedLatinHypercube(ranges, plan.trials, plan.sampler_seed)


def _distribution(r: Range) -> BaseDistribution:
    """Optuna's form of a range."""
    if r.choices is not None:
        return CategoricalDistribution(r.choices)
    assert r.low is not None
    assert r.high is not None
    return FloatDistribution(r.low, r.high, log=r.log)
