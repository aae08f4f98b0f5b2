"""KL estimators: values, exact moments and exact gradients on a softmax policy."""

from __future__ import annotations

import math

import pytest
import torch

from harness.errors import InputError
from harness.parts.clip import PPOClip
from harness.parts.kl import AdaptiveKL, KLInLoss, KLInReward, NoKL, estimate_kl
from harness.parts.ratio import TokenRatio


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_values(golden, estimator):
    v = golden("kl_estimators_k1_k2_k3")
    got = estimate_kl(estimator, tensor([v["inputs"]["logp"]]), tensor([v["inputs"]["ref_logp"]]))
    tolerance = v["tolerance"]
    assert got[0].tolist() == pytest.approx(v["expected"][estimator], rel=tolerance, abs=tolerance)
    assert got.mean().item() == pytest.approx(v["expected"]["mean"][estimator], abs=tolerance)
    assert got.sum().item() == pytest.approx(v["expected"]["seq_sum"][estimator], rel=tolerance)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_exact_bias_and_variance(golden, estimator):
    v = golden("kl_estimators_exact_bias_variance")
    pi, ref = tensor([v["inputs"]["pi"]]), tensor([v["inputs"]["ref"]])
    k = estimate_kl(estimator, pi.log(), ref.log())
    mean = (pi * k).sum().item()
    expected = v["expected"][estimator]
    assert mean == pytest.approx(expected["expectation"], abs=v["tolerance"])
    assert (pi * (k - mean) ** 2).sum().item() == pytest.approx(expected["variance"], abs=1e-9)
    assert mean - v["expected"]["kl_pi_ref"] == pytest.approx(expected["bias"], abs=v["tolerance"])


def every_action(v) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and one one-token completion for every action, weighed by its probability."""
    pi, ref = tensor(v["inputs"]["pi"]), tensor(v["inputs"]["ref"])
    logits = pi.log().requires_grad_()
    return logits, torch.log_softmax(logits, 0)[:, None], ref.log()[:, None], pi[:, None]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradient_as_a_loss(golden, estimator):
    v = golden("kl_estimators_expected_gradient_as_loss")
    logits, logprobs, ref, pi = every_action(v)
    kl = KLInLoss(estimator=estimator).in_loss(logprobs, ref)
    assert kl is not None
    (gradient,) = torch.autograd.grad((pi * kl).sum(), logits)
    assert gradient.tolist() == pytest.approx(v["expected"][f"grad_{estimator}"], abs=1e-9)


def test_whose_gradient_that_is(golden):
    v = golden("kl_estimators_expected_gradient_as_loss")
    logits, logprobs, ref, _ = every_action(v)
    to_ref = (logprobs.exp() * (logprobs - ref)).sum()
    from_ref = (ref.exp() * (ref - logprobs)).sum()
    (forward,) = torch.autograd.grad(to_ref, logits, retain_graph=True)
    (reverse,) = torch.autograd.grad(from_ref, logits)
    assert forward.tolist() == pytest.approx(v["expected"]["grad_KL_pi_ref"], abs=1e-9)
    assert reverse.tolist() == pytest.approx(v["expected"]["grad_KL_ref_pi"], abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_gradient_in_the_reward(golden, estimator):
    """The penalty is a constant reward; what moves the policy is the surrogate at ratio 1."""
    v = golden("kl_estimators_expected_gradient_in_reward")
    logits, logprobs, ref, pi = every_action(v)
    penalty = KLInReward(estimator=estimator).in_reward(logprobs.detach(), ref)
    assert isinstance(penalty, torch.Tensor)
    ratio = TokenRatio()(logprobs, logprobs.detach(), torch.ones_like(pi, dtype=torch.bool))
    objective, _ = PPOClip()(ratio, penalty, logprobs)
    (gradient,) = torch.autograd.grad((pi * objective).sum(), logits)
    assert gradient.tolist() == pytest.approx(v["expected"][f"grad_{estimator}"], abs=1e-9)


def test_adaptive_controller(golden):
    v = golden("adaptive_kl_controller")
    x = v["inputs"]
    kl = KLInReward(controller=AdaptiveKL(target=x["target"], horizon=x["horizon"]))
    got = [kl.next_coef(x["beta"], observed, x["n_steps"]) for observed in x["observed"]]
    assert got == pytest.approx(v["expected"]["beta_next"], abs=v["tolerance"])
    assert KLInReward().next_coef(x["beta"], 9.0, x["n_steps"]) == x["beta"]


def test_the_controller_steers_a_penalty_in_the_loss_as_well(golden):
    v = golden("adaptive_kl_controller")
    x = v["inputs"]
    kl = KLInLoss(controller=AdaptiveKL(target=x["target"], horizon=x["horizon"]))
    got = [kl.next_coef(x["beta"], observed, x["n_steps"]) for observed in x["observed"]]
    assert got == pytest.approx(v["expected"]["beta_next"], abs=v["tolerance"])


def test_a_clamp_bounds_each_tokens_estimate_and_stops_its_gradient():
    """OpenRLHF holds k1 to [-10, 10]; as a loss, what is held has no gradient left."""
    delta = tensor([[-30.0, -2.0, 0.5, 30.0]])
    held = KLInReward(clamp=10.0).in_reward(delta, torch.zeros_like(delta))
    assert isinstance(held, torch.Tensor)
    assert held[0].tolist() == [-10.0, -2.0, 0.5, 10.0]
    free = KLInReward().in_reward(delta, torch.zeros_like(delta))
    assert isinstance(free, torch.Tensor)
    assert torch.equal(free, delta)
    logprobs = delta.clone().requires_grad_()
    loss = KLInLoss(estimator="k2", clamp=10.0).in_loss(logprobs, torch.zeros_like(delta))
    assert loss is not None
    assert loss[0].tolist() == [10.0, 2.0, 0.125, 10.0]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient[0].tolist() == [0.0, -2.0, 0.5, 0.0]


def test_k3_k2_has_the_value_of_one_and_the_gradient_of_the_other():
    logprobs = tensor([[-0.4, 0.9]]).requires_grad_()
    kl = KLInLoss(estimator="k3_k2").in_loss(logprobs, torch.zeros_like(logprobs))
    assert kl is not None
    by_hand = [math.exp(0.4) - 1 - 0.4, math.exp(-0.9) - 1 + 0.9]
    assert kl[0].tolist() == pytest.approx(by_hand)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx([-0.4, 0.9])


def test_k3_keeps_its_digits_and_its_sign_in_float32():
    """Near the reference k3 is delta^2 / 2; exp(-delta) - 1 + delta gives 0 or noise there."""
    delta = torch.tensor([1e-3, -1e-3, 1e-4, -1e-4, 3e-5, -3e-5])
    k3 = estimate_kl("k3", delta, torch.zeros_like(delta))
    assert k3.tolist() == pytest.approx((delta.double().square() / 2).tolist(), rel=5e-3)


def test_what_needs_a_reference():
    assert not NoKL().needs_reference
    assert NoKL().initial_coef == 0.0
    assert KLInReward(kl_coef=0.3).needs_reference
    assert KLInLoss(kl_coef=0.3).initial_coef == 0.3
    x = tensor([[0.1]])
    assert KLInReward().in_loss(x, x) is None
    assert KLInLoss().in_reward(x, x) == 0.0


def test_an_unknown_estimator_is_refused():
    with pytest.raises(InputError, match="'k4' is none of k1, k2, k3"):
        estimate_kl("k4", tensor([[0.0]]), tensor([[0.0]]))
