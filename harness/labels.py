"""An arm in short: a row of the axes in which arms differ.

A label says in a word what a part does and gives its numbers; a field that it does not mention is
added where it differs from its default, so that two arms that differ do not look alike. A part
that does not ship is shown by its class and fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from harness.arm import Arm
from harness.external.arm import ExternalArm, OfflineArm, TRLLoop, TRLOffline
from harness.identity import tree
from harness.parts import trust_region as trust
from harness.parts.advantage import (
    GAE,
    BatchBaseline,
    GroupBaseline,
    LeaveOneOut,
    LengthAdaptiveGAE,
    ReturnToGo,
)
from harness.parts.aggregate import FixedLength, SequenceMean, TokenMean
from harness.parts.clip import CISPOClip, NoClip, PPOClip
from harness.parts.critic import Critic, SharedHead
from harness.parts.divergence import KullbackLeibler, TotalVariation
from harness.parts.exclude import Unfinished, ZeroVariance
from harness.parts.imitate import Imitate
from harness.parts.kl import AdaptiveKL, KLInLoss, KLInReward, NoKL, Refresh
from harness.parts.mixing import NeighbourMixing
from harness.parts.preference import KLInPreference, SigmoidLoss
from harness.parts.process import ProcessSupervision
from harness.parts.ratio import NoRatio, ProductRatio, SequenceRatio, TokenRatio
from harness.parts.reward import GoldReward
from harness.parts.sampling import DynamicSampling, FixedGroups
from harness.parts.scale import BatchStd, GroupStd, Whiten
from harness.parts.shaping import OverlongPenalty, SignedScore, UnfinishedPenalty

NONE = "none"
AXES = {
    "mean": "what a score is compared with; λ of the policy | of the critic",
    "std": "what the difference is divided by, plus eps; whiten: of all tokens, less their mean",
    "kl": "where the penalty acts, its estimator and coefficient",
    "ratio": "what the ratio is of; /engine: over the policy that sampled",
    "clip": "how far below and above 1 the ratio, or how far the divergence, may go",
    "average": "what counts the same in the loss",
    "sampling": "which groups are drawn and used",
    "exclude": "what the loss leaves out (/kept: and is not divided by)",
    "shaping": "what the score becomes before credit",
    "imitate": "a likelihood term on right ones",
}


def axes_of(arm: Arm) -> dict[str, str]:
    """The arm's value on each of ``AXES``; ``none`` where it has no such part."""
    mean, std = label(arm.advantage), label(arm.scale)
    if isinstance(arm.advantage, ProcessSupervision) and arm.scale is None:
        std = f"steps {_std(arm.advantage)}"
    row = {
        "mean": mean,
        "std": std,
        "kl": label(arm.kl),
        "ratio": label(arm.ratio),
        "clip": label(arm.clip),
        "average": label(arm.aggregate),
        "sampling": label(arm.sampling),
        "exclude": label(arm.exclude),
        "shaping": " + ".join(map(label, arm.shaping)) or NONE,
        "imitate": label(arm.imitate),
    }
    if arm.reward is not None:
        row["reward"] = label(arm.reward)
    if isinstance(arm, OfflineArm):
        row["preference"] = label(arm.preference)
    if isinstance(arm, (ExternalArm, OfflineArm)):
        row["loop"] = label(arm.loop)
    return row if type(arm) is Arm else row | {"arm": type(arm).__name__}


def family(arm: Arm) -> str:
    """What the arm compares a score with, as a heading for those that do the same."""
    if isinstance(arm, ExternalArm):
        return f"in the trainers of {arm.loop.library}"
    if isinstance(arm, OfflineArm):
        return "from pairs of completions, sampling nothing"
    return FAMILIES.get(type(arm.advantage), f"by {type(arm.advantage).__name__}")


def label(part: Any) -> str:
    """A part in short."""
    if part is None:
        return NONE
    if type(part) not in LABELS:
        return brief(tree(part))
    text, mentioned = LABELS[type(part)]
    words = [text(part)]
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name not in mentioned and value != _default(field):
            nested = dataclasses.is_dataclass(value) or value is None
            words.append(f"{field.name} {label(value) if nested else _number(value)}")
    return ", ".join(word for word in words if word)


def brief(part: Any) -> str:
    """A part's JSON in few words: its class, and the settings that are not None."""
    if part is None or part == []:
        return NONE
    if isinstance(part, list):
        return " + ".join(brief(p) for p in part)
    if not isinstance(part, Mapping):
        return _number(part)
    hidden = ("part", "version", "module")
    inner = [f"{k}={brief(v)}" for k, v in part.items() if k not in hidden and v is not None]
    return part["part"] + (f"({', '.join(inner)})" if inner else "")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _number(value: Any) -> str:
    """A number without the zeros of its exponent: 1e-6."""
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


# --- what each kind is called --------------------------------------------------------------------


def _critic(part: GAE) -> str:
    """Policy's lambda, the critic's where it is another, and the critic."""
    own = _number(part.gae_lambda)
    if type(part) is LengthAdaptiveGAE:
        own = f"1-1/({part.alpha:g}T)"
    targets = "" if part.critic_lambda is None else f"|{part.critic_lambda:g}"
    return f"critic λ {own}{targets}, {label(part.critic)}"


def _std(part: Any) -> str:
    return f"ddof {part.ddof} +{_number(part.eps)}"


def _penalty(place: str) -> Callable[[Any], str]:
    return lambda part: f"{place} {part.estimator} {part.kl_coef:g}"


def _over(what: str) -> Callable[[Any], str]:
    return lambda part: what if part.anchor == "old" else f"{what}/engine"


def _bounds(part: PPOClip | CISPOClip) -> str:
    """How far below and above 1; a side that is open is left out."""
    sides = (("-", part.clip_low), ("+", part.clip_high))
    found = [f"{sign}{_number(bound)}" for sign, bound in sides if bound is not None]
    return " ".join(found) or "open"


def _ppo_clip(part: PPOClip) -> str:
    return _bounds(part) + ("" if part.dual_clip is None else f", dual {part.dual_clip:g}")


def _divergence(name: str) -> Callable[[Any], str]:
    return lambda part: name if part.top_k is None else f"{name} top {part.top_k}"


def _gate(name: str) -> Callable[[Any], str]:
    return lambda part: f"{name}{label(part.divergence)} {part.delta:g}"


def _prefix(name: str) -> Callable[[Any], str]:
    return lambda part: (
        f"{name} {label(part.divergence)} {part.delta:g}, budget {label(part.budget)}"
    )


def _sequence_mask(part: trust.SequenceMask) -> str:
    largest, mean = (
        "" if bound is None else f" {name} {bound:g}"
        for name, bound in (("max", part.delta_max), ("mean", part.delta_mean))
    )
    return f"completion {label(part.divergence)}{largest}{mean}"


def _groups(name: str) -> Callable[[Any], str]:
    return lambda part: name if part.group_size is None else f"{name}, {part.group_size} a prompt"


def _cut(part: UnfinishedPenalty) -> str:
    return f"cut {'=' if part.replace else '+'} {part.value:g}"


def _loop(part: TRLLoop) -> str:
    sampled = "" if part.sampler == "trl" else ", sampled by ours"
    return f"{part.library} {part.trainer}{sampled}"


def _is(text: str) -> Callable[[Any], str]:
    return lambda part: text


# The label, and the fields that it mentions.
LABELS: dict[type, tuple[Callable[[Any], str], tuple[str, ...]]] = {
    GAE: (_critic, ("gae_lambda", "critic_lambda", "critic")),
    LengthAdaptiveGAE: (_critic, ("gae_lambda", "critic_lambda", "critic", "alpha")),
    Critic: (lambda part: f"warm-up {part.warmup_steps}", ("warmup_steps",)),
    SharedHead: (lambda part: f"shared head {part.value_coef:g}", ("value_coef",)),
    GroupBaseline: (_is("group"), ()),
    LeaveOneOut: (_is("leave one out"), ()),
    BatchBaseline: (_is("batch"), ()),
    ReturnToGo: (_is("none"), ()),
    ProcessSupervision: (_is("steps of group"), ("ddof", "eps")),
    GroupStd: (lambda part: f"group {_std(part)}", ("ddof", "eps")),
    BatchStd: (lambda part: f"batch {_std(part)}", ("ddof", "eps")),
    Whiten: (lambda part: f"whiten {_std(part)}", ("ddof", "eps")),
    NoKL: (_is("none"), ()),
    KLInReward: (_penalty("reward"), ("estimator", "kl_coef")),
    KLInLoss: (_penalty("loss"), ("estimator", "kl_coef")),
    AdaptiveKL: (lambda part: f"to {part.target:g} in {part.horizon:g}", ("target", "horizon")),
    Refresh: (lambda part: f"every {part.every} steps", ("every",)),
    TokenRatio: (_over("token"), ("anchor",)),
    SequenceRatio: (_over("sequence"), ("anchor",)),
    ProductRatio: (_over("product"), ("anchor",)),
    NoRatio: (_is("none"), ("anchor",)),
    PPOClip: (_ppo_clip, ("clip_low", "clip_high", "dual_clip")),
    CISPOClip: (lambda part: f"weight {_bounds(part)}", ("clip_low", "clip_high")),
    NoClip: (_is("none"), ()),
    TotalVariation: (_divergence("TV"), ("top_k",)),
    KullbackLeibler: (_divergence("KL"), ("top_k",)),
    trust.DivergenceMask: (_gate("mask "), ("divergence", "delta")),
    trust.PrefixBudget: (_prefix("prefix"), ("divergence", "delta", "budget")),
    trust.PrefixGate: (_prefix("prefix gate"), ("divergence", "delta", "budget")),
    trust.SequenceMask: (_sequence_mask, ("divergence", "delta_max", "delta_mean")),
    trust.FixedBudget: (
        lambda part: NONE if part.delta_b is None else f"{part.delta_b:g}",
        ("delta_b",),
    ),
    trust.AdaptiveBudget: (
        lambda part: f"{part.floor:g}..{2 * part.floor:g} by quantile {part.quantile:g}",
        ("floor", "quantile"),
    ),
    TokenMean: (_is("tokens"), ()),
    SequenceMean: (_is("completions"), ()),
    FixedLength: (_is("constant"), ()),
    FixedGroups: (_groups("fixed"), ("group_size",)),
    DynamicSampling: (_groups("dynamic"), ("group_size",)),
    NeighbourMixing: (
        lambda part: f"{part.share:g} of {part.neighbours} neighbours",
        ("share", "neighbours"),
    ),
    Unfinished: (lambda part: f"cut ones/{part.denominator}", ("denominator",)),
    ZeroVariance: (lambda part: f"flat groups/{part.denominator}", ("denominator",)),
    SignedScore: (_is("±1"), ()),
    OverlongPenalty: (lambda part: f"overlong {part.cache_share:g}", ("cache_share",)),
    UnfinishedPenalty: (_cut, ("value", "replace")),
    Imitate: (lambda part: f"NLL {part.coef:g}", ("coef",)),
    GoldReward: (_is("gold reward"), ()),
    KLInPreference: (lambda part: f"preference {_number(part.kl_coef)}", ("kl_coef",)),
    SigmoidLoss: (_is("sigmoid of the margin"), ()),
    TRLOffline: (lambda part: f"{part.library} {part.trainer}", ("trainer", "library")),
    TRLLoop: (_loop, ("trainer", "sampler", "library")),
}

FAMILIES: dict[type, str] = {
    GAE: "with a critic",
    LengthAdaptiveGAE: "with a critic",
    GroupBaseline: "with the group's mean",
    ProcessSupervision: "with the scores of steps",
    LeaveOneOut: "with the mean of the others",
    BatchBaseline: "with the batch's mean",
    ReturnToGo: "without a baseline",
}
