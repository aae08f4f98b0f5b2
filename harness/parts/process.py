"""Process supervision: credit from the scores of worked steps, not from the completion's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.parts.advantage import Advantage
from harness.types import Experience, group_mean, group_range, group_sum


@dataclass(frozen=True)
class ProcessSupervision(Advantage):
    """The normalised scores of all steps that end at a token or later (arXiv:2402.03300 4.1.3).

    Each step's score, less the mean and divided by the std (plus ``eps``) of all steps of the
    group's completions together. A step's own tokens, the one that ends it included, carry its
    score; those after the last step carry 0, as do all where the group's steps score the same.
    Nothing is discounted and nothing normalised again, so that a completion of many steps weighs
    more in the mean and collects larger sums.

    The paper gives neither ``ddof`` nor ``eps``; they are GroupStd's.

    Steps alone count: neither the verdict, nor its shaping, nor a KL in the reward comes in. Where
    the answer is a step, as in the embedded arithmetic, its score is the outcome's only share.
    """

    version: ClassVar[int] = 1
    min_group: ClassVar[int] = 2
    needs_steps: ClassVar[bool] = True
    eps: float = 1e-6
    ddof: int = 0

    def assign(
        self, rewards: Float[Tensor, "B T"], x: Experience
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        assert x.step_ends is not None
        assert x.step_scores is not None
        ends = x.step_ends & x.mask
        advantages = torch.zeros_like(rewards)
        advantages[ends] = self.normalise(
            x.step_scores[ends].to(rewards), x.group[:, None].expand_as(ends)[ends]
        )
        return advantages.flip(1).cumsum(1).flip(1) * x.mask, None

    def normalise(self, scores: Float[Tensor, "N"], group: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
        """The scores of steps, by the mean and std of their group's steps."""
        centred = scores - group_mean(scores, group)
        size = group_sum(torch.ones_like(scores), group)
        std = (group_sum(centred.square(), group) / (size - self.ddof)).sqrt()
        flat = group_range(scores, group) == 0
        return torch.where(flat, torch.zeros_like(scores), centred / (std + self.eps))

    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        """Not to be called: where the steps end is not among these.

        Raises:
            TypeError: always; ``assign`` sees the experience.
        """
        raise TypeError("ProcessSupervision reads steps, which rewards do not have; call assign")
