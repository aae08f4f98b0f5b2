"""What the importance ratio is a ratio of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Ratio(ABC):
    """pi over its denominator, one number a token.

    ``anchor``: the denominator. ``old``: the trainer's policy before this step's updates;
    ``behaviour``: the log-probs of the engine that sampled. In exact arithmetic they agree.
    """

    anchor: Literal["old", "behaviour"] = "old"

    @abstractmethod
    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        anchor_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """The ratio; 1 on padding."""


@dataclass(frozen=True)
class TokenRatio(Ratio):
    """Each token's own ratio (PPO; GRPO as DeepSeekMath writes it)."""

    version: ClassVar[int] = 1

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        anchor_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        return _delta(logprobs, anchor_logprobs, mask).exp()


@dataclass(frozen=True)
class SequenceRatio(Ratio):
    """The geometric mean of a completion's token ratios (GSPO, arXiv:2507.18071)."""

    version: ClassVar[int] = 1

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        anchor_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        delta = _delta(logprobs, anchor_logprobs, mask)
        mean = delta.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return torch.where(mask, mean.exp(), torch.ones_like(delta))


@dataclass(frozen=True)
class ProductRatio(Ratio):
    """The product of a completion's token ratios: that of the whole completion (TRL's RLOO)."""

    version: ClassVar[int] = 1

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        anchor_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        delta = _delta(logprobs, anchor_logprobs, mask)
        return torch.where(mask, delta.sum(1, keepdim=True).exp(), torch.ones_like(delta))


@dataclass(frozen=True)
class NoRatio(Ratio):
    """No importance weight: 1 in value, with the gradient of log pi (REINFORCE)."""

    version: ClassVar[int] = 1

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        anchor_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        return _delta(logprobs, logprobs.detach(), mask).exp()


def _delta(
    logprobs: Float[Tensor, "B T"], anchor: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    delta = logprobs - anchor
    return torch.where(mask, delta, torch.zeros_like(delta))
