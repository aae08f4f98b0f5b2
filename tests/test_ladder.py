"""The ladder's arms: one axis a step, there and back, and every mixture; and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.arm import Arm, parts
from harness.arms import find_arms, list_arms
from harness.arms.grpo import GRPO
from harness.arms.ladder import FACTORIAL, FORWARD, LADDER_PPO, REVERSE, RUNGS, Step, ladder
from harness.arms.ppo import PPO
from harness.axes import axes, factorial
from harness.errors import InputError
from harness.parts.advantage import GroupBaseline
from harness.parts.aggregate import SequenceMean
from harness.parts.scale import GroupStd
from harness.spec.load import load_spec
from harness.spec.schema import ExperimentSpec
from harness.tune import propose, space

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module")
def spec() -> ExperimentSpec:
    return load_spec(EXPERIMENTS / "ladder.yaml")


def paths(rungs: tuple[Arm, ...]) -> list[str]:
    """The axis of each step; more than one would not unpack."""
    found = []
    for a, b in pairwise(rungs):
        (axis,) = axes(parts(a), parts(b))
        found.append(axis.path)
    return found


def test_each_step_forward_is_the_one_that_it_says():
    assert paths(FORWARD) == [
        "advantage.gae_lambda",
        "advantage.critic.warmup_steps",
        "sampling.group_size",
        "advantage",
        "scale",
        "scale",
        "kl",
        "kl.estimator",
        "aggregate",
    ]
    assert FORWARD[-1] is GRPO
    assert FORWARD[0] is LADDER_PPO


def test_the_way_back_exchanges_the_same_axes_in_another_order():
    assert sorted(paths(REVERSE)) == sorted(paths(FORWARD))
    assert paths(REVERSE) != paths(FORWARD)[::-1]  # or it would be the same arms again
    assert (REVERSE[0], REVERSE[-1]) == (GRPO, LADDER_PPO)
    between = {arm.name for arm in REVERSE[1:-1]} & {arm.name for arm in FORWARD}
    assert between == set()


def test_the_kl_coefficient_is_the_same_on_every_rung():
    coefs = {arm.kl.initial_coef for arm in (*FORWARD, *REVERSE, *FACTORIAL)}
    assert coefs == {GRPO.kl.initial_coef}


def test_the_start_is_ppo_but_for_its_axes_and_the_coefficient():
    found = {axis.path for axis in axes(parts(PPO), parts(LADDER_PPO))}
    assert found == {
        "advantage.gae_lambda", "advantage.critic.warmup_steps", "sampling.group_size",
        "kl.kl_coef",
    }  # fmt: skip


def test_the_mixtures_are_all_sixteen_and_reuse_the_rungs():
    design = factorial({arm.name: parts(arm) for arm in FACTORIAL})
    assert set(design.axes) == {"advantage", "scale", "kl", "aggregate"}
    assert len(set(design.levels.values())) == len(FACTORIAL) == 16
    assert design.ends == (FORWARD[3].name, GRPO.name)
    shared = {arm.name for arm in FACTORIAL} & {arm.name for arm in (*FORWARD, *REVERSE)}
    assert len(shared) == 6
    twins = [a.name for a in FACTORIAL for b in RUNGS.values() if parts(a) == parts(b)]
    assert len(twins) == 15  # each once, and grpo is not among the rungs


def test_every_rung_is_found_by_name_and_none_hides_a_shipped_arm():
    found = find_arms(list(RUNGS))
    assert {f.origin for f in found.values()} == {"built-in"}
    assert set(RUNGS) <= set(list_arms())
    assert len({str(parts(arm)) for arm in RUNGS.values()}) == len(RUNGS)


# -- what ladder() refuses ------------------------------------------------------------------------


A, B = FORWARD[5], FORWARD[6]  # without and with the group's std


def test_a_ladder_of_one_step():
    assert ladder(A, B, [Step(B.name, "scale", GroupStd())]) == (A, B)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "ends at 'ladder_no_whitening', not at 'ladder_group_std': it still differs in scale"),
        ([Step("other", "scale", GroupStd())], "ends at 'other', .* its name is another"),
        ([Step(B.name, "scale", GroupStd(ddof=1))], "it still differs in scale.ddof"),
        ([Step("same", "scale", None)], "'same' changes nothing, and its step says 'scale'"),
        ([Step(B.name, "scael", GroupStd())], "no setting 'scael' on Arm.*scale"),
        (
            [Step("gone", "aggregate", SequenceMean()), Step(B.name, "scale", GroupStd())],
            "it still differs in aggregate",
        ),
    ],
)
def test_steps_that_do_not_lead_there_are_refused(steps: list[Step], message: str):
    with pytest.raises(InputError, match=message):
        ladder(A, B, steps)


def test_a_step_of_two_axes_at_once_is_refused():
    """A part of the same class that differs in two of its fields is two axes, not one."""
    with pytest.raises(InputError, match=r"changes \['scale.ddof', 'scale.eps'\]"):
        ladder(B, A, [Step("two", "scale", GroupStd(eps=1e-4, ddof=1))])


def test_a_rung_that_cannot_be_run_is_refused():
    """One completion a prompt, and a group's std."""
    with pytest.raises(
        InputError, match="needs at least 2 completions per prompt, and the arm sets 1"
    ):
        ladder(LADDER_PPO, GRPO, [Step("impossible", "scale", GroupStd())])


# -- designs by their parts -----------------------------------------------------------------------

CORNERS: dict[str, dict[str, Any]] = {
    "none": {"x": 1, "y": "low", "z": None},
    "first": {"x": 2, "y": "low", "z": None},
    "second": {"x": 1, "y": "high", "z": None},
    "both": {"x": 2, "y": "high", "z": None},
}


def test_a_design_is_read_from_parts_whatever_the_names():
    renamed = dict(zip("dbca", CORNERS.values(), strict=True))
    design = factorial(renamed)
    assert design.axes == ("x", "y")
    assert design.levels == {
        "d": frozenset(), "b": frozenset("x"), "c": frozenset("y"), "a": frozenset("xy"),
    }  # fmt: skip
    assert design.ends == ("d", "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": {"x": 3, "y": "low", "z": None}}, "first has a x of neither none nor both"),
        ({"first": {"x": 2, "y": "low", "z": 1}}, "first has a z of neither none nor both"),
        ({"first": CORNERS["second"]}, "second and first have the same parts"),
        ({"first": None}, "no arm has both's x and else none's parts"),
        ({"both": CORNERS["none"], "first": None, "second": None}, "so there is no axis"),
    ],
)
def test_what_is_no_factorial_is_told(changes: dict[str, Any], message: str):
    arms = {name: parts_ for name, parts_ in (CORNERS | changes).items() if parts_ is not None}
    with pytest.raises(ValueError, match=message):
        factorial(arms)


# -- the spec -------------------------------------------------------------------------------------


def test_the_shipped_spec_names_the_shipped_ladders(spec: ExperimentSpec):
    assert spec.ladder is not None
    for names, arms in (
        (spec.ladder.forward, FORWARD), (spec.ladder.reverse, REVERSE),
        (spec.ladder.factorial, FACTORIAL),
    ):  # fmt: skip
        assert names == tuple(arm.name for arm in arms)
    assert set(spec.arms) == {*RUNGS, GRPO.name}  # every cell is used, and runs once
    assert spec.tuning is None
    assert len(spec.seeds) >= 5


def test_the_pilot_differs_from_the_ladder_in_its_rates_alone(spec: ExperimentSpec):
    pilot = load_spec(EXPERIMENTS / "ladder_pilot.yaml")
    for section in ("model", "data", "reward", "sampling", "optimizer", "budget", "evaluation"):
        assert getattr(pilot, section) == getattr(spec, section), section
    assert pilot.tuning is not None
    assert not set(pilot.tuning.seeds) & set(spec.seeds)
    assert pilot.arms == (FORWARD[0].name, FORWARD[-1].name)
    for arm in (FORWARD[0], FORWARD[-1]):
        trials = propose(pilot, arm, [])
        rates = [trial.pop("optimizer.learning_rate") for trial in trials]
        space_ = pilot.tuning.shared["optimizer.learning_rate"].choices
        assert set(rates) == set(space_ or ())
        assert all(trial == trials[0] for trial in trials)  # nothing else moves
        for path, value in trials[0].items():
            held: Any = parts(arm)
            for key in path.split("."):
                held = held[key]
            assert held == value


def test_a_ladder_tunes_what_its_rungs_share_and_nothing_of_their_own(spec: ExperimentSpec):
    """gae_lambda would else be searched on the very rungs that differ in it."""
    tuning = {"trials": 2, "budget_fraction": 0.5, "seeds": [1000]}
    shared = {"optimizer.learning_rate": {"low": 1e-4, "high": 1e-3, "log": True}}
    tree = spec.model_dump(mode="json") | {"tuning": tuning | {"shared": shared}}
    on = ExperimentSpec.model_validate(tree)
    for arm in RUNGS.values():
        assert set(space(on, arm)) == {"optimizer.learning_rate"}
    off = ExperimentSpec.model_validate(tree | {"ladder": None})
    assert "advantage.gae_lambda" in space(off, LADDER_PPO)
    own = {"ladder_ppo": {"advantage.gae_lambda": {"choices": [0.9, 1.0]}}}
    with pytest.raises(ValueError, match=r"tuning\.arms sets single arms"):
        ExperimentSpec.model_validate(tree | {"tuning": tuning | {"arms": own}})


@pytest.mark.parametrize(
    ("ladder_", "message"),
    [
        ({}, "give forward, reverse or factorial"),
        ({"forward": ["grpo"]}, "give two arms or more"),
        ({"forward": ["grpo", "ladder_k3", "grpo"]}, "each once"),
        ({"forward": ["ladder_k3", "dapo"]}, r"ladder.forward: \['dapo'\] are not among arms"),
        ({"factorial": ["grpo", "ladder_k3", "mix_kl"]}, "factorial has 3 arms"),
        (
            {"forward": ["ladder_k3", "grpo"], "reverse": ["ladder_k3", "grpo"]},
            "the other way than forward",
        ),
    ],
)
def test_lists_that_are_no_ladder_are_refused(
    spec: ExperimentSpec, ladder_: dict[str, Any], message: str
):
    tree = spec.model_dump(mode="json") | {"ladder": ladder_}
    with pytest.raises(ValueError, match=message):
        ExperimentSpec.model_validate(tree)


def test_a_spec_without_a_ladder_says_nothing_of_one():
    """Or every spec's hash would have changed with the key."""
    assert "ladder" not in load_spec(EXPERIMENTS / "matched_math.yaml").model_dump(mode="json")


def test_group_mean_of_groups_of_one_is_refused():
    with pytest.raises(InputError, match="needs at least 2 completions per prompt"):
        LADDER_PPO.but("alone", advantage=GroupBaseline()).check(8)
