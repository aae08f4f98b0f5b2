"""Rules that several tests compose from parts."""

from __future__ import annotations

import torch

from harness.parts.advantage import GroupBaseline
from harness.parts.scale import GroupStd
from harness.types import Tokens


def z_score(eps: float = 1e-6, ddof: int = 0):
    """Group mean and group std, called like an advantage."""

    def rule(rewards, mask, group, values):
        centred, returns = GroupBaseline()(rewards, mask, group, values)
        return GroupStd(eps=eps, ddof=ddof)(centred, rewards, mask, group), returns

    return rule


def tokens(
    logprobs: torch.Tensor, anchor: torch.Tensor, mask: torch.Tensor | None = None
) -> Tokens:
    """What a clip rule sees of these log-probs; every token is real unless a mask says other."""
    real = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    return Tokens(mask=real, logprobs=logprobs, anchor_logprobs=anchor)
