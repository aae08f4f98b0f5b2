"""The surrogate objective, and by autograd where its gradient is cut."""

from __future__ import annotations

import pytest
import torch

from harness.parts.clip import CISPOClip, PPOClip
from tests.rules import tokens


def objective_and_gradient(part: PPOClip, ratios: list[float], advantage: float):
    """Objective, whether each ratio has a gradient, and what the part says was cut."""
    ratio = torch.tensor([ratios], dtype=torch.float64, requires_grad=True)
    objective, clipped = part(
        ratio, torch.full_like(ratio, advantage), tokens(ratio.log(), torch.zeros_like(ratio))
    )
    objective.sum().backward()
    assert ratio.grad is not None
    active = ratio.grad[0] != 0
    # A gradient that is there is the whole advantage: ties inside the band must not halve it.
    assert ratio.grad[0][active].tolist() == [advantage] * int(active.sum())
    return objective[0].tolist(), active.tolist(), clipped[0].tolist()


@pytest.mark.parametrize(
    "name", ["clipped_surrogate_symmetric_0p2", "clipped_surrogate_clip_higher_0p2_0p28"]
)
@pytest.mark.parametrize(("sign", "advantage"), [("pos", 1.0), ("neg", -1.0)])
def test_clipped_surrogate(golden, name, sign, advantage):
    v = golden(name)
    part = PPOClip(clip_low=v["inputs"]["eps_low"], clip_high=v["inputs"]["eps_high"])
    objective, active, clipped = objective_and_gradient(part, v["inputs"]["ratios"], advantage)
    assert objective == pytest.approx(v["expected"][f"objective_{sign}"], abs=v["tolerance"])
    assert active == v["expected"][f"grad_active_{sign}"]
    assert clipped == [not a for a in active]


def test_dual_clip(golden):
    v = golden("dual_clip_negative_advantage_c3")
    x = v["inputs"]
    part = PPOClip(clip_low=x["eps"], clip_high=x["eps"], dual_clip=x["c"])
    objective, active, clipped = objective_and_gradient(part, x["ratios"], x["advantage"])
    assert objective == pytest.approx(v["expected"]["objective"], abs=v["tolerance"])
    assert active == v["expected"]["grad_active"]
    assert clipped == [not a for a in active]


def test_dual_clip_leaves_good_actions_alone():
    ratios = [0.5, 1.0, 5.0]
    plain = objective_and_gradient(PPOClip(), ratios, 1.0)
    assert objective_and_gradient(PPOClip(dual_clip=3.0), ratios, 1.0) == plain


def test_trl_delta_is_a_dual_clip(golden):
    """Capping the ratio at delta before the min is a floor of delta A on the objective."""
    v = golden("two_sided_clip_delta4_trl")
    x = v["inputs"]
    part = PPOClip(clip_low=x["eps"], clip_high=x["eps"], dual_clip=x["delta"])
    objective, _, _ = objective_and_gradient(part, x["ratios"], x["advantage"])
    assert objective == pytest.approx(v["expected"]["objective"], abs=v["tolerance"])


def test_no_advantage_no_clip():
    objective, active, clipped = objective_and_gradient(PPOClip(dual_clip=3.0), [0.1, 1.0, 9.0], 0)
    assert objective == [0.0] * 3
    assert active == [False] * 3
    assert clipped == [False] * 3


def test_cispo_weights(golden):
    """The paper's has no lower bound; verl's default has one, and is another rule."""
    v = golden("cispo_weights")
    x = v["inputs"]
    ratio = torch.tensor([x["ratios"]], dtype=torch.float64)
    for part, key in (
        (CISPOClip(clip_low=None, clip_high=x["paper_eps_high"]), "paper_upper_only"),
        (CISPOClip(clip_low=None, clip_high=x["trl_abs_cap"] - 1), "trl_cap"),
        (CISPOClip(clip_low=1 - x["verl"][0], clip_high=x["verl"][1] - 1), "verl_two_sided"),
    ):
        logprobs = torch.full_like(ratio, -2.0)
        objective, clipped = part(ratio, torch.ones_like(ratio), tokens(logprobs, logprobs))
        assert (objective / -2.0)[0].tolist() == pytest.approx(v["expected"][key])
        assert clipped[0].tolist() == [
            w != r for w, r in zip(v["expected"][key], x["ratios"], strict=True)
        ]


def test_cispo_loss(golden):
    v = golden("cispo_loss_upper_only")
    x, expected = v["inputs"], v["expected"]
    logprobs = torch.tensor([x["logp"]], dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([x["ratios"]], dtype=torch.float64)
    part = CISPOClip(clip_low=None, clip_high=x["eps_high"])
    objective, _ = part(ratio, torch.full_like(ratio, x["advantage"]), tokens(logprobs, logprobs))
    assert (-objective)[0].tolist() == pytest.approx(expected["per_token_loss"])
    assert -objective.mean().item() == pytest.approx(expected["token_mean"])
    (gradient,) = torch.autograd.grad(-objective.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx(expected["dloss_dlogp"])


def test_an_open_side_never_clips():
    part = PPOClip(clip_low=0.2, clip_high=None)
    ratio = torch.tensor([[9.0, 0.1]], dtype=torch.float64)
    up, cut = part(ratio, torch.ones_like(ratio), tokens(ratio.log(), torch.zeros_like(ratio)))
    assert up.tolist() == ratio.tolist()
    assert not cut.any()
    down, cut = part(ratio, -torch.ones_like(ratio), tokens(ratio.log(), torch.zeros_like(ratio)))
    assert down.tolist() == [[-9.0, -0.8]]
    assert cut.tolist() == [[False, True]]
