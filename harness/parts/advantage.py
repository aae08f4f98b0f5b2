"""Rewards to advantages; an advantage that needs a critic brings it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.knobs import knob
from harness.parts.critic import Critic
from harness.types import group_mean, group_range, group_sum, zero_padding


@dataclass(frozen=True)
class Advantage(ABC):
    """A rule from per-token rewards to per-token advantages."""

    min_group: ClassVar[int] = 1  # completions per prompt it needs; the experiment checks
    critic: ClassVar[Critic | None] = None

    @abstractmethod
    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        """The advantages and, where a critic is trained, the returns it should predict."""

    def monte_carlo(
        self, rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Undiscounted return-to-go of each token: the critic's targets while it warms up."""
        rewards = zero_padding(rewards, mask)
        return rewards.flip(1).cumsum(1).flip(1) * mask


@dataclass(frozen=True)
class GAE(Advantage):
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438) with a critic.

    ``gae_lambda`` is the setting that matters most for long completions: at 0.95 the terminal
    reward's weight a hundred tokens earlier is 0.006. So tuning tries 1.0 among others, and 1.0
    is what an untuned arm gets (verl, OpenRLHF; TRL and N+ use 0.95).
    The value beyond a completion is 0, cut or not: a group baseline could not bootstrap either.
    """

    version: ClassVar[int] = 1
    gamma: float = 1.0
    gae_lambda: float = knob(1.0, choices=(0.9, 0.95, 0.99, 1.0))
    critic: Critic = field(default_factory=Critic)  # type: ignore[assignment]

    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        assert values is not None
        rewards, values = zero_padding(rewards, mask), zero_padding(values, mask)
        advantages = torch.zeros_like(rewards)
        next_value = next_advantage = torch.zeros_like(rewards[:, 0])
        for t in reversed(range(rewards.shape[1])):
            delta = rewards[:, t] + self.gamma * next_value - values[:, t]
            advantages[:, t] = delta + self.gamma * self.gae_lambda * next_advantage
            next_value, next_advantage = values[:, t], advantages[:, t]
        return advantages * mask, (advantages + values) * mask

    def monte_carlo(
        self, rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Return-to-go discounted by ``gamma``: what the values mean once warm-up is over."""
        no_group = torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)
        whole = replace(self, gae_lambda=1.0)
        _, returns = whole(rewards, mask, no_group, torch.zeros_like(rewards))
        assert returns is not None
        return returns


def completion_return(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B"]:
    """The sum of a completion's rewards."""
    return zero_padding(rewards, mask).sum(1)


@dataclass(frozen=True)
class GroupBaseline(Advantage):
    """Return minus the group's mean (Dr. GRPO, arXiv:2503.20783)."""

    version: ClassVar[int] = 1
    min_group: ClassVar[int] = 2

    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        total = completion_return(rewards, mask)
        centred = total - group_mean(total, group)
        centred = torch.where(group_range(total, group) == 0, torch.zeros_like(total), centred)
        return centred[:, None] * mask, None


@dataclass(frozen=True)
class GroupZScore(Advantage):
    """Return minus the group's mean, over the group's standard deviation (DeepSeekMath 4.1.2).

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
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        total = completion_return(rewards, mask)
        centred = total - group_mean(total, group)
        size = group_sum(torch.ones_like(total), group)
        std = (group_sum(centred.square(), group) / (size - self.ddof)).sqrt()
        flat = group_range(total, group) == 0
        scaled = torch.where(flat, torch.zeros_like(total), centred / (std + self.eps))
        return scaled[:, None] * mask, None
