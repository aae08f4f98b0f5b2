"""One optimizer step: cut and padded in any way it is the same step; and the shipped arms' figures.

``tests/golden/arms.json`` holds each arm's loss and gradient norm on one fixed batch. The formulas
are written out again below, token by token, from the papers and without the arms' code.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from tiny import Trained, ragged, trained, weights

from harness.arms.dapo import DAPO, DAPO_FILTERED
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.checkpoint import load_checkpoint, load_weights, save_checkpoint, save_weights
from harness.errors import CellError, DivergedError
from harness.models import trainable
from harness.optimizer import MasterAdamW
from harness.parts.exclude import Unfinished, ZeroVariance
from harness.spec.schema import OptimizerSpec

ROOT = Path(__file__).parent.parent
LIMIT = 12
EXCLUDING = [
    PPO.but("ppo_cut", exclude=Unfinished()),
    GRPO.but("grpo_kept", exclude=Unfinished(denominator="kept")),
    GRPO.but("grpo_flat", exclude=ZeroVariance()),
    DAPO_FILTERED,
]


def update(t: Trained, **changes):
    """One optimizer step on the whole batch."""
    minibatch = t.learner.arm.weigh(t.batch, max_new_tokens=LIMIT)
    given = {"kl_coef": t.learner.arm.kl.initial_coef, "rate": 1.0, "critic_rate": 1.0}
    given |= {"warmup": False, "first": True}
    return t.learner.update(minibatch, **(given | changes))


# -- one step, however it is cut ------------------------------------------------------------------


@pytest.mark.parametrize("arm", [PPO, GRPO, DAPO, *EXCLUDING], ids=lambda a: a.name)
def test_micro_batches_change_no_weight_and_no_statistic(arm):
    whole = trained(arm, ragged())
    expected = update(whole)
    for micro_batch in (1, 3, 7):
        cut = trained(arm, ragged(), micro_batch=micro_batch)
        found = update(cut)
        assert found == pytest.approx(expected, abs=1e-9)
        assert float((weights(cut.learner) - weights(whole.learner)).abs().max()) < 1e-9


@pytest.mark.parametrize("arm", [PPO, GRPO, DAPO_FILTERED], ids=lambda a: a.name)
def test_padding_changes_no_weight_and_no_statistic(arm):
    whole, wide = trained(arm, ragged()), trained(arm, ragged(left=3, right=5, garbage=9))
    wide.batch = dataclasses.replace(
        wide.batch,
        **{  # anything may stand on padding
            name: getattr(wide.batch, name).masked_fill(~wide.batch.mask, math.nan)
            for name in ("old_logprobs", "advantages", "behaviour_logprobs")
        },
    )
    assert update(wide) == pytest.approx(update(whole), abs=1e-9)
    assert float((weights(wide.learner) - weights(whole.learner)).abs().max()) < 1e-9


def test_the_order_of_rows_changes_nothing():
    a, b = trained(PPO, ragged(), micro_batch=3), trained(PPO, ragged(), micro_batch=3)
    b.batch = b.batch.select(torch.randperm(8, generator=torch.Generator().manual_seed(0)))
    assert update(a) == pytest.approx(update(b), abs=1e-9)
    assert float((weights(a.learner) - weights(b.learner)).abs().max()) < 1e-9


def test_excluded_completions_push_nothing():
    """Their advantages may be anything: the step is that of the rows that are kept."""
    a, b = trained(DAPO_FILTERED, ragged()), trained(DAPO_FILTERED, ragged())
    assert 0 < int(b.batch.keep.sum()) < 8
    wild = b.batch.advantages.masked_fill(~b.batch.keep[:, None], 1e9)
    b.batch = dataclasses.replace(b.batch, advantages=wild)
    assert update(a) == update(b)
    assert torch.equal(weights(a.learner), weights(b.learner))


@pytest.mark.parametrize("arm", [PPO, GRPO], ids=lambda a: a.name)
def test_the_first_step_is_adamw_on_the_clipped_gradient(arm):
    t = trained(arm, ragged(), micro_batch=3, max_grad_norm=0.05, weight_decay=0.1)
    again = trained(arm, ragged())
    minibatch = arm.weigh(again.batch, max_new_tokens=LIMIT)
    policy = again.learner.policy
    loss, _ = arm.policy_loss(minibatch, policy.logprobs(minibatch), arm.kl.initial_coef)
    gradient = torch.autograd.grad(loss, policy.parameters())
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    stats = update(t, rate=0.5)
    assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
    assert stats["loss/policy"] == pytest.approx(loss.item(), abs=1e-12)
    assert norm > 0.05
    for before, g, after in zip(
        policy.parameters(), gradient, t.learner.policy.parameters(), strict=True
    ):
        g = g * (0.05 / (norm + 1e-6))
        step = 0.5e-2 * (g / (g.abs() + 1e-8) + 0.1 * before)
        assert float((before - step - after).detach().abs().max()) < 1e-9


# -- what must not touch what ---------------------------------------------------------------------


def test_the_policy_stands_still_while_the_critic_warms_up():
    t = trained(PPO, ragged(), warmup=True)
    before = [p.clone() for p in t.learner.policy.parameters()]
    assert t.learner.critic is not None
    head = t.learner.critic.head.weight.clone()
    stats = update(t, warmup=True)
    assert "grad_norm" not in stats
    assert "loss/policy" not in stats
    assert all(
        torch.equal(a, b) for a, b in zip(before, t.learner.policy.parameters(), strict=True)
    )
    assert not t.learner.policy_optimizer.state
    assert not torch.equal(head, t.learner.critic.head.weight)


def test_the_critics_gradient_never_reaches_the_policy():
    """A hundredfold value loss changes neither the policy's gradient norm nor its weights."""
    a, b = trained(PPO, ragged()), trained(PPO, ragged())
    assert b.batch.returns is not None
    b.batch = dataclasses.replace(b.batch, returns=100 * b.batch.returns + 10)
    calm, wild = update(a), update(b)
    assert wild["critic_grad_norm"] > 10 * calm["critic_grad_norm"]
    assert wild["grad_norm"] == calm["grad_norm"]
    for p, q in zip(a.learner.policy.parameters(), b.learner.policy.parameters(), strict=True):
        assert torch.equal(p, q)


def test_both_rates_are_their_own():
    a, b = trained(PPO, ragged()), trained(PPO, ragged())
    update(a, rate=0.5, critic_rate=1.0)
    update(b, rate=0.5, critic_rate=0.25)
    assert a.learner.policy_optimizer.param_groups[0]["lr"] == 0.005
    assert b.learner.critic_optimizer is not None
    assert b.learner.critic_optimizer.param_groups[0]["lr"] == 0.25e-3
    for p, q in zip(a.learner.policy.parameters(), b.learner.policy.parameters(), strict=True):
        assert torch.equal(p, q)


# -- the guards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [PPO, GRPO, DAPO], ids=lambda a: a.name)
def test_the_first_ratio_is_one(arm):
    stats = update(trained(arm, ragged(), micro_batch=3))
    assert stats["first_ratio_error"] < 1e-12
    assert stats["approx_kl"] == pytest.approx(0, abs=1e-12)
    assert stats["clip_fraction_high"] == stats["clip_fraction_low"] == 0


def test_the_second_ratio_is_not():
    t = trained(GRPO, ragged())
    update(t)
    stats = update(t, first=False)
    assert stats["approx_kl"] > 1e-3
    assert "first_ratio_error" not in stats


def test_scoring_at_another_temperature_is_caught():
    t = trained(GRPO, ragged())
    before = weights(t.learner)
    t.learner.policy.temperature *= 1.01
    with pytest.raises(CellError, match="ratio differs from 1"):
        update(t)
    assert torch.equal(weights(t.learner), before)


@pytest.mark.parametrize("field", ["advantages", "returns", "old_logprobs"])
def test_a_nan_is_caught_before_it_is_learned(field):
    t = trained(PPO, ragged())
    before = weights(t.learner)
    bad = getattr(t.batch, field).clone()
    bad[2, 1] = math.nan
    t.batch = dataclasses.replace(t.batch, **{field: bad})
    with pytest.raises(DivergedError, match="nan"):
        update(t)
    assert torch.equal(weights(t.learner), before)


# -- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [PPO, GRPO], ids=lambda a: a.name)
def test_a_restored_learner_goes_on_to_the_same_bits(arm, tmp_path):
    straight, resumed = trained(arm, ragged()), trained(arm, ragged())
    update(straight)
    update(straight, first=False)
    save_checkpoint(tmp_path / "checkpoint", straight.learner, {"step": 2})
    state = load_checkpoint(tmp_path / "checkpoint", resumed.learner)
    assert state is not None
    assert state["step"] == 2
    for _ in range(2):
        assert update(straight, first=False) == update(resumed, first=False)
    assert torch.equal(weights(straight.learner), weights(resumed.learner))
    assert {n for n, _ in straight.learner.tensors()} == {n for n, _ in resumed.learner.tensors()}


def test_a_critic_that_warmed_up_is_restored_with_a_fresh_policy(tmp_path):
    """In warm-up the policy has no moments yet: none are saved, none are made up."""
    straight, resumed = trained(PPO, ragged()), trained(PPO, ragged())
    update(straight, warmup=True)
    save_checkpoint(tmp_path / "checkpoint", straight.learner, {"step": 1})
    load_checkpoint(tmp_path / "checkpoint", resumed.learner)
    assert not resumed.learner.policy_optimizer.state
    assert update(straight) == update(resumed)
    assert torch.equal(weights(straight.learner), weights(resumed.learner))


def test_an_older_checkpoint_goes_only_when_the_new_one_is_whole(tmp_path):
    t, folder = trained(GRPO, ragged()), tmp_path / "checkpoint"
    assert load_checkpoint(folder, t.learner) is None
    for step in (1, 2):
        save_checkpoint(folder, t.learner, {"step": step})
    assert sorted(p.name for p in folder.iterdir()) == [
        "state.json", "step-0000002.safetensors",
    ]  # fmt: skip


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_checkpoint(tmp_path, trained(GRPO, ragged()).learner, {"step": 1})
    with pytest.raises(CellError, match="cannot be resumed"):
        load_checkpoint(tmp_path, trained(PPO, ragged()).learner)


def test_the_trained_policy_is_kept_for_later(tmp_path):
    t = trained(GRPO, ragged())
    base = trainable(t.learner.policy.model, None, 0)  # type: ignore[arg-type]
    update(t)
    save_weights(tmp_path, t.learner)
    load_weights(tmp_path / "policy.safetensors", base)
    for p, q in zip(base.parameters(), t.learner.policy.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_bfloat16_weights_follow_float32_masters():
    """Steps far below bfloat16's resolution add up instead of being rounded away."""
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    torch.nn.init.ones_(model.weight)
    optimizer = MasterAdamW(model, OptimizerSpec(learning_rate=1e-4), 1e-4)
    for _ in range(200):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.gather()
        optimizer.step()
        optimizer.scatter()
    # Adam moves by the rate at every step of a constant gradient: 1 - 200 * 1e-4.
    assert optimizer.masters["weight"].detach().mean().item() == pytest.approx(0.98, abs=1e-5)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.float().mean().item() == pytest.approx(0.98, abs=2**-8)
    again = MasterAdamW(
        torch.nn.Linear(4, 1, bias=False).bfloat16(), OptimizerSpec(learning_rate=1e-4), 1e-4
    )
    again.restore("policy", {k: v.clone() for k, v in optimizer.tensors("policy")})
    assert torch.equal(again.weights["weight"], model.weight)
    assert optimizer.bytes_held() == 4 * (4 + 4 + 4) + 4  # master, two moments, a step count
