"""Combinations of parts that cannot mean anything, and why.

Refused are those in which a part would do nothing, undo another, or be undefined: two arms that
differ in such a part would be one arm, or none. What is merely odd may be run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.parts.advantage import GAE, Advantage, ReturnToGo
from harness.parts.aggregate import Aggregate, SequenceMean
from harness.parts.clip import CISPOClip, Clip, PPOClip
from harness.parts.critic import Critic
from harness.parts.exclude import Exclude, ZeroVariance
from harness.parts.imitate import Imitate
from harness.parts.kl import KL, KLInLoss, KLInReward, Penalty
from harness.parts.process import ProcessSupervision
from harness.parts.ratio import NoRatio, ProductRatio, Ratio, SequenceRatio, TokenRatio
from harness.parts.sampling import DynamicSampling, Sampling
from harness.parts.scale import BatchStd, GroupStd, Scale
from harness.parts.shaping import OverlongPenalty, Shaping, SignedScore
from harness.parts.trust_region import DivergenceGate, DivergenceMask, PrefixBudget


def refusals(
    *,
    sampling: Sampling,
    shaping: tuple[Shaping, ...],
    exclude: Exclude | None,
    kl: KL,
    advantage: Advantage,
    scale: Scale | None,
    ratio: Ratio,
    clip: Clip,
    aggregate: Aggregate,
    imitate: Imitate | None,
) -> Iterator[str]:
    """A line for each combination that must not be run: what, why, and what to take instead."""
    yield from _of_penalty(kl)
    yield from _of_surrogate(ratio, clip, aggregate)
    yield from _of_bounds(clip)
    yield from _of_divergences(clip)
    yield from _of_steps(shaping, kl, advantage, scale)
    yield from _of_groups(sampling, advantage, scale)
    yield from _of_mixing(sampling, advantage)
    yield from _of_scores(shaping, exclude, imitate)
    yield from _of_discounts(advantage)


def least_group(part: Advantage | Scale) -> int:
    """The completions per prompt without which a part is undefined: a ddof takes one more."""
    return max(part.min_group, part.ddof + 1) if isinstance(part, GroupStd) else part.min_group


def _of_penalty(kl: KL) -> Iterator[str]:
    if isinstance(kl, KLInLoss) and kl.estimator == "k1":
        yield (
            "k1 in the loss has an expected gradient of 0 and penalises nothing; take k2 (the "
            "gradient of KL(pi || ref)) or k3 (that of KL(ref || pi))"
        )
    if isinstance(kl, KLInReward) and kl.estimator == "k3_k2":
        yield "k3_k2 in the reward is k3, for no gradient flows there; say k3"
    if not isinstance(kl, Penalty):
        return
    if not kl.kl_coef >= 0:
        yield f"kl_coef {kl.kl_coef} rewards the distance to the reference; give 0 or more"
    if kl.clamp is not None and not kl.clamp > 0:
        yield f"clamp {kl.clamp} leaves nothing of the KL; give a positive number or None"
    if kl.controller is not None and not (kl.controller.target > 0 < kl.controller.horizon):
        yield (
            f"the KL controller has target {kl.controller.target} and horizon "
            f"{kl.controller.horizon}, and divides by both; give positive numbers"
        )


def _of_surrogate(ratio: Ratio, clip: Clip, aggregate: Aggregate) -> Iterator[str]:
    if isinstance(clip, DivergenceGate) and not isinstance(ratio, TokenRatio):
        yield (
            f"{type(clip).__name__} compares token distributions, and {type(ratio).__name__} is no "
            "token's ratio; take TokenRatio"
        )
    if clip.top_k is not None and ratio.anchor != "behaviour":
        yield (
            f"{type(clip).__name__} with top_k {clip.top_k} compares with the likeliest tokens of "
            f"the engine, and the ratio's anchor is {ratio.anchor!r}: two policies in one "
            'divergence; take anchor="behaviour", or top_k None'
        )
    if isinstance(ratio, NoRatio) and isinstance(clip, (PPOClip, CISPOClip)):
        yield (
            f"{type(clip).__name__} on NoRatio never clips, for that ratio is always 1; take NoClip"
        )
    if isinstance(ratio, (SequenceRatio, ProductRatio)) and not isinstance(aggregate, SequenceMean):
        yield (
            f"{type(ratio).__name__} is one number for a completion, and "
            f"{type(aggregate).__name__} would count it once for each token, so that long "
            "completions weigh more; take SequenceMean"
        )


def _of_bounds(clip: Clip) -> Iterator[str]:
    """A bound on the wrong side of 1 would cut the first update, before anything has moved."""
    if isinstance(clip, (PPOClip, CISPOClip)):
        for name in ("clip_low", "clip_high"):
            bound = getattr(clip, name)
            if bound is not None and not bound >= 0:
                yield f"{name} {bound} cuts at ratio 1; give 0 or more, or None for an open side"
    if isinstance(clip, PPOClip) and clip.dual_clip is not None and not clip.dual_clip > 1:
        yield (
            f"dual_clip {clip.dual_clip} cuts every negative advantage at ratio 1; give more than "
            "1, or None"
        )


def _of_divergences(clip: Clip) -> Iterator[str]:
    if isinstance(clip, DivergenceGate) and clip.ratio_cap is not None and not clip.ratio_cap >= 1:
        yield (
            f"ratio_cap {clip.ratio_cap} shrinks the first update, at ratio 1, too; give 1 or "
            "more, or None"
        )
    if isinstance(clip, DivergenceMask) and not clip.delta > 0:
        yield f"delta {clip.delta} lets no token move; give a positive number"
    if isinstance(clip, PrefixBudget) and not 0 <= clip.w_min <= 1:
        yield f"w_min {clip.w_min} is no weight of a last token; give 0 to 1, the first one's"


def _of_groups(sampling: Sampling, advantage: Advantage, scale: Scale | None) -> Iterator[str]:
    size = sampling.group_size
    for part in (advantage, scale):
        if part is not None and size is not None and size < least_group(part):
            rest = " or leave the scale out" if part is scale else ""
            yield (
                f"{type(part).__name__} needs at least {least_group(part)} completions per prompt, "
                f"and the arm sets {size}; raise sampling.group_size{rest}"
            )
    if sampling.resamples and size == 1:
        yield (
            "dynamic sampling keeps groups with both right and wrong completions, and a group of "
            "one has never both; raise sampling.group_size"
        )
    if isinstance(sampling, DynamicSampling) and sampling.max_rounds < 1:
        yield f"max_rounds {sampling.max_rounds} samples nothing; give 1 or more"


def _of_mixing(sampling: Sampling, advantage: Advantage) -> Iterator[str]:
    mixing = sampling.mixing
    if mixing is None:
        return
    if isinstance(advantage.critic, Critic):
        yield (
            "a critic of its own would judge other inputs than the mixed ones that were fed; take "
            "an arm without one, or with a SharedHead"
        )
    if not 0 <= mixing.share <= 1:
        yield f"share {mixing.share} is no probability; give 0 to 1"
    if mixing.neighbours < 1:
        yield f"neighbours {mixing.neighbours} mixes nothing; give 1 (the anchor alone) or more"


def _of_scores(
    shaping: tuple[Shaping, ...], exclude: Exclude | None, imitate: Imitate | None
) -> Iterator[str]:
    for at, rule in enumerate(shaping):
        if isinstance(rule, SignedScore) and at > 0:
            yield (
                f"SignedScore puts the verdict in place of the score, and so undoes "
                f"{type(shaping[at - 1]).__name__} before it; put SignedScore first"
            )
        if isinstance(rule, OverlongPenalty) and not 0 < rule.cache_share <= 1:
            yield (
                f"cache_share {rule.cache_share} is no share of the length limit; give more than "
                "0 and at most 1"
            )
    if isinstance(exclude, ZeroVariance) and not 0 <= exclude.tolerance < math.inf:
        what = "no group" if exclude.tolerance < 0 else "every group"
        yield f"tolerance {exclude.tolerance} leaves {what} out; give a number from 0 on"
    if imitate is not None and not imitate.coef > 0:
        yield (
            f"coef {imitate.coef} of the likelihood term imitates nothing; give a positive number, "
            "or leave imitate out"
        )


def _of_discounts(advantage: Advantage) -> Iterator[str]:
    names = []
    if isinstance(advantage, GAE):
        names = ["gamma", "gae_lambda", "critic_lambda"]
    elif isinstance(advantage, ReturnToGo):
        names = ["gamma"]
    for name in names:
        value = getattr(advantage, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{name} {value} weighs the future more than the present; give 0 to 1"


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
