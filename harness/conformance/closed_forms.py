"""What the expected update of an arm of known parts must be, in closed form.

Of one prompt with success probability p, in batches of G completions whose scores take two values:
an advantage that depends on a completion's own verdict and on the number k of right ones alone has,
by verdict, a mean over k that is binomial. The expected update is then the sum over completions of
probability x that mean x weight x grad log pi; at equal lengths it is a multiple of the exact
policy gradient. Parts that do not ship are not known here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.arm import Arm
from harness.conformance.enumerated import World
from harness.conformance.expected import LIMIT, shaped, some_values
from harness.conformance.finding import NotApplicableError
from harness.parts.advantage import (
    GAE,
    BatchBaseline,
    GroupBaseline,
    LeaveOneOut,
    LengthAdaptiveGAE,
    ReturnToGo,
)
from harness.parts.aggregate import FixedLength, SequenceMean, TokenMean
from harness.parts.exclude import Unfinished, ZeroVariance
from harness.parts.process import ProcessSupervision
from harness.parts.ratio import NoRatio, ProductRatio, SequenceRatio, TokenRatio
from harness.parts.sampling import DynamicSampling, FixedGroups
from harness.parts.scale import BatchStd, GroupStd, Whiten


def mean_share(arm: Arm, size: int) -> float:
    """What a baseline leaves of the exact policy gradient.

    1 where the baseline does not hold the completion's own score (a leave-one-out mean, a critic,
    none), (G - 1) / G where it is a mean that does.

    Raises:
        NotApplicableError: no such baseline.
    """
    kind, rule = type(arm.advantage), arm.advantage
    if isinstance(rule, (GAE, ReturnToGo)) and rule.gamma != 1:
        raise NotApplicableError(f"gamma {rule.gamma} discounts, so the objective is another")
    if kind in (GAE, LengthAdaptiveGAE, ReturnToGo, LeaveOneOut):
        return 1.0
    if kind in (GroupBaseline, BatchBaseline):
        return (size - 1) / size
    raise NotApplicableError(f"no closed form for {kind.__name__}")


def needs_exact_values(arm: Arm) -> bool:
    """Whether the estimate is unbiased with the true values alone: lambda below 1.

    Of a lambda by length too, which is 0 for completions as short as these; for longer ones it
    depends on the length still to come, and nothing is claimed.
    """
    rule = arm.advantage
    return type(rule) is LengthAdaptiveGAE or (type(rule) is GAE and rule.gae_lambda != 1)


def constant_weights(arm: Arm) -> bool:
    """Whether aggregation and ratio together weigh short and long completions alike."""
    if type(arm.ratio) is ProductRatio:
        return type(arm.aggregate) is SequenceMean
    return type(arm.ratio) in (TokenRatio, NoRatio) and type(arm.aggregate) is FixedLength


def completion_weights(arm: Arm, world: World) -> Tensor:
    """[N]: the weight of grad log pi of each completion, times the completions of the batch.

    Raises:
        NotApplicableError: a part that does not ship, or a denominator that chance decides.
    """
    lengths = world.lengths.double()
    if type(arm.aggregate) is FixedLength:
        weights = torch.full_like(lengths, 1 / LIMIT)
    elif type(arm.aggregate) is SequenceMean:
        weights = 1 / lengths
    elif type(arm.aggregate) is TokenMean:
        if lengths.min() != lengths.max():
            raise NotApplicableError(
                "TokenMean divides by the tokens of the batch, which chance decides"
            )
        weights = 1 / lengths
    else:
        raise NotApplicableError(f"no closed form for {type(arm.aggregate).__name__}")
    if type(arm.ratio) is ProductRatio:
        return weights * lengths
    if type(arm.ratio) not in (TokenRatio, NoRatio, SequenceRatio):
        raise NotApplicableError(f"no closed form for {type(arm.ratio).__name__}")
    return weights


def predicted_update(arm: Arm, world: World, size: int) -> Tensor:
    """The expected update of the whole arm at kl_coef 0, by the policy's logits.

    Raises:
        NotApplicableError: no closed form.
    """
    weights = completion_weights(arm, world)[:, None]
    probability = world.probabilities(world.logits)[:, None]
    if type(arm.exclude) not in (type(None), Unfinished, ZeroVariance):
        raise NotApplicableError(f"no closed form for {type(arm.exclude).__name__}")
    if type(arm.sampling) not in (FixedGroups, DynamicSampling):
        raise NotApplicableError(f"no closed form for {type(arm.sampling).__name__}")
    if type(arm.advantage) is GAE:
        coefficients = _with_critic(arm, world)
    else:
        coefficients = _by_verdict(arm, world, size)[:, None]
    total = world.by_parameters(probability * weights * coefficients)
    if arm.imitate is not None:
        total = total + imitation(arm, world, size)
    return total


def imitation(arm: Arm, world: World, size: int) -> Tensor:
    """The expected pull of the likelihood term: grad p x coef (1 - (1 - p)^G) / (p T).

    Raises:
        NotApplicableError: lengths differ, or batches are not all kept.
    """
    assert arm.imitate is not None
    T = int(world.lengths.max())
    if int(world.lengths.min()) != T:
        raise NotApplicableError("the likelihood term divides by the tokens of right completions")
    if type(arm.sampling) is not FixedGroups or type(arm.exclude) is ZeroVariance:
        raise NotApplicableError("no closed form of the likelihood term where groups are dropped")
    p = success(world)
    share = arm.imitate.coef * (1 - (1 - p) ** size) / (p * T)
    return share * world.gradient_of_expected(world.right.double())


def success(world: World) -> float:
    return float((world.probabilities(world.logits) * world.right).sum())


def _with_critic(arm: Arm, world: World) -> Tensor:
    """[N, T]: at lambda 1 and unscaled, the score less the value of the prefix."""
    rule = arm.advantage
    assert isinstance(rule, GAE)
    if arm.scale is not None:
        raise NotApplicableError(
            f"no closed form for {type(arm.scale).__name__} of a critic's advantages"
        )
    if (rule.gamma, rule.gae_lambda) != (1, 1):
        raise NotApplicableError("no closed form for lambda below 1 with a critic that errs")
    if type(arm.sampling) is not FixedGroups or type(arm.exclude) is ZeroVariance:
        raise NotApplicableError("no closed form for a critic where groups are dropped")
    if type(arm.ratio) not in (TokenRatio, NoRatio):
        raise NotApplicableError("no closed form for a critic under a ratio of whole completions")
    return shaped(arm, world)[:, None] - some_values(world)


def _by_verdict(arm: Arm, world: World, size: int) -> Tensor:
    """[N]: the mean advantage of each completion, over the verdicts of the others."""
    score = shaped(arm, world)
    values = [score[world.right == verdict] for verdict in (False, True)]
    if any(float(v.max() - v.min()) > 1e-12 for v in values):
        raise NotApplicableError("shaping tells completions of one verdict apart")
    low, high = (float(v[0]) for v in values)
    if type(arm.scale) is Whiten and world.lengths.min() != world.lengths.max():
        raise NotApplicableError("Whiten counts tokens, and so lengths")
    tokens = int(world.lengths.max())
    p, mean, kept = success(world), [0.0, 0.0], 0.0
    for others in range(size):
        chance = math.comb(size - 1, others) * p**others * (1 - p) ** (size - 1 - others)
        for verdict in (0, 1):
            right = others + verdict
            mixed = 0 < right < size
            silent = type(arm.exclude) is ZeroVariance and not mixed
            dropped = type(arm.sampling) is DynamicSampling and not mixed
            if not (silent or dropped):
                found = _advantages(arm, size, right, low, high, tokens)
                mean[verdict] += chance * found[verdict]
            if not dropped:
                kept += chance * (p if verdict else 1 - p)
    return torch.tensor(mean, dtype=torch.float64)[world.right.long()] / kept


def _advantages(
    arm: Arm, size: int, right: int, low: float, high: float, tokens: int
) -> tuple[float, float]:
    """Those of a wrong and of a right completion, among ``size`` of which ``right`` are right."""
    mean = (right * high + (size - right) * low) / size
    centred = (low - mean, high - mean)
    kind = type(arm.advantage)
    if kind is ReturnToGo and arm.advantage.gamma == 1:  # type: ignore[attr-defined]
        found = (low, high)
    elif kind is LeaveOneOut:
        found = (centred[0] * size / (size - 1), centred[1] * size / (size - 1))
    elif kind in (GroupBaseline, BatchBaseline, ProcessSupervision):
        found = centred
    else:
        raise NotApplicableError(f"no closed form for {kind.__name__}")
    squares = (size - right) * centred[0] ** 2 + right * centred[1] ** 2
    scale = arm.advantage if kind is ProcessSupervision else arm.scale
    if scale is None:
        return found
    if type(scale) in (GroupStd, BatchStd, ProcessSupervision):
        std = math.sqrt(squares / max(size - scale.ddof, 1))  # type: ignore[union-attr]
        if not 0 < right < size:
            return 0.0, 0.0
        return found[0] / (std + scale.eps), found[1] / (std + scale.eps)  # type: ignore[union-attr]
    if type(scale) is Whiten:
        grown = (found[1] - found[0]) / (high - low)
        variance = tokens * squares * grown**2 / max(size * tokens - scale.ddof, 1)
        std = math.sqrt(variance + scale.eps)
        return centred[0] * grown / std, centred[1] * grown / std
    raise NotApplicableError(f"no closed form for {type(scale).__name__}")
