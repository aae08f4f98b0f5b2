"""What the importance ratio is a ratio of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Ratio(ABC):
    """pi / pi_old, one number a token."""

    @abstractmethod
    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        old_logprobs: Float[Tensor, "B T"],
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
        old_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        delta = logprobs - old_logprobs
        return torch.where(mask, delta, torch.zeros_like(delta)).exp()
