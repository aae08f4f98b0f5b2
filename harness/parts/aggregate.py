"""Each token's share of the loss, fixed for an optimizer step before it is cut into micro-batches.

A loss is ``(weights * per_token).sum()``, so micro-batches and devices cannot change it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Aggregate(ABC):
    """A rule from a mask to weights."""

    @abstractmethod
    def __call__(self, mask: Bool[Tensor, "B T"], max_new_tokens: int) -> Float[Tensor, "B T"]:
        """The weight of each token; 0 on padding."""


@dataclass(frozen=True)
class TokenMean(Aggregate):
    """Every token of the optimizer batch counts the same (DAPO; most PPO code)."""

    version: ClassVar[int] = 1

    def __call__(self, mask: Bool[Tensor, "B T"], max_new_tokens: int) -> Float[Tensor, "B T"]:
        return mask.double() / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class SequenceMean(Aggregate):
    """Every completion counts the same, its tokens share (DeepSeekMath eq. 3)."""

    version: ClassVar[int] = 1

    def __call__(self, mask: Bool[Tensor, "B T"], max_new_tokens: int) -> Float[Tensor, "B T"]:
        return mask.double() / mask.sum(1, keepdim=True).clamp(min=1) / max(len(mask), 1)


@dataclass(frozen=True)
class FixedLength(Aggregate):
    """1 / (completions x length limit), whatever was sampled (Dr. GRPO, arXiv:2503.20783)."""

    version: ClassVar[int] = 1

    def __call__(self, mask: Bool[Tensor, "B T"], max_new_tokens: int) -> Float[Tensor, "B T"]:
        return mask.double() / (max(len(mask), 1) * max_new_tokens)
