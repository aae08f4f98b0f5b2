"""The importance ratio."""

from __future__ import annotations

import math

import pytest
import torch

from harness.parts.aggregate import SequenceMean
from harness.parts.clip import PPOClip
from harness.parts.ratio import NoRatio, ProductRatio, SequenceRatio, TokenRatio
from tests.rules import tokens


def test_token_ratio_and_its_gradient():
    logprobs = torch.tensor([[-1.0, -0.5, float("nan")]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.2, -0.5, 1e30]], dtype=torch.float64)
    ratio = TokenRatio()(logprobs, old, torch.tensor([[True, True, False]]))
    assert ratio[0].tolist() == pytest.approx([math.exp(0.2), 1.0, 1.0])
    ratio.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([math.exp(0.2), 1.0, 0.0])


def padded(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios as one tensor, whose padding must not be read, and its mask."""
    width = max(map(len, rows)) + 1
    x = torch.full((len(rows), width), float("nan"), dtype=torch.float64)
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return x, ~x.isnan()


def test_gspo(golden):
    v = golden("gspo_sequence_ratio_and_loss")
    x, expected = v["inputs"], v["expected"]
    delta, mask = padded(x["token_log_ratios"])
    ratio = SequenceRatio()(delta, torch.zeros_like(delta), mask)
    assert ratio[:, 0].tolist() == pytest.approx(expected["seq_ratio"], rel=v["tolerance"])
    assert torch.equal(ratio[mask], ratio[:, :1].expand_as(mask)[mask])
    assert (ratio[~mask] == 1).all()
    advantages = torch.tensor(x["advantages"], dtype=torch.float64)[:, None] * mask
    part = PPOClip(clip_low=x["eps_low"], clip_high=x["eps_high"])
    objective, clipped = part(ratio, advantages, tokens(ratio.log(), torch.zeros_like(ratio)))
    assert objective[:, 0].tolist() == pytest.approx(expected["objective"], rel=v["tolerance"])
    assert clipped[:, 0].tolist() == expected["clipped"]
    loss = -(SequenceMean()(mask, 9) * objective).sum()
    assert loss.item() == pytest.approx(expected["loss"], rel=v["tolerance"])


def test_the_gradient_of_gspo_is_shared_by_its_tokens():
    """d s / d log pi_t = s / T for each of the T tokens."""
    logprobs = torch.tensor([[0.3, -0.1, 0.4]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    ratio = SequenceRatio()(logprobs, torch.zeros_like(logprobs), mask)
    (gradient,) = torch.autograd.grad(ratio[0, 0], logprobs)
    assert gradient[0].tolist() == pytest.approx([math.exp(0.1) / 2] * 2 + [0.0])


def test_product_ratio(golden):
    v = golden("sequence_ratio_unnormalised_trl_rloo")
    delta, mask = padded(v["inputs"]["token_log_ratios"])
    ratio = ProductRatio()(delta, torch.zeros_like(delta), mask)
    assert ratio[:, 0].tolist() == pytest.approx(v["expected"]["seq_ratio"], rel=v["tolerance"])


def test_no_ratio_is_one_with_the_gradient_of_log_pi():
    logprobs = torch.tensor([[-0.3, -2.0, float("nan")]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    ratio = NoRatio()(logprobs, torch.zeros_like(logprobs), mask)
    assert ratio.tolist() == [[1.0, 1.0, 1.0]]
    (gradient,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert gradient.tolist() == [[1.0, 1.0, 0.0]]
