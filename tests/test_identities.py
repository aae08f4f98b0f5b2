"""Where two algorithms are one: each identity on whole arms, off policy and on ragged batches.

Of surrogates the gradients are compared: a clip that cuts a token may leave another constant.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from harness.arm import Arm
from harness.arms.cispo import CISPO
from harness.arms.cppo import CPPO
from harness.arms.dapo import DAPO
from harness.arms.dppo import DPPO_TOPK_TV, DPPO_TV
from harness.arms.dr_grpo import DR_GRPO
from harness.arms.filtered import LITE_PPO
from harness.arms.grpo import GRPO, GRPO_CLIP_HIGHER
from harness.arms.gspo import GSPO
from harness.arms.ppo import PPO
from harness.arms.presets import TRL_GRPO
from harness.arms.process import GRPO_PROCESS
from harness.arms.rloo import RLOO
from harness.arms.vapo import VAPO, VC_PPO
from harness.conformance.scene import (
    LIMIT,
    Scene,
    chosen,
    credit,
    losses,
    make_scene,
    top,
    update,
    weigh,
)
from harness.knobs import turn
from harness.parts.advantage import GAE, GroupBaseline, LengthAdaptiveGAE
from harness.parts.aggregate import SequenceMean, TokenMean
from harness.parts.clip import NoClip, PPOClip
from harness.parts.critic import Critic
from harness.parts.divergence import Divergence
from harness.parts.kl import KLInLoss, NoKL
from harness.parts.ratio import NoRatio, ProductRatio, SequenceRatio, TokenRatio
from harness.parts.sampling import FixedGroups
from harness.parts.scale import BatchStd, GroupStd
from harness.parts.trust_region import DivergenceMask, FixedBudget, PrefixBudget
from harness.types import Minibatch, Tokens, group_mean

SCENES = pytest.mark.parametrize(("seed", "move"), [(0, 0.02), (1, 0.2), (2, 0.8), (3, 1.5)])


def same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def gradients(a: Arm, b: Arm, seed: int, move: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of both arms' policy losses on the scene of the second, by each log-prob."""
    scene = make_scene(b, seed=seed, move=move)
    return update(a, scene)["gradient"], update(b, scene)["gradient"]


def cut(arm: Arm, scene: Scene) -> torch.Tensor:
    """Where the clip cuts the gradient of a token that has one."""
    x = weigh(arm, scene.x)
    pushed = (x.weights * x.advantages) != 0
    return pushed & (update(arm, scene, x)["gradient"] == 0)


def alike(scene: Scene, length: int) -> Scene:
    """The scene with every completion of one length."""
    mask = (torch.arange(LIMIT) < length).expand_as(scene.x.mask)
    old = torch.where(mask, scene.x.old_logprobs.clamp(max=-0.1), 0.0)
    x = dataclasses.replace(scene.x, mask=mask, old_logprobs=old, behaviour_logprobs=old)
    old = chosen(scene.table, x) - 0.1 * torch.sin(torch.arange(mask.numel())).reshape(mask.shape)
    return Scene(
        dataclasses.replace(x, old_logprobs=old, behaviour_logprobs=old), scene.table, scene.values
    )


# --- baselines -----------------------------------------------------------------------------------


@SCENES
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ppo_whose_critic_is_the_group_mean_is_dr_grpo(seed: int, move: float, size: int):
    """The one thing that a critic replaces: at lambda 1, unwhitened, with no KL in the reward."""
    oracle = PPO.but("oracle", kl=NoKL(), scale=None, advantage=GAE(gae_lambda=1.0),
                     sampling=FixedGroups(group_size=size))  # fmt: skip
    scene = make_scene(oracle, seed=seed, move=move)
    mean = group_mean(scene.x.score, scene.x.group)[:, None].expand_as(scene.x.mask)
    x = dataclasses.replace(scene.x, values=mean)
    with_critic, without = credit(oracle, x).advantages, credit(DR_GRPO, x).advantages
    assert without.abs().max() > 0.1
    same(with_critic, without)
    # With the rest of Dr. GRPO's parts the whole update is the same.
    whole = oracle.but("whole", aggregate=DR_GRPO.aggregate)
    same(update(whole, Scene(x, scene.table, scene.values))["gradient"],
         update(DR_GRPO, Scene(x, scene.table, scene.values))["gradient"])  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 5])
def test_leave_one_out_is_a_multiple_of_the_group_baseline(size: int):
    grouped = FixedGroups(group_size=size)
    arms = [arm.but("sized", sampling=grouped, kl=NoKL()) for arm in (RLOO, DR_GRPO)]
    x = make_scene(arms[0], seed=size).x
    rloo, group = (credit(arm, x).advantages for arm in arms)
    same(rloo, group * size / (size - 1))
    # And by its own definition: the score less the mean of the others'.
    for row in range(len(x)):
        others = [r for r in range(len(x)) if x.group[r] == x.group[row] and r != row]
        expected = x.score[row] - x.score[others].mean()
        same(rloo[row][x.mask[row]], expected.expand(int(x.mask[row].sum())))


@SCENES
def test_grpo_is_dr_grpo_up_to_a_constant_at_equal_lengths_and_unit_std(seed: int, move: float):
    """Scores 0 and 2, half of each: std 1. Then 1/(B T) stands against 1/(B limit)."""
    grpo = GRPO.but("plain", kl=NoKL(), scale=GroupStd(eps=0.0),
                    sampling=FixedGroups(group_size=4))  # fmt: skip
    length = 5
    scene = alike(make_scene(grpo, seed=seed, move=move), length)
    score = 2.0 * (torch.arange(len(scene.x)) % 2)
    x = dataclasses.replace(scene.x, score=score.double(), bonus=0 * scene.x.bonus)
    scene = Scene(x, scene.table, scene.values)
    found, plain = update(grpo, scene)["gradient"], update(DR_GRPO, scene)["gradient"]
    assert plain.abs().max() > 1e-3
    same(found, plain * LIMIT / length)


def test_ddof_one_is_a_smaller_learning_rate():
    x = make_scene(GRPO).x
    plain = GRPO.but("population", kl=NoKL(), scale=GroupStd(eps=0.0, ddof=0))
    sample = plain.but("sample", scale=GroupStd(eps=0.0, ddof=1))
    same(credit(sample, x).advantages, credit(plain, x).advantages * math.sqrt(2 / 3))


def test_one_groups_std_is_its_batchs():
    x = make_scene(LITE_PPO).x
    one = dataclasses.replace(x, group=torch.zeros_like(x.group))
    assert isinstance(LITE_PPO.scale, BatchStd)
    by_group = LITE_PPO.but("by_group", scale=GroupStd(eps=1e-6, ddof=0))
    same(credit(LITE_PPO, one).advantages, credit(by_group, one).advantages)
    assert (credit(LITE_PPO, x).advantages - credit(by_group, x).advantages).abs().max() > 0.01


def test_one_step_a_completion_makes_process_supervision_grpo():
    x = make_scene(GRPO_PROCESS).x
    last = torch.arange(LIMIT) == x.mask.sum(1, keepdim=True) - 1
    x = dataclasses.replace(x, step_ends=last, step_scores=last * x.score[:, None])
    same(credit(GRPO_PROCESS, x, 0.0).advantages, credit(GRPO, x, 0.0).advantages)


# --- critics -------------------------------------------------------------------------------------


def test_a_critics_own_lambda_is_the_policys_where_they_agree():
    shared = GAE(gae_lambda=0.9)
    x = make_scene(PPO).x
    one = credit(PPO.but("one", advantage=shared), x)
    two = credit(PPO.but("two", advantage=dataclasses.replace(shared, critic_lambda=0.9)), x)
    assert torch.equal(one.advantages, two.advantages)
    assert one.returns is not None
    assert two.returns is not None
    assert torch.equal(one.returns, two.returns)


def test_vapos_lambda_is_vc_ppos_at_its_length():
    """1 - 1/(alpha T) = 0.95 where alpha T = 20."""
    scene = alike(make_scene(VC_PPO), 5)
    critic = Critic(warmup_steps=4)
    adaptive = LengthAdaptiveGAE(alpha=4.0, critic_lambda=1.0, critic=critic)
    a = credit(VC_PPO.but("adaptive", advantage=adaptive), scene.x)
    b = credit(VC_PPO, scene.x)
    same(a.advantages, b.advantages)
    assert isinstance(VAPO.advantage, LengthAdaptiveGAE)


# --- clips and ratios ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RatioGap(Divergence):
    """|ratio - 1|: no divergence of distributions, and PPO's measure."""

    version: ClassVar[int] = 1

    def __call__(self, x: Tokens) -> torch.Tensor:
        return ((x.logprobs - x.anchor_logprobs).exp() - 1).abs().detach()


@SCENES
@pytest.mark.parametrize("eps", [0.02, 0.2])
def test_dppo_by_the_ratio_is_ppos_clip(seed: int, move: float, eps: float):
    dppo = DPPO_TV.but("by_ratio", clip=DivergenceMask(divergence=RatioGap(), delta=eps))
    ppo = dppo.but("clipped", clip=PPOClip(clip_low=eps, clip_high=eps))
    scene = make_scene(dppo, seed=seed, move=move)
    blocked = cut(ppo, scene)
    assert torch.equal(cut(dppo, scene), blocked)
    assert move < eps or blocked.any()
    same(update(dppo, scene)["gradient"], update(ppo, scene)["gradient"])


@SCENES
@pytest.mark.parametrize("base", [DPPO_TV, DPPO_TOPK_TV], ids=lambda a: a.name)
def test_cppo_without_a_budget_is_dppo(seed: int, move: float, base: Arm):
    """w = 1 at every token, and nothing that earlier ones use up."""
    delta = 0.02  # small, so that some tokens are blocked
    dppo = turn(base, "clip.delta", delta)
    endless = PrefixBudget(
        divergence=dppo.clip.divergence,  # type: ignore[attr-defined]
        delta=delta, w_min=1.0, budget=FixedBudget(delta_b=None),
    )  # fmt: skip
    cppo = dppo.but("endless", clip=endless)
    scene = make_scene(dppo, seed=seed, move=move)
    blocked = cut(dppo, scene)
    assert move < 0.2 or blocked.any()
    assert torch.equal(cut(cppo, scene), blocked)
    same(update(cppo, scene)["gradient"], update(dppo, scene)["gradient"])


def test_a_budget_blocks_tokens_that_dppo_would_not():
    dppo = turn(DPPO_TV, "clip.delta", 0.05)
    spent = PrefixBudget(delta=0.05, w_min=1.0, budget=FixedBudget(delta_b=0.0))
    scene = make_scene(dppo, move=0.8)
    free, strict = cut(dppo, scene), cut(dppo.but("strict", clip=spent), scene)
    assert (strict & ~free).any()
    assert not (free & ~strict).any()


@pytest.mark.parametrize("shift", [0.0, 1e-4, 0.15, 0.3])
def test_gspo_is_grpo_where_the_ratios_of_a_completion_are_equal(shift: float):
    """Each completion moved as a whole; both clipped at the same bounds."""
    clip = PPOClip(clip_low=0.2, clip_high=0.2)
    gspo = GSPO.but("wide", clip=clip)
    grpo = GRPO.but("plain", kl=NoKL(), clip=clip)
    scene = make_scene(gspo)
    x = weigh(gspo, scene.x)
    steps = shift * torch.sin(torch.arange(len(x)).double())[:, None]
    now = x.old_logprobs + steps
    found, expected = (losses(arm, x, now, scene.values, None) for arm in (gspo, grpo))
    for name in ("loss", "gradient", "sum/clip_fraction_high", "sum/clip_fraction_low"):
        same(found[name], expected[name])
    clipped = found["sum/clip_fraction_high"] + found["sum/clip_fraction_low"]
    assert (float(clipped) > 0) is (shift == 0.3)


def first(arm: Arm, scene: Scene) -> torch.Tensor:
    """The gradient of the first minibatch, before the policy has moved."""
    x: Minibatch = weigh(arm, scene.x)
    return losses(arm, x, x.old_logprobs, scene.values, top(scene.table, x))["gradient"]


def test_the_first_update_knows_no_clip_and_no_ratio():
    """On policy GSPO is GRPO; CISPO, CPPO and clip-higher are what they clip."""
    scene = make_scene(CPPO)
    plain = GRPO.but("plain", kl=NoKL())
    assert plain.aggregate == GSPO.aggregate
    same(first(GSPO, scene), first(plain, scene))
    same(first(GRPO_CLIP_HIGHER.but("h", kl=NoKL()), scene), first(plain, scene))
    tokens = plain.but("tokens", aggregate=TokenMean())
    bare = {"shaping": (), "sampling": FixedGroups(), "exclude": None}
    for arm in (CISPO, CPPO, DAPO):
        same(first(arm.but("bare", **bare), scene), first(tokens, scene))
    same(first(TRL_GRPO.but("ddof0", scale=plain.scale), scene), first(tokens, scene))


@SCENES
def test_a_clip_open_on_both_sides_is_none(seed: int, move: float):
    open_ = DR_GRPO.but("open", clip=PPOClip(clip_low=None, clip_high=None))
    same(*gradients(open_, DR_GRPO.but("none", clip=NoClip()), seed, move))


@SCENES
def test_a_mask_that_nothing_reaches_is_no_clip(seed: int, move: float):
    never = DPPO_TV.but("never", clip=DivergenceMask(delta=1.0))  # a total variation's most
    same(*gradients(never, DPPO_TV.but("none", clip=NoClip()), seed, move))


@SCENES
def test_a_completion_of_one_token_has_one_ratio(seed: int, move: float):
    plain = GRPO.but("token", kl=NoKL())
    scene = alike(make_scene(plain, seed=seed, move=move), 1)
    expected = update(plain, scene)["gradient"]
    assert expected.abs().max() > 1e-3
    for ratio in (SequenceRatio(), ProductRatio()):
        same(update(plain.but("whole", ratio=ratio), scene)["gradient"], expected)


def test_a_product_of_ratios_is_the_sequence_mean_to_the_power_of_the_length():
    scene = make_scene(GSPO, move=0.3)
    x, now = scene.x, chosen(scene.table, scene.x)
    mean = SequenceRatio()(now, x.old_logprobs, x.mask)
    product = ProductRatio()(now, x.old_logprobs, x.mask)
    same(product, mean ** x.mask.sum(1, keepdim=True))
    tokens = TokenRatio()(now, x.old_logprobs, x.mask)
    same(product[:, 0], tokens.prod(1))


@SCENES
def test_without_a_ratio_the_update_forgets_how_far_it_went(seed: int, move: float):
    """REINFORCE again and again: the gradient stays that of the first minibatch."""
    arm = DR_GRPO.but("plain", ratio=NoRatio(), clip=NoClip())
    scene = make_scene(arm, seed=seed, move=move)
    same(update(arm, scene)["gradient"], first(arm, scene))


# --- averages and penalties ----------------------------------------------------------------------


@SCENES
def test_averages_agree_at_equal_lengths(seed: int, move: float):
    scene = alike(make_scene(GRPO, seed=seed, move=move), 4)
    by_token = GRPO.but("tokens", aggregate=TokenMean())
    assert isinstance(GRPO.aggregate, SequenceMean)
    same(update(GRPO, scene)["gradient"], update(by_token, scene)["gradient"])
    same(weigh(GRPO, scene.x).weights, weigh(by_token, scene.x).weights)


@SCENES
def test_k3_k2_has_the_value_of_k3_and_the_gradient_of_k2(seed: int, move: float):
    scene = make_scene(GRPO, seed=seed, move=move)
    k2, k3, both = (
        update(GRPO.but(name, kl=KLInLoss(kl_coef=0.5, estimator=name)), scene)
        for name in ("k2", "k3", "k3_k2")
    )
    same(both["gradient"], k2["gradient"])
    same(both["loss"], k3["loss"])
    assert (k2["gradient"] - k3["gradient"]).abs().max() > 1e-5


def test_a_penalty_of_no_weight_is_none():
    scene = make_scene(GRPO, move=0.3)
    free = GRPO.but("free", kl=KLInLoss(kl_coef=0.0))
    same(update(free, scene)["gradient"], update(GRPO.but("none", kl=NoKL()), scene)["gradient"])


def test_which_baselines_these_are():
    """The names above mean what the identities take them to mean."""
    assert isinstance(DR_GRPO.advantage, GroupBaseline)
    assert DR_GRPO.scale is None
    assert isinstance(GSPO.ratio, SequenceRatio)
