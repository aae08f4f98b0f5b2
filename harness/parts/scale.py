"""What advantages are divided by: the std level of a baseline, apart from its mean level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.types import completion_return, group_mean, group_range, group_sum


@dataclass(frozen=True)
class Scale(ABC):
    """A rule from advantages to scaled advantages, over a whole rollout batch."""

    min_group: ClassVar[int] = 1  # completions per prompt it needs; the experiment checks

    @abstractmethod
    def __call__(
        self,
        advantages: Float[Tensor, "B T"],
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
    ) -> Float[Tensor, "B T"]:
        """The scaled advantages; ``rewards`` are those that the advantages were made from."""


@dataclass(frozen=True)
class GroupStd(Scale):
    """Divide by the standard deviation of the group's returns, plus ``eps`` (DeepSeekMath 4.1.2).

    The paper states neither ``ddof`` nor ``eps``; ddof 0 agrees with its worked form, and 1 would
    shrink advantages by sqrt((G-1)/G), a learning rate that depends on the group's size. A group
    without variance has advantage exactly 0.
    """

    version: ClassVar[int] = 1
    min_group: ClassVar[int] = 2
    eps: float = 1e-6
    ddof: int = 0

    def __call__(
        self,
        advantages: Float[Tensor, "B T"],
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
    ) -> Float[Tensor, "B T"]:
        total = completion_return(rewards, mask)
        centred = total - group_mean(total, group)
        size = group_sum(torch.ones_like(total), group)
        std = (group_sum(centred.square(), group) / (size - self.ddof)).sqrt()
        flat = group_range(total, group) == 0
        scaled = advantages / (std + self.eps)[:, None]
        return torch.where(flat[:, None] | ~mask, torch.zeros_like(scaled), scaled)


@dataclass(frozen=True)
class BatchStd(Scale):
    """Divide by the standard deviation of all returns of the batch, plus ``eps``.

    Each completion counts once, and no mean is taken off (Lite PPO, arXiv:2508.08221; TRL's
    ``scale_rewards="batch"``, which has ddof 1 and eps 1e-4). A batch without variance has
    advantage exactly 0.
    """

    version: ClassVar[int] = 1
    eps: float = 1e-6
    ddof: int = 0

    def __call__(
        self,
        advantages: Float[Tensor, "B T"],
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
    ) -> Float[Tensor, "B T"]:
        total = completion_return(rewards, mask)
        if float(total.max() - total.min()) == 0.0:
            return torch.zeros_like(advantages)
        spread = (total - total.mean()).square().sum() / max(len(total) - self.ddof, 1)
        return torch.where(mask, advantages / (spread.sqrt() + self.eps), 0.0)


@dataclass(frozen=True)
class Whiten(Scale):
    """Mean 0 and variance 1 over the valid tokens of the whole rollout batch.

    TRL and verl use ddof 1 (the default here), N+ and OpenRLHF 0. It subtracts the batch's mean
    advantage, and so acts as a second baseline; tokens count, so long completions weigh more.
    """

    version: ClassVar[int] = 1
    eps: float = 1e-8
    ddof: int = 1

    def __call__(
        self,
        advantages: Float[Tensor, "B T"],
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
    ) -> Float[Tensor, "B T"]:
        valid = advantages[mask]
        mean = valid.mean()
        variance = (valid - mean).square().sum() / max(valid.numel() - self.ddof, 1)
        scaled = (advantages - mean) / (variance + self.eps).sqrt()
        return torch.where(mask, scaled, torch.zeros_like(scaled))
