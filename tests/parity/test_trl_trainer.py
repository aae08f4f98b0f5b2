"""A few updates of TRL's own trainers and of our learner, from the same weights.

Both draw with our sampler from *their own* weights, so the completions stay the same only while the
weights do. Prompts have one length: TRL numbers positions from the padding on, which a model with
absolute positions would see.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.arm import Arm
from harness.arms import ARMS
from harness.arms.dr_grpo import DR_GRPO
from harness.arms.grpo import GRPO
from harness.learner import Learner
from harness.models import Policy, Reference, scored
from harness.parts.advantage import LeaveOneOut
from harness.parts.kl import NoKL
from harness.parts.ratio import ProductRatio
from harness.parts.scale import GroupStd
from harness.samplers.sampler import Decoding, Drawn
from harness.spec.schema import OptimizerSpec
from harness.types import Experience
from tests.parity.trl_setup import GROUP, LIMIT, PINNED, make_trainer
from tests.tiny import as_rollout, sampler, tiny_model, tokenizer

PROMPTS = ["1+1=", "2+7="]
STEPS, EPOCHS = 3, 2
TRL_STD = GroupStd(eps=1e-4, ddof=1)
CASES: dict[str, tuple[Arm, str, dict[str, Any]]] = {
    "grpo": (
        GRPO.but("sample_std", scale=TRL_STD), "grpo",
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "its defaults": (ARMS["trl_grpo"], "grpo", {}),
    "dr_grpo": (DR_GRPO, "grpo", {"loss_type": "dr_grpo", "beta": 0.0, "scale_rewards": "none"}),
    "rloo": (
        GRPO.but("product", kl=NoKL(), advantage=LeaveOneOut(), scale=None, ratio=ProductRatio()),
        "rloo", {"beta": 0.0},
    ),
}  # fmt: skip


def draw(model: torch.nn.Module, step: int) -> Drawn:
    ids = [tokenizer()(p, add_special_tokens=False)["input_ids"] for p in PROMPTS]
    with torch.no_grad():
        return sampler(model).draw(ids, GROUP, Decoding(1.0, 1.0, LIMIT), 100 + step)


def score(first: Tensor) -> Tensor:
    """Some of each group right, some wrong: a rule of the first token that both sides can see."""
    return (first % 2).double()


def ours(arm: Arm) -> tuple[list[Tensor], list[list[int]]]:
    model, base = tiny_model(), tiny_model()
    policy, reference = Policy(model, 1.0), Reference(base, 1.0)
    spec = OptimizerSpec(learning_rate=PINNED["learning_rate"], micro_batch=3)
    learner, seen = Learner(arm, policy, None, spec), []
    coef = arm.kl.initial_coef
    for step in range(STEPS):
        drawn = draw(model, step)
        seen.append(drawn.completion_ids.flatten().tolist())
        x = as_rollout(drawn, GROUP, score(drawn.completion_ids[:, 0]))
        experience = x.extend(
            Experience,
            old_logprobs=scored(policy.logprobs, x, 8),
            ref_logprobs=scored(reference.logprobs, x, 8) if arm.kl.needs_reference else None,
            values=None,
        )
        batch = arm.credit(experience, kl_coef=coef, max_new_tokens=LIMIT, warmup=False)
        minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
        for epoch in range(EPOCHS):
            learner.update(
                minibatch, kl_coef=coef, rate=1.0, critic_rate=1.0, warmup=False, first=epoch == 0
            )
    return [p.detach() for p in model.parameters()], seen


def theirs(kind: str, options: dict[str, Any], folder) -> tuple[list[Tensor], list[list[int]]]:
    model, seen = tiny_model(), []

    def rows(prompt_ids: list[list[int]]) -> Drawn:
        drawn = draw(trainer.model, len(seen))
        seen.append(drawn.completion_ids.flatten().tolist())
        assert prompt_ids == unpadded(drawn.prompt_ids, drawn.prompt_mask)
        return drawn

    def generate_grpo(prompt_ids: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        drawn = rows(prompt_ids)
        return unpadded(drawn.completion_ids, drawn.mask), None

    def generate_rloo(prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
        return generate_grpo(prompt_ids)[0]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return score(torch.tensor([row[0] for row in completion_ids])).tolist()

    trainer = make_trainer(
        kind, model, folder, PROMPTS * STEPS, reward,
        num_iterations=EPOCHS, max_steps=STEPS * EPOCHS, **options,
    )  # fmt: skip
    trainer._generate_single_turn = {"grpo": generate_grpo, "rloo": generate_rloo}[kind]
    trainer.train()
    return [p.detach() for p in trainer.model.parameters()], seen


def unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_the_same_weights_after_the_same_updates(case, tmp_path):
    arm, kind, options = CASES[case]
    start = [p.detach() for p in tiny_model().parameters()]
    mine, drawn_by_us = ours(arm)
    found, drawn_by_trl = theirs(kind, options, tmp_path)
    assert drawn_by_us == drawn_by_trl, "the completions came apart"
    moved = max(float((a - b).abs().max()) for a, b in zip(mine, start, strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(mine, found, strict=True))
    assert moved > 3e-3
    assert apart < 1e-5, f"weights differ by {apart:.2g} after moving by {moved:.2g}"
