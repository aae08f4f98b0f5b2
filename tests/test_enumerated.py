"""Exact expectations on policies that can be written down: the sums themselves, and what they show.

The conformance checks rest on these sums, so each is compared here with another way to get it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch

from harness.arms.dr_grpo import DR_GRPO
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.arms.rloo import RLOO
from harness.conformance.enumerated import EQUAL, ONE_TOKEN, RAGGED, World, batches
from harness.conformance.expected import LIMIT, expected_update, gap, share_of
from harness.parts.advantage import GAE
from harness.parts.aggregate import FixedLength, SequenceMean, TokenMean
from harness.parts.kl import KLInLoss, KLInReward, NoKL
from harness.parts.sampling import DynamicSampling

WORLDS = pytest.mark.parametrize("world", [EQUAL, RAGGED, ONE_TOKEN], ids=lambda w: w.name)


def slope(f: Callable[[torch.Tensor], float], at: torch.Tensor) -> torch.Tensor:
    """Central differences by every finite entry."""
    found = torch.zeros_like(at)
    for index in torch.isfinite(at).nonzero():
        ends = []
        for step in (1e-6, -1e-6):
            moved = at.clone()
            moved[tuple(index)] += step
            ends.append(f(moved))
        found[tuple(index)] = (ends[0] - ends[1]) / 2e-6
    return found


# --- the sums ------------------------------------------------------------------------------------


def test_the_worlds_are_as_small_as_they_say():
    assert [len(w) for w in (EQUAL, RAGGED, ONE_TOKEN)] == [4, 7, 5]
    assert EQUAL.lengths.tolist() == [3] * 4
    assert sorted(RAGGED.lengths.tolist()) == [1, 2, 2, 3, 3, 3, 3]
    for world in (EQUAL, RAGGED, ONE_TOKEN):
        assert len({tuple(row) for row in world.ids.tolist()}) == len(world)
        assert int(world.ids.max()) < 5
        success = float((world.probabilities(world.logits) * world.right).sum())
        assert 0.1 < success < 0.9
        assert abs(success - 0.5) > 0.01  # no symmetry that would hide a factor


@WORLDS
def test_probabilities_sum_to_one_under_both_policies(world: World):
    for logits in (world.logits, world.ref_logits, world.logits * 0.3):
        assert world.probabilities(logits).sum().item() == pytest.approx(1.0, abs=1e-14)


@WORLDS
def test_the_policy_gradient_is_the_slope_of_the_expected_score(world: World):
    score = torch.linspace(-1.0, 2.0, len(world), dtype=torch.float64).sin()
    numeric = slope(lambda at: float((world.probabilities(at) * score).sum()), world.logits)
    torch.testing.assert_close(world.gradient_of_expected(score), numeric, atol=1e-9, rtol=0.0)
    # And the score-function form of it, with any constant taken off.
    weight = world.probabilities(world.logits)[:, None] * (score[:, None] - 0.7)
    found = world.by_parameters(weight.expand(world.mask.shape))
    torch.testing.assert_close(found, numeric, atol=1e-9, rtol=0.0)


@WORLDS
def test_the_value_of_a_prefix_is_the_mean_over_what_may_follow(world: World):
    rewards = torch.sin(1.0 + torch.arange(world.mask.numel())).reshape(world.mask.shape).double()
    found = world.expected_later(rewards)
    p = world.probabilities(world.logits)
    for row, t in world.mask.nonzero().tolist():
        prefix = world.ids[row, :t]
        alike = [
            other for other in range(len(world))
            if world.mask[other, t] and torch.equal(world.ids[other, :t], prefix)
        ]  # fmt: skip
        later = [float((rewards[o] * world.mask[o])[t:].sum()) for o in alike]
        mass = float(p[alike].sum())
        mean = sum(float(p[o]) * x for o, x in zip(alike, later, strict=True)) / mass
        assert found[row, t].item() == pytest.approx(mean, abs=1e-12)
    assert found[~world.mask].eq(0).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_are_all_ordered_draws_put_together(size: int):
    p = RAGGED.probabilities(RAGGED.logits)
    values = torch.sin(torch.arange(len(RAGGED)).double() + 0.5)

    def of(rows: tuple[int, ...]) -> float:  # of the multiset alone, and not linear in it
        return math.exp(float(values[list(rows)].sum())) + float(values[list(rows)].max())

    found = sum(probability * of(tuple(rows)) for rows, probability in batches(p, size))
    ordered = sum(
        math.prod(float(p[row]) for row in rows) * of(rows)
        for rows in itertools.product(range(len(p)), repeat=size)
    )
    assert found == pytest.approx(ordered, rel=1e-12)
    assert len(list(batches(p, size))) == math.comb(len(p) + size - 1, size)


def one_token(pi: list[float], ref: list[float]) -> World:
    """A world of a vector's distributions."""
    count = len(pi)
    column = torch.arange(count)[:, None]
    row = torch.tensor([pi, ref], dtype=torch.float64).log()
    return World(
        "a vector's", column, column >= 0, 0 * column, row[:1], row[1:], torch.arange(count) > 0
    )


def test_kl_gradients_are_the_reference_vectors(golden):
    v = golden("kl_estimators_expected_gradient_as_loss")
    world, expected = one_token(v["inputs"]["pi"], v["inputs"]["ref"]), v["expected"]
    for to, name in ((True, "grad_KL_pi_ref"), (False, "grad_KL_ref_pi")):
        found = world.gradient_of_kl(to_reference=to)[0].tolist()
        assert found == pytest.approx(expected[name], abs=1e-9)
    v = golden("kl_estimators_expected_gradient_in_reward")
    world = one_token(v["inputs"]["pi"], v["inputs"]["ref"])
    k3 = world.gradient_of_penalty("k3") - world.gradient_of_kl(to_reference=False)
    assert k3[0].tolist() == pytest.approx(v["expected"]["grad_k3"], abs=1e-9)
    k1 = world.gradient_of_penalty("k1")[0].tolist()
    assert k1 == pytest.approx(v["expected"]["grad_k1"], abs=1e-9)


@WORLDS
def test_kl_gradients_are_slopes(world: World):
    def whole(logits: torch.Tensor) -> float:
        delta = (world.logprobs(logits) - world.logprobs(world.ref_logits)).sum(1)
        return float((world.probabilities(logits) * delta).sum())

    visits = world.visits()

    def held(logits: torch.Tensor) -> float:
        here = torch.isfinite(world.logits)
        p, q = logits.softmax(1), world.ref_logits.softmax(1)
        terms = torch.where(here, q * (q.clamp(min=1e-300) / p.clamp(min=1e-300)).log(), 0.0)
        return float((visits * terms.sum(1)).sum())

    for found, f in (
        (world.gradient_of_penalty("k1"), whole),
        (world.gradient_of_kl(to_reference=False), held),
    ):
        torch.testing.assert_close(found, slope(f, world.logits), atol=1e-9, rtol=0.0)


# --- what they show ------------------------------------------------------------------------------


def difficulty(p: float, size: int) -> float:
    """What a group std makes of the exact policy gradient, at success rate p."""

    def advantage(right: bool, k: int) -> float:
        mean = k / size
        std = math.sqrt(mean * (1 - mean))
        return 0.0 if std == 0 else (right - mean) / std

    return sum(
        math.comb(size - 1, k) * p**k * (1 - p) ** (size - 1 - k)
        * (advantage(True, k + 1) - advantage(False, k))
        for k in range(size)
    )  # fmt: skip


def verdicts(*right: int) -> World:
    """Equal lengths, with another set of right answers."""
    return dataclasses.replace(EQUAL, right=torch.tensor(right) > 0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_group_std_weighs_prompts_by_their_difficulty(size: int):
    """The direction is exact, and the factor depends on the success rate unless G is 2 or 3."""
    arm = GRPO.but("std", kl=NoKL(), aggregate=FixedLength())
    factors = []
    for world in (verdicts(1, 0, 0, 0), verdicts(0, 1, 0, 1), verdicts(1, 1, 0, 1)):
        p = float((world.probabilities(world.logits) * world.right).sum())
        exact = world.gradient_of_expected(world.right.double())
        along, angle = share_of(expected_update(arm, world, rows=size).update, exact)
        assert angle < 1e-6
        factors.append(along * LIMIT)
        assert factors[-1] == pytest.approx(difficulty(p, size), rel=1e-5)  # eps is 1e-6
    spread = max(factors) - min(factors)
    assert (spread < 1e-4) if size < 4 else (spread > 0.01)


def test_a_sequence_mean_weighs_completions_by_their_length():
    """3/4 sum pi (r - p) / T grad log pi: not the policy gradient where lengths differ."""
    arm = DR_GRPO.but("mean", aggregate=SequenceMean())
    found = expected_update(arm, RAGGED, rows=4).update
    pi = RAGGED.probabilities(RAGGED.logits)
    p = float((pi * RAGGED.right).sum())
    weight = 0.75 * pi * (RAGGED.right.double() - p) / RAGGED.lengths
    assert gap(found, RAGGED.by_parameters(weight[:, None].expand(RAGGED.mask.shape))) < 1e-12
    exact = RAGGED.gradient_of_expected(RAGGED.right.double())
    assert share_of(found, exact)[1] > 5
    assert share_of(expected_update(arm, EQUAL, rows=4).update,
                    EQUAL.gradient_of_expected(EQUAL.right.double()))[1] < 1e-6  # fmt: skip


def test_a_token_mean_is_biased_by_a_denominator_that_chance_decides():
    arm = RLOO.but("tokens", kl=NoKL(), aggregate=TokenMean())
    for world, biased in ((EQUAL, False), (RAGGED, True)):
        exact = world.gradient_of_expected(world.right.double())
        angle = share_of(expected_update(arm, world, rows=3).update, exact)[1]
        assert (angle > 0.5) if biased else (angle < 1e-6)


def test_lambda_below_one_is_unbiased_with_the_true_values_alone():
    arm = PPO.but("low", kl=NoKL(), scale=None, aggregate=FixedLength(),
                  advantage=GAE(gae_lambda=0.5))  # fmt: skip
    score = RAGGED.right.double()
    exact = RAGGED.gradient_of_expected(score) / LIMIT
    last = torch.arange(3) == RAGGED.lengths[:, None] - 1
    true = RAGGED.expected_later(last * score[:, None])
    assert gap(expected_update(arm, RAGGED, rows=2, values=true).update, exact) < 1e-12
    assert gap(expected_update(arm, RAGGED, rows=2).update, exact) > 0.05
    one = arm.but("one", advantage=GAE(gae_lambda=1.0))
    assert gap(expected_update(one, RAGGED, rows=2).update, exact) < 1e-12
    # And with no more than one completion, of one prompt.
    assert gap(expected_update(one, RAGGED, rows=1).update, exact) < 1e-12


def test_dynamic_sampling_divides_by_what_it_keeps():
    plain = expected_update(DR_GRPO, RAGGED, rows=3)
    dynamic = expected_update(DR_GRPO.but("d", sampling=DynamicSampling()), RAGGED, rows=3)
    p = float((RAGGED.probabilities(RAGGED.logits) * RAGGED.right).sum())
    assert plain.kept == pytest.approx(1.0, abs=1e-14)
    assert dynamic.kept == pytest.approx(1 - p**3 - (1 - p) ** 3, abs=1e-12)
    assert gap(dynamic.update, plain.update / dynamic.kept) < 1e-12


# --- penalties -----------------------------------------------------------------------------------


def penalty_update(kl: KLInLoss | KLInReward, world: World) -> torch.Tensor:
    """What the penalty alone does, its coefficient and the constant denominator taken out."""
    arm = RLOO.but("penalised", kl=kl)
    zero = torch.zeros(len(world), dtype=torch.float64)
    return -LIMIT * expected_update(arm, world, rows=2, kl_coef=1.0, score=zero).update


@WORLDS
def test_k1_in_the_loss_would_do_nothing(world: World):
    logprobs = world.logprobs(world.logits).requires_grad_()
    found = KLInLoss(estimator="k1").in_loss(logprobs, world.logprobs(world.ref_logits))
    assert found is not None
    (slopes,) = torch.autograd.grad(found.sum(), logprobs)
    weight = world.probabilities(world.logits)[:, None]
    assert world.by_parameters(weight * slopes).abs().max() < 1e-15


@pytest.mark.parametrize(
    ("kl", "held", "end"),
    [
        (KLInLoss(estimator="k2"), True, "pi to ref"),
        (KLInLoss(estimator="k3"), True, "ref to pi"),
        (KLInLoss(estimator="k3_k2"), True, "pi to ref"),
        (KLInReward(estimator="k1"), False, "pi to ref"),
    ],
    ids=["k2 loss", "k3 loss", "k3_k2 loss", "k1 reward"],
)
def test_which_kl_a_penalty_descends(kl: KLInLoss | KLInReward, held: bool, end: str):
    """At one token the places agree; beyond, a loss holds the prefixes and a reward does not."""
    for world in (ONE_TOKEN, RAGGED):
        found = penalty_update(kl, world)
        of_tokens = world.gradient_of_kl(to_reference=end == "pi to ref")
        of_completions = world.gradient_of_penalty("k1")
        assert gap(found, of_tokens if held else of_completions) < 1e-12
        if world is RAGGED:
            assert gap(found, of_completions if held else of_tokens) > 0.05
        elif end == "pi to ref":
            assert gap(of_tokens, of_completions) < 1e-12


def test_k3_in_the_reward_is_a_difference_and_not_k1s_penalty():
    found = penalty_update(KLInReward(estimator="k3"), ONE_TOKEN)
    to, other = (ONE_TOKEN.gradient_of_kl(to_reference=side) for side in (True, False))
    assert gap(found, to - other) < 1e-12
    assert gap(found, to) > 0.5
