"""Clip rules that bound how far the distribution has moved, rather than the ratio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.parts.clip import Clip
from harness.parts.divergence import Divergence, TotalVariation
from harness.types import Tokens


@dataclass(frozen=True)
class DivergenceMask(Clip):
    """ratio x A, without gradient where a token has moved away by more than ``delta`` (DPPO).

    A token moves away where A > 0 and ratio > 1, or A < 0 and ratio < 1; one that moves back
    towards the policy that sampled is never blocked (arXiv:2602.04879). The ratio's denominator is
    that policy: give the arm ``TokenRatio(anchor="behaviour")``. ``ratio_cap`` C bounds the weight
    of the gradient at min(ratio, C); None, as in the paper's stability study, leaves it open.
    """

    version: ClassVar[int] = 1
    divergence: Divergence = field(default_factory=TotalVariation)
    delta: float = 0.15
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

    @torch.no_grad()
    def gate(
        self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], x: Tokens
    ) -> Float[Tensor, "B T"]:
        """The share of each token's gradient that is let through."""
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
    """One number for all (CPPO, post-trained 1.7B models: 0.015)."""

    version: ClassVar[int] = 1
    delta_b: float = 0.015

    def __call__(
        self, divergence: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B 1"]:
        return torch.full_like(divergence[:, :1], self.delta_b)


@dataclass(frozen=True)
class AdaptiveBudget(Budget):
    """A quantile of the completion's divergences, within [floor, 2 floor] (CPPO, base models)."""

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
        divergence = self.divergence(x)
        Z, S, W = self.drift(divergence, x.mask)
        delta_b = self.budget(divergence, x.mask)
        threshold = (self.delta + delta_b * W - S).clamp(max=self.delta)
        return (~(moves_away(ratio, advantages) & (threshold < Z))).to(ratio)

    def drift(
        self, divergence: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Z of each token, and the sums of Z and of w over the tokens before it."""
        steps = torch.arange(mask.shape[1], device=mask.device).to(divergence)
        last = (mask.sum(1, keepdim=True) - 1).clamp(min=1)
        w = (1 - (1 - self.w_min) * steps / last) * mask
        Z = w * divergence
        return Z, Z.cumsum(1) - Z, w.cumsum(1) - w


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
        divergence = self.divergence(x)
        Z, S, W = self.drift(divergence, x.mask)
        budget = self.delta + self.budget(divergence, x.mask) * W
        share = soft_gate(Z / self.delta, (S + Z) / budget)
        return torch.where(moves_away(ratio, advantages), share, torch.ones_like(share))


def soft_gate(token: Tensor, prefix: Tensor) -> Tensor:
    """min(1, 1/x) of the larger overdraft x."""
    return 1 / torch.maximum(token, prefix).clamp(min=1.0)
