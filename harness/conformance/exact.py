"""Expected updates on an enumerable policy, against the exact policy gradient and KL gradients."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch
from torch import Tensor

from harness.arm import Arm
from harness.conformance.closed_forms import (
    completion_weights,
    constant_weights,
    imitation,
    mean_share,
    needs_exact_values,
    predicted_update,
)
from harness.conformance.enumerated import EQUAL, ONE_TOKEN, RAGGED, World
from harness.conformance.expected import (
    Expected,
    batch_rows,
    expected_update,
    gap,
    shaped,
    share_of,
)
from harness.conformance.finding import (
    NotApplicableError,
    Verdict,
    failed,
    not_applicable,
    passed,
)
from harness.parts.aggregate import FixedLength
from harness.parts.kl import KL, KLInLoss, KLInReward, NoKL, Penalty
from harness.parts.ratio import NoRatio, TokenRatio
from harness.parts.sampling import FixedGroups

TOLERANCE = 1e-10  # relative
PARALLEL = 1e-6  # degrees
ROWS, KL_ROWS = 4, 2  # of a batch; of three, a group std would weigh all success rates alike
WORLDS = {world.name: world for world in (EQUAL, RAGGED)}


def core(arm: Arm, **changes: object) -> Arm:
    """The arm's advantage, ratio and clip, with nothing that weighs completions unlike.

    Where the ratio is a whole completion's, its own aggregation stays: others are refused.
    """
    plain = type(arm.ratio) in (TokenRatio, NoRatio)
    given = {
        "scale": None,
        "exclude": None,
        "imitate": None,
        "kl": NoKL(),
        "sampling": FixedGroups(arm.sampling.group_size),
        "aggregate": FixedLength() if plain else arm.aggregate,
    }
    return dataclasses.replace(arm, **(given | changes))  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _whole(arm: Arm, world: str) -> Expected:
    return expected_update(arm, WORLDS[world], rows=batch_rows(arm, ROWS))


# --- the policy gradient -------------------------------------------------------------------------


def check_estimator(arm: Arm) -> Verdict:
    """Advantage, ratio and clip alone: the expected update is the exact policy gradient.

    Under constant weights and without scale. A mean that holds the completion's own score leaves
    (G - 1) / G of it; lambda below 1 needs the true values, lambda 1 works with any.
    """
    bare = core(arm)
    world = RAGGED if constant_weights(bare) else EQUAL
    score, rows = shaped(bare, world), batch_rows(bare, ROWS)
    exact = world.gradient_of_expected(score)
    values, note = None, "" if bare.critic is None else ", any values"
    if needs_exact_values(bare):
        values, note = world.expected_later(_at_last(world, score)), ", true values"
    found = expected_update(bare, world, rows=rows, values=values)
    along, angle = share_of(found.update, exact)
    if not along > 0:
        return failed(
            f"the expected update lowers the expected score ({along:.3g} of its gradient)"
        )
    where = f"{world.name}, all {found.batches} batches of {rows}{note}"
    try:
        weight = float(completion_weights(bare, world)[0])
        share = mean_share(bare, rows)
    except NotApplicableError as reason:
        if angle < PARALLEL:
            return passed(f"parallel to the exact policy gradient, {along:.4g} of it; {where}")
        return not_applicable(f"{reason}; measured {angle:.1f} degrees off the exact policy "
                              f"gradient ({where})")  # fmt: skip
    error = gap(found.update, share * weight * exact)
    part = "the" if share == 1 else f"{rows - 1}/{rows} of the"
    text = f"{part} exact policy gradient; {where}; gap {error:.1e}"
    if not error <= TOLERANCE:
        return failed(
            f"expected {text}; measured {along / weight:.4g} of it, {angle:.2g} degrees off"
        )
    return passed(text)


def _at_last(world: World, score: Tensor) -> Tensor:
    """[N, T]: each completion's score on its last token."""
    last = torch.arange(world.mask.shape[1]) == world.lengths[:, None] - 1
    return last * score[:, None]


def check_ascent(arm: Arm) -> Verdict:
    """The whole arm's expected first update raises the expected (shaped) score."""
    texts = []
    for world in WORLDS.values():
        exact = world.gradient_of_expected(shaped(arm, world))
        along, angle = share_of(_whole(arm, world.name).update, exact)
        texts.append(f"{angle:.1f} degrees off the exact policy gradient ({world.name})")
        if not along > 0:
            return failed(f"the expected update lowers the expected score: {texts[-1]}")
    return passed("; ".join(texts))


def check_expected_update(arm: Arm) -> Verdict:
    """The whole arm's expected first update is what its parts' closed form says."""
    texts: list[str] = []
    unknown: list[str] = []
    rows = batch_rows(arm, ROWS)
    for world in WORLDS.values():
        found = _whole(arm, world.name)
        try:
            error = gap(found.update, predicted_update(arm, world, rows))
        except NotApplicableError as reason:
            unknown.append(f"{world.name}: {reason}")
            continue
        seen = f"{world.name}: {_multiple(arm, world, found)}"
        if not error <= TOLERANCE:
            return failed(f"{seen}; the closed form is {error:.1e} (relative) away")
        texts.append(f"{seen} (gap to closed form {error:.1e})")
    if not texts:
        return not_applicable("; ".join(unknown))
    return passed("; ".join([*texts, *unknown]))


def _multiple(arm: Arm, world: World, found: Expected) -> str:
    """An update in exact policy gradients, the weights of completions taken out."""
    along, angle = share_of(found.update, world.gradient_of_expected(shaped(arm, world)))
    if angle > PARALLEL:
        return f"{angle:.1f} degrees off the exact policy gradient"
    weight = float(completion_weights(arm, world)[0])
    return f"{along / weight:.4g} x exact policy gradient"


def check_imitation(arm: Arm) -> Verdict:
    """The likelihood term pulls towards right completions by its closed form."""
    if arm.imitate is None:
        return not_applicable("it has no likelihood term")
    bare = core(arm)
    with_term, rows = dataclasses.replace(bare, imitate=arm.imitate), batch_rows(bare, ROWS)
    expected = imitation(with_term, EQUAL, rows)
    pull = expected_update(with_term, EQUAL, rows=rows).update
    pull = pull - expected_update(bare, EQUAL, rows=rows).update
    share, _ = share_of(pull, EQUAL.gradient_of_expected(EQUAL.right.double()))
    error = gap(pull, expected)
    text = f"{share:.4g} x gradient of the success rate; {EQUAL.name}; gap {error:.1e}"
    return passed(text) if error <= TOLERANCE else failed(text)


# --- the KL term ---------------------------------------------------------------------------------


def check_kl_gradient(arm: Arm) -> Verdict:
    """With every score 0, the expected update is minus the KL gradient that the choice stands for.

    In the loss k2 and k3_k2 give that of KL(pi || ref), k3 that of KL(ref || pi), of each next
    token with the prefixes held; in the reward k1 gives that of KL(pi || ref) of whole completions,
    k3 the same less what k3 would give in the loss.
    """
    if type(arm.kl) is NoKL or not arm.kl.needs_reference:
        return not_applicable("it has no penalty")
    bare = core(arm, kl=arm.kl, shaping=())
    worlds = (ONE_TOKEN, RAGGED) if constant_weights(bare) else (ONE_TOKEN,)
    rows, worst = batch_rows(bare, KL_ROWS), 0.0
    for world in worlds:
        zero = torch.zeros(len(world), dtype=torch.float64)
        found = expected_update(
            bare, world, rows=rows, kl_coef=1.0, score=zero, values=_values_of_penalty(bare, world)
        )
        try:
            exact = _exact_kl(bare, world, rows)
        except NotApplicableError as reason:
            return not_applicable(f"{reason}; {_nearest(found.update, world)}")
        error = gap(found.update, -exact)
        if not error <= TOLERANCE:
            return failed(f"{world.name}: {error:.1e} (relative) away from {_stands_for(arm.kl)}")
        worst = max(worst, error)
    names = " and ".join(world.name for world in worlds)
    return passed(f"{_stands_for(arm.kl)}; {names}; gap {worst:.1e}")


def _values_of_penalty(arm: Arm, world: World) -> Tensor | None:
    """The true values where the only reward is the penalty; None where any values will do."""
    if not needs_exact_values(arm):
        return None
    nothing = torch.zeros(world.mask.shape, dtype=torch.float64)
    return world.expected_later(-_penalty(arm.kl, world) if type(arm.kl) is KLInReward else nothing)


def _penalty(kl: KL, world: World) -> Tensor:
    """[N, T]: the penalty of each token."""
    assert isinstance(kl, Penalty)
    delta = world.logprobs(world.logits) - world.logprobs(world.ref_logits)
    k3 = (-delta).exp() - 1 + delta
    return {"k1": delta, "k2": delta**2 / 2, "k3": k3, "k3_k2": k3}[kl.estimator]


def _exact_kl(arm: Arm, world: World, rows: int) -> Tensor:
    """The gradient that the expected loss must have, by the policy's logits.

    Raises:
        NotApplicableError: a penalty that does not ship, or a clamp that acts here.
    """
    kl = arm.kl
    if type(kl) not in (KLInLoss, KLInReward):
        raise NotApplicableError(f"no closed form for {type(kl).__name__}")
    assert isinstance(kl, Penalty)
    if kl.clamp is not None and float(_penalty(kl, world).abs().max()) > kl.clamp:
        raise NotApplicableError(f"a clamp of {kl.clamp} cuts the penalty here")
    weight = float(completion_weights(arm, world)[0])
    to_ref = world.gradient_of_kl(to_reference=True)
    from_ref = world.gradient_of_kl(to_reference=False)
    if isinstance(kl, KLInLoss):
        return weight * {"k2": to_ref, "k3": from_ref, "k3_k2": to_ref}[kl.estimator]
    held = {"k1": torch.zeros_like(to_ref), "k2": to_ref, "k3": from_ref}[kl.estimator]
    return weight * mean_share(arm, rows) * (world.gradient_of_penalty(kl.estimator) - held)


STANDS_FOR = {
    ("loss", "k2"): "the gradient of KL(pi || ref), prefixes held",
    ("loss", "k3"): "the gradient of KL(ref || pi), prefixes held",
    ("loss", "k3_k2"): "the gradient of KL(pi || ref), prefixes held",
    ("reward", "k1"): "the gradient of KL(pi || ref)",
    ("reward", "k2"): "the gradient of the mean k2, less that of KL(pi || ref), prefixes held",
    ("reward", "k3"): "the gradient of KL(pi || ref), less that of KL(ref || pi), prefixes held",
}


def _stands_for(kl: KL) -> str:
    assert isinstance(kl, Penalty)
    place = "loss" if isinstance(kl, KLInLoss) else "reward"
    return f"{kl.estimator} in the {place}: {STANDS_FOR[place, kl.estimator]}"


def _nearest(update: Tensor, world: World) -> str:
    """How far a penalty of which nothing is known lies from both KL gradients."""
    if not update.any():
        return "it moves nothing"
    to, other = (
        share_of(-update, world.gradient_of_kl(to_reference=to))[1] for to in (True, False)
    )
    return (
        f"{to:.2g} degrees off the gradient of KL(pi || ref), {other:.2g} off that of "
        f"KL(ref || pi) ({world.name})"
    )
