"""The arm's mathematics from a rollout to a loss, and how two arms are told apart."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from harness.arm import Arm, at_last_token, parts
from harness.arms import ARMS
from harness.arms.dapo import DAPO
from harness.arms.grpo import GRPO, GRPO_CLIP_HIGHER
from harness.arms.ppo import PPO, PPO_UNGROUPED
from harness.errors import InputError
from harness.identity import difference
from harness.knobs import turn
from harness.parts.advantage import GAE, GroupBaseline
from harness.parts.aggregate import FixedLength, SequenceMean, TokenMean
from harness.parts.exclude import Unfinished
from harness.parts.kl import KLInReward, NoKL
from harness.parts.shaping import SignedScore, UnfinishedPenalty
from harness.types import Experience

NAN = float("nan")


def padded(rows: list[list[float]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([r + [NAN] * (width - len(r)) for r in rows], dtype=torch.float64)


def experience(
    old: list[list[float]],
    scores: list[float],
    *,
    ref: list[list[float]] | None = None,
    values: list[list[float]] | None = None,
    group: list[int] | None = None,
    finished: list[bool] | None = None,
) -> Experience:
    """An experience of one group, its padding NaN."""
    old_logprobs = padded(old)
    mask = ~old_logprobs.isnan()
    ids = torch.zeros(mask.shape, dtype=torch.long)
    score = torch.tensor(scores, dtype=torch.float64)
    return Experience(
        prompt_ids=ids[:, :1],
        prompt_mask=mask[:, :1],
        completion_ids=ids,
        mask=mask,
        group=torch.tensor(group or [0] * len(scores)),
        score=score,
        bonus=torch.zeros_like(score),
        correct=score > 0,
        finished=torch.tensor(finished or [True] * len(scores)),
        behaviour_logprobs=old_logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=None if ref is None else padded(ref),
        values=None if values is None else padded(values),
    )


@pytest.mark.parametrize(
    ("key", "aggregate"),
    [
        ("loss_seq_mean", SequenceMean()),
        ("loss_token_mean", TokenMean()),
        ("loss_constant", FixedLength()),
    ],
)
@pytest.mark.parametrize(
    ("name", "arm"),
    [("end_to_end_grpo_eps0p2_beta0p04", GRPO), ("end_to_end_dapo_0p2_0p28_beta0", DAPO)],
)
def test_end_to_end(golden, name, arm: Arm, key, aggregate):
    """The shipped arm, but for the eps that the vector leaves out, from scores to the loss."""
    v = golden(name)
    x, expected, tolerance = v["inputs"], v["expected"], v["tolerance"]
    assert arm.aggregate == (SequenceMean() if arm is GRPO else TokenMean())
    arm = turn(arm.but("exact", aggregate=aggregate), "scale.eps", 0.0)
    data = experience(x["old_logp"], x["rewards"], ref=x["ref_logp"])
    coef = arm.kl.initial_coef
    assert coef == x["beta"]
    batch = arm.credit(data, kl_coef=coef, max_new_tokens=x["max_len"], warmup=False)
    assert batch.advantages[:, 0].tolist() == pytest.approx(expected["advantages"], abs=tolerance)
    new = padded(x["new_logp"])
    minibatch = arm.weigh(batch, max_new_tokens=x["max_len"])
    loss, stats = arm.policy_loss(minibatch, new, coef)
    assert loss.item() == pytest.approx(expected[key], abs=tolerance)
    assert stats["loss/surrogate"].item() == pytest.approx(
        loss.item() - stats.get("loss/kl", torch.zeros(())).item()
    )
    # One token at a time, the loss is that token's own.
    for i, row in enumerate(expected["per_token_loss"]):
        for t, token_loss in enumerate(row):
            alone = torch.zeros_like(minibatch.weights)
            alone[i, t] = 1.0
            one, _ = arm.policy_loss(dataclasses.replace(minibatch, weights=alone), new, coef)
            assert one.item() == pytest.approx(token_loss, rel=tolerance, abs=tolerance)


def test_ppo_by_hand():
    """Score 1 on two tokens, KL coefficient .1, log-ratios .2 and -.4, values .5 and .25.

    Rewards -.02, 1 + .04; at lambda 1 the returns are 1.02, 1.04 and the advantages .52, .79.
    Whitened over two tokens with ddof 1: -+ 1/sqrt 2.
    """
    arm = turn(PPO, "scale.eps", 0.0)
    x = experience([[-1.0, -2.0]], [1.0], ref=[[-1.2, -1.6]], values=[[0.5, 0.25]])
    batch = arm.credit(x, kl_coef=0.1, max_new_tokens=2, warmup=False)
    assert batch.rewards[0].tolist() == pytest.approx([-0.02, 1.04])
    assert batch.returns is not None
    assert batch.returns[0].tolist() == pytest.approx([1.02, 1.04])
    assert batch.advantages[0].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    # The critic's targets are those of the advantages before whitening.
    minibatch = arm.weigh(batch, max_new_tokens=2)
    values = torch.tensor([[0.6, 0.25]], dtype=torch.float64)
    expected = (0.42**2 + 0.79**2) / 2 / 2
    assert arm.value_loss(minibatch, values).item() == pytest.approx(expected)
    loss, stats = arm.policy_loss(minibatch, x.old_logprobs + math.log(1.5), 0.1)
    # Ratio 1.5: the bad token pays 1.5, the good one is clipped at 1.2.
    assert loss.item() == pytest.approx(math.sqrt(0.5) * (1.5 - 1.2) / 2)
    assert stats["sum/clip_fraction_high"].item() == 1
    assert stats["sum/clip_fraction_low"].item() == 0
    assert stats["sum/approx_kl"].item() == pytest.approx(2 * (0.5 - math.log(1.5)))


def test_the_critic_warms_up_on_what_was_returned():
    arm = PPO.but("low", advantage=GAE(gae_lambda=0.5), scale=None)
    x = experience([[-1.0, -1.0]], [1.0], ref=[[-1.0, -1.0]], values=[[0.2, 0.6]])
    credit = {"kl_coef": 0.0, "max_new_tokens": 2}
    cold = arm.credit(x, warmup=True, **credit)
    warm = arm.credit(x, warmup=False, **credit)
    assert cold.returns is not None
    assert warm.returns is not None
    assert cold.returns[0].tolist() == pytest.approx([1.0, 1.0])
    assert warm.returns[0].tolist() == pytest.approx([0.8, 1.0])
    grouped = experience([[-1.0], [-1.0]], [1.0, 0.0], ref=[[-1.0], [-1.0]])
    assert GRPO.credit(grouped, warmup=True, **credit).returns is None


def test_shaping_comes_before_credit_and_in_order():
    shaping = (UnfinishedPenalty(value=-1.0, replace=True), UnfinishedPenalty(-0.5, replace=False))
    arm = GRPO.but("cut", scale=None, kl=NoKL(), shaping=shaping)
    x = experience([[-1.0], [-1.0, -1.0]], [1.0, 1.0], finished=[True, False])
    batch = arm.credit(x, kl_coef=0.0, max_new_tokens=2, warmup=False)
    assert batch.rewards.tolist() == [[1.0, 0.0], [0.0, -1.5]]
    assert batch.advantages.tolist() == [[1.25, 0.0], [-1.25, -1.25]]


def test_an_excluded_completion_counts_in_the_mean_and_not_in_the_loss():
    arm = GRPO.but("cut", scale=None, kl=NoKL(), exclude=Unfinished())
    x = experience([[-1.0], [-1.0]], [1.0, 0.0], finished=[True, False])
    batch = arm.credit(x, kl_coef=0.0, max_new_tokens=2, warmup=False)
    assert batch.advantages.tolist() == [[0.5], [-0.5]]
    # Its log-ratio overflows; a weight of 0 would make that 0 * inf.
    new = torch.tensor([[-1.0], [2000.0]], dtype=torch.float64, requires_grad=True)
    loss, stats = arm.policy_loss(arm.weigh(batch, max_new_tokens=2), new, 0.0)
    loss.backward()
    assert loss.item() == -0.25
    assert new.grad is not None
    assert new.grad.tolist() == [[-0.25], [0.0]]
    assert stats["sum/clip_fraction_low"].item() == 0


def test_at_last_token():
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    got = at_last_token(torch.tensor([2.0, 3.0, NAN]), mask)
    assert got.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]


def test_one_exchanged_field_is_one_difference():
    assert difference(parts(GRPO), parts(GRPO_CLIP_HIGHER)) == {"clip.clip_high": (0.2, 0.28)}
    assert difference(parts(PPO), parts(PPO_UNGROUPED)) == {"sampling.group_size": (None, 1)}
    assert difference(parts(GRPO), parts(GRPO.but("renamed"))) == {}


def test_ppo_and_grpo_differ_in_exactly_four_parts():
    """The comparison itself. Sampling is equal here: completions per prompt are a control."""
    found = difference(parts(PPO), parts(GRPO))
    assert found.keys() == {"kl", "advantage", "scale", "aggregate"}
    names = {key: tuple(side and side["part"] for side in pair) for key, pair in found.items()}
    assert names == {
        "kl": ("KLInReward", "KLInLoss"),
        "advantage": ("GAE", "GroupBaseline"),
        "scale": ("Whiten", "GroupStd"),
        "aggregate": ("TokenMean", "SequenceMean"),
    }


def test_grpo_and_dapo_differ_in_exactly_five_parts():
    found = difference(parts(GRPO), parts(DAPO))
    assert found.keys() == {"sampling", "shaping", "kl", "clip.clip_high", "aggregate"}


def test_a_difference_inside_a_nested_part_is_named_by_its_path():
    other = turn(PPO, "advantage.critic.value_clip", 0.5)
    found = difference(parts(PPO), parts(other))
    assert found == {"advantage.critic.value_clip": (0.2, 0.5)}
    shaped = PPO.but("shaped", shaping=(UnfinishedPenalty(),))
    assert difference(parts(PPO), parts(shaped)).keys() == {"shaping"}


def test_an_overridden_arm_is_a_difference():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Twisted(Arm):
        pass

    fields = {f.name: getattr(GRPO, f.name) for f in dataclasses.fields(Arm)}
    assert difference(parts(GRPO), parts(Twisted(**fields))) == {"arm": (None, "Twisted")}


def test_a_group_too_small_for_its_baseline_is_refused():
    with pytest.raises(InputError, match=r"'grpo': GroupBaseline needs at least 2 .* gives 1"):
        GRPO.check(1)
    GRPO.check(2)
    PPO.check(1)
    assert PPO_UNGROUPED.group_size(8) == 1
    assert PPO.group_size(8) == 8
    with pytest.raises(InputError, match="needs at least 2"):
        PPO_UNGROUPED.but("impossible", advantage=GroupBaseline()).check(8)


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_an_arm_is_a_value(arm: Arm):
    assert hash(arm) == hash(dataclasses.replace(arm))
    assert arm == dataclasses.replace(arm)
    assert arm != arm.but("another")
    with pytest.raises(dataclasses.FrozenInstanceError):
        arm.name = "renamed"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        arm.clip.clip_low = 0.5  # type: ignore[attr-defined]


def test_an_exchanged_part_leaves_the_original_alone():
    other = GRPO.but("grpo_kl_reward", kl=KLInReward())
    assert other.source == "grpo with kl changed"
    assert difference(parts(GRPO), parts(other)).keys() == {"kl"}
    assert ARMS["grpo"] is GRPO


@pytest.mark.parametrize(
    "changes", [{"kl": 0.1}, {"clip": NoKL()}, {"shaping": [SignedScore()]}, {"ratio": None}]
)
def test_a_part_of_the_wrong_kind_is_refused_when_built(changes):
    (name,) = changes
    with pytest.raises(InputError, match=rf"arm 'odd': {name} is .*; give a"):
        GRPO.but("odd", **changes)
