"""The likelihood term on right answers."""

from __future__ import annotations

import pytest
import torch

from harness.arms.vapo import VAPO
from harness.parts.imitate import Imitate
from harness.types import Batch


def batch(correct: list[bool], lengths: list[int], keep: list[bool] | None = None) -> Batch:
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    zero = torch.zeros(mask.shape, dtype=torch.float64)
    rows = len(lengths)
    return Batch(
        prompt_ids=torch.zeros((rows, 1), dtype=torch.long),
        prompt_mask=torch.ones((rows, 1), dtype=torch.bool),
        completion_ids=mask.long(), mask=mask, group=torch.zeros(rows, dtype=torch.long),
        score=torch.tensor(correct).double(), bonus=torch.zeros(rows, dtype=torch.float64),
        correct=torch.tensor(correct), finished=torch.ones(rows, dtype=torch.bool),
        behaviour_logprobs=zero, old_logprobs=zero, ref_logprobs=None, values=zero,
        rewards=zero, advantages=zero, returns=zero,
        keep=torch.tensor(keep or [True] * rows),
    )  # fmt: skip


def test_vapo_positive_examples(golden):
    v = golden("vapo_positive_example_loss")
    x = v["inputs"]
    found = batch(x["correct"], [len(row) for row in x["logp"]])
    weights = Imitate(coef=x["mu"]).weights(found)
    logprobs = torch.zeros(found.mask.shape, dtype=torch.float64)
    for i, row in enumerate(x["logp"]):
        logprobs[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    nll = -(weights * logprobs).sum().item()
    assert nll == pytest.approx(v["expected"]["nll"])
    assert x["ppo_loss"] + x["mu"] * nll == pytest.approx(v["expected"]["total"])
    # And as the arm adds it: with advantages of 0 its loss is this term alone.
    minibatch = VAPO.weigh(found, max_new_tokens=3)
    loss, stats = VAPO.policy_loss(minibatch, logprobs, 0.0)
    assert loss.item() == pytest.approx(0.1 * v["expected"]["nll"])
    assert stats["loss/imitation"].item() == loss.item()


def test_without_a_right_answer_there_is_nothing_to_imitate():
    assert Imitate().weights(batch([False, False], [2, 1])).sum() == 0


def test_what_the_loss_leaves_out_is_not_imitated():
    weights = Imitate().weights(batch([True, True], [2, 3], keep=[False, True]))
    assert weights.tolist() == [[0.0] * 3, [pytest.approx(1 / 3)] * 3]
