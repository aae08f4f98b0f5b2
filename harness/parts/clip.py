"""The surrogate objective of a ratio and an advantage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.knobs import knob
from harness.types import Tokens


@dataclass(frozen=True)
class Clip(ABC):
    """A rule from ratio and advantage to the objective, to be maximised."""

    @property
    def top_k(self) -> int | None:
        """How many of the engine's likeliest tokens it compares the policies on; None for none."""
        return None

    @abstractmethod
    def __call__(
        self,
        ratio: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        x: Tokens,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """The objective, and where its gradient is cut."""


@dataclass(frozen=True)
class PPOClip(Clip):
    """min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347 eq. 7).

    None leaves a side open. ``dual_clip`` c bounds the objective of negative advantages at c A
    (arXiv:1912.09729); verl applies c = 3 unsaid. None leaves it out.
    """

    version: ClassVar[int] = 1
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None

    def __call__(
        self,
        ratio: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        x: Tokens,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        plain = ratio * advantages
        near = bounded(ratio, self.clip_low, self.clip_high) * advantages
        objective = torch.minimum(plain, near)
        clipped = near < plain
        if self.dual_clip is not None:
            floor = self.dual_clip * advantages
            low = (advantages < 0) & (objective < floor)
            objective = torch.where(low, floor, objective)
            clipped = clipped | low
        return objective, clipped


@dataclass(frozen=True)
class NoClip(Clip):
    """ratio x A: nothing is cut."""

    version: ClassVar[int] = 1

    def __call__(
        self,
        ratio: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        x: Tokens,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        return ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)


@dataclass(frozen=True)
class CISPOClip(Clip):
    """The clipped importance weight, held constant, times A log pi (MiniMax-M1, arXiv:2506.13585).

    No token loses its gradient: only the weight is bounded, and from above alone. The paper tuned
    its bound and does not disclose it, so tuning may set it here, from verl's 1.2 to 10;
    1 + ``clip_high`` = 5 is ScaleRL's, and TRL's suggestion. verl bounds the weight from below too
    (0.8), which is another rule; ``clip_low`` None is the paper's.
    """

    version: ClassVar[int] = 1
    clip_low: float | None = None
    clip_high: float = knob(4.0, low=0.2, high=9.0, log=True)

    def __call__(
        self,
        ratio: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        x: Tokens,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        weight = bounded(ratio, self.clip_low, self.clip_high).detach()
        return weight * advantages * x.logprobs, weight != ratio.detach()


def bounded(
    ratio: Float[Tensor, "B T"], clip_low: float | None, clip_high: float | None
) -> Float[Tensor, "B T"]:
    """The ratio within 1 - clip_low and 1 + clip_high, where they are given."""
    if clip_low is None and clip_high is None:
        return ratio
    return ratio.clamp(
        None if clip_low is None else 1 - clip_low, None if clip_high is None else 1 + clip_high
    )
