"""What the score becomes before credit is assigned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from harness.types import Rollout


@dataclass(frozen=True)
class Shaping(ABC):
    """A rule from a score to a score."""

    @abstractmethod
    def __call__(
        self, score: Float[Tensor, "B"], x: Rollout, max_new_tokens: int
    ) -> Float[Tensor, "B"]:
        """The shaped score of each completion."""


@dataclass(frozen=True)
class SignedScore(Shaping):
    """+1 for a correct completion, -1 for any other (DAPO eq. 7), plus the experiment's bonus."""

    version: ClassVar[int] = 1

    def __call__(
        self, score: Float[Tensor, "B"], x: Rollout, max_new_tokens: int
    ) -> Float[Tensor, "B"]:
        return 2 * x.correct.to(score) - 1 + x.bonus


@dataclass(frozen=True)
class OverlongPenalty(Shaping):
    """The soft overlong punishment (DAPO, arXiv:2503.14476 eq. 13).

    0 up to ``limit - cache`` tokens, then linearly down to -1 at ``limit``. Both are given as
    shares of the experiment's length limit (paper: limit 20480, cache 4096, a fifth).
    """

    version: ClassVar[int] = 1
    cache_share: float = 0.2

    def __call__(
        self, score: Float[Tensor, "B"], x: Rollout, max_new_tokens: int
    ) -> Float[Tensor, "B"]:
        length = x.mask.sum(1).to(score)
        return score + overlong_penalty(length, max_new_tokens, self.cache_share * max_new_tokens)


def overlong_penalty(length: Float[Tensor, "B"], limit: float, cache: float) -> Float[Tensor, "B"]:
    """DAPO eq. 13 with its floor at -1."""
    return torch.clamp((limit - cache - length) / cache, min=-1.0, max=0.0)


@dataclass(frozen=True)
class UnfinishedPenalty(Shaping):
    """What a completion cut at the length limit scores.

    ``replace``: its score becomes ``value`` (N+, arXiv:2403.17031); otherwise ``value`` is added
    (TRL's ``missing_eos_penalty`` is ``value = -penalty``).
    """

    version: ClassVar[int] = 1
    value: float = -1.0
    replace: bool = True

    def __call__(
        self, score: Float[Tensor, "B"], x: Rollout, max_new_tokens: int
    ) -> Float[Tensor, "B"]:
        cut = torch.full_like(score, self.value) + (0 if self.replace else score)
        return torch.where(x.finished, score, cut)
