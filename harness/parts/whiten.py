"""Batch scaling of advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Whiten:
    """Mean 0 and variance 1 over the valid tokens of the whole rollout batch.

    TRL and verl use ddof 1 (the default here), N+ and OpenRLHF 0. It subtracts the batch's mean
    advantage, and so acts as a second baseline.
    """

    version: ClassVar[int] = 1
    eps: float = 1e-8
    ddof: int = 1

    def __call__(
        self, advantages: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        valid = advantages[mask]
        mean = valid.mean()
        variance = (valid - mean).square().sum() / max(valid.numel() - self.ddof, 1)
        scaled = (advantages - mean) / (variance + self.eps).sqrt()
        return torch.where(mask, scaled, torch.zeros_like(scaled))
