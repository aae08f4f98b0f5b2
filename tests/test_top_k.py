"""The engine's likeliest tokens: recorded while sampling, scored again while learning."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from tiny import as_rollout, double_model, make_loop, ragged, sampler, tiny_model, trained, weights

from harness.arm import Arm
from harness.arms.cppo import CPPO, CPPO_FIXED
from harness.arms.dppo import DPPO_KL, DPPO_TOPK_TV, DPPO_TV
from harness.arms.grpo import GRPO
from harness.collect import collect, join
from harness.models import Policy, token_logprobs, trim
from harness.parts.divergence import KullbackLeibler, TotalVariation
from harness.parts.trust_region import DivergenceMask, PrefixGate, SequenceMask
from harness.rewards.maths import Outcome, Verdict
from harness.samplers.sampler import Decoding, Drawn
from harness.train import step
from harness.types import Rollout

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11], [12, 13]]
LIMIT, TEMPERATURE, K, VOCABULARY = 12, 0.8, 3, 19
TOP_TV, TOP_KL = TotalVariation(top_k=K), KullbackLeibler(top_k=K)
# Arms of each rule over few tokens, so that the sampled one is often outside of them.
ARMS = (
    DPPO_TV,
    DPPO_KL,
    DPPO_TOPK_TV.but("dppo_top3_tv", clip=DivergenceMask(divergence=TOP_TV, delta=0.15)),
    DPPO_TOPK_TV.but(
        "dppo_top3_kl_capped", clip=DivergenceMask(divergence=TOP_KL, delta=0.05, ratio_cap=1.5)
    ),
    CPPO.but("cppo_top3", clip=dataclasses.replace(CPPO.clip, divergence=TOP_TV)),
    CPPO_FIXED.but("cppo_top3_fixed", clip=dataclasses.replace(CPPO_FIXED.clip, divergence=TOP_TV)),
    CPPO.but("cppo_top3_soft", clip=PrefixGate(divergence=TOP_TV)),
    DPPO_TV.but("trm_top3", clip=SequenceMask(divergence=TOP_KL, delta_max=0.9, delta_mean=0.4)),
)
every_arm = pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)


def dense(model: Any, prompt: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-probs of the whole vocabulary at each completion token, by a pass of this row alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, ids])[None]).logits[0].double()
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(1)


def row_of(x: Any, row: int) -> tuple[Tensor, Tensor]:
    return x.prompt_ids[row][x.prompt_mask[row]], x.completion_ids[row][x.mask[row]]


def sampled_by(model: Any, x: Rollout, top: int | None) -> Rollout:
    """The rollout as if this model had sampled it, its likeliest tokens recorded."""
    behaviour = torch.full(x.mask.shape, math.nan, dtype=torch.float64)
    ids = torch.full((*x.mask.shape, top or 0), 5)  # anything may stand on padding
    logprobs = torch.full(ids.shape, math.nan, dtype=torch.float64)
    for row in range(len(x)):
        prompt, completion = row_of(x, row)
        full = dense(model, prompt, completion, TEMPERATURE)
        behaviour[row, : len(completion)] = full.gather(1, completion[:, None])[:, 0]
        if top:
            best = full.topk(top)
            ids[row, : len(completion)] = best.indices
            logprobs[row, : len(completion)] = best.values
    x = dataclasses.replace(x, behaviour_logprobs=behaviour)
    return dataclasses.replace(x, top_ids=ids, top_logprobs=logprobs) if top else x


def off_policy(arm: Arm, *, micro_batch: int = 1000, **padding: Any):
    """A learner, and a batch that another model near to it has sampled."""
    x = sampled_by(near(double_model(1)), ragged(**padding), arm.clip.top_k)
    return trained(arm, x, micro_batch=micro_batch, temperature=TEMPERATURE)


def near(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.06 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def update(t: Any) -> dict[str, float]:
    minibatch = t.learner.arm.weigh(t.batch, max_new_tokens=LIMIT)
    return t.learner.update(
        minibatch, kl_coef=0.0, rate=1.0, critic_rate=1.0, warmup=False, first=True
    )


# -- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [1, 4, 50])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.6)])
def test_the_likeliest_tokens_are_recorded_before_top_p(top, temperature, top_p):
    """All of a vocabulary smaller than what is asked for; and the draw is the same without."""
    model = tiny_model()
    decoding = Decoding(temperature, top_p, 8, record_top=top)
    drawn = sampler(model).draw(PROMPTS, 3, decoding, seed=1)
    plain = sampler(model).draw(PROMPTS, 3, dataclasses.replace(decoding, record_top=0), seed=1)
    assert torch.equal(drawn.completion_ids, plain.completion_ids)
    assert torch.equal(drawn.logprobs, plain.logprobs)
    assert plain.top_ids is plain.top_logprobs is None
    assert drawn.top_ids is not None
    assert drawn.top_logprobs is not None
    assert drawn.mask.sum(1).min() < drawn.mask.sum(1).max()
    for row in range(12):
        prompt, ids = row_of(drawn, row)
        full = dense(model, prompt, ids, temperature)
        best = full.topk(min(top, full.shape[1])).values
        got = drawn.top_logprobs[row, : len(ids)].double()
        torch.testing.assert_close(got, best, rtol=0, atol=2e-5)
        named = full.gather(1, drawn.top_ids[row, : len(ids)])
        torch.testing.assert_close(got, named, rtol=0, atol=2e-5)
        if top == 50:
            assert got.exp().sum(1).tolist() == pytest.approx([1.0] * len(ids), abs=1e-5)
    assert not drawn.top_logprobs[~drawn.mask].any()


def test_batching_moves_no_record():
    model = tiny_model(3)
    decoding = Decoding(1.0, 1.0, 16, record_top=4)
    prompts = [PROMPTS[i % 4] for i in range(16)]
    together, alone = (sampler(model, n).draw(prompts, 2, decoding, seed=7) for n in (1024, 1))
    assert together.top_ids is not None
    assert alone.top_ids is not None
    assert together.mask.sum(1).min() <= 4  # rows left the batch on the way
    assert torch.equal(together.top_ids, alone.top_ids)
    torch.testing.assert_close(together.top_logprobs, alone.top_logprobs, rtol=0, atol=2e-5)


# -- scoring --------------------------------------------------------------------------------------


def test_the_policys_view_of_them_comes_from_the_same_pass():
    model, passes = double_model(1), []
    model.register_forward_hook(lambda *_: passes.append(1))
    policy = Policy(model, TEMPERATURE)
    x = sampled_by(double_model(2), ragged(left=2, right=3), K)
    chosen, top = policy.logprobs_and_top(x)
    assert len(passes) == 1
    assert torch.equal(chosen, policy.logprobs(x))
    assert chosen.requires_grad
    assert top is not None
    assert not top.requires_grad
    assert top.shape == (*x.mask.shape, K)
    assert not top[~x.mask].any()
    assert x.top_ids is not None
    inside = 0
    for row in range(len(x)):
        prompt, ids = row_of(x, row)
        n, named = len(ids), x.top_ids[row, : len(ids)]
        full = dense(model, prompt, ids, TEMPERATURE)
        torch.testing.assert_close(top[row, :n], full.gather(1, named), rtol=0, atol=1e-12)
        same = named == ids[:, None]  # the sampled token has one log-prob, to the last bit
        assert torch.equal(top[row, :n][same], chosen[row, :n, None].expand(n, K)[same])
        inside += int(same.sum())
    assert 0 < inside < int(x.mask.sum())


def test_without_a_record_nothing_is_looked_up():
    policy, x = Policy(double_model(1), TEMPERATURE), ragged()
    chosen, top = policy.logprobs_and_top(x)
    assert top is None
    logits = policy.model(
        input_ids=torch.cat([x.prompt_ids, x.completion_ids], 1),
        attention_mask=torch.cat([x.prompt_mask, x.mask], 1).long(),
        position_ids=(torch.cat([x.prompt_mask, x.mask], 1).long().cumsum(1) - 1).clamp(min=0),
    ).logits[:, x.prompt_ids.shape[1] - 1 : -1]
    plain = token_logprobs(logits, x.completion_ids, x.mask, TEMPERATURE)
    torch.testing.assert_close(chosen, plain, rtol=0, atol=1e-12)


def test_records_are_cut_and_joined_with_their_rows():
    model = tiny_model()
    parts = []
    for limit, seed in ((3, 1), (8, 2)):
        drawn = sampler(model).draw(PROMPTS, 2, Decoding(1.0, 1.0, limit, record_top=4), seed)
        x = as_rollout(drawn, 2)
        parts.append(dataclasses.replace(x, top_ids=drawn.top_ids, top_logprobs=drawn.top_logprobs))
    both = join(parts)
    assert both.top_ids is not None
    assert both.top_ids.shape == (16, 8, 4)
    for offset, part in ((0, parts[0]), (8, parts[1])):
        assert part.top_ids is not None
        for row in range(8):
            one = trim(both.select(torch.tensor([offset + row])))
            n = int(part.mask[row].sum())
            assert one.top_ids is not None
            assert one.top_logprobs is not None
            assert torch.equal(one.top_ids[0], part.top_ids[row, :n])
            assert torch.equal(one.top_logprobs[0], part.top_logprobs[row, :n])  # type: ignore[index]


# -- learning -------------------------------------------------------------------------------------


@every_arm
def test_neither_micro_batches_nor_padding_move_a_step(arm):
    """Prefix sums and quantiles end where their completions end."""
    whole = off_policy(arm)
    expected = update(whole)
    assert 0 < expected["clip_fraction_high"] + expected["clip_fraction_low"] < 1
    for t in (off_policy(arm, micro_batch=3), off_policy(arm, left=3, right=5, garbage=9)):
        assert update(t) == pytest.approx(expected, abs=1e-9)
        assert float((weights(t.learner) - weights(whole.learner)).abs().max()) < 1e-9


def divergence_by_hand(kind: str, mu: list[float], pi: list[float], top: int, sampled: int):
    """Over the K likeliest under mu, the sampled token, and what is left."""
    likeliest = sorted(range(len(mu)), key=lambda v: -mu[v])[:top]
    chosen = {*likeliest, sampled}
    pairs = [(mu[v], pi[v]) for v in chosen]
    rest = [v for v in range(len(mu)) if v not in chosen]
    pairs.append((sum(mu[v] for v in rest), sum(pi[v] for v in rest)))
    if kind == "tv":
        return sum(abs(p - q) for p, q in pairs) / 2
    return sum(p * math.log(p / q) for p, q in pairs)


def gate_by_hand(arm: Arm, moved: list[float], away: list[bool]) -> list[float]:
    """DPPO's mask, CPPO's Algorithm 1, its soft form, and TRM's mask, token by token."""
    D, n, clip = moved, len(moved), arm.clip
    if isinstance(clip, SequenceMask):
        return [float(max(D) <= 0.9 and sum(D) / n <= 0.4)] * n
    if type(clip) is DivergenceMask:
        return [float(not (a and d > clip.delta)) for a, d in zip(away, D, strict=True)]
    ordered = sorted(D)
    at = 0.9 * (n - 1)
    p90 = ordered[int(at)] + (at - int(at)) * (ordered[min(int(at) + 1, n - 1)] - ordered[int(at)])
    budget = 0.015 if arm.name.endswith("fixed") else min(max(p90, 0.02), 0.04)
    found, S, W = [], 0.0, 0.0
    for t in range(n):
        w = 1 - 0.2 * t / (n - 1) if n > 1 else 1.0
        Z = w * D[t]
        if isinstance(clip, PrefixGate):
            over = max(Z / 0.15, (S + Z) / (0.15 + budget * W))
            found.append(min(1.0, 1 / over) if away[t] and over > 0 else 1.0)
        else:
            found.append(float(not (away[t] and min(0.15, 0.15 + budget * W - S) < Z)))
        S, W = S + Z, W + w
    return found


@every_arm
def test_the_gradient_is_that_of_the_papers_written_out(arm):
    """-sum of weight x M x min(r, C) x A x grad log pi, from whole distributions of two models."""
    t, top = off_policy(arm), arm.clip.top_k or 0
    x, model, mu_model = t.batch, t.learner.policy.model, near(double_model(1))
    kind = "kl" if "kl" in arm.name or "trm" in arm.name else "tv"
    group_scaled = arm.name.startswith("cppo")
    tokens = int(x.mask.sum())
    cap = 1.5 if arm.name.endswith("capped") else math.inf
    loss, clipped, outside = torch.zeros((), dtype=torch.float64), 0, 0
    for row in range(len(x)):
        prompt, ids = row_of(x, row)
        A = float(x.score[row]) - 0.5  # each group holds two right and two wrong
        A = A / (0.5 + 1e-6) if group_scaled else A
        mus = dense(mu_model, prompt, ids, TEMPERATURE).exp().tolist()
        logits = model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        logpi = (logits / TEMPERATURE).log_softmax(1)
        pis = logpi.detach().exp().tolist()
        actions = ids.tolist()
        D = [
            divergence_by_hand(kind, m, p, top, a)
            for m, p, a in zip(mus, pis, actions, strict=True)
        ]
        r = [p[a] / m[a] for m, p, a in zip(mus, pis, actions, strict=True)]
        gate = gate_by_hand(arm, D, [A * (u - 1) > 0 for u in r])
        for i, a in enumerate(actions):
            share = 1 / tokens if group_scaled else 1 / (8 * LIMIT)
            loss = loss - share * gate[i] * min(r[i], cap) * A * logpi[i, a]
            clipped += gate[i] < 1
            outside += a not in sorted(range(VOCABULARY), key=lambda v: -mus[i][v])[:top]
    expected = torch.autograd.grad(loss, t.learner.policy.parameters())
    minibatch = arm.weigh(x, max_new_tokens=LIMIT)
    chosen, seen = t.learner.policy.logprobs_and_top(minibatch)
    ours, stats = arm.policy_loss(minibatch, chosen, 0.0, seen)
    got = torch.autograd.grad(ours, t.learner.policy.parameters())
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    cut = stats["sum/clip_fraction_high"] + stats["sum/clip_fraction_low"]
    assert int(cut) == clipped
    assert 0 < clipped < tokens
    assert outside > 0


# -- the loop -------------------------------------------------------------------------------------


def every_third(indices: list[int], drawn: Drawn, seed: int):
    """Verdicts by row, whatever was written."""
    correct = torch.tensor([row % 3 == 0 for row in range(len(indices))])
    verdicts = [Verdict(Outcome.CORRECT if c else Outcome.WRONG, "1") for c in correct.tolist()]
    return verdicts, correct.float(), torch.zeros(len(correct)), correct


@pytest.mark.parametrize("arm", [CPPO, DPPO_TOPK_TV], ids=lambda arm: arm.name)
def test_an_arm_that_asks_learns_from_what_was_recorded(arm):
    """Nothing is cut on the policy that sampled; further epochs on the same batch are."""
    options: dict[str, Any] = {"limit": 1000, "judge": every_third}
    loop = make_loop(arm, **options, optimizer={"minibatches": 1})
    rollout = collect(make_loop(arm), {})
    assert rollout is not None
    assert rollout.top_ids is not None
    assert rollout.top_ids.shape == (*rollout.mask.shape, VOCABULARY)  # 20 were asked for
    first = step(loop)
    assert first["clip_fraction_high"] == first["clip_fraction_low"] == 0
    assert first["grad_norm"] > 0
    reuse = {"minibatches": 1, "epochs": 6, "learning_rate": 1e-2}
    again = make_loop(arm, **options, optimizer=reuse)
    before = weights(again.learner)
    cut = [step(again) for _ in range(3)]
    assert sum(r["clip_fraction_high"] + r["clip_fraction_low"] for r in cut) > 0
    assert float((weights(again.learner) - before).abs().max()) > 1e-3


def test_an_arm_that_does_not_ask_records_nothing():
    rollout = collect(make_loop(GRPO), {})
    assert rollout is not None
    assert rollout.top_ids is rollout.top_logprobs is None
    asked = collect(make_loop(CPPO), {})
    assert asked is not None
    assert torch.equal(asked.completion_ids, rollout.completion_ids)
    assert torch.equal(asked.behaviour_logprobs, rollout.behaviour_logprobs)
