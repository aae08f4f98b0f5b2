"""An arm's row of axes says what its parts do, and tells every two arms apart."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import pytest

from harness.arm import Arm, parts
from harness.arms import ARMS, BUILT_IN
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.knobs import settings, turn
from harness.labels import AXES, LABELS, axes_of, brief, family, label
from harness.parts.advantage import GAE, GroupBaseline, LengthAdaptiveGAE
from harness.parts.clip import CISPOClip, PPOClip
from harness.parts.critic import Critic
from harness.parts.divergence import TotalVariation
from harness.parts.exclude import Unfinished, ZeroVariance
from harness.parts.kl import AdaptiveKL, KLInLoss, KLInReward, Refresh
from harness.parts.mixing import NeighbourMixing
from harness.parts.ratio import SequenceRatio, TokenRatio
from harness.parts.sampling import DynamicSampling, FixedGroups
from harness.parts.scale import GroupStd
from harness.parts.shaping import UnfinishedPenalty
from harness.parts.trust_region import FixedBudget, PrefixBudget, SequenceMask


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (None, "none"),
        (GAE(gae_lambda=0.95, critic_lambda=1.0), "critic λ 0.95|1, warm-up 2"),
        (GAE(gamma=0.9, critic=Critic(warmup_steps=0)), "critic λ 1, warm-up 0, gamma 0.9"),
        (GroupStd(eps=1e-4, ddof=1), "group ddof 1 +0.0001"),
        (KLInReward(kl_coef=0.01, clamp=10.0), "reward k1 0.01, clamp 10"),
        (
            KLInReward(controller=AdaptiveKL(target=3.0)),
            "reward k1 0.05, controller to 3 in 10000",
        ),
        (KLInLoss(refresh=Refresh(every=5)), "loss k3 0.04, refresh every 5 steps"),
        (TokenRatio(), "token"),
        (SequenceRatio(anchor="behaviour"), "sequence/engine"),
        (PPOClip(clip_low=3e-4, clip_high=4e-4), "-0.0003 +0.0004"),
        (PPOClip(clip_low=None, clip_high=0.28, dual_clip=3.0), "+0.28, dual 3"),
        (PPOClip(clip_low=None, clip_high=None), "open"),
        (CISPOClip(clip_low=0.2, clip_high=0.2), "weight -0.2 +0.2"),
        (
            PrefixBudget(divergence=TotalVariation(top_k=20), budget=FixedBudget(), w_min=0.5),
            "prefix TV top 20 0.15, budget 0.015, w_min 0.5",
        ),
        (SequenceMask(delta_mean=None), "completion KL max 0.05"),
        (FixedGroups(group_size=1), "fixed, 1 a prompt"),
        (DynamicSampling(max_rounds=3), "dynamic, max_rounds 3"),
        (FixedGroups(mixing=NeighbourMixing()), "fixed, mixing 0.1 of 3 neighbours"),
        (Unfinished(denominator="kept"), "cut ones/kept"),
        (ZeroVariance(tolerance=0.1), "flat groups/all, tolerance 0.1"),
        (UnfinishedPenalty(value=-0.5, replace=False), "cut + -0.5"),
    ],
)
def test_a_part_in_short(part: Any, text: str):
    assert label(part) == text


def test_grpo_in_one_row():
    assert axes_of(GRPO) == {
        "mean": "group", "std": "group ddof 0 +1e-6", "kl": "loss k3 0.04", "ratio": "token",
        "clip": "-0.2 +0.2", "average": "completions", "sampling": "fixed", "exclude": "none",
        "shaping": "none", "imitate": "none",
    }  # fmt: skip
    assert set(axes_of(GRPO)) == set(AXES)
    assert family(GRPO) == "with the group's mean"
    assert family(PPO) == "with a critic"


def test_no_two_arms_look_alike():
    rows = {name: axes_of(arm) for name, arm in BUILT_IN.items()}
    for a, b in combinations(BUILT_IN, 2):
        alike = parts(BUILT_IN[a]) == parts(BUILT_IN[b])
        assert (rows[a] == rows[b]) is alike, f"{a} and {b}"


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_every_number_of_an_arm_shows_once_it_is_changed(arm: Arm):
    """Of those that are numbers: a field that a label forgot would hide a difference."""
    numbers = {
        path: value
        for path, value in settings(arm).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if isinstance(arm.advantage, LengthAdaptiveGAE):
        del numbers["advantage.gae_lambda"]  # which it does not read
    for path, value in numbers.items():
        half = value * 0.5 if value else 0.5
        other = turn(arm, path, half if isinstance(value, float) else value + 1)
        assert axes_of(other) != axes_of(arm), path


@dataclass(frozen=True)
class Momentum(GroupBaseline):
    """A plugin's part."""

    version: ClassVar[int] = 1
    decay: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Twisted(Arm):
    pass


def test_a_plugins_part_is_shown_by_its_class_and_fields():
    arm = GRPO.but("mine", advantage=Momentum(decay=0.5))
    assert axes_of(arm)["mean"] == "Momentum(decay=0.5)"
    assert family(arm) == "by Momentum"
    assert Momentum not in LABELS
    fields = {name: getattr(GRPO, name) for name in GRPO.__dataclass_fields__}
    assert axes_of(Twisted(**fields))["arm"] == "Twisted"


def test_a_tree_in_few_words():
    assert brief(parts(GRPO)["scale"]) == "GroupStd(eps=1e-6, ddof=0)"
    assert brief(parts(ARMS["dapo"])["shaping"]) == "SignedScore + OverlongPenalty(cache_share=0.2)"
    assert (brief(None), brief([]), brief(0.28), brief("k3")) == ("none", "none", "0.28", "k3")
