"""Rewards paid along the way: when they come, what they sum to, and who sees which."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from harness.arms import ARMS, BUILT_IN
from harness.conformance.scene import credit, make_scene
from harness.errors import InputError
from harness.grading import check_reward
from harness.rewards.judge import reward_identity
from harness.rewards.steps import Steps
from harness.spec.reward import DenseSpec, NoiseSpec
from harness.spec.schema import RewardSpec
from harness.spec.sweep import load_sweep
from harness.train import step
from harness.types import Experience

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))
from tiny import make_loop  # noqa: E402


def paid(x: Experience, amount: float) -> Experience:
    """The scene with ``amount`` paid at each completion's first token, on top of its score."""
    along = torch.zeros_like(x.old_logprobs)
    along[:, 0] = amount
    return dataclasses.replace(x, paid=along, score=x.score + amount)


def test_what_is_paid_comes_when_it_is_paid_and_the_rest_at_the_end():
    x = make_scene(BUILT_IN["ppo"]).x
    arm = dataclasses.replace(ARMS["ppo"], kl=ARMS["dr_grpo"].kl)  # no KL beside the reward
    batch = credit(arm, paid(x, 0.5))
    first, last = batch.rewards[:, 0], batch.mask.sum(1) - 1
    longer = last > 0
    assert torch.allclose(first[longer], torch.tensor(0.5, dtype=first.dtype))
    ends = batch.rewards[torch.arange(len(last)), last]
    assert torch.allclose(ends[longer], x.score[longer].to(ends))
    assert torch.allclose(batch.rewards.sum(1), (x.score + 0.5).to(first))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo_score"])
def test_arms_that_compare_completions_see_the_sum(name: str):
    """Whenever it came: the same advantages as for the same score at the end."""
    arm = BUILT_IN[name]
    x = make_scene(arm).x
    amount = torch.linspace(0, 1, len(x)).to(x.score)
    along = torch.zeros_like(x.old_logprobs)
    along[:, 0] = amount.to(along)
    early = dataclasses.replace(x, paid=along, score=x.score + amount)
    late = dataclasses.replace(x, score=x.score + amount)
    assert torch.allclose(credit(arm, early).advantages, credit(arm, late).advantages, atol=1e-6)


def test_a_value_function_sees_when_it_came():
    """With lambda 1, what was paid before a token is no part of that token's return."""
    arm = ARMS["ppo"]
    x = make_scene(arm).x
    early = credit(arm, paid(x, 0.5))
    late = credit(arm, dataclasses.replace(x, score=x.score + 0.5))
    assert not torch.allclose(early.advantages, late.advantages, atol=1e-3)


def test_a_step_of_training_is_paid_for_right_steps():
    run = make_loop(ARMS["grpo"])

    class Half:
        """Pays the first token of every second completion one step."""

        def __call__(self, indices: list[int], drawn: object, seed: int) -> object:
            mask = drawn.mask  # type: ignore[attr-defined]
            ends = torch.zeros_like(mask)
            ends[:, 0] = True
            scores = torch.zeros(mask.shape)
            scores[::2, 0] = 1.0
            return Steps(ends, scores)

    plain = step(make_loop(ARMS["grpo"]))
    dense = dataclasses.replace(
        run,
        step_judge=Half(),
        dense=DenseSpec(steps=0.25, outcome=2.0),  # type: ignore[arg-type]
    )
    record = step(dense)
    assert record["accuracy"] == plain["accuracy"]
    assert record["worked_steps"]["right_share"] == 0.5
    assert record["score_mean"] == pytest.approx(2.0 * plain["score_mean"] + 0.25 * 0.5)
    assert record["spent"]["steps_graded"] == record["spent"]["completions"]


def test_an_arm_that_would_not_be_paid_is_refused():
    sweep = load_sweep(ROOT.parent / "experiments/dense_reward.yaml")
    assert sweep is not None
    outcome, dense = (case.spec for case in sweep.cases)
    assert outcome.reward.dense is None
    assert dense.reward.dense == DenseSpec(steps=0.25)
    for name in ("ppo", "grpo", "grpo_process", "rloo"):
        check_reward(dense, ARMS[name])
    with pytest.raises(InputError, match="scores signs of verdicts"):
        check_reward(dense, ARMS["dapo"])
    check_reward(outcome, ARMS["dapo"])


def test_it_is_part_of_the_reward_and_goes_with_no_noise():
    assert reward_identity(RewardSpec()) != reward_identity(RewardSpec(dense=DenseSpec(steps=0.1)))
    assert "dense" not in RewardSpec().model_dump()
    with pytest.raises(ValidationError, match="leave learned and noise out"):
        RewardSpec(dense=DenseSpec(steps=0.1), noise=NoiseSpec(flip=0.1))
