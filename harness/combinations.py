"""Combinations of parts that cannot mean anything, and why."""

from __future__ import annotations

from collections.abc import Iterator

from harness.parts.advantage import Advantage
from harness.parts.aggregate import Aggregate, SequenceMean
from harness.parts.clip import Clip, PPOClip
from harness.parts.kl import KL, KLInLoss, KLInReward
from harness.parts.process import ProcessSupervision
from harness.parts.ratio import NoRatio, ProductRatio, Ratio, SequenceRatio, TokenRatio
from harness.parts.sampling import Sampling
from harness.parts.scale import BatchStd, GroupStd, Scale
from harness.parts.shaping import Shaping
from harness.parts.trust_region import DivergenceMask


def refusals(
    *,
    sampling: Sampling,
    shaping: tuple[Shaping, ...],
    kl: KL,
    advantage: Advantage,
    scale: Scale | None,
    ratio: Ratio,
    clip: Clip,
    aggregate: Aggregate,
) -> Iterator[str]:
    """A line for each combination that must not be run: what, why, and what to take instead."""
    if isinstance(kl, KLInLoss) and kl.estimator == "k1":
        yield (
            "k1 in the loss has an expected gradient of 0 and penalises nothing; take k2 (the "
            "gradient of KL(pi || ref)) or k3 (that of KL(ref || pi))"
        )
    if isinstance(kl, KLInReward) and kl.estimator == "k3_k2":
        yield "k3_k2 in the reward is k3, for no gradient flows there; say k3"
    if isinstance(clip, DivergenceMask) and not isinstance(ratio, TokenRatio):
        yield (
            f"{type(clip).__name__} compares token distributions, and {type(ratio).__name__} is no "
            "token's ratio; take TokenRatio"
        )
    if isinstance(ratio, NoRatio) and isinstance(clip, PPOClip):
        yield "PPOClip on NoRatio never clips, for that ratio is always 1; take NoClip"
    if isinstance(ratio, (SequenceRatio, ProductRatio)) and not isinstance(aggregate, SequenceMean):
        yield (
            f"{type(ratio).__name__} is one number for a completion, and "
            f"{type(aggregate).__name__} would count it once for each token, so that long "
            "completions weigh more; take SequenceMean"
        )
    yield from _of_steps(shaping, kl, advantage, scale)
    size = sampling.group_size
    if scale is not None and size is not None and size < scale.min_group:
        yield (
            f"{type(scale).__name__} needs {scale.min_group} completions per prompt, and the arm "
            f"sets {size}; raise sampling.group_size or leave the scale out"
        )
    if sampling.resamples and size == 1:
        yield (
            "dynamic sampling keeps groups with both right and wrong completions, and a group of "
            "one has never both; raise sampling.group_size"
        )


def _of_steps(
    shaping: tuple[Shaping, ...], kl: KL, advantage: Advantage, scale: Scale | None
) -> Iterator[str]:
    """What ProcessSupervision would leave unread, and so undone."""
    if not isinstance(advantage, ProcessSupervision):
        return
    if shaping:
        yield (
            f"{type(shaping[0]).__name__} shapes the completion's score, and ProcessSupervision "
            "reads the scores of steps; leave shaping out"
        )
    if isinstance(kl, KLInReward):
        yield (
            "ProcessSupervision reads the scores of steps, so that a KL in the reward penalises "
            "nothing; take KLInLoss or NoKL"
        )
    if isinstance(scale, (GroupStd, BatchStd)):
        yield (
            f"{type(scale).__name__} divides by the std of the completions' returns, and "
            "ProcessSupervision has divided by that of the steps already; set scale to None"
        )
