"""What must hold on every batch, whatever its groups, lengths and numbers (in float64)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.arm import Arm
from harness.arms import ARMS
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.parts.advantage import GAE
from harness.parts.aggregate import FixedLength, SequenceMean, TokenMean
from harness.parts.clip import CISPOClip, NoClip, PPOClip
from harness.parts.exclude import Unfinished, ZeroVariance
from harness.parts.kl import KLInLoss, KLInReward, NoKL, estimate_kl
from harness.parts.ratio import NoRatio
from harness.parts.sampling import DynamicSampling
from harness.parts.scale import GroupStd
from harness.parts.trust_region import DivergenceMask
from harness.types import Batch, Experience, Minibatch, group_mean, group_range, zero_padding
from tests.rules import z_score

settings.register_profile("harness", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("harness")

# Every shipped arm, and the parts that none of them uses.
MORE = (
    GRPO.but("fixed", scale=None, aggregate=FixedLength(), kl=NoKL()),
    GRPO.but("sample_std", scale=GroupStd(eps=1e-4, ddof=1), kl=KLInLoss(estimator="k2")),
    GRPO.but("dual", clip=PPOClip(0.1, 0.1, dual_clip=1.5), kl=KLInReward(estimator="k3")),
    GRPO.but("no_flat_groups", exclude=ZeroVariance(denominator="kept")),
    ARMS["dapo"].but("dapo_kept", exclude=Unfinished(denominator="kept")),
    PPO.but("ppo_old", advantage=GAE(gamma=0.97, gae_lambda=0.95), exclude=Unfinished()),
)
EVERY = {arm.name: arm for arm in (*ARMS.values(), *MORE)}
LIMIT = 8  # tokens a completion may have
every_arm = pytest.mark.parametrize("arm", EVERY.values(), ids=EVERY.keys())
seeds = st.integers(0, 2**31)


@dataclasses.dataclass(frozen=True)
class Draw:
    """An experience, and the policy and critic some updates later."""

    x: Experience
    logprobs: torch.Tensor
    values: torch.Tensor


def recorded_top(old: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Two top tokens of a wider vocabulary: the sampled one (id 0) and another, or two others."""
    first = torch.rand(old.shape, generator=rng) < 0.5
    ids = torch.stack([torch.where(first, 0, 1), torch.full_like(old, 2).long()], 2)
    rest = (1 - old.exp()).log()
    other = torch.where(first, rest - 0.5, rest - 0.9)
    return {
        "top_ids": ids,
        "top_logprobs": torch.stack([torch.where(first, old, rest - 1.5), other], 2),
    }


def worked_steps(mask: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Steps that end at about two tokens in five, each right or wrong; some rows have none."""
    rng = torch.Generator().manual_seed(seed + 1)
    ends = (torch.rand(mask.shape, generator=rng) < 0.4) & mask
    right = torch.rand(mask.shape, generator=rng) > 0.5
    return {"step_ends": ends, "step_scores": (ends & right).double()}


def draw(seed: int, prompts: int = 3, size: int = 3, *, continuous: bool = False) -> Draw:
    rng = torch.Generator().manual_seed(seed)

    def normal(scale: float, mean: float = 0.0) -> torch.Tensor:
        noise = torch.randn(rows, LIMIT, generator=rng, dtype=torch.float64)
        return mean + scale * noise

    rows = prompts * size
    lengths = torch.randint(1, LIMIT + 1, (rows,), generator=rng)
    mask = torch.arange(LIMIT) < lengths[:, None]
    old = normal(0.7, -1.5).clamp(max=-0.05)
    uniform = torch.rand(rows, generator=rng, dtype=torch.float64)
    correct = uniform > 0.5
    score = uniform if continuous else correct.double()
    ids = torch.zeros(rows, LIMIT, dtype=torch.long)
    x = Experience(
        prompt_ids=ids[:, :2],
        prompt_mask=ids[:, :2] == 0,
        completion_ids=ids,
        mask=mask,
        group=torch.arange(prompts).repeat_interleave(size),
        score=score,
        bonus=torch.zeros_like(score),
        correct=correct,
        finished=torch.rand(rows, generator=rng) > 0.3,
        behaviour_logprobs=old,
        old_logprobs=old,
        ref_logprobs=old + normal(0.2),
        values=normal(0.5, 0.4),
        **recorded_top(old, rng),
        **worked_steps(mask, seed),
    )
    assert x.values is not None
    return Draw(x, old + normal(0.25), x.values + normal(0.3))


def learn(arm: Arm, d: Draw) -> tuple[Batch, Minibatch, dict[str, torch.Tensor]]:
    """Credit, weights, and the losses with their gradients."""
    coef = arm.kl.initial_coef
    batch = arm.credit(d.x, kl_coef=coef, max_new_tokens=LIMIT, warmup=False)
    minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
    return batch, minibatch, losses(arm, minibatch, d.logprobs, d.values)


def top_now(x: Minibatch) -> torch.Tensor | None:
    """What the policy thinks of the recorded tokens some updates later."""
    return None if x.top_logprobs is None else x.top_logprobs + 0.1 * x.top_logprobs.sin()


def losses(arm: Arm, x: Minibatch, logprobs, values) -> dict[str, torch.Tensor]:
    logprobs, values = logprobs.clone().requires_grad_(), values.clone().requires_grad_()
    loss, stats = arm.policy_loss(x, logprobs, arm.kl.initial_coef, top_now(x))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    found = {"loss": loss.detach(), "gradient": gradient, **stats}
    if arm.critic is not None:
        value_loss = arm.value_loss(x, values)
        (value_gradient,) = torch.autograd.grad(value_loss, values)
        found |= {"value_loss": value_loss.detach(), "value_gradient": value_gradient}
    return found


def same(got: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-13)


def change(x: Experience, rule: Callable[[torch.Tensor], torch.Tensor]) -> Experience:
    """The experience with a rule applied to each per-token field of numbers."""
    tokens = ("old_logprobs", "ref_logprobs", "values", "behaviour_logprobs", "step_scores")
    return dataclasses.replace(x, **{name: rule(getattr(x, name)) for name in tokens})


@every_arm
def test_the_draws_move_policy_and_critic(arm: Arm):
    """Or what follows would hold for an arm whose losses are constant."""
    found = [learn(arm, draw(seed)) for seed in range(4)]
    assert any(losses["gradient"].ne(0).any() for _, _, losses in found)
    assert all(losses["gradient"][~batch.mask].eq(0).all() for batch, _, losses in found)
    if arm.critic is not None:
        assert all(losses["value_gradient"].ne(0).any() for _, _, losses in found)


# --- the loss does not depend on how a minibatch is cut, padded or ordered --------------------


@every_arm
@given(seed=seeds, cut=st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_micro_batches_add_up(arm: Arm, seed: int, cut: list[int]):
    """Any assignment of rows to up to four micro-batches."""
    d = draw(seed)
    _, minibatch, whole = learn(arm, d)
    totals = {name: torch.zeros_like(value) for name, value in whole.items()}
    for part in set(cut):
        rows = torch.tensor([i for i, p in enumerate(cut) if p == part])
        piece = losses(arm, minibatch.select(rows), d.logprobs[rows], d.values[rows])
        for name, value in piece.items():
            if name.endswith("gradient"):
                totals[name][rows] += value
            else:
                totals[name] += value
    for name, value in whole.items():
        same(totals[name], value, 1e-9 if name.endswith("gradient") else 1e-12)


@every_arm
@pytest.mark.parametrize("junk", [float("nan"), 1e30, -float("inf")])
@given(seed=seeds)
def test_padding_is_never_read(arm: Arm, junk: float, seed: int):
    d = draw(seed)

    def spoil(field: torch.Tensor) -> torch.Tensor:
        return torch.where(d.x.mask, field, torch.full_like(field, junk))

    assert d.x.step_ends is not None
    x = dataclasses.replace(change(d.x, spoil), step_ends=d.x.step_ends | ~d.x.mask)
    spoilt = Draw(x, spoil(d.logprobs), spoil(d.values))
    batch, minibatch, clean = learn(arm, d)
    batch2, minibatch2, found = learn(arm, spoilt)
    assert torch.equal(batch2.advantages, batch.advantages)
    assert torch.equal(batch2.rewards, batch.rewards)
    assert torch.equal(minibatch2.weights, minibatch.weights)
    for name, value in clean.items():
        assert torch.equal(found[name], value), name
    # Nor what stands in the padding of what credit returned.
    worse = dataclasses.replace(
        minibatch2,
        advantages=spoil(batch.advantages),
        returns=None if batch.returns is None else spoil(batch.returns),
    )
    for name, value in losses(arm, worse, spoilt.logprobs, spoilt.values).items():
        assert torch.equal(value, clean[name]), name


@every_arm
@given(seed=seeds, extra=st.integers(1, 5))
def test_more_padding_changes_nothing(arm: Arm, seed: int, extra: int):
    d = draw(seed)
    assert d.x.top_ids is not None
    assert d.x.top_logprobs is not None
    assert d.x.step_ends is not None

    def widen(field: torch.Tensor) -> torch.Tensor:
        junk = torch.full((len(field), extra), float("nan"), dtype=field.dtype)
        return torch.cat([field, junk], 1)

    tokens = torch.zeros(len(d.x), extra, dtype=torch.long)
    x = dataclasses.replace(
        change(d.x, widen),
        mask=torch.cat([d.x.mask, tokens.bool()], 1),
        step_ends=torch.cat([d.x.step_ends, ~tokens.bool()], 1),
        completion_ids=torch.cat([d.x.completion_ids, tokens], 1),
        top_ids=torch.nn.functional.pad(d.x.top_ids, (0, 0, 0, extra)),
        top_logprobs=torch.nn.functional.pad(d.x.top_logprobs, (0, 0, 0, extra), value=-1e30),
    )
    _, _, clean = learn(arm, d)
    _, _, wide = learn(arm, Draw(x, widen(d.logprobs), widen(d.values)))
    for name, value in clean.items():
        got = wide[name]
        if name.endswith("gradient"):
            assert got[:, LIMIT:].eq(0).all()
            got = got[:, :LIMIT]
        same(got, value)


@every_arm
@given(seed=seeds, rng=st.randoms(use_true_random=False))
def test_row_order_changes_nothing(arm: Arm, seed: int, rng):
    """Rows in any order, their group ids with them and renamed."""
    d = draw(seed)
    order = list(range(len(d.x)))
    rng.shuffle(order)
    rows = torch.tensor(order)
    x = d.x.select(rows)
    x = dataclasses.replace(x, group=17 - 3 * x.group)
    batch, _, clean = learn(arm, d)
    batch2, _, found = learn(arm, Draw(x, d.logprobs[rows], d.values[rows]))
    same(batch2.advantages, batch.advantages[rows], 1e-9)
    # An advantage that is 0 but for rounding has a sign that the order of summing decides; divided
    # by a std that is rounding too, plus eps = 1e-6, it may reach 1e-10.
    unsure = bool((batch.advantages.abs() < 1e-9)[d.x.mask].any())
    for name, value in clean.items():
        if unsure and name.startswith("sum/clip_fraction"):
            continue
        same(found[name], value[rows] if name.endswith("gradient") else value, 1e-9)


# --- weights -------------------------------------------------------------------------------------


@given(seed=seeds, exclude=st.sampled_from([None, "kept"]))
@pytest.mark.parametrize("aggregate", [TokenMean(), SequenceMean()])
def test_weights_sum_to_one(aggregate, seed: int, exclude):
    arm = GRPO.but("w", aggregate=aggregate, exclude=exclude and Unfinished(denominator="kept"))
    batch, minibatch, _ = learn(arm, draw(seed))
    assert batch.keep.all() or exclude
    assert minibatch.weights.sum().item() == pytest.approx(float(batch.keep.any()), abs=1e-12)
    assert minibatch.value_weights.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert minibatch.weights[~minibatch.mask].eq(0).all()


# --- gradients -----------------------------------------------------------------------------------


@given(
    seed=seeds,
    low=st.floats(0.0, 1.0),
    high=st.floats(0.0, 10.0),
    dual=st.one_of(st.none(), st.floats(1.01, 5.0)),
)
def test_on_policy_no_clip_rule_acts(seed: int, low: float, high: float, dual: float | None):
    """At ratio 1 every surrogate has the plain policy gradient: each token's weight x advantage."""
    arm = GRPO.but("any", kl=NoKL(), clip=PPOClip(low, high, dual))
    d = draw(seed)
    batch, minibatch, found = learn(arm, Draw(d.x, d.x.old_logprobs, d.values))
    same(found["gradient"], -minibatch.weights * batch.advantages)
    assert found["sum/approx_kl"].item() == 0
    assert found["sum/clip_fraction_low"].item() == found["sum/clip_fraction_high"].item() == 0


@given(seed=seeds)
def test_groups_that_agree_push_nothing(seed: int):
    """With no KL term; with one, only it remains."""
    d = draw(seed)
    score = group_mean(d.x.score, d.x.group).round()
    d = dataclasses.replace(d, x=dataclasses.replace(d.x, score=score, correct=score > 0))
    for name in ("grpo", "grpo_clip_higher", "dapo_overlong_filter"):
        arm = ARMS[name].but("silent", kl=NoKL())
        _, _, found = learn(arm, d)
        assert found["loss"].item() == 0
        assert found["gradient"].eq(0).all()
    _, _, found = learn(GRPO, d)
    assert found["loss/surrogate"].item() == 0
    assert found["gradient"][d.x.mask].ne(0).any()


@every_arm
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradients_are_those_of_finite_differences(arm: Arm, seed: int):
    """Of a linear softmax policy and a linear critic, off policy enough that some tokens clip."""
    rng = torch.Generator().manual_seed(seed)
    d = draw(seed)
    features = torch.randn(*d.x.mask.shape, 4, generator=rng, dtype=torch.float64)
    token = torch.randint(5, d.x.mask.shape, generator=rng)
    weight = torch.randn(4, 5, generator=rng, dtype=torch.float64)

    def logprobs(w: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(features @ w, -1).gather(-1, token[..., None])[..., 0]

    far = 0.8 if isinstance(arm.clip, DivergenceMask) else 0.1  # these bound probabilities
    old = logprobs(weight + far * torch.randn(4, 5, generator=rng, dtype=torch.float64))
    x = dataclasses.replace(d.x, old_logprobs=old, behaviour_logprobs=old)
    coef = arm.kl.initial_coef
    batch = arm.credit(x, kl_coef=coef, max_new_tokens=LIMIT, warmup=False)
    minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
    _, stats = arm.policy_loss(minibatch, logprobs(weight), coef, top_now(minibatch))
    cut = stats["sum/clip_fraction_high"] + stats["sum/clip_fraction_low"]
    assert cut > 0 or isinstance(arm.clip, (NoClip, CISPOClip))
    # A weight that is held constant belongs to the gradient and not to the objective's slope.
    held = None
    if isinstance(arm.clip, CISPOClip):
        held = (logprobs(weight) - old).exp().clamp(max=5.0).detach()
    elif isinstance(arm.ratio, NoRatio):
        held = torch.ones_like(old)

    def policy_loss(w: torch.Tensor) -> torch.Tensor:
        if held is not None:
            return -(minibatch.weights * held * minibatch.advantages * logprobs(w)).sum()
        return arm.policy_loss(minibatch, logprobs(w), coef, top_now(minibatch))[0]

    weight.requires_grad_()
    assert torch.autograd.gradcheck(policy_loss, weight, eps=1e-6, atol=1e-7, rtol=1e-5)
    ours = arm.policy_loss(minibatch, logprobs(weight), coef, top_now(minibatch))[0]
    gradients = [torch.autograd.grad(f, weight)[0] for f in (ours, policy_loss(weight))]
    same(gradients[0], gradients[1], 1e-9)
    if arm.critic is not None:
        head = torch.randn(4, generator=rng, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda h: arm.value_loss(minibatch, features @ h), head, eps=1e-6, atol=1e-7, rtol=1e-5
        )


# --- advantages ----------------------------------------------------------------------------------


@given(seed=seeds, gamma=st.floats(0.5, 1.0))
def test_gae_at_lambda_one_is_return_to_go_less_value(seed: int, gamma: float):
    x = draw(seed).x
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randn(x.mask.shape, generator=rng, dtype=torch.float64)
    advantages, returns = GAE(gamma=gamma, gae_lambda=1.0)(rewards, x.mask, x.group, x.values)
    to_go, later = torch.zeros_like(rewards), torch.zeros(len(x), dtype=torch.float64)
    for t in reversed(range(LIMIT)):
        later = torch.where(x.mask[:, t], rewards[:, t], 0.0) + gamma * later
        to_go[:, t] = later
    assert x.values is not None
    assert returns is not None
    same(advantages, (to_go - x.values) * x.mask, 1e-9)
    same(returns, to_go * x.mask, 1e-9)
    same(GAE(gamma=gamma, gae_lambda=0.5).monte_carlo(rewards, x.mask), returns, 1e-9)


@given(seed=seeds, prompts=st.integers(1, 4), size=st.integers(2, 6))
def test_group_advantages_are_centred_and_bounded(seed: int, prompts: int, size: int):
    x = draw(seed, prompts, size, continuous=True).x
    one = torch.ones(len(x), 1, dtype=torch.bool)
    advantages, _ = z_score(eps=0.0)(x.score[:, None], one, x.group, None)
    z = advantages[:, 0]
    same(group_mean(z, x.group), torch.zeros_like(z))
    same(group_mean(z.square(), x.group), torch.ones_like(z), 1e-9)
    assert z.abs().max() <= (size - 1) ** 0.5 + 1e-9
    sample, _ = z_score(eps=0.0, ddof=1)(x.score[:, None], one, x.group, None)
    same(sample[:, 0], z * ((size - 1) / size) ** 0.5, 1e-9)


# --- the rest ------------------------------------------------------------------------------------


@given(seed=seeds, prompts=st.integers(1, 6), size=st.integers(1, 5))
def test_dynamic_sampling_keeps_or_drops_whole_groups(seed: int, prompts: int, size: int):
    x = draw(seed, prompts, size).x
    keep = DynamicSampling().keep(x.correct, x.group)
    assert group_range(keep.double(), x.group).eq(0).all()
    mixed = group_range(x.correct.double(), x.group) > 0
    assert torch.equal(keep, mixed)


@given(delta=st.floats(-20, 20, allow_subnormal=False))
def test_k3_is_never_negative(delta: float):
    for dtype in (torch.float64, torch.float32):
        d = torch.tensor([[delta]], dtype=dtype)
        k3 = estimate_kl("k3", d, torch.zeros_like(d)).item()
        assert k3 >= -torch.finfo(dtype).eps * abs(delta)


@given(seed=seeds)
def test_zeroed_places_pass_no_gradient(seed: int):
    d = draw(seed)
    x = torch.where(d.x.mask, d.logprobs, float("nan")).requires_grad_()
    zero_padding(x, d.x.mask).exp().sum().backward()
    assert x.grad is not None
    same(x.grad, torch.where(d.x.mask, d.logprobs.exp(), 0.0))


def test_no_rows_make_no_groups():
    """A step of dynamic sampling may end with nothing."""
    none, group = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert group_mean(none, group).shape == (0,)
    assert group_range(none, group).shape == (0,)
    assert DynamicSampling().keep(none > 0, group).shape == (0,)
