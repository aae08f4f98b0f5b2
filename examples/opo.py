"""On-Policy RL with Optimal Reward Baseline (OPO, Hao et al. 2025), as a plugin."""

from dataclasses import dataclass
from typing import ClassVar

from harness.arms.grpo import GRPO
from harness.parts.advantage import Advantage
from harness.parts.aggregate import TokenMean
from harness.parts.clip import NoClip
from harness.parts.kl import NoKL
from harness.types import completion_return, group_mean


@dataclass(frozen=True)
class LengthWeightedBaseline(Advantage):
    """Return minus the group's mean return, each completion weighted by its length."""

    version: ClassVar[int] = 1
    min_group: ClassVar[int] = 2

    def __call__(self, rewards, mask, group, values):
        total, length = completion_return(rewards, mask), mask.sum(1).to(rewards)
        baseline = group_mean(total * length, group) / group_mean(length, group)
        return (total - baseline)[:, None] * mask, None


OPO = GRPO.but(
    "opo",
    source="OPO (Hao et al. 2025): length-weighted baseline, exactly on-policy, no KL",
    advantage=LengthWeightedBaseline(),
    scale=None,
    kl=NoKL(),
    clip=NoClip(),
    aggregate=TokenMean(),
)
