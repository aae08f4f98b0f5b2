"""Equal tuning: the same trials by the same rule for every arm, and the best by validation."""

from __future__ import annotations

import dataclasses
import math

import pytest

from harness.arms.dapo import DAPO
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.errors import InputError
from harness.job import configured
from harness.metrics import expected_best
from harness.spec.schema import ExperimentSpec, OptimizerSpec, TuningSpec
from harness.tune import choose, propose, space

RATE = "optimizer.learning_rate"


def spec(trials=6, sampler="paired", *, seed=0, shared=None, arms=None):
    """A spec whose optimizer and tuning alone are read."""
    return ExperimentSpec.model_construct(
        optimizer=OptimizerSpec(learning_rate=1e-4),
        tuning=TuningSpec(
            trials=trials,
            budget_fraction=0.5,
            seeds=(1000,),
            sampler=sampler,
            sampler_seed=seed,
            shared={RATE: {"low": 5e-5, "high": 5e-4, "log": True}} if shared is None else shared,
            arms=arms or {},
        ),
    )


@pytest.mark.parametrize("sampler", ["paired", "tpe"])
@pytest.mark.parametrize("arm", [PPO, GRPO, DAPO], ids=lambda a: a.name)
def test_trial_zero_is_the_arms_own_defaults(arm, sampler):
    first = propose(spec(sampler=sampler), arm, [])[0]
    same, untouched = configured(spec(), arm, first)
    assert untouched == arm
    assert same.optimizer.learning_rate == 1e-4


def test_all_arms_try_the_same_learning_rates_in_the_same_trials():
    tried = {a.name: [t[RATE] for t in propose(spec(), a, [])] for a in (PPO, GRPO, DAPO)}
    assert tried["ppo"] == tried["grpo"] == tried["dapo"]
    assert len(set(tried["ppo"])) == 6
    # A shared knob pairs just as the learning rate does, also between arms with other knobs.
    kl = [[t["kl.kl_coef"] for t in propose(spec(), a, [])][1:] for a in (PPO, GRPO)]
    assert kl[0] == kl[1]


@pytest.mark.parametrize("trials", [2, 6, 17])
def test_a_dimension_is_covered_slice_by_slice(trials):
    found = propose(spec(trials), PPO, [])
    assert len(found) == trials
    slices = trials - 1
    at = [math.log(t[RATE] / 5e-5) / math.log(10) for t in found[1:]]
    assert sorted(int(q * slices) for q in at) == list(range(slices))
    lambdas = [t["advantage.gae_lambda"] for t in found[1:]]
    counts = [lambdas.count(v) for v in (0.9, 0.95, 0.99, 1.0)]
    assert max(counts) - min(counts) <= 1 + (slices % 4 > 0)
    assert found[1:] != propose(spec(trials, seed=1), PPO, [])[1:]


@pytest.mark.parametrize("sampler", ["paired", "tpe"])
def test_proposals_are_a_function_of_spec_and_results(sampler):
    s, results = spec(8, sampler), [0.1, None, 0.5, 0.2, 0.4, 0.3, 0.6]
    assert propose(s, PPO, results) == propose(s, PPO, results)


def test_paired_proposals_ignore_results():
    assert propose(spec(), PPO, []) == propose(spec(), PPO, [0.9, 0.1, None])


def test_tpe_goes_on_after_a_restart_as_if_uninterrupted():
    """One trial at a time, each from a fresh study told of all before: one growing list."""
    s, results, grown = spec(8, "tpe"), [0.1, 0.5, None, 0.2, 0.45, 0.3, 0.6, 0.2], []
    for number in range(8):
        proposed = propose(s, GRPO, results[:number])
        assert len(proposed) == number + 1
        assert proposed[:number] == grown
        grown = proposed
    assert propose(s, GRPO, results) == grown
    other = propose(s, GRPO, [1 - (r or 0) for r in results])
    assert other[:2] == grown[:2]
    assert other != grown  # it does learn from results


def test_what_may_be_tuned():
    found = space(spec(arms={"grpo": {"kl.kl_coef": {"choices": [0.0, 0.1]}}}), GRPO)
    assert set(found) == {RATE, "kl.kl_coef"}
    assert found["kl.kl_coef"].choices == (0.0, 0.1)
    assert set(space(spec(), PPO)) == {
        RATE, "kl.kl_coef", "advantage.gae_lambda", "advantage.critic.learning_rate",
        "advantage.critic.warmup_steps",
    }  # fmt: skip


def test_a_default_outside_the_range_gives_way_to_its_middle():
    narrow = {RATE: {"low": 2e-4, "high": 3e-4, "log": True}}
    found = propose(spec(shared=narrow), GRPO, [])
    assert found[0][RATE] == pytest.approx((2e-4 * 3e-4) ** 0.5)
    assert all(2e-4 <= t[RATE] <= 3e-4 for t in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared": {"optimizer.learning_rat": {"low": 1.0, "high": 2.0}}}, "learning_rate"),
        ({"shared": {"sampling.temperature": {"low": 1.0, "high": 2.0}}}, "no optimizer setting"),
        ({"arms": {"grpo": {"kl.coef": {"low": 1.0, "high": 2.0}}}}, "kl.kl_coef"),
        ({"arms": {"grpo": {"sampling.group_size": {"low": 2, "high": 8}}}}, "choices"),
        ({"shared": {"optimizer.epochs": {"low": 1, "high": 4}}}, "choices"),
        ({"shared": {"optimizer.schedule": {"low": 1, "high": 4}}}, "choices"),
    ],
)
def test_paths_that_cannot_be_tuned(options, message):
    with pytest.raises(InputError, match=message):
        propose(spec(**options), GRPO, [])


def test_whole_numbers_are_tuned_by_choices():
    s = spec(arms={"grpo": {"sampling.group_size": {"choices": [4, 8]}}},
             shared={"optimizer.epochs": {"choices": [1, 2, 4]}})  # fmt: skip
    found = propose(s, GRPO, [])
    assert found[0] == {"optimizer.epochs": 1, "sampling.group_size": 8, "kl.kl_coef": 0.04}
    for trial in found[1:]:
        tuned, arm = configured(s, GRPO, trial)
        assert tuned.optimizer.epochs in (1, 2, 4)
        assert arm.sampling.group_size in (4, 8)
        assert dataclasses.replace(arm, sampling=GRPO.sampling, kl=GRPO.kl) == GRPO


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ([0.1, 0.5, 0.2], 1),
        ([0.5, 0.5, 0.5], 0),
        ([0.1, 0.5, 0.5], 1),
        ([None, 0.0, None], 1),
        ([None, None, 0.3, 0.3], 2),
        ([0.2, None], 0),
        ([None, None, None], 0),
        ([], 0),
    ],
)
def test_the_best_by_validation_and_the_earliest_of_equals(results, best):
    assert choose(results) == best


# -- the expected best of a number of trials ------------------------------------------------------


def test_expected_best_golden(golden):
    v = golden("expected_max_of_n_tuning_curve")
    scores = v["inputs"]["trial_scores"]
    for replacement, key in ((True, "with_replacement"), (False, "without_replacement")):
        found = [expected_best(scores, n, replacement) for n in v["inputs"]["n"]]
        assert found == pytest.approx(v["expected"][key], abs=v["tolerance"])


def test_expected_best_by_enumeration():
    from itertools import combinations, product
    from statistics import fmean

    scores = [0.3, 0.1, 0.1, 0.7]
    for n in range(1, 5):
        drawn = fmean(max(c) for c in combinations(scores, n))
        assert expected_best(scores, n, replacement=False) == pytest.approx(drawn, abs=1e-12)
        again = fmean(max(c) for c in product(scores, repeat=n))
        assert expected_best(scores, n, replacement=True) == pytest.approx(again, abs=1e-12)


@pytest.mark.parametrize(("scores", "n"), [([], 1), ([0.1], 0), ([0.1, 0.2], 3)])
def test_expected_best_of_impossible_draws(scores, n):
    with pytest.raises(InputError, match="trials"):
        expected_best(scores, n, replacement=False)
    if len(scores) < n and scores:
        assert expected_best(scores, n, replacement=True) < max(scores)
