"""What cannot mean anything is refused when the arm is built; what is merely odd is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.arm import Arm
from harness.arms import BUILT_IN
from harness.arms.grpo import GRPO
from harness.arms.gspo import GSPO
from harness.arms.ppo import PPO
from harness.arms.shared_head import PPO_SHARED_HEAD
from harness.combinations import least_group
from harness.errors import InputError
from harness.parts.advantage import GAE, GroupBaseline, LeaveOneOut, ReturnToGo
from harness.parts.aggregate import FixedLength, TokenMean
from harness.parts.clip import CISPOClip, NoClip, PPOClip
from harness.parts.divergence import TotalVariation
from harness.parts.exclude import Unfinished, ZeroVariance
from harness.parts.imitate import Imitate
from harness.parts.kl import AdaptiveKL, KLInLoss, KLInReward, NoKL
from harness.parts.mixing import NeighbourMixing
from harness.parts.process import ProcessSupervision
from harness.parts.ratio import NoRatio, ProductRatio, SequenceRatio, TokenRatio
from harness.parts.sampling import DynamicSampling, FixedGroups
from harness.parts.scale import BatchStd, GroupStd, Whiten
from harness.parts.shaping import OverlongPenalty, SignedScore, UnfinishedPenalty
from harness.parts.trust_region import DivergenceMask, FixedBudget, PrefixBudget, SequenceMask

ALONE = FixedGroups(group_size=1)
TOP = TotalVariation(top_k=20)
STEPS = {"advantage": ProcessSupervision(), "scale": None, "kl": NoKL()}


def mixing(**changes: Any) -> FixedGroups:
    return FixedGroups(mixing=NeighbourMixing(**changes))


def case(base: Arm, message: str, **changes: Any) -> Any:
    return pytest.param(base, changes, message, id=message)


IMPOSSIBLE = [
    # The penalty.
    case(GRPO, "k1 in the loss has an expected gradient of 0", kl=KLInLoss(estimator="k1")),
    case(PPO, "k3_k2 in the reward is k3", kl=KLInReward(estimator="k3_k2")),
    case(PPO, "kl_coef -0.1 rewards the distance", kl=KLInReward(kl_coef=-0.1)),
    case(PPO, "kl_coef nan rewards the distance", kl=KLInReward(kl_coef=math.nan)),
    case(PPO, "clamp 0.0 leaves nothing of the KL", kl=KLInReward(clamp=0.0)),
    case(
        PPO, "target 0.0 and horizon 10000.0, and divides",
        kl=KLInReward(controller=AdaptiveKL(target=0.0)),
    ),
    # Ratio, clip, aggregation.
    case(GSPO, "DivergenceMask compares token distributions, and Seq", clip=DivergenceMask()),
    case(
        GSPO, "PrefixBudget compares token distributions, and Prod",
        ratio=ProductRatio(), clip=PrefixBudget(),
    ),
    case(GRPO, "DivergenceMask compares .*NoRatio", ratio=NoRatio(), clip=DivergenceMask()),
    case(GRPO, "top_k 20 .* anchor is 'old'", clip=DivergenceMask(divergence=TOP)),
    case(GRPO, "PPOClip on NoRatio never clips", ratio=NoRatio()),
    case(GRPO, "CISPOClip on NoRatio never clips", ratio=NoRatio(), clip=CISPOClip()),
    case(GSPO, "SequenceRatio is one number .*TokenMean", aggregate=TokenMean()),
    case(GSPO, "ProductRatio is .*FixedLength", ratio=ProductRatio(), aggregate=FixedLength()),
    case(GRPO, "clip_high -0.1 cuts at ratio 1", clip=PPOClip(clip_high=-0.1)),
    case(GRPO, "clip_low -0.2 cuts at ratio 1", clip=CISPOClip(clip_low=-0.2)),
    case(GRPO, "dual_clip 1.0 cuts every negative", clip=PPOClip(dual_clip=1.0)),
    case(
        GRPO, "SequenceMask compares token distributions, and Seq",
        ratio=SequenceRatio(), clip=SequenceMask(),
    ),
    case(GRPO, "ratio_cap 0.5 shrinks the first", clip=DivergenceMask(ratio_cap=0.5)),
    case(GRPO, "delta 0.0 lets no token move", clip=DivergenceMask(delta=0.0)),
    case(GRPO, "delta nan lets no token move", clip=PrefixBudget(delta=math.nan)),
    case(GRPO, "w_min 1.5 is no weight", clip=PrefixBudget(w_min=1.5)),
    # Groups.
    case(GRPO, "GroupBaseline needs at least 2 .* sets 1; raise s", scale=None, sampling=ALONE),
    case(PPO, "GroupStd needs at least 2 .* or leave", scale=GroupStd(), sampling=ALONE),
    case(
        GRPO, "GroupStd needs at least 3 completions per prompt, and the arm sets 2",
        scale=GroupStd(ddof=2), sampling=FixedGroups(group_size=2),
    ),
    case(PPO, "a group of one has never both", sampling=DynamicSampling(group_size=1)),
    case(GRPO, "max_rounds 0 samples nothing", sampling=DynamicSampling(max_rounds=0)),
    # Mixing.
    case(PPO, "a critic of its own would judge other inputs", sampling=mixing()),
    case(GRPO, "share 1.5 is no probability", sampling=mixing(share=1.5)),
    case(GRPO, "share nan is no probability", sampling=mixing(share=math.nan)),
    case(GRPO, "neighbours 0 mixes nothing", sampling=mixing(neighbours=0)),
    # Scores.
    case(
        GRPO, "SignedScore puts .* undoes OverlongPenalty before it",
        shaping=(OverlongPenalty(), SignedScore()),
    ),
    case(GRPO, "cache_share 0.0 is no share", shaping=(OverlongPenalty(cache_share=0.0),)),
    case(GRPO, "tolerance inf leaves every group out", exclude=ZeroVariance(tolerance=math.inf)),
    case(GRPO, "tolerance -1.0 leaves no group out", exclude=ZeroVariance(tolerance=-1.0)),
    case(GRPO, "coef 0.0 of the likelihood term imitates", imitate=Imitate(coef=0.0)),
    # Steps.
    case(GRPO, "SignedScore shapes the completion's", **STEPS, shaping=(SignedScore(),)),
    case(GRPO, "a KL in the reward penalises nothing", **STEPS | {"kl": KLInReward()}),
    case(GRPO, "BatchStd divides by the std of the comp", **STEPS | {"scale": BatchStd()}),
    # Discounts.
    case(PPO, "gae_lambda 1.1 weighs the future", advantage=GAE(gae_lambda=1.1)),
    case(PPO, "critic_lambda -1.0 weighs the", advantage=GAE(critic_lambda=-1.0)),
    case(PPO, "gamma 1.01 weighs the future", advantage=ReturnToGo(gamma=1.01)),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "message"), IMPOSSIBLE)
def test_the_impossible_is_refused_with_its_reason(base: Arm, changes: dict[str, Any], message):
    with pytest.raises(InputError, match=rf"^arm 'odd': .*{message}"):
        base.but("odd", **changes)


ODD = {
    "a penalty that a study sets to 0": (GRPO, {"kl": KLInLoss(kl_coef=0.0)}),
    "R1's upper clip of 10": (GRPO, {"clip": PPOClip(clip_high=10.0)}),
    "a clip of no width": (GRPO, {"clip": PPOClip(clip_low=0.0, clip_high=0.0)}),
    "a clip open on both sides": (GRPO, {"clip": PPOClip(clip_low=None, clip_high=None)}),
    "group std of a critic's advantages": (PPO, {"scale": GroupStd()}),
    "a critic under a sequence ratio": (GSPO, {"advantage": GAE(), "scale": None}),
    "dppo on the trainer's own log-probs": (GRPO, {"clip": DivergenceMask()}),
    "trm on the trainer's own": (GRPO, {"clip": SequenceMask(delta_max=None)}),
    "a prefix without a budget": (
        GRPO, {"clip": PrefixBudget(budget=FixedBudget(None), w_min=1.0, ratio_cap=1.0)}
    ),
    "top-k on the engine's": (
        GRPO, {"clip": DivergenceMask(divergence=TOP), "ratio": TokenRatio(anchor="behaviour")}
    ),
    "both of dapo's answers to overlong": (
        GRPO, {"shaping": (SignedScore(), OverlongPenalty()), "exclude": Unfinished()}
    ),
    "a filter behind dynamic sampling": (
        GRPO, {"sampling": DynamicSampling(), "exclude": ZeroVariance()}
    ),
    "two penalties on length": (GRPO, {"shaping": (OverlongPenalty(), UnfinishedPenalty())}),
    "a leave-one-out mean, whitened": (GRPO, {"advantage": LeaveOneOut(), "scale": Whiten()}),
    "imitation without a critic": (GRPO, {"imitate": Imitate()}),
    "steps, whitened": (GRPO, STEPS | {"scale": Whiten()}),
    "a mixture of one": (GRPO, {"sampling": mixing(neighbours=1)}),
    "mixing that is switched off": (GRPO, {"sampling": mixing(share=0.0)}),
    "mixing under a head on the same trunk": (PPO_SHARED_HEAD, {"sampling": mixing(share=1.0)}),
    "lambda 0": (PPO, {"advantage": GAE(gae_lambda=0.0)}),
    "no clip on a ratio": (GRPO, {"clip": NoClip(), "ratio": SequenceRatio()}),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_the_merely_odd_may_be_run(name: str):
    base, changes = ODD[name]
    arm = base.but("odd", **changes)
    assert all(getattr(arm, field) == value for field, value in changes.items())


def test_what_ships_is_possible_and_stays_so_at_the_specs_group_size():
    for arm in BUILT_IN.values():
        arm.check(8)


def test_a_ddof_needs_one_completion_more():
    assert least_group(GroupStd(ddof=0)) == least_group(GroupStd(ddof=1)) == 2
    assert least_group(GroupStd(ddof=2)) == 3
    assert least_group(GroupBaseline()) == 2
    wide = GRPO.but("wide", scale=GroupStd(ddof=2))
    wide.check(3)
    with pytest.raises(InputError, match=r"GroupStd needs at least 3 .* the spec gives 2"):
        wide.check(2)
