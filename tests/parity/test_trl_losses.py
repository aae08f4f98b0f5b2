"""Our losses against those of the installed TRL, on the same tensors.

``_compute_loss`` of a real trainer is called: model, old and reference log-probs and advantages are
given, and loss and gradient must agree to 1e-6. Where TRL cannot say what an arm says, or says
something else under the same name, a test below holds the difference.
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
from harness.types import Experience, Minibatch
from tests.parity.trl_setup import GROUP, LIMIT, make_trainer
from tests.tiny import ragged, tiny_model

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
    "cispo": (
        GRPO_NO_KL.but("weight", clip=CISPOClip(None, 0.3), aggregate=TokenMean()), "grpo",
        {"loss_type": "cispo", "beta": 0.0, "epsilon_high": 1.3},
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
    x = ragged()
    x = dataclasses.replace(x, group=torch.arange(len(x)) // GROUP)
    with torch.no_grad():
        now = Policy(model, 1.0).logprobs(x)
    noise = torch.Generator().manual_seed(5)
    old = (now + 0.3 * torch.randn(now.shape, generator=noise)) * x.mask
    ref = (now + 0.2 * torch.randn(now.shape, generator=noise)) * x.mask
    return x.extend(
        Experience, old_logprobs=old, values=None,
        ref_logprobs=ref if arm.kl.needs_reference else None,
    )  # fmt: skip


def theirs(minibatch: Minibatch, level: str) -> dict[str, torch.Tensor]:
    """What TRL's trainer hands its loss."""
    found = {
        "prompt_ids": minibatch.prompt_ids,
        "prompt_mask": minibatch.prompt_mask.long(),
        "completion_ids": minibatch.completion_ids,
        "completion_mask": minibatch.mask.long(),
        "advantages": minibatch.advantages[:, 0].float(),
        "num_items_in_batch": minibatch.mask.sum(),
        "old_per_token_logps": minibatch.old_logprobs,
        "old_logps": minibatch.old_logprobs.sum(1),
    }
    if minibatch.ref_logprobs is not None:
        found["ref_per_token_logps"] = minibatch.ref_logprobs
    assert level in ("grpo", "rloo")
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_trls(case, tmp_path):
    arm, kind, options = CASES[case]
    model, twin = tiny_model().train(), tiny_model().train()
    trainer = make_trainer(kind, model, tmp_path, ["1+1="] * 4, lambda **_: [], **options)
    x = experience(arm, model)
    batch = arm.credit(x, kl_coef=arm.kl.initial_coef, max_new_tokens=LIMIT, warmup=False)
    minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
    ours, stats = arm.policy_loss(
        minibatch, Policy(twin, 1.0).logprobs(minibatch), arm.kl.initial_coef
    )
    ours.backward()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, theirs(minibatch, kind))
    loss.backward()
    assert loss.item() == pytest.approx(ours.item(), rel=1e-6, abs=1e-6)
    for p, q in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    clipped = stats["sum/clip_fraction_high"] + stats["sum/clip_fraction_low"]
    assert clipped > 0, "nothing was clipped: the case shows less than it says"


@pytest.mark.parametrize(("scale", "ddof"), [("group", 1), ("batch", 1), ("none", None)])
def test_the_advantages_are_trls(scale, ddof, tmp_path):
    """TRL scales by ddof 1 + 1e-4, by group or batch. The paper gives neither; ours has ddof 0."""
    from harness.parts.scale import BatchStd, GroupStd

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
    model = tiny_model().train()
    trainer = make_trainer(
        "grpo", model, tmp_path, ["1+1="] * 4, lambda **_: [], loss_type="grpo", beta=1.0
    )
    x = experience(GRPO, model)
    batch = GRPO.credit(x, kl_coef=1.0, max_new_tokens=LIMIT, warmup=False)
    minibatch = GRPO.weigh(batch, max_new_tokens=LIMIT)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, theirs(minibatch, "grpo"))
    now = Policy(model, 1.0).logprobs(minibatch)
    ours, stats = GRPO.policy_loss(minibatch, now, 1.0)
    assert x.ref_logprobs is not None
    ratio = (now - x.old_logprobs).exp()
    weighed = (minibatch.weights * ratio * estimate_kl("k3", now, x.ref_logprobs)).sum()
    assert loss.item() == pytest.approx((stats["loss/surrogate"] + weighed).item(), rel=1e-5)
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
