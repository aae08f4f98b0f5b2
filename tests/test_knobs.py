"""Numbers that tuning may set."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from harness.arms import ARMS
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.errors import InputError
from harness.knobs import Range, knob, knobs, settings, turn


def test_what_each_arm_lets_tuning_set():
    assert knobs(PPO).keys() == {
        "kl.kl_coef",
        "advantage.gae_lambda",
        "advantage.critic.learning_rate",
        "advantage.critic.warmup_steps",
    }
    assert knobs(GRPO).keys() == {"kl.kl_coef"}
    assert knobs(ARMS["dapo"]) == {}
    assert knobs(ARMS["cispo"]).keys() == {"clip.clip_high"}  # the paper does not disclose it


def test_a_ppo_without_lambda_one_would_be_a_straw_man():
    choices = knobs(PPO)["advantage.gae_lambda"].choices
    assert choices is not None
    assert 1.0 in choices
    assert 0.95 in choices


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_every_default_lies_in_its_own_range(arm):
    """Trial 0 is the arm's default: a space without it would tune another arm."""
    values = settings(arm)
    for path, space in knobs(arm).items():
        if space.choices is not None:
            assert values[path] in space.choices
        else:
            assert space.low is not None
            assert space.high is not None
            assert space.low <= values[path] <= space.high


def test_turn_sets_one_field_and_copies():
    turned = turn(PPO, "advantage.critic.learning_rate", 5e-4)
    assert settings(turned)["advantage.critic.learning_rate"] == 5e-4
    changed = {k for k, v in settings(turned).items() if settings(PPO)[k] != v}
    assert changed == {"advantage.critic.learning_rate"}
    assert PPO.critic is not None
    assert PPO.critic.learning_rate == 1e-3


def test_an_unknown_setting_is_named_with_a_suggestion():
    with pytest.raises(InputError, match=r"no setting 'kl_coeff' on KLInLoss. Did you mean 'kl_co"):
        turn(GRPO, "kl.kl_coeff", 0.1)


@pytest.mark.parametrize(
    ("space", "quantile", "value"),
    [
        (Range(0.0, 10.0), 0.25, 2.5),
        (Range(1e-4, 1e-2, log=True), 0.5, 1e-3),
        (Range(choices=(1, 2, 4)), 0.0, 1),
        (Range(choices=(1, 2, 4)), 0.34, 2),
        (Range(choices=(1, 2, 4)), 0.999999, 4),
        (Range(choices=(1, 2, 4)), 1.0, 4),
    ],
)
def test_range_at_a_quantile(space, quantile, value):
    assert space.at(quantile) == pytest.approx(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either low and high, or choices"),
        ({"low": 1.0}, "either low and high, or choices"),
        ({"low": 1.0, "high": 2.0, "choices": (1,)}, "either low and high, or choices"),
        ({"low": 2.0, "high": 1.0}, "low 2.0 must be below high 1.0"),
        ({"low": 0.0, "high": 1.0, "log": True}, "log scale needs low > 0, found 0.0"),
    ],
)
def test_an_impossible_range_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        Range(**given)


def test_a_plugin_part_brings_its_knobs():
    @dataclass(frozen=True)
    class Inner:
        strength: float = knob(0.5, low=0.0, high=1.0)

    @dataclass(frozen=True)
    class Outer:
        inner: Inner = field(default_factory=Inner)
        fixed: int = 3

    assert knobs(Outer()) == {"inner.strength": Range(0.0, 1.0)}
    assert settings(Outer()) == {"inner.strength": 0.5, "fixed": 3}
