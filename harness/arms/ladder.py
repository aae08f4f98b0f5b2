"""From PPO to GRPO one change at a time, both ways round, and every mixture of their parts.

No algorithm of a paper: combinations that answer which change does what. Two rungs in a row
differ in exactly one axis; everything else, kl_coef among it, is the same from end to end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.arm import Arm, parts
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.axes import axes, subsets
from harness.errors import InputError
from harness.knobs import turn
from harness.parts.advantage import GAE, GroupBaseline
from harness.parts.aggregate import SequenceMean, TokenMean
from harness.parts.critic import Critic
from harness.parts.kl import KLInLoss, KLInReward
from harness.parts.sampling import FixedGroups
from harness.parts.scale import GroupStd, Whiten


@dataclass(frozen=True)
class Step:
    """One change, and the name of the rung that it leads to.

    Attributes:
        path: a part (``scale``) or a field below one (``advantage.gae_lambda``).
    """

    rung: str
    path: str
    value: Any


def ladder(a: Arm, b: Arm, steps: Sequence[Step]) -> tuple[Arm, ...]:
    """The rungs from ``a`` to ``b``, both included, each made from the last by one step.

    Raises:
        InputError: a step that changes nothing or more than its one path, or steps that do not
            end at ``b``; combinations of parts that cannot be run.
    """
    rungs = [a]
    for step in steps:
        last = rungs[-1]
        rung = dataclasses.replace(
            turn(last, step.path, step.value),
            name=step.rung,
            source=f"{last.name} with another {step.path}",
        )
        changed = [axis.path for axis in axes(parts(last), parts(rung))]
        if changed != [step.path]:
            raise InputError(
                f"ladder from {a.name!r}: {step.rung!r} changes {changed or 'nothing'}, and its "
                f"step says {step.path!r}; change exactly that"
            )
        rungs.append(rung)
    left = [axis.path for axis in axes(parts(rungs[-1]), parts(b))]
    if left or rungs[-1].name != b.name:
        what = f"it still differs in {', '.join(left)}" if left else "its name is another"
        raise InputError(
            f"ladder from {a.name!r} ends at {rungs[-1].name!r}, not at {b.name!r}: {what}; "
            "add or mend steps"
        )
    return (*rungs[:-1], b)


def mixtures(a: Arm, b: Arm, known: Iterable[Arm], prefix: str = "mix") -> tuple[Arm, ...]:
    """Every combination of a's and b's parts, from a to b; one of ``known`` where it fits.

    Others are called by the parts that they have of b: ``mix_kl_aggregate``.

    Raises:
        InputError: a combination of parts that cannot be run.
    """
    there = [a, b, *known]
    mine, theirs = parts(a), parts(b)
    differing = [name for name in mine if mine[name] != theirs[name]]
    found = []
    for chosen in subsets(differing):
        names = [name for name in differing if name in chosen]
        arm = dataclasses.replace(
            a,
            name="_".join([prefix, *names]),
            source=f"{a.name} with {b.name}'s {', '.join(names)}",
            **{name: getattr(b, name) for name in names},
        )
        found.append(next((k for k in there if parts(k) == parts(arm)), arm))
    return tuple(found)


KL_COEF = GRPO.kl.initial_coef  # of every rung, in the reward and in the loss alike

LADDER_PPO = PPO.but(
    "ladder_ppo",
    source="PPO as InstructGPT ran it: one completion a prompt, lambda 0.95, an untrained critic",
    sampling=FixedGroups(group_size=1),
    kl=KLInReward(kl_coef=KL_COEF, estimator="k1"),
    advantage=GAE(gae_lambda=0.95, critic=Critic(warmup_steps=0)),
)

FORWARD = ladder(
    LADDER_PPO,
    GRPO,
    (
        Step("ladder_lambda_1", "advantage.gae_lambda", 1.0),
        Step("ladder_warm_critic", "advantage.critic.warmup_steps", 2),
        Step("ladder_groups", "sampling.group_size", None),
        Step("ladder_group_mean", "advantage", GroupBaseline()),
        Step("ladder_no_whitening", "scale", None),
        Step("ladder_group_std", "scale", GroupStd()),
        # k2 in the loss has the expected gradient of k1 in the reward: the place alone changes.
        Step("ladder_kl_in_loss", "kl", KLInLoss(kl_coef=KL_COEF, estimator="k2")),
        Step("ladder_k3", "kl.estimator", "k3"),
        Step(GRPO.name, "aggregate", SequenceMean()),
    ),
)

# The same axes again, from the other end, in the same order so far as that is possible: lambda
# and warm-up need a critic, one completion a prompt can have no group std. Read from PPO, it is
# the ladder with the order of its changes turned round.
REVERSE = ladder(
    GRPO,
    LADDER_PPO,
    (
        Step("back_critic", "advantage", GAE(gae_lambda=1.0, critic=Critic(warmup_steps=2))),
        Step("back_lambda_095", "advantage.gae_lambda", 0.95),
        Step("back_cold_critic", "advantage.critic.warmup_steps", 0),
        Step("back_no_std", "scale", None),
        Step("back_ungrouped", "sampling.group_size", 1),
        Step("back_whitening", "scale", Whiten()),
        Step("back_kl_in_reward", "kl", KLInReward(kl_coef=KL_COEF, estimator="k3")),
        Step("back_k1", "kl.estimator", "k1"),
        Step(LADDER_PPO.name, "aggregate", TokenMean()),
    ),
)

# The four axes that combine freely, between the best of PPO (lambda 1, a warm critic, groups) and
# GRPO: critic or group mean, whitening or group std, k1 in the reward or k3 in the loss, token
# mean or sequence mean.
FACTORIAL = mixtures(FORWARD[3], GRPO, (*FORWARD, *REVERSE))

# By name; not among the algorithms that ship.
RUNGS: dict[str, Arm] = {
    arm.name: arm for arm in (*FORWARD, *REVERSE, *FACTORIAL) if arm.name != GRPO.name
}
