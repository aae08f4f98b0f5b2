"""The surrogate objective of a ratio and an advantage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Clip(ABC):
    """A rule from ratio and advantage to the objective, to be maximised."""

    @abstractmethod
    def __call__(
        self,
        ratio: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        logprobs: Float[Tensor, "B T"],
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """The objective, and where its gradient is cut."""


@dataclass(frozen=True)
class PPOClip(Clip):
    """min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347 eq. 7).

    ``dual_clip`` c bounds the objective of negative advantages at c A (arXiv:1912.09729); verl
    applies c = 3 unsaid. None leaves it out.
    """

    version: ClassVar[int] = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __call__(
        self,
        ratio: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        logprobs: Float[Tensor, "B T"],
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        plain = ratio * advantages
        near = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        objective = torch.minimum(plain, near)
        clipped = near < plain
        if self.dual_clip is not None:
            floor = self.dual_clip * advantages
            low = (advantages < 0) & (objective < floor)
            objective = torch.where(low, floor, objective)
            clipped = clipped | low
        return objective, clipped
