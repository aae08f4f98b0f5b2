"""Divergences, and the rules that bound them: DPPO and CPPO, against the reference numbers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import InputError
from harness.parts.clip import PPOClip
from harness.parts.divergence import Divergence, KullbackLeibler, TotalVariation
from harness.parts.trust_region import (
    AdaptiveBudget,
    DivergenceMask,
    FixedBudget,
    PrefixBudget,
    PrefixGate,
    SequenceMask,
    soft_gate,
)
from harness.types import Tokens
from tests.rules import tokens


def row(*values: float) -> torch.Tensor:
    return torch.tensor([list(values)], dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class Given(Divergence):
    """Divergences as a vector states them."""

    version: ClassVar[int] = 1
    values: tuple[float, ...] = ()

    def __call__(self, x: Tokens) -> torch.Tensor:
        return row(*self.values).expand_as(x.logprobs)


@dataclasses.dataclass(frozen=True)
class Rows(Divergence):
    """Divergences of several completions."""

    version: ClassVar[int] = 1
    values: tuple[tuple[float, ...], ...] = ()

    def __call__(self, x: Tokens) -> torch.Tensor:
        return torch.tensor(self.values, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class FromRatio(Divergence):
    """|ratio - 1|, with which DPPO's mask is PPO's clip."""

    version: ClassVar[int] = 1

    def __call__(self, x: Tokens) -> torch.Tensor:
        return ((x.logprobs - x.anchor_logprobs).exp() - 1).abs().detach()


def seen(ratio: torch.Tensor) -> Tokens:
    return tokens(ratio.log() - 3.0, torch.full_like(ratio, -3.0))


def test_dppo_binary(golden):
    v = golden("dppo_binary_masks")
    x, expected = v["inputs"], v["expected"]
    mu, pi, advantages = row(*x["mu"]), row(*x["pi"]), row(*x["advantages"])
    ratio, view = pi / mu, tokens(pi.log(), mu.log())
    assert ratio[0].tolist() == pytest.approx(expected["ratio"])
    for name, divergence in (("tv", TotalVariation()), ("kl", KullbackLeibler())):
        got = divergence(view)[0].tolist()
        assert got == pytest.approx(expected[f"binary_{name}"], rel=v["tolerance"])
        part = DivergenceMask(divergence=divergence, delta=x[f"delta_{name}"])
        objective, cut = part(ratio, advantages, view)
        keep = torch.tensor([expected[f"keep_{name}"]])
        assert torch.equal(cut, ~keep)
        assert torch.allclose(objective, ratio * advantages * keep, rtol=1e-12)
    _, cut = PPOClip(clip_low=x["eps"], clip_high=x["eps"])(ratio, advantages, view)
    assert (~cut)[0].tolist() == expected["keep_ppo"]


def top(mu: list[float], pi: list[float], k: int, sampled: int) -> Tokens:
    """One token, its engine's K likeliest recorded."""
    p, q = torch.tensor(mu, dtype=torch.float64), torch.tensor(pi, dtype=torch.float64)
    best = p.topk(k).indices
    return dataclasses.replace(
        tokens(q[sampled].log().reshape(1, 1), p[sampled].log().reshape(1, 1)),
        top_logprobs=q[best].log().reshape(1, 1, k),
        anchor_top_logprobs=p[best].log().reshape(1, 1, k),
        sampled_in_top=torch.tensor([[sampled in best.tolist()]]),
    )


def test_top_k_divergence(golden):
    v = golden("dppo_topk_reduced_tv")
    x, expected = v["inputs"], v["expected"]
    view = top(x["mu"], x["pi"], x["K"], x["sampled_index"])
    tolerance = v["tolerance"]
    assert TotalVariation(top_k=x["K"])(view).item() == pytest.approx(expected["tv_topk"])
    assert TotalVariation()(view).item() == pytest.approx(expected["tv_binary"], rel=tolerance)
    kl = KullbackLeibler(top_k=x["K"])(view).item()
    assert kl == pytest.approx(expected["kl_topk"], rel=tolerance)
    whole = top(x["mu"], x["pi"], len(x["mu"]), x["sampled_index"])
    assert TotalVariation(top_k=5)(whole).item() == pytest.approx(expected["tv_full"])


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(0, 5))
def test_merging_tokens_lowers_a_divergence(seed: int, k: int, sampled: int):
    """Binary <= top-K <= exact, and top-K of the whole vocabulary is exact."""
    rng = torch.Generator().manual_seed(seed)
    mu, pi = (torch.rand(6, generator=rng, dtype=torch.float64) + 0.01 for _ in range(2))
    mu, pi = mu / mu.sum(), pi / pi.sum()
    view = top(mu.tolist(), pi.tolist(), k, sampled)
    exact = {"tv": (mu - pi).abs().sum() / 2, "kl": (mu * (mu / pi).log()).sum()}
    for name, part in (("tv", TotalVariation), ("kl", KullbackLeibler)):
        few, many = part()(view).item(), part(top_k=k)(view).item()
        assert few <= many + 1e-12
        assert many <= exact[name].item() + 1e-12
        if k == 6:
            assert many == pytest.approx(exact[name].item(), abs=1e-9)


@given(
    st.lists(st.floats(0.2, 3.0), min_size=4, max_size=4),
    st.lists(st.sampled_from([-1.5, -0.5, 0.5, 2.0]), min_size=4, max_size=4),
    st.sampled_from([0.1, 0.2, 0.5]),
)
def test_dppo_with_the_ratio_as_divergence_is_ppo(ratios, advantages, eps):
    """Mask and gradient; the objective's value where a token is cut is PPO's constant."""
    gradients = []
    for part in (PPOClip(eps, eps), DivergenceMask(divergence=FromRatio(), delta=eps)):
        ratio = row(*ratios).requires_grad_()
        objective, cut = part(ratio, row(*advantages), seen(ratio))
        (gradient,) = torch.autograd.grad(objective.sum(), ratio)
        # On the very edge, and up to the rounding of exp(log r), both answers are right.
        away = (row(*ratios) - 1).abs().sub(eps).abs() > 1e-9
        gradients.append((gradient[away].tolist(), cut[away].tolist()))
    assert gradients[0] == gradients[1]


@pytest.mark.parametrize("part", [TotalVariation, KullbackLeibler])
def test_no_tokens_are_nothing_to_compare(part):
    with pytest.raises(InputError, match="top_k 0 compares no tokens; give 1 or more"):
        part(top_k=0)


def test_a_capped_ratio_keeps_its_gradient():
    """min(r, C) A grad log pi: the cap bounds the weight and does not cut the token."""
    logprobs = row(-1.0, -1.0).requires_grad_()
    anchor = row(-3.0, -1.1)
    ratio = (logprobs - anchor).exp()
    part = DivergenceMask(divergence=Given(values=(0.0, 0.0)), ratio_cap=5.0)
    objective, cut = part(ratio, row(2.0, 2.0), tokens(logprobs, anchor))
    (gradient,) = torch.autograd.grad(objective.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx([2 * 5.0, 2 * 2.718281828459045**0.1])
    assert objective[0].tolist() == pytest.approx(gradient[0].tolist())
    assert not cut.any()


@pytest.mark.parametrize(
    "name",
    [
        "cppo_mask_six_tokens",
        "cppo_mask_quiet_prefix_then_late_spike",
        "cppo_reduces_to_dppo",
        "cppo_single_token",
    ],
)
def test_cppo_mask(golden, name):
    v = golden(name)
    x, expected = v["inputs"], v["expected"]
    divergence = Given(values=tuple(x["D"]))
    part = PrefixBudget(
        divergence=divergence, delta=x["delta"], w_min=x["w_min"], budget=FixedBudget(x["delta_b"])
    )
    ratio, advantages = row(*x["ratios"]), row(*x["advantages"])
    _, cut = part(ratio, advantages, seen(ratio))
    assert (~cut)[0].tolist() == expected["keep"]
    mask = torch.ones_like(ratio, dtype=torch.bool)
    Z, S, allowed = part.drift(row(*x["D"]), mask)
    near = {"rel": v["tolerance"], "abs": v["tolerance"]}
    if "w" in expected:
        assert part.weights(mask)[0].tolist() == pytest.approx(expected["w"], **near)
    if "Z" in expected:
        assert Z[0].tolist() == pytest.approx(expected["Z"], **near)
        assert (S + Z)[0, -1].item() == pytest.approx(expected["S_final"], **near)
        W_final = (allowed[0, -1] - x["delta"]).item() / x["delta_b"] + expected["w"][-1]
        assert W_final == pytest.approx(expected["W_final"], **near)
    if "c" in expected:
        c = (allowed - S).clamp(max=x["delta"])
        assert c[0].tolist() == pytest.approx(expected["c"], **near)
    if "dppo_keep" in expected:
        _, cut = DivergenceMask(divergence=divergence, delta=x["delta"])(
            ratio, advantages, seen(ratio)
        )
        assert (~cut)[0].tolist() == expected["dppo_keep"]


@given(
    st.lists(st.floats(0.2, 3.0), min_size=5, max_size=5),
    st.lists(st.sampled_from([-1.5, 0.0, 0.5]), min_size=5, max_size=5),
    st.sampled_from([0.05, 0.15, 0.4]),
)
def test_cppo_without_weights_and_budget_is_dppo(ratios, advantages, delta):
    """Mask and gradient, the first token included, where no weight stands before."""
    ratio, A = row(*ratios), row(*advantages)
    uniform = {"divergence": TotalVariation(), "delta": delta}
    found = []
    for part in (
        DivergenceMask(**uniform),
        PrefixBudget(**uniform, w_min=1.0, budget=FixedBudget(None)),
        PrefixBudget(**uniform, w_min=1.0, budget=FixedBudget(1e9)),
    ):
        logprobs = (ratio.log() - 1.2).requires_grad_()
        anchor = torch.full_like(ratio, -1.2)
        objective, cut = part((logprobs - anchor).exp(), A, tokens(logprobs, anchor))
        (gradient,) = torch.autograd.grad(objective.sum(), logprobs)
        found.append((gradient.tolist(), cut.tolist()))
    assert found[0] == found[1] == found[2]


def test_without_a_budget_the_soft_form_sees_tokens_alone():
    part = PrefixGate(divergence=Given(values=(0.3,) * 3), budget=FixedBudget(None), w_min=1.0)
    ratio = row(1.5, 1.5, 1.5)
    got = part.gate(ratio, row(1.0, -1.0, 1.0), seen(ratio))
    # S_1 is the token's own 0.3, against delta alone; later ones have no end of budget.
    assert got[0].tolist() == pytest.approx([0.5, 1.0, 0.5])


def test_cppo_adaptive_budget(golden):
    v = golden("cppo_adaptive_delta_b")
    budget = AdaptiveBudget(floor=v["inputs"]["delta_b_min"])
    for name, values in v["inputs"]["D"].items():
        padded = row(*values, float("nan"), 9.0)
        mask = torch.arange(padded.shape[1])[None] < len(values)
        got = budget(padded, mask).item()
        assert got == pytest.approx(v["expected"][name]["delta_b"], rel=v["tolerance"]), name


def test_cppo_soft_gate(golden):
    v = golden("cppo_soft_gate")
    token, prefix = (row(*v["inputs"][key]) for key in ("Z_over_delta", "S_over_budget"))
    assert soft_gate(token, prefix)[0].tolist() == pytest.approx(v["expected"]["gate"])


def test_the_soft_form_shrinks_what_the_hard_one_cuts():
    """D .3 at delta .15, on tokens that move away, back, and away again, by hand.

    Weights 1, .9, .8 (w_min .8): Z .3, .27, .24; S .3, .57, .81; delta_b W 0, .02, .038.
    """
    part = PrefixGate(divergence=Given(values=(0.3,) * 3), budget=FixedBudget(0.02), w_min=0.8)
    ratio = row(1.5, 0.5, 1.5)
    got = part.gate(ratio, row(1.0, 1.0, 1.0), seen(ratio))
    third = max(0.24 / 0.15, 0.81 / (0.15 + 0.02 * 1.9))
    assert got[0].tolist() == pytest.approx([0.5, 1.0, 1 / third])


def test_a_prefix_ends_with_its_completion():
    """Padding changes neither the weights' slope nor the sums."""
    part = PrefixBudget(divergence=FromRatio(), budget=AdaptiveBudget(), w_min=0.8)
    ratio = row(1.05, 1.1, 0.8)
    alone = part.gate(ratio, row(1.0, 1.0, 1.0), seen(ratio))
    padded = torch.cat([ratio, row(7.0, 7.0)], 1)
    mask = torch.tensor([[True, True, True, False, False]])
    view = dataclasses.replace(seen(padded), mask=mask)
    view = dataclasses.replace(
        view, logprobs=view.logprobs * mask, anchor_logprobs=view.anchor_logprobs * mask
    )
    got = part.gate(padded, row(1.0, 1.0, 1.0, 0.0, 0.0), view)
    assert got[0, :3].tolist() == alone[0].tolist()


def test_trm_drops_whole_completions(golden):
    v = golden("trm_sequence_masks")
    x, expected = v["inputs"], v["expected"]
    kl = tuple(tuple(r) for r in x["token_kl"])
    ratio = torch.tensor([[1.1, 0.9, 2.0], [0.5, 1.2, 1.0]], dtype=torch.float64)
    A = torch.tensor([[1.0, 1.0, -1.0], [-1.0, 2.0, 1.0]], dtype=torch.float64)
    for keep, bounds in (
        (expected["keep_max"], {"delta_max": x["delta_max"], "delta_mean": None}),
        (expected["keep_avg"], {"delta_max": None, "delta_mean": x["delta_avg"]}),
        ([True, True], {"delta_max": None, "delta_mean": None}),
    ):
        objective, cut = SequenceMask(divergence=Rows(values=kl), **bounds)(ratio, A, seen(ratio))
        assert (~cut).tolist() == [[k] * 3 for k in keep]
        assert torch.equal(objective, ratio * A * torch.tensor(keep)[:, None])


@pytest.mark.parametrize(("bound", "kept"), [(0.0501, True), (0.0499, False)])
def test_trm_averages_over_the_tokens_of_a_completion(bound, kept):
    """The second row of the vector, mean 0.05, followed by padding that would move both tests."""
    part = SequenceMask(
        divergence=Rows(values=((0.04, 0.05, 0.06, 9.0, 0.0),)), delta_max=1.0, delta_mean=bound
    )
    ratio = row(1.1, 0.9, 1.0, 1.0, 1.0)
    mask = torch.tensor([[True, True, True, False, False]])
    gate = part.gate(ratio, torch.ones_like(ratio), dataclasses.replace(seen(ratio), mask=mask))
    assert gate[0, :3].tolist() == [float(kept)] * 3


def test_a_published_table_is_what_its_columns_average_to(golden):
    """AIME 24/25/26 of CPPO's Table: the single numbers quoted are means over three sets."""
    v = golden("cppo_table_arithmetic")
    for name, scores in v["inputs"]["aime24_25_26"].items():
        assert sum(scores) / 3 == pytest.approx(v["expected"][name], abs=v["tolerance"])
