"""The importance ratio."""

from __future__ import annotations

import math

import pytest
import torch

from harness.parts.ratio import TokenRatio


def test_token_ratio_and_its_gradient():
    logprobs = torch.tensor([[-1.0, -0.5, float("nan")]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.2, -0.5, 1e30]], dtype=torch.float64)
    ratio = TokenRatio()(logprobs, old, torch.tensor([[True, True, False]]))
    assert ratio[0].tolist() == pytest.approx([math.exp(0.2), 1.0, 1.0])
    ratio.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([math.exp(0.2), 1.0, 0.0])
