"""Rewards to advantages: the mean level of a baseline. What they are divided by is ``scale``'s.

An advantage that needs a critic brings it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.knobs import knob
from harness.parts.critic import Critic, ValueModel
from harness.types import (
    Experience,
    completion_return,
    group_mean,
    group_range,
    group_sum,
    zero_padding,
)


@dataclass(frozen=True)
class Advantage(ABC):
    """A rule from per-token rewards to per-token advantages."""

    min_group: ClassVar[int] = 1  # completions per prompt it needs; the experiment checks
    needs_steps: ClassVar[bool] = False  # whether it reads step_ends and step_scores
    critic: ClassVar[ValueModel | None] = None

    def assign(
        self, rewards: Float[Tensor, "B T"], x: Experience
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        """As ``__call__``, for a rule that looks at more of the experience than that."""
        return self(rewards, x.mask, x.group, x.values)

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

    ``critic_lambda``: that of the critic's targets where it is not the policy's (decoupled GAE,
    VC-PPO, arXiv:2504.05118 and 2503.01491: 1); None for the same.
    """

    version: ClassVar[int] = 2
    gamma: float = 1.0
    gae_lambda: float = knob(1.0, choices=(0.9, 0.95, 0.99, 1.0))
    critic_lambda: float | None = None
    critic: ValueModel = field(default_factory=Critic)  # type: ignore[assignment]

    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        assert values is not None
        rewards, values = zero_padding(rewards, mask), zero_padding(values, mask)
        advantages = self._sum(rewards, values, self.policy_lambda(mask), mask) * mask
        targets = advantages
        if self.critic_lambda is not None:
            lambdas = torch.full_like(rewards[:, 0], self.critic_lambda)
            targets = self._sum(rewards, values, lambdas, mask) * mask
        return advantages, (targets + values) * mask

    def policy_lambda(self, mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B"]:
        """Each completion's lambda."""
        return torch.full((len(mask),), self.gae_lambda, dtype=torch.float64, device=mask.device)

    def _sum(
        self,
        rewards: Float[Tensor, "B T"],
        values: Float[Tensor, "B T"],
        lambdas: Float[Tensor, "B"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """The discounted sum of temporal differences from one sampled token to the next.

        What an environment wrote between them is no action: it has no value and takes no time.
        """
        decay = (self.gamma * lambdas).to(rewards)
        advantages = torch.zeros_like(rewards)
        next_value = next_advantage = torch.zeros_like(rewards[:, 0])
        for t in reversed(range(rewards.shape[1])):
            delta = rewards[:, t] + self.gamma * next_value - values[:, t]
            advantages[:, t] = delta + decay * next_advantage
            next_value = torch.where(mask[:, t], values[:, t], next_value)
            next_advantage = torch.where(mask[:, t], advantages[:, t], next_advantage)
        return advantages

    def monte_carlo(
        self, rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Return-to-go discounted by ``gamma``: what the values mean once warm-up is over."""
        no_group = torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)
        whole = GAE(gamma=self.gamma, gae_lambda=1.0)
        _, returns = whole(rewards, mask, no_group, torch.zeros_like(rewards))
        assert returns is not None
        return returns


@dataclass(frozen=True)
class LengthAdaptiveGAE(GAE):
    """GAE with lambda = 1 - 1 / (alpha * length) for each completion (VAPO, arXiv:2504.05118).

    The formula is negative below 1 / alpha = 20 tokens, on which the paper is silent; it is held
    to [0, 1]. ``gae_lambda`` is not used, and is fixed so that tuning does not turn it in vain.
    """

    version: ClassVar[int] = 1
    gae_lambda: float = 1.0
    alpha: float = 0.05

    def policy_lambda(self, mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B"]:
        length = mask.sum(1).clamp(min=1).double()
        return (1 - 1 / (self.alpha * length)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class GroupBaseline(Advantage):
    """Return minus the group's mean (GRPO, arXiv:2402.03300; alone, Dr. GRPO, arXiv:2503.20783)."""

    version: ClassVar[int] = 1
    min_group: ClassVar[int] = 2

    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        return _centred(rewards, mask, group)[:, None] * mask, None


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """Return minus the mean of the group's other completions (RLOO, arXiv:2402.14740).

    G / (G - 1) times ``GroupBaseline``.
    """

    version: ClassVar[int] = 1
    min_group: ClassVar[int] = 2

    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        centred = _centred(rewards, mask, group)
        size = group_sum(torch.ones_like(centred), group)
        return (centred * size / (size - 1))[:, None] * mask, None


@dataclass(frozen=True)
class BatchBaseline(Advantage):
    """Return minus the mean return of the whole batch."""

    version: ClassVar[int] = 1

    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        return _centred(rewards, mask, torch.zeros_like(group))[:, None] * mask, None


@dataclass(frozen=True)
class ReturnToGo(Advantage):
    """The rewards from each token on, discounted, with no baseline (REINFORCE++, 2501.03262)."""

    version: ClassVar[int] = 1
    gamma: float = 1.0

    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, "B"],
        values: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        rewards = zero_padding(rewards, mask)
        advantages = torch.zeros_like(rewards)
        later = torch.zeros_like(rewards[:, 0])
        for t in reversed(range(rewards.shape[1])):
            later = torch.where(mask[:, t], rewards[:, t] + self.gamma * later, later)
            advantages[:, t] = later
        return advantages * mask, None


def _centred(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], group: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """Returns less their group's mean; exactly 0 where a group agrees."""
    total = completion_return(rewards, mask)
    centred = total - group_mean(total, group)
    return torch.where(group_range(total, group) == 0, torch.zeros_like(total), centred)
