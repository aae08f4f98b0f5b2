"""Our losses against those of the installed TRL, on the same tensors.

``_compute_loss`` of a real trainer is called: model, old and reference log-probs and advantages are
given, and loss and gradient must agree to 1e-6. Weights are float64, and TRL's log-probs float32
all the same. Where TRL cannot say what an arm says, or says something else under the same name, a
test below holds the difference.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness.arm import Arm
from harness.arms import ARMS
from harness.arms.dr_grpo import DR_GRPO
from harness.arms.grpo import GRPO
from harness.models import Policy
from harness.parts.advantage import GroupBaseline, LeaveOneOut
from harness.parts.aggregate import SequenceMean, TokenMean
from harness.parts.clip import CISPOClip, PPOClip
from harness.parts.kl import KLInLoss, NoKL, estimate_kl
from harness.parts.ratio import ProductRatio, SequenceRatio
from harness.parts.scale import BatchStd, GroupStd
from harness.types import Experience, Minibatch
from tests.parity.trl_setup import GROUP, LIMIT, make_trainer
from tests.tiny import double_model, ragged, tiny_model

# TRL 1.16 weighs the KL of an off-policy token by its ratio unless told not to: not DeepSeekMath's.
PLAIN_KL = {"use_bias_correction_kl": False}
GRPO_NO_KL = GRPO.but("no_kl", kl=NoKL())
CASES: dict[str, tuple[Arm, str, dict]] = {
    "grpo": (GRPO, "grpo", {"loss_type": "grpo", "beta": 0.04} | PLAIN_KL),
    "grpo_clip_higher": (
        ARMS["grpo_clip_higher"], "grpo",
        {"loss_type": "grpo", "beta": 0.04, "epsilon": 0.2, "epsilon_high": 0.28} | PLAIN_KL,
    ),
    "dapo": (
        GRPO_NO_KL.but("dapo", aggregate=TokenMean(), clip=PPOClip(0.2, 0.28)), "grpo",
        {"loss_type": "dapo", "beta": 0.0, "epsilon_high": 0.28},
    ),
    "trl_grpo": (ARMS["trl_grpo"], "grpo", {}),  # its defaults, with nothing said
    "bnpo": (
        GRPO_NO_KL.but("bnpo", aggregate=TokenMean()), "grpo", {"loss_type": "bnpo", "beta": 0.0},
    ),
    "dr_grpo": (DR_GRPO, "grpo", {"loss_type": "dr_grpo", "beta": 0.0, "scale_rewards": "none"}),
    "delta": (
        GRPO_NO_KL.but("dual", clip=PPOClip(0.2, 0.2, dual_clip=1.5)), "grpo",
        {"loss_type": "grpo", "beta": 0.0, "delta": 1.5},
    ),
    # The arm's bound of 5 is out of these policies' reach. TRL's epsilon_high is the bound itself.
    "cispo": (
        ARMS["cispo"].but("near", clip=CISPOClip(None, 0.3)), "grpo",
        {"loss_type": "cispo", "beta": 0.0, "epsilon_high": 1.3},
    ),
    "lite_ppo": (
        ARMS["lite_ppo"], "grpo", {"loss_type": "dapo", "beta": 0.0, "scale_rewards": "batch"},
    ),
    "gspo": (
        ARMS["gspo"], "grpo",
        {"loss_type": "grpo", "beta": 0.0, "importance_sampling_level": "sequence",
         "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo with k3": (
        GRPO.but(
            "gspo_kl", ratio=SequenceRatio(), kl=KLInLoss(kl_coef=0.1), clip=PPOClip(0.02, 0.02)
        ), "grpo",
        {"loss_type": "grpo", "beta": 0.1, "epsilon": 0.02}
        | {"importance_sampling_level": "sequence"} | PLAIN_KL,
    ),
    "rloo as TRL has it": (
        GRPO.but("product", kl=NoKL(), advantage=LeaveOneOut(), scale=None, ratio=ProductRatio()),
        "rloo", {"beta": 0.0},
    ),
}  # fmt: skip


def experience(arm: Arm, model) -> Experience:
    """Two groups of four; old and reference policies a little away from the present one."""
    x = ragged(prompts=(3,) * 8, group_size=GROUP)  # TRL numbers positions from the padding on
    with torch.no_grad():
        now = Policy(model, 1.0).logprobs(x)
    noise = torch.Generator().manual_seed(5)
    old = (now + 0.3 * torch.randn(now.shape, generator=noise)) * x.mask
    ref = (now + 0.2 * torch.randn(now.shape, generator=noise)) * x.mask
    return x.extend(
        Experience, old_logprobs=old, values=None,
        ref_logprobs=ref if arm.kl.needs_reference else None,
    )  # fmt: skip


def theirs(minibatch: Minibatch) -> dict[str, torch.Tensor]:
    """What TRL's trainer hands its loss."""
    found = {
        "prompt_ids": minibatch.prompt_ids,
        "prompt_mask": minibatch.prompt_mask.long(),
        "completion_ids": minibatch.completion_ids,
        "completion_mask": minibatch.mask.long(),
        "advantages": minibatch.advantages[:, 0],
        "num_items_in_batch": minibatch.mask.sum(),
        "old_per_token_logps": minibatch.old_logprobs,
        "old_logps": minibatch.old_logprobs.sum(1),
    }
    if minibatch.ref_logprobs is not None:
        found["ref_per_token_logps"] = minibatch.ref_logprobs
    return found


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All of them in one vector."""
    found = [p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in found if g is not None])


def trls_loss(trainer, minibatch: Minibatch) -> torch.Tensor:
    trainer.current_gradient_accumulation_steps = 1
    return trainer._compute_loss(trainer.model, theirs(minibatch))


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_trls(case, tmp_path):
    arm, kind, options = CASES[case]
    model, twin = double_model().train(), double_model().train()
    trainer = make_trainer(kind, model, tmp_path, ["1+1="] * 4, lambda **_: [], **options)
    x = experience(arm, model)
    batch = arm.credit(x, kl_coef=arm.kl.initial_coef, max_new_tokens=LIMIT, warmup=False)
    minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
    ours, stats = arm.policy_loss(
        minibatch, Policy(twin, 1.0).logprobs(minibatch), arm.kl.initial_coef
    )
    ours.backward()
    loss = trls_loss(trainer, minibatch)
    loss.backward()
    assert loss.item() == pytest.approx(ours.item(), abs=1e-6)
    found = gradients(twin)
    assert found.abs().max() > 1e-2
    torch.testing.assert_close(gradients(trainer.model), found, rtol=0, atol=1e-6)
    clipped = stats["sum/clip_fraction_high"] + stats["sum/clip_fraction_low"]
    assert clipped > 0, "nothing was clipped: the case shows less than it says"


@pytest.mark.parametrize(("scale", "ddof"), [("group", 1), ("batch", 1), ("none", None)])
def test_the_advantages_are_trls(scale, ddof, tmp_path):
    """TRL scales by ddof 1 + 1e-4, by group or batch. The paper gives neither; ours has ddof 0."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    ids = [[3, 4, 5, 2]] * 8

    def rollout(prompts, trainer):
        return {"prompt_ids": [[4, 5]] * 8, "completion_ids": ids, "logprobs": [[0.0] * 4] * 8}

    trainer = make_trainer(
        "grpo", tiny_model(), tmp_path, ["1+1="] * 4, lambda **_: rewards, rollout,
        scale_rewards=scale, beta=0.0,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    found = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 8)["advantages"]
    column = torch.tensor(rewards, dtype=torch.float64)[:, None]
    mask, group = torch.ones_like(column, dtype=torch.bool), torch.arange(8) // GROUP
    ours, _ = GroupBaseline()(column, mask, group, None)
    if scale != "none":
        part = {"group": GroupStd, "batch": BatchStd}[scale](eps=1e-4, ddof=ddof)
        ours = part(ours, column, mask, group)
    torch.testing.assert_close(found.double(), ours[:, 0], rtol=1e-6, atol=1e-6)


def test_trl_weighs_its_kl_by_the_ratio_unless_told(tmp_path):
    """On its defaults the KL of a token is u k3: equal at u = 1, and another penalty after that."""
    model = double_model().train()
    trainer = make_trainer(
        "grpo", model, tmp_path, ["1+1="] * 4, lambda **_: [], loss_type="grpo", beta=1.0
    )
    x = experience(GRPO, model)
    batch = GRPO.credit(x, kl_coef=1.0, max_new_tokens=LIMIT, warmup=False)
    minibatch = GRPO.weigh(batch, max_new_tokens=LIMIT)
    loss = trls_loss(trainer, minibatch)
    now = Policy(model, 1.0).logprobs(minibatch)
    ours, stats = GRPO.policy_loss(minibatch, now, 1.0)
    assert x.ref_logprobs is not None
    ratio = (now - x.old_logprobs).exp()
    weighed = (minibatch.weights * ratio * estimate_kl("k3", now, x.ref_logprobs)).sum()
    assert loss.item() == pytest.approx((stats["loss/surrogate"] + weighed).item(), abs=1e-6)
    assert abs(loss.item() - ours.item()) > 1e-3


def test_trls_dr_grpo_keeps_the_std_unless_told(tmp_path):
    """``loss_type`` alone changes the denominator: half of Dr. GRPO."""
    trainer = make_trainer(
        "grpo", tiny_model(), tmp_path, ["1+1="] * 4, lambda **_: [], loss_type="dr_grpo", beta=0.0
    )
    assert trainer.scale_rewards == "group"
    assert DR_GRPO.scale is None


def test_trls_defaults_are_the_preset_and_not_deepseekmaths(tmp_path):
    trainer = make_trainer("grpo", tiny_model(), tmp_path, ["1+1="] * 4, lambda **_: [])
    assert (trainer.loss_type, trainer.beta, trainer.scale_rewards) == ("dapo", 0.0, "group")
    preset = ARMS["trl_grpo"]
    assert isinstance(preset.aggregate, TokenMean)
    assert isinstance(preset.kl, NoKL)
    assert isinstance(GRPO.aggregate, SequenceMean)
    assert isinstance(GRPO.kl, KLInLoss)


def test_rloo_takes_its_penalty_and_baseline_as_trl_does(tmp_path):
    """Score less beta times the summed k1, then the mean of the group's others taken off."""
    arm = ARMS["rloo"]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    ids = [[3, 4, 5, 2], [6, 2], [7, 8, 9, 10, 2], [11, 2], [3, 2], [5, 6, 7, 2], [2], [4, 2]]
    model = double_model()
    trainer = make_trainer(
        "rloo", model, tmp_path, ["1+1="] * 4, lambda **_: rewards, beta=arm.kl.initial_coef
    )
    trainer._generate_single_turn = lambda *_: ids
    with torch.no_grad():  # away from the reference, which is what was saved
        for p in trainer.model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    found = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 8)
    x = ragged(prompts=(4,) * 8, completions=[len(row) for row in ids], group_size=GROUP)
    x = dataclasses.replace(
        x, prompt_ids=found["prompt_ids"], completion_ids=found["completion_ids"],
        score=torch.tensor(rewards, dtype=torch.float64),
    )  # fmt: skip
    assert torch.equal(x.mask, found["completion_mask"].bool())
    with torch.no_grad():
        experience = x.extend(
            Experience, old_logprobs=Policy(trainer.model, 1.0).logprobs(x), values=None,
            ref_logprobs=Policy(trainer.ref_model, 1.0).logprobs(x),
        )  # fmt: skip
    coef = arm.kl.initial_coef
    ours = arm.credit(experience, kl_coef=coef, max_new_tokens=LIMIT, warmup=False).advantages[:, 0]
    plain = arm.credit(experience, kl_coef=0.0, max_new_tokens=LIMIT, warmup=False).advantages[:, 0]
    assert (ours - plain).abs().max() > 1e-2
    torch.testing.assert_close(found["advantages"].double(), ours, rtol=0, atol=1e-6)


def test_trls_rloo_is_ours_until_the_first_update(tmp_path):
    """TRL corrects stale completions by a clipped product of ratios; REINFORCE does nothing.

    Ours divides the sum over tokens by the length limit as well. At the policy that sampled, that
    constant is the whole difference.
    """
    arm = ARMS["rloo"].but("no_kl", kl=NoKL())
    gradient = {}
    for stale in (False, True):
        model, twin = double_model().train(), double_model().train()
        trainer = make_trainer("rloo", model, tmp_path, ["1+1="] * 4, lambda **_: [], beta=0.0)
        x = experience(arm, model)
        if not stale:
            x = dataclasses.replace(x, old_logprobs=Policy(model, 1.0).logprobs(x).detach())
        batch = arm.credit(x, kl_coef=0.0, max_new_tokens=LIMIT, warmup=False)
        minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
        loss, _ = arm.policy_loss(minibatch, Policy(twin, 1.0).logprobs(minibatch), 0.0)
        loss.backward()
        trls_loss(trainer, minibatch).backward()
        gradient[stale] = gradients(trainer.model) / LIMIT, gradients(twin)
    torch.testing.assert_close(*gradient[False], rtol=0, atol=1e-6)
    assert (gradient[True][0] - gradient[True][1]).abs().max() > 1e-3
    torch.testing.assert_close(gradient[True][1], gradient[False][1], rtol=0, atol=1e-12)


def test_trls_cispo_bounds_every_weight_at_a_fifth_unless_told(tmp_path):
    """Its bound is ``epsilon_high`` itself, whose default is the token clip's 0.2."""
    arm = ARMS["cispo"]
    model = double_model().train()
    trainer = make_trainer(
        "grpo", model, tmp_path, ["1+1="] * 4, lambda **_: [], loss_type="cispo", beta=0.0
    )
    batch = arm.credit(experience(arm, model), kl_coef=0.0, max_new_tokens=LIMIT, warmup=False)
    minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
    now = Policy(model, 1.0).logprobs(minibatch)
    reinforce = -(minibatch.weights * minibatch.advantages * now).sum()
    assert trls_loss(trainer, minibatch).item() == pytest.approx(0.2 * reinforce.item(), abs=1e-6)


def test_trls_sequence_level_keeps_the_clip_of_a_token(tmp_path):
    trainer = make_trainer(
        "grpo", tiny_model(), tmp_path, ["1+1="] * 4, lambda **_: [],
        loss_type="grpo", importance_sampling_level="sequence",
    )  # fmt: skip
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.2)
    assert ARMS["gspo"].clip == PPOClip(clip_low=3e-4, clip_high=4e-4)
