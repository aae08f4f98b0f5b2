"""How far the policy has moved from the one that sampled, token by token.

The exact divergence needs both whole distributions. What is computed here merges tokens into
categories, which can only lower it (DPPO, arXiv:2602.04879): the sampled token and all others
(binary), or the engine's K likeliest, the sampled one and all others (top-K).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from harness.errors import InputError
from harness.types import Tokens


@dataclass(frozen=True)
class Divergence(ABC):
    """``top_k``: how many of the engine's likeliest tokens are categories; None for binary.

    Raises:
        InputError: a ``top_k`` below 1.
    """

    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise InputError(
                f"{type(self).__name__}: top_k {self.top_k} compares no tokens; give 1 or more, or "
                "None for the sampled token against all others"
            )

    @abstractmethod
    def __call__(self, x: Tokens) -> Float[Tensor, "B T"]:
        """D(mu, pi) of each token, without gradient; 0 on padding."""


@dataclass(frozen=True)
class TotalVariation(Divergence):
    """Half the sum of |mu - pi| over the categories."""

    version: ClassVar[int] = 1

    def __call__(self, x: Tokens) -> Float[Tensor, "B T"]:
        mu, pi = categories(x, self.top_k)
        return ((mu - pi).abs().sum(2) / 2).masked_fill(~x.mask, 0.0)


@dataclass(frozen=True)
class KullbackLeibler(Divergence):
    """KL(mu || pi) over the categories, in nats; ``floor`` bounds probabilities in the log."""

    version: ClassVar[int] = 1
    floor: float = 1e-12

    def __call__(self, x: Tokens) -> Float[Tensor, "B T"]:
        mu, pi = categories(x, self.top_k)
        log_ratio = mu.clamp(min=self.floor).log() - pi.clamp(min=self.floor).log()
        return (mu * log_ratio).sum(2).masked_fill(~x.mask, 0.0)


@torch.no_grad()
def categories(
    x: Tokens, top_k: int | None
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B T C"]]:
    """Probabilities under mu and pi: of the K likeliest, of the sampled token, of all others.

    A sampled token that is one of the K has an empty category of its own.

    Raises:
        ValueError: top-K categories, and the rollout recorded none.
    """
    mu, pi = x.anchor_logprobs.exp()[:, :, None], x.logprobs.detach().exp()[:, :, None]
    if top_k is None:
        return torch.cat([mu, 1 - mu], 2), torch.cat([pi, 1 - pi], 2)
    if x.top_logprobs is None or x.anchor_top_logprobs is None or x.sampled_in_top is None:
        raise ValueError("a top-K divergence without recorded top-K log-probs")
    outside = (~x.sampled_in_top)[:, :, None].to(mu)
    mu = torch.cat([x.anchor_top_logprobs.exp(), outside * mu], 2)
    pi = torch.cat([x.top_logprobs.detach().exp(), outside * pi], 2)
    rest_mu = (1 - mu.sum(2, keepdim=True)).clamp(min=0)
    rest_pi = (1 - pi.sum(2, keepdim=True)).clamp(min=0)
    return torch.cat([mu, rest_mu], 2), torch.cat([pi, rest_pi], 2)
