"""Completions that were sampled and judged, but are left out of the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Bool
from torch import Tensor

from harness.types import Rollout, group_range


@dataclass(frozen=True)
class Exclude(ABC):
    """Which completions the loss leaves out; they still count in the group's mean.

    ``denominator``: ``all`` divides the loss by every completion, so that those left out count as
    zeros (TRL's ``grpo``); ``kept`` by the kept ones alone (verl), which gives them more weight.
    """

    denominator: Literal["all", "kept"] = "all"

    @abstractmethod
    def keep(self, x: Rollout) -> Bool[Tensor, "B"]:
        """True where a completion stays in the loss."""


@dataclass(frozen=True)
class Unfinished(Exclude):
    """Overlong filtering (DAPO, arXiv:2503.14476 sec. 3.4): cut completions carry no loss."""

    version: ClassVar[int] = 1

    def keep(self, x: Rollout) -> Bool[Tensor, "B"]:
        return x.finished


@dataclass(frozen=True)
class ZeroVariance(Exclude):
    """Groups whose scores are all equal, within ``tolerance``, carry no loss."""

    version: ClassVar[int] = 1
    tolerance: float = 1e-6

    def keep(self, x: Rollout) -> Bool[Tensor, "B"]:
        return group_range(x.score, x.group) > self.tolerance
