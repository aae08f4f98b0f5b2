"""Clip rules that bound how far the distribution has moved, rather than the ratio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.parts.clip import Clip
from harness.parts.divergence import Divergence, KullbackLeibler, TotalVariation
from harness.types import Tokens


@dataclass(frozen=True)
class DivergenceGate(Clip):
    """ratio x A, let through by a gate that looks at divergences and passes no gradient itself.

    The ratio's denominator is the policy that sampled: give the arm
    ``TokenRatio(anchor="behaviour")``. ``ratio_cap`` C bounds the weight of the gradient at
    min(ratio, C); None leaves it open.
    """

    divergence: Divergence = field(default_factory=TotalVariation)
    ratio_cap: float | None = None

    @property
    def top_k(self) -> int | None:
        return self.divergence.top_k

    def __call__(
        self,
        ratio: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        x: Tokens,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        gate = self.gate(ratio.detach(), advantages, x)
        return gate * capped(ratio, self.ratio_cap, x) * advantages, gate < 1

    @abstractmethod
    def gate(
        self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], x: Tokens
    ) -> Float[Tensor, "B T"]:
        """The share of each token's gradient that is let through, in [0, 1]."""


@dataclass(frozen=True)
class DivergenceMask(DivergenceGate):
    """No gradient where a token has moved away by more than ``delta`` (DPPO, arXiv:2602.04879).

    A token moves away where A > 0 and ratio > 1, or A < 0 and ratio < 1; one that moves back
    towards the policy that sampled is never blocked. The paper's stability study has no cap, its
    scaling runs one of 5.
    """

    version: ClassVar[int] = 1
    delta: float = 0.15

    @torch.no_grad()
    def gate(
        self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], x: Tokens
    ) -> Float[Tensor, "B T"]:
        blocked = moves_away(ratio, advantages) & (self.divergence(x) > self.delta)
        return (~blocked).to(ratio)


def moves_away(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]
) -> Bool[Tensor, "B T"]:
    """Where a step along the gradient leads further from the policy that sampled."""
    return advantages * (ratio - 1) > 0


def capped(ratio: Float[Tensor, "B T"], cap: float | None, x: Tokens) -> Float[Tensor, "B T"]:
    """min(ratio, cap) in value, and times grad log pi in gradient: a cap does not stop it."""
    if cap is None:
        return ratio
    return ratio.detach().clamp(max=cap) * (1 + x.logprobs - x.logprobs.detach())


@dataclass(frozen=True)
class Budget(ABC):
    """What a completion may drift per weighted token."""

    @abstractmethod
    def __call__(
        self, divergence: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B 1"]:
        """delta_b of each completion."""


@dataclass(frozen=True)
class FixedBudget(Budget):
    """One number for all (CPPO, post-trained 1.7B models: 0.015); None for no budget at all."""

    version: ClassVar[int] = 1
    delta_b: float | None = 0.015

    def __call__(
        self, divergence: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B 1"]:
        return torch.full_like(divergence[:, :1], inf if self.delta_b is None else self.delta_b)


@dataclass(frozen=True)
class AdaptiveBudget(Budget):
    """A quantile of the completion's divergences, within [floor, 2 floor] (CPPO, base models).

    Of all its tokens, unweighted; linear between order statistics.
    """

    version: ClassVar[int] = 1
    floor: float = 0.02
    quantile: float = 0.9

    def __call__(
        self, divergence: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B 1"]:
        real = divergence.masked_fill(~mask, float("nan"))
        found = torch.nanquantile(real, self.quantile, dim=1, keepdim=True)
        return found.nan_to_num(self.floor).clamp(self.floor, 2 * self.floor)


@dataclass(frozen=True)
class PrefixBudget(DivergenceMask):
    """DPPO's mask under a budget for what the tokens before have drifted (CPPO, 2606.10968).

    With w_t from 1 at the first token down to ``w_min`` at the last, Z_t = w_t D_t, and S, W the
    sums of Z and w before t, a token that moves away is kept while
    Z_t <= min(delta, delta + delta_b W - S). All tokens add to S, masked ones and those that move
    back too. Not the completion-pruning CPPO of 2025.
    """

    version: ClassVar[int] = 1
    budget: Budget = field(default_factory=AdaptiveBudget)
    w_min: float = 0.8

    @torch.no_grad()
    def gate(
        self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], x: Tokens
    ) -> Float[Tensor, "B T"]:
        Z, S, allowed = self.drift(self.divergence(x), x.mask)
        threshold = (allowed - S).clamp(max=self.delta)
        return (~(moves_away(ratio, advantages) & (threshold < Z))).to(ratio)

    def drift(
        self, divergence: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Z of each token, S before it, and delta + delta_b W, which S may reach."""
        w = self.weights(mask).to(divergence)
        Z, W = w * divergence, w.cumsum(1) - w
        # No weight stands before the first token, and without a budget inf x 0 would be no number.
        earned = torch.where(W > 0, self.budget(divergence, mask) * W, torch.zeros_like(W))
        return Z, Z.cumsum(1) - Z, self.delta + earned

    def weights(self, mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """w_t: from 1 at a completion's first token down to ``w_min`` at its last; 0 on padding."""
        steps = mask.cumsum(1, dtype=torch.float64) - 1  # counts sampled tokens, not places
        last = (mask.sum(1, keepdim=True) - 1).clamp(min=1)
        return (1 - (1 - self.w_min) * steps / last) * mask


@dataclass(frozen=True)
class PrefixGate(PrefixBudget):
    """CPPO's soft form: an overdrawn token keeps min(1, 1/x) of its gradient.

    x = max(Z_t / delta, S_t / (delta + delta_b W_{t-1})), where S_t includes the token itself.
    """

    version: ClassVar[int] = 1

    @torch.no_grad()
    def gate(
        self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], x: Tokens
    ) -> Float[Tensor, "B T"]:
        Z, S, allowed = self.drift(self.divergence(x), x.mask)
        share = soft_gate(Z / self.delta, (S + Z) / allowed)
        return torch.where(moves_away(ratio, advantages), share, torch.ones_like(share))


def soft_gate(token: Float[Tensor, "B T"], prefix: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """min(1, 1/x) of the larger overdraft x."""
    return 1 / torch.maximum(token, prefix).clamp(min=1.0)


@dataclass(frozen=True)
class SequenceMask(DivergenceGate):
    """Whole completions without gradient that have diverged too far (TRM, arXiv:2512.23075).

    Dropped where any token's divergence exceeds ``delta_max``, or their mean ``delta_mean``, in
    whichever direction it moved; None leaves a test out. The paper's divergence is the exact
    KL(mu || pi); those of categories are lower bounds of it. A dropped completion counts as zeros:
    the loss is still divided by all. The defaults are the paper's thresholds as others quote them.
    """

    version: ClassVar[int] = 1
    divergence: Divergence = field(default_factory=KullbackLeibler)
    delta_max: float | None = 0.05
    delta_mean: float | None = 0.001

    @torch.no_grad()
    def gate(
        self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], x: Tokens
    ) -> Float[Tensor, "B T"]:
        divergence = self.divergence(x).masked_fill(~x.mask, 0.0)
        largest = divergence.amax(1, keepdim=True)
        mean = divergence.sum(1, keepdim=True) / x.mask.sum(1, keepdim=True).clamp(min=1)
        keep = largest <= (inf if self.delta_max is None else self.delta_max)
        keep &= mean <= (inf if self.delta_mean is None else self.delta_mean)
        return keep.to(ratio).expand_as(ratio)
