"""How many completions a prompt gets, and which groups are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Int
from torch import Tensor

from harness.parts.mixing import NeighbourMixing
from harness.types import group_mean


@dataclass(frozen=True)
class Sampling(ABC):
    """``group_size`` None leaves completions per prompt to the experiment, equal for all arms.

    ``mixing``: what is fed in place of sampled tokens; None feeds the tokens.
    """

    group_size: int | None = None
    mixing: NeighbourMixing | None = None

    @property
    def resamples(self) -> bool:
        """Whether dropped groups are replaced by fresh prompts."""
        return False

    @abstractmethod
    def keep(self, correct: Bool[Tensor, "B"], group: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
        """Which completions are used; whole groups only."""


@dataclass(frozen=True)
class FixedGroups(Sampling):
    """Every group is used."""

    version: ClassVar[int] = 1

    def keep(self, correct: Bool[Tensor, "B"], group: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
        return correct == correct


@dataclass(frozen=True)
class DynamicSampling(Sampling):
    """All-right and all-wrong groups are dropped and replaced (DAPO, arXiv:2503.14476 eq. 8).

    The condition is on accuracy, before any shaping. Dropped completions are charged like others.
    ``max_rounds`` bounds the sampling rounds of one step (verl's ``max_num_gen_batches``); a step
    that has not filled up by then goes on with what it has.
    """

    version: ClassVar[int] = 1
    max_rounds: int = 10

    @property
    def resamples(self) -> bool:
        return True

    def keep(self, correct: Bool[Tensor, "B"], group: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
        accuracy = group_mean(correct.double(), group)
        return (accuracy > 0) & (accuracy < 1)
