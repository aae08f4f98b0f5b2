"""The critic's loss."""

from __future__ import annotations

import pytest
import torch

from harness.parts.critic import Critic


def test_value_loss_clipped(golden):
    v = golden("value_loss_clipped")
    values, old, returns = (
        torch.tensor([v["inputs"][key]], dtype=torch.float64)
        for key in ("vpred", "v_old", "returns")
    )
    clipped = Critic(value_clip=v["inputs"]["clip"]).loss(values, old, returns)
    plain = Critic(value_clip=None).loss(values, old, returns)
    assert (2 * clipped)[0].tolist() == pytest.approx(v["expected"]["per_token_max"], abs=1e-9)
    assert (2 * plain)[0].tolist() == pytest.approx(v["expected"]["unclipped_sq"], abs=1e-9)
    assert clipped.mean().item() == pytest.approx(v["expected"]["loss"], abs=v["tolerance"])
    assert plain.mean().item() == pytest.approx(v["expected"]["loss_no_clip"], abs=v["tolerance"])


def test_a_value_beyond_its_clip_stops_learning():
    """Old 0, return 1, clip 0.2: at 0.5 the clipped error 0.64 is the larger and is flat."""
    values = torch.tensor([[0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    Critic(value_clip=0.2).loss(values, old, returns).sum().backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([0.0, -0.9])
