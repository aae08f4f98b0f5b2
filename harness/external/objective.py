"""What an arm's parts are called by TRL's trainers; what they cannot be told is refused.

Said here are the losses that tests/parity holds against TRL's own: a setting that means another
thing than the part would make the arm's declaration untrue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.arm import Arm
from harness.errors import InputError
from harness.parts.advantage import GroupBaseline, LeaveOneOut
from harness.parts.aggregate import FixedLength, SequenceMean, TokenMean
from harness.parts.clip import CISPOClip, PPOClip
from harness.parts.kl import KLInLoss, KLInReward, NoKL, Penalty
from harness.parts.ratio import ProductRatio, SequenceRatio, TokenRatio
from harness.parts.sampling import FixedGroups
from harness.parts.scale import BatchStd, GroupStd

Arguments = dict[str, Any]
Rule = Callable[[Any], Arguments | None]  # None: it cannot be said

TOKEN_MEAN = "token_mean"  # has two names, and which one is exact depends on the experiment
STD = {"eps": 1e-4, "ddof": 1}  # written into TRL's code


def objective(arm: Arm, trainer: str) -> Arguments:
    """An arm's parts as arguments of TRL's ``trainer``; nothing of them is left at its default.

    Raises:
        InputError: a part that the trainer cannot be told.
    """
    said: Arguments = {}
    for name, rule in RULES[trainer].items():
        found = rule(getattr(arm, name))
        if found is None:
            raise InputError(
                f"arm {arm.name!r}: TRL's {trainer} cannot be told {name} "
                f"{getattr(arm, name)!r}; it can be {CAN_BE[trainer][name]}"
            )
        said |= found
    return said | _checked(arm, said)


def _checked(arm: Arm, said: Mapping[str, Any]) -> Arguments:
    """What depends on several parts."""
    if isinstance(arm.clip, CISPOClip):
        if not isinstance(arm.aggregate, TokenMean) or not isinstance(arm.ratio, TokenRatio):
            raise InputError(
                f"arm {arm.name!r}: TRL bounds the weight of tokens alone, in a mean over tokens; "
                "take ratio=TokenRatio() and aggregate=TokenMean()"
            )
        return {"loss_type": "cispo"}
    return {}


def _groups(part: Any) -> Arguments | None:
    return {} if type(part) is FixedGroups and part.mixing is None else None


def _none(part: Any) -> Arguments | None:
    return {} if part in (None, ()) else None


def _exactly(value: Any, **said: Any) -> Rule:
    return lambda part: said if part == value else None


def _either(*rules: Rule) -> Rule:
    return lambda part: next((s for rule in rules if (s := rule(part)) is not None), None)


def _fixed(part: Penalty, estimator: str) -> bool:
    """A constant coefficient above 0 on a plain estimate, against the base."""
    bare = part.controller is None and part.clamp is None and part.refresh is None
    return part.estimator == estimator and bare and part.kl_coef > 0


def _no_kl(part: Any) -> Arguments | None:
    return {"beta": 0.0} if type(part) is NoKL else None


def _k3_in_loss(part: Any) -> Arguments | None:
    plain = type(part) is KLInLoss and _fixed(part, "k3")
    return {"beta": part.kl_coef} if plain else None


def _k1_in_reward(part: Any) -> Arguments | None:
    plain = type(part) is KLInReward and _fixed(part, "k1")
    return {"beta": part.kl_coef} if plain else None


def _two_sided(part: Any) -> Arguments | None:
    closed = type(part) is PPOClip and part.clip_low is not None and part.clip_high is not None
    return {"epsilon": part.clip_low, "epsilon_high": part.clip_high} if closed else None


def _ppo_clip(part: Any) -> Arguments | None:
    said = _two_sided(part)
    if said is None:
        return None
    if part.dual_clip is not None and part.dual_clip <= 1 + part.clip_high:
        return None  # TRL's bound acts on both signs, and would undo the clip
    return said | {"delta": part.dual_clip}


def _plain_clip(part: Any) -> Arguments | None:
    return _two_sided(part) if getattr(part, "dual_clip", 0) is None else None


def _cispo(part: Any) -> Arguments | None:
    open_below = type(part) is CISPOClip and part.clip_low is None
    # TRL's epsilon_high is the bound itself; epsilon and delta are not read.
    said = {"epsilon_high": 1 + part.clip_high, "epsilon": 0.0, "delta": None}
    return said if open_below else None


def _graded_here(part: Any) -> Arguments:
    """The harness grades for the trainer too."""
    return {}


NO_PARTS: dict[str, Rule] = {
    "shaping": _none, "exclude": _none, "imitate": _none, "reward": _graded_here,
}  # fmt: skip
RULES: dict[str, dict[str, Rule]] = {
    "GRPOTrainer": {
        "sampling": _groups,
        "kl": _either(_no_kl, _k3_in_loss),
        "advantage": _exactly(GroupBaseline()),
        "scale": _either(
            _exactly(None, scale_rewards="none"),
            _exactly(GroupStd(**STD), scale_rewards="group"),
            _exactly(BatchStd(**STD), scale_rewards="batch"),
        ),
        "ratio": _either(
            _exactly(TokenRatio(), importance_sampling_level="token"),
            _exactly(SequenceRatio(), importance_sampling_level="sequence"),
        ),
        "clip": _either(_ppo_clip, _cispo),
        "aggregate": _either(
            _exactly(SequenceMean(), loss_type="grpo"),
            _exactly(FixedLength(), loss_type="dr_grpo"),
            _exactly(TokenMean(), loss_type=TOKEN_MEAN),
        ),
    }
    | NO_PARTS,
    "RLOOTrainer": {
        "sampling": _groups,
        "kl": _either(_no_kl, _k1_in_reward),
        "advantage": _exactly(LeaveOneOut()),
        "scale": _exactly(None),
        "ratio": _exactly(ProductRatio()),
        "clip": _plain_clip,
        "aggregate": _exactly(SequenceMean()),
    }
    | NO_PARTS,
}

_SHARED = {
    "sampling": "FixedGroups without mixing",
    "shaping": "empty: shape no scores",
    "exclude": "None",
    "imitate": "None",
}
CAN_BE: dict[str, dict[str, str]] = {
    "GRPOTrainer": _SHARED
    | {
        "kl": "NoKL, or KLInLoss with a fixed k3 without clamp or refresh",
        "advantage": "GroupBaseline",
        "scale": "None, or GroupStd or BatchStd with eps 1e-4 and ddof 1",
        "ratio": "TokenRatio or SequenceRatio, over the old policy",
        "clip": "PPOClip with both sides (dual_clip above 1 + clip_high), or CISPOClip without "
        "clip_low",
        "aggregate": "SequenceMean, FixedLength or TokenMean",
    },
    "RLOOTrainer": _SHARED
    | {
        "kl": "NoKL, or KLInReward with a fixed k1 without clamp or refresh",
        "advantage": "LeaveOneOut",
        "scale": "None",
        "ratio": "ProductRatio over the old policy",
        "clip": "PPOClip with both sides and without dual_clip",
        "aggregate": "SequenceMean",
    },
}
