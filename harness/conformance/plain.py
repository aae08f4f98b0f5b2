"""A minibatch's terms at ratio 1, written out from their definitions, token by token.

Only kinds that ship are known here; for a plugin's part its own value at ratio 1 is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.arm import Arm
from harness.parts.aggregate import FixedLength, SequenceMean, TokenMean
from harness.parts.kl import KLInLoss
from harness.parts.ratio import NoRatio, ProductRatio, SequenceRatio, TokenRatio
from harness.types import Minibatch, zero_padding


def expected_weights(arm: Arm, x: Minibatch, limit: int) -> Tensor | None:
    """Each token's share of the loss by definition; None for an aggregate that does not ship."""
    kept_only = arm.exclude is not None and arm.exclude.denominator == "kept"
    counted = x.keep if kept_only else torch.ones_like(x.keep)
    completions = int(counted.sum())
    tokens = int(x.mask[counted].sum())
    weights = torch.zeros(x.mask.shape, dtype=torch.float64)
    for row in range(len(x)):
        if not x.keep[row]:
            continue
        length = int(x.mask[row].sum())
        if type(arm.aggregate) is TokenMean:
            share = 1 / tokens
        elif type(arm.aggregate) is SequenceMean:
            share = 1 / (completions * length)
        elif type(arm.aggregate) is FixedLength:
            share = 1 / (completions * limit)
        else:
            return None
        weights[row] = x.mask[row].double() * share
    return weights


def expected_surrogate_gradient(arm: Arm, x: Minibatch, now: Tensor) -> Tensor:
    """Minus weight times advantage, by each log-prob, through the ratio's own slope at 1."""
    live = x.mask & x.keep[:, None]
    share = zero_padding(x.weights * x.advantages, live)
    length = x.mask.sum(1, keepdim=True)
    if type(arm.ratio) in (TokenRatio, NoRatio):
        return -share
    if type(arm.ratio) is SequenceRatio:
        return -(share.sum(1, keepdim=True) / length) * live
    if type(arm.ratio) is ProductRatio:
        return -share.sum(1, keepdim=True) * live
    moving = now.detach().requires_grad_()
    (found,) = torch.autograd.grad((share * arm.ratio(moving, now.detach(), x.mask)).sum(), moving)
    return -found * live


def expected_kl(arm: Arm, x: Minibatch, now: Tensor) -> tuple[Tensor, Tensor]:
    """The KL term of the loss and its gradient by each log-prob."""
    live = x.mask & x.keep[:, None]
    nothing = torch.zeros_like(now)
    if x.ref_logprobs is None:
        return nothing.sum(), nothing
    coef = arm.kl.initial_coef
    weights = zero_padding(x.weights, live)
    delta = zero_padding(now.detach() - x.ref_logprobs, live)
    if type(arm.kl) is KLInLoss and arm.kl.clamp is None:
        k3 = (-delta).exp() - 1 + delta
        values = {"k2": delta**2 / 2, "k3": k3, "k3_k2": k3}
        gradients = {"k2": delta, "k3": 1 - (-delta).exp(), "k3_k2": delta}
        kl, slope = values[arm.kl.estimator], gradients[arm.kl.estimator]
    else:
        moving = now.detach().requires_grad_()
        found = arm.kl.in_loss(moving, x.ref_logprobs)
        if found is None:
            return nothing.sum(), nothing
        found = zero_padding(found, live)
        (slope,) = torch.autograd.grad(found.sum(), moving)
        kl = found.detach()
    return coef * (weights * kl).sum(), coef * weights * slope


def expected_imitation(arm: Arm, x: Minibatch, now: Tensor) -> tuple[Tensor, Tensor]:
    """The likelihood term: minus coef times the mean log-prob of right completions' tokens."""
    if arm.imitate is None:
        return torch.zeros((), dtype=torch.float64), torch.zeros_like(now)
    good = x.mask & (x.correct & x.keep)[:, None]
    share = good.double() * arm.imitate.coef / max(int(good.sum()), 1)
    return -(share * now.detach()).sum(), -share
