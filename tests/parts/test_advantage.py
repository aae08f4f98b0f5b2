"""Rewards to advantages, against the reference numbers and by hand."""

from __future__ import annotations

import pytest
import torch

from harness.parts.advantage import (
    GAE,
    BatchBaseline,
    GroupBaseline,
    LeaveOneOut,
    LengthAdaptiveGAE,
    ReturnToGo,
)
from harness.parts.kl import KLInReward
from harness.parts.scale import Whiten
from tests.rules import z_score

NAN = float("nan")


def by_response(part, rewards: list[float]) -> list[float]:
    """Advantages of one group of one-token completions."""
    column = torch.tensor(rewards, dtype=torch.float64)[:, None]
    group = torch.zeros(len(rewards), dtype=torch.long)
    advantages, returns = part(column, torch.ones_like(column, dtype=torch.bool), group, None)
    assert returns is None
    return advantages[:, 0].tolist()


def by_token(part: GAE, rewards: list[float], values: list[float]) -> tuple[list, list]:
    """Advantages and returns of one completion, its row padded with what must not be read."""
    r = torch.tensor([[*rewards, NAN, 9.0]], dtype=torch.float64)
    v = torch.tensor([[*values, 7.0, NAN]], dtype=torch.float64)
    mask = torch.arange(r.shape[1])[None] < len(rewards)
    advantages, returns = part(r, mask, torch.zeros(1, dtype=torch.long), v)
    assert returns is not None
    assert advantages[0, len(rewards) :].tolist() == [0.0, 0.0]
    assert returns[0, len(rewards) :].tolist() == [0.0, 0.0]
    return advantages[0, : len(rewards)].tolist(), returns[0, : len(rewards)].tolist()


@pytest.mark.parametrize(
    "name",
    [
        "grpo_adv_seed_population_std",
        "grpo_adv_seed_sample_std",
        "grpo_adv_seed_trl",
        "grpo_adv_seed_verl",
        "grpo_adv_seed_openrlhf_group_norm",
        "grpo_adv_one_of_eight_population",
        "grpo_adv_one_of_eight_sample",
    ],
)
def test_group_z_score(golden, name):
    v = golden(name)
    part = z_score(eps=v["inputs"]["eps"], ddof=v["inputs"]["ddof"])
    got = by_response(part, v["inputs"]["rewards"])
    assert got == pytest.approx(v["expected"]["advantages"], rel=v["tolerance"], abs=v["tolerance"])
    largest = v["expected"].get("max_abs_possible")
    assert largest is None or max(map(abs, got)) == pytest.approx(largest, rel=v["tolerance"])


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3, -0.7])
def test_a_group_without_variance_has_exactly_no_advantage(golden, eps, ddof, value):
    v = golden("grpo_adv_zero_variance_with_eps")
    assert by_response(z_score(), v["inputs"]["rewards"]) == v["expected"]["advantages"]
    # 0.1 * 5 / 5 is not 0.1 in floating point: the mean of equal numbers is not always the number.
    assert by_response(z_score(eps=eps, ddof=ddof), [value] * 5) == [0.0] * 5
    assert by_response(GroupBaseline(), [value] * 5) == [0.0] * 5


@pytest.mark.parametrize(("key", "eps"), [("eps_1e_4", 1e-4), ("eps_1e_6", 1e-6), ("eps_0", 0.0)])
def test_eps_decides_a_group_that_nearly_agrees(golden, key, eps):
    v = golden("grpo_adv_near_zero_variance_eps_sensitivity")
    got = by_response(z_score(eps=eps, ddof=v["inputs"]["ddof"]), v["inputs"]["rewards"])
    assert got == pytest.approx(v["expected"][key], rel=v["tolerance"], abs=v["tolerance"])


def test_group_baseline(golden):
    v = golden("drgrpo_adv_seed")
    got = by_response(GroupBaseline(), v["inputs"]["rewards"])
    assert got == pytest.approx(v["expected"]["advantages"], abs=v["tolerance"])


def test_groups_do_not_leak_into_each_other():
    rewards = torch.tensor([[1.0], [10.0], [0.0], [30.0]], dtype=torch.float64)
    mask = torch.ones(4, 1, dtype=torch.bool)
    group = torch.tensor([7, 3, 7, 3])  # rows of a group need not be adjacent here
    got, _ = GroupBaseline()(rewards, mask, group, None)
    assert got[:, 0].tolist() == [0.5, -10.0, -0.5, 10.0]


@pytest.mark.parametrize(
    "name",
    [
        "gae_terminal_reward_gamma1.0_lambda1.0",
        "gae_terminal_reward_gamma1.0_lambda0.95",
        "gae_terminal_reward_gamma1.0_lambda0.0",
        "gae_terminal_reward_gamma0.99_lambda0.95",
        "gae_terminal_reward_gamma0.9_lambda0.5",
    ],
)
def test_gae(golden, name):
    v = golden(name)
    part = GAE(gamma=v["inputs"]["gamma"], gae_lambda=v["inputs"]["lambda"])
    advantages, returns = by_token(part, v["inputs"]["rewards"], v["inputs"]["values"])
    assert advantages == pytest.approx(v["expected"]["advantages"], abs=v["tolerance"])
    assert returns == pytest.approx(v["expected"]["returns"], abs=v["tolerance"])


@pytest.mark.parametrize(
    ("name", "estimator"), [("gae_kl_in_reward_k1", "k1"), ("gae_kl_in_reward_k3", "k3")]
)
def test_gae_with_the_penalty_in_the_reward(golden, name, estimator):
    v = golden(name)
    x, expected = v["inputs"], v["expected"]
    kl = KLInReward(estimator=estimator).in_reward(
        torch.tensor([x["logp"]], dtype=torch.float64),
        torch.tensor([x["ref_logp"]], dtype=torch.float64),
    )
    assert isinstance(kl, torch.Tensor)
    assert kl[0].tolist() == pytest.approx(expected[f"per_token_{estimator}"], abs=v["tolerance"])
    rewards = (-x["beta"] * kl)[0].tolist()
    rewards[-1] += x["score"]
    assert rewards == pytest.approx(expected["rewards"], abs=v["tolerance"])
    part = GAE(gamma=x["gamma"], gae_lambda=x["lambda"])
    advantages, returns = by_token(part, rewards, x["values"])
    assert advantages == pytest.approx(expected["advantages"], abs=v["tolerance"])
    if "returns" in expected:
        assert returns == pytest.approx(expected["returns"], abs=v["tolerance"])


def test_a_cut_completion_ends_like_any_other(golden):
    """We never bootstrap: that would be a reward of V at the last token, which no group gets."""
    v = golden("gae_truncated_with_bootstrap")
    x = v["inputs"]
    part = GAE(gamma=x["gamma"], gae_lambda=x["lambda"])
    with_value = [*x["rewards"][:-1], x["rewards"][-1] + x["gamma"] * x["bootstrap_value"]]
    bootstrapped, _ = by_token(part, with_value, x["values"])
    assert bootstrapped == pytest.approx(v["expected"]["advantages"], abs=v["tolerance"])
    ours, _ = by_token(part, x["rewards"], x["values"])
    assert ours == pytest.approx([-value for value in x["values"]], abs=v["tolerance"])


def test_what_lambda_leaves_of_a_terminal_reward(golden):
    v = golden("gae_reward_decay_lambda095")
    length = max(v["inputs"]["lags"]) + 1
    part = GAE(gae_lambda=v["inputs"]["lambda"])
    advantages, _ = by_token(part, [0.0] * (length - 1) + [1.0], [0.0] * length)
    got = [advantages[length - 1 - lag] for lag in v["inputs"]["lags"]]
    assert got == pytest.approx(v["expected"]["weights"], rel=1e-9)


def test_one_value_per_response(golden):
    v = golden("ppo_response_level_advantage_seed")
    got = [by_token(GAE(), [r], [v["inputs"]["value"]])[0][0] for r in v["inputs"]["rewards"]]
    assert got == pytest.approx(v["expected"]["advantages"], abs=v["tolerance"])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_warm_up_targets_mean_what_the_values_will_mean(gamma):
    """0.5 now and 2 two tokens later: by hand 0.5 + gamma^2 * 2, gamma * 2, 2."""
    rewards = torch.tensor([[0.5, 0.0, 2.0, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    got = GAE(gamma=gamma, gae_lambda=0.3).monte_carlo(rewards, mask)
    assert got[0].tolist() == pytest.approx([0.5 + gamma**2 * 2, gamma * 2, 2.0, 0.0])


def test_leave_one_out(golden):
    v = golden("rloo_adv_seed")
    got = by_response(LeaveOneOut(), v["inputs"]["rewards"])
    assert got == pytest.approx(v["expected"]["advantages"], abs=v["tolerance"])
    baselines = [r - a for r, a in zip(v["inputs"]["rewards"], got, strict=True)]
    assert baselines == pytest.approx(v["expected"]["baselines"], abs=v["tolerance"])
    v = golden("rloo_adv_with_kl_in_reward")
    x = v["inputs"]
    shaped = [r - x["beta"] * k for r, k in zip(x["rewards"], x["seq_kl_k1_sums"], strict=True)]
    assert shaped == pytest.approx(v["expected"]["shaped_rewards"], abs=v["tolerance"])
    got = by_response(LeaveOneOut(), shaped)
    assert got == pytest.approx(v["expected"]["advantages"], abs=v["tolerance"])


def test_decoupled_lambdas(golden):
    v = golden("gae_decoupled_vcppo")
    x = v["inputs"]
    part = GAE(gamma=x["gamma"], gae_lambda=x["lambda_policy"], critic_lambda=x["lambda_critic"])
    advantages, targets = by_token(part, x["rewards"], x["values"])
    assert advantages == pytest.approx(v["expected"]["policy_advantages"], abs=v["tolerance"])
    assert targets == pytest.approx(v["expected"]["critic_targets"], abs=v["tolerance"])


def test_length_adaptive_lambda(golden):
    """Held to [0, 1]: the paper's formula is -1 at ten tokens."""
    v = golden("vapo_length_adaptive_lambda")
    lengths = v["inputs"]["lengths"]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    part = LengthAdaptiveGAE(alpha=v["inputs"]["alpha"])
    got = part.policy_lambda(mask).tolist()
    assert got == pytest.approx(v["expected"]["lambda_clamped"], abs=v["tolerance"])
    assert [max(raw, 0.0) for raw in v["expected"]["lambda_raw"]] == pytest.approx(got)


def test_each_completion_has_its_own_adaptive_lambda():
    """40 tokens: lambda 0.5, so a terminal reward halves with every token before it; 10: one-step.

    Values are 0; the critic's targets stay at lambda 1.
    """
    mask = torch.arange(40)[None] < torch.tensor([40, 10])[:, None]
    rewards = torch.zeros(2, 40, dtype=torch.float64)
    rewards[0, 39] = rewards[1, 9] = 1.0
    part = LengthAdaptiveGAE(critic_lambda=1.0)
    group = torch.zeros(2, dtype=torch.long)
    advantages, targets = part(rewards, mask, group, torch.zeros_like(rewards))
    assert advantages[0, 36:].tolist() == [0.125, 0.25, 0.5, 1.0]
    assert advantages[1, :11].tolist() == [0.0] * 9 + [1.0, 0.0]
    assert targets is not None
    assert torch.equal(targets, mask.double())


def test_reinforce_pp(golden):
    """Returns-to-go of score and penalty, then one mean and variance over all tokens."""
    v = golden("reinforce_pp_global_norm")
    x, expected = v["inputs"], v["expected"]
    lengths = [len(k) for k in x["per_token_k1"]]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    for i, (score, kl) in enumerate(zip(x["scores"], x["per_token_k1"], strict=True)):
        rewards[i, : lengths[i]] = -x["beta"] * torch.tensor(kl, dtype=torch.float64)
        rewards[i, lengths[i] - 1] += score
    group = torch.zeros(len(lengths), dtype=torch.long)
    returns, none = ReturnToGo(gamma=x["gamma"])(rewards, mask, group, None)
    assert none is None
    for got, key in (
        (returns, "returns"),
        (Whiten(eps=0.0, ddof=0)(returns, rewards, mask, group), "adv_ddof0_no_eps"),
        (Whiten(eps=1e-8, ddof=1)(returns, rewards, mask, group), "adv_ddof1_eps1e_8"),
    ):
        rows = [got[i, :n].tolist() for i, n in enumerate(lengths)]
        flat = [value for row in expected[key] for value in row]
        assert [value for row in rows for value in row] == pytest.approx(flat, abs=v["tolerance"])


def test_reinforce_pp_baseline(golden):
    v = golden("reinforce_pp_baseline")
    x, expected = v["inputs"], v["expected"]
    lengths = torch.tensor(x["lengths"])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(len(lengths)), lengths - 1] = torch.tensor(x["scores"]).double()
    group = torch.tensor(x["groups"])
    centred, _ = GroupBaseline()(rewards, mask, group, None)
    assert centred[:, 0].tolist() == pytest.approx(expected["centred"])
    for eps, ddof, key in ((0.0, 0, "adv_ddof0"), (1e-8, 1, "adv_ddof1_eps1e_8")):
        got = Whiten(eps=eps, ddof=ddof)(centred, rewards, mask, group)
        flat = [value for row in expected[key] for value in row]
        assert got[mask].tolist() == pytest.approx(flat, abs=v["tolerance"])


def test_batch_baseline():
    column = torch.tensor([[1.0], [0.0], [2.0], [5.0]], dtype=torch.float64)
    mask, group = torch.ones_like(column, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    got, _ = BatchBaseline()(column, mask, group, None)
    assert got[:, 0].tolist() == [-1.0, -2.0, 0.0, 3.0]
