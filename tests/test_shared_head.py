"""A value head on the policy's trunk: one pass, one optimizer, two losses."""

from __future__ import annotations

import pytest
import torch

from harness.arms.ppo import PPO
from harness.arms.shared_head import PPO_SHARED_HEAD
from harness.models import Critic, Policy, ValueHead
from harness.train import step
from tests.tiny import double_model, make_loop, ragged, trained

LIMIT = 12


def update(t, **changes):
    minibatch = t.learner.arm.weigh(t.batch, max_new_tokens=LIMIT)
    given = {"kl_coef": 0.05, "rate": 1.0, "critic_rate": 1.0, "warmup": False, "first": True}
    return t.learner.update(minibatch, **(given | changes))


def test_values_are_those_of_a_critic_on_the_same_trunk():
    model, x = double_model(), ragged()
    head = ValueHead(Policy(model, 0.7), 16, "fresh_head", 3).double()
    critic = Critic(model.base_model, 16, "fresh_head", 3).double()
    logprobs, _, values = head.with_logprobs(x)
    torch.testing.assert_close(values, critic.values(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(logprobs, Policy(model, 0.7).logprobs(x))


def test_its_gradient_is_the_sum_of_both_losses():
    t = trained(PPO_SHARED_HEAD, ragged(), max_grad_norm=1e9)
    head, policy = t.learner.head, t.learner.policy
    assert head is not None
    minibatch = PPO_SHARED_HEAD.weigh(t.batch, max_new_tokens=LIMIT)
    weights = [*policy.parameters(), *head.parameters()]
    logprobs, _, values = head.with_logprobs(minibatch)
    policy_loss = PPO_SHARED_HEAD.policy_loss(minibatch, logprobs, 0.05)[0]
    value_loss = PPO_SHARED_HEAD.value_loss(minibatch, values)
    expected = torch.autograd.grad(policy_loss + 0.1 * value_loss, weights, allow_unused=True)
    norm = torch.cat([g.flatten() for g in expected if g is not None]).norm()
    before = [w.detach().clone() for w in weights]
    stats = update(t)
    assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
    assert stats["loss/policy"] == pytest.approx(policy_loss.item(), abs=1e-12)
    assert stats["loss/value"] == pytest.approx(value_loss.item(), abs=1e-12)
    assert "critic_grad_norm" not in stats
    moved = [not torch.equal(a, b) for a, b in zip(before, weights, strict=True)]
    assert all(moved[-2:]), "the head learns"


def test_micro_batches_change_nothing():
    expected = update(trained(PPO_SHARED_HEAD, ragged()))
    for micro_batch in (1, 3):
        found = update(trained(PPO_SHARED_HEAD, ragged(), micro_batch=micro_batch))
        assert found == pytest.approx(expected, abs=1e-9)


def test_a_restored_learner_goes_on_alike():
    a, b = trained(PPO_SHARED_HEAD, ragged()), trained(PPO_SHARED_HEAD, ragged())
    update(a)
    saved = {name: tensor.clone() for name, tensor in a.learner.tensors()}
    assert any("head" in name for name in saved)
    b.learner.restore(saved)
    assert update(a, first=False) == update(b, first=False)


def test_it_pays_for_no_second_model():
    """One pass gives both: what it scores and trains is the policy, and nothing else."""
    shared, separate = make_loop(PPO_SHARED_HEAD), make_loop(PPO)
    found, other = step(shared), step(separate)
    assert {key.split("/")[0] for key in found["flops"]} == {"policy", "reference"}
    assert "critic/train" in other["flops"]
    assert found["flops"]["policy/score"] == other["flops"]["policy/score"]
    assert found["phase"] == "train"
    assert found["loss/value"] >= 0
    assert found["effective"]["critic_learning_rate"] is None
