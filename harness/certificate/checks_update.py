"""What each optimizer step really used: rates, decoding, coefficients, and the loss's terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.certificate.checks_consumption import before_and_after
from harness.certificate.compare import (
    LOSS_TOLERANCE,
    RATE_TOLERANCE,
    WEIGHT_TOLERANCE,
    close,
    equal,
)
from harness.certificate.design import SHARED_HEAD, Design, part
from harness.certificate.evidence import Cell, Evidence
from harness.certificate.external import loop_of, samples_itself
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import Effective, Run, Spent, Step
from harness.spec.schema import OptimizerSpec

# Two passes of one network over one batch differ by kernel order alone; a stale or differently
# tempered log-prob differs by far more.
RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
# A step's coins fall worse than this once in exp(30) = 10^13 steps.
LEAST_CREDIBLE = 30.0
UNIT_WEIGHTS = ("TokenMean", "SequenceMean")
# Two float32 computations of a group's mean and deviation.
ADVANTAGE_TOLERANCE = 1e-4


def check_effective(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Each step used the pinned numbers, and its loss is the sum of its declared terms."""
    for cell, run, steps in design.sampling_cells(evidence):
        parts = design.parts_of(cell, run)
        yield from _phases(cell, steps, parts)
        yield from coefficients(cell, steps, parts)
        yield from _references(cell, run, steps, parts, design)
        charged: Mapping[str, float] = {}
        policy_updates = 0  # the critic's warm-up does not use up the policy's
        for line, before, step in before_and_after(steps):
            key = f"steps.jsonl line {line}"
            updates = step.spent.updates - before.updates
            taken = step.effective.gradient_steps if step.effective else 0
            if updates != taken:
                yield violation(
                    "effective", cell.id, f"{key}: spent.updates", taken, updates,
                    "updates charged are not the optimizer steps taken",
                )  # fmt: skip
            yield from _mixed(cell, key, before, step, parts)
            if step.used and step.effective is None:
                yield violation(
                    MISSING, cell.id, f"{key}: effective", "what was used", None,
                    "the step trained, and does not say how",
                )  # fmt: skip
            elif step.used and step.effective is not None:
                yield from _pinned(cell, key, step, step.effective, run, design)
                share = share_before(cell, step, before, charged, design)
                done = {"learning_rate": policy_updates, "critic_learning_rate": before.updates}
                yield from _rates(cell, key, step.effective, done, share, run, design, parts)
                yield from _weights(cell, key, step.effective, parts)
                yield from _measured(
                    cell, key, step, parts, design.learned, design.spec.reward.dense is not None
                )
                yield from _loss(cell, key, step, run, parts, design)
            charged = step.flops
            policy_updates += updates if step.phase == "train" else 0


def _phases(cell: Cell, steps: tuple[Step, ...], parts: Mapping[str, Any]) -> Iterator[Violation]:
    warmup = part(part(parts, "advantage"), "critic").get("warmup_steps", 0)
    for line, step in enumerate(steps, 1):
        expected = "critic_warmup" if step.step <= warmup else "train"
        if step.phase != expected:
            yield violation(
                "effective", cell.id, f"steps.jsonl line {line}: phase", expected, step.phase,
                f"the critic's warm-up is declared as {warmup} steps",
            )  # fmt: skip


def coefficients(
    cell: Cell, steps: tuple[Step, ...], parts: Mapping[str, Any]
) -> Iterator[Violation]:
    """The KL coefficient in force is the part's, or what its controller makes of it."""
    kl = part(parts, "kl")
    expected = float(kl.get("kl_coef", 0.0))
    controller = part(kl, "controller")
    for line, step in enumerate(steps, 1):
        found = 0.0 if step.kl_coef is None and kl.get("part") == "NoKL" else step.kl_coef
        if found is None or not close(found, expected, RATE_TOLERANCE, RATE_TOLERANCE):
            yield violation(
                "effective", cell.id, f"steps.jsonl line {line}: kl_coef", expected, found,
                "the KL coefficient in force is not the arm's",
            )  # fmt: skip
            return
        if controller and step.kl_to_reference is not None:
            error = min(max(step.kl_to_reference / controller["target"] - 1.0, -0.2), 0.2)
            expected = found * (1.0 + error * step.used / controller["horizon"])


def _references(
    cell: Cell, run: Run, steps: tuple[Step, ...], parts: Mapping[str, Any], design: Design
) -> Iterator[Violation]:
    """The reference is the base or, where it is refreshed, the policy of the last refresh.

    A policy is no distance from itself, so a KL right after a refresh shows that there was none.
    """
    every = part(part(parts, "kl"), "refresh").get("every")
    tolerance = RATIO_TOLERANCE[design.spec.model.dtype] * design.sampling(run).max_new_tokens
    for line, step in enumerate(steps, 1):
        expected = (step.step - 1) // every * every if every else 0
        found = step.reference_step
        if every and found is None:
            yield violation(
                MISSING, cell.id, f"steps.jsonl line {line}: reference_step", expected, None,
                "whose policy the reference was is not recorded",
            )  # fmt: skip
        elif found not in (None, expected):
            yield violation(
                "effective", cell.id, f"steps.jsonl line {line}: reference_step", expected, found,
                f"the arm declares {f'a refresh every {every} steps' if every else 'no refresh'}",
            )  # fmt: skip
        fresh = 0 < expected == step.step - 1
        if fresh and step.used and abs(step.kl_to_reference or 0.0) > tolerance:
            yield violation(
                "effective", cell.id, f"steps.jsonl line {line}: kl_to_reference",
                f"<= {tolerance}", step.kl_to_reference,
                "the policy is away from a reference that was just made from it",
            )  # fmt: skip


def _pinned(
    cell: Cell, key: str, step: Step, effective: Effective, run: Run, design: Design
) -> Iterator[Violation]:
    sampling, optimizer = design.sampling(run), design.optimizer(run)
    minibatches = min(optimizer.minibatches, step.used)
    expected = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_new_tokens,
        "epochs": optimizer.epochs,
        "minibatches": minibatches,
        "gradient_steps": optimizer.epochs * minibatches,
    }
    for name, value in expected.items():
        found = getattr(effective, name)
        if not equal(value, found):
            yield violation(
                "effective", cell.id, f"{key}: effective.{name}", value, found,
                "the step used another value than the controls pin",
            )  # fmt: skip
    if step.length_mean > sampling.max_new_tokens:
        yield violation(
            "effective", cell.id, f"{key}: length_mean", f"<= {sampling.max_new_tokens}",
            step.length_mean, "completions are longer than the controls allow",
        )  # fmt: skip


def share_before(
    cell: Cell, step: Step, before: Spent, charged: Mapping[str, float], design: Design
) -> tuple[float, float]:
    """Between which shares of the budget the optimizer steps began: after sampling and scoring."""
    unit, limit = design.spec.budget.unit, design.limit_of(cell)
    if unit == "seconds":
        lines = cell.timing or ()
        end = [line.total_seconds for line in lines if line.step == step.step]
        start = [line.total_seconds for line in lines if line.step == step.step - 1]
        low, high = (start or [0.0])[0], (end or [limit])[0]
    elif unit == "flops":
        now = sum(
            value - charged.get(role, 0)
            for role, value in step.flops.items()
            if not role.endswith("/train")
        )
        low = high = before.flops + now
    else:
        low = high = float(getattr(before if unit == "updates" else step.spent, unit))
    return min(low / limit, 1.0), min(high / limit, 1.0)


def rate_factor(optimizer: OptimizerSpec, updates: int, share: float) -> float:
    """Factor on the learning rates: warm-up over optimizer steps, then the schedule."""
    warm = min(1.0, (updates + 1) / optimizer.warmup_steps) if optimizer.warmup_steps else 1.0
    if optimizer.schedule == "linear":
        return warm * (1.0 - share)
    if optimizer.schedule == "cosine":
        return warm * 0.5 * (1.0 + math.cos(math.pi * share))
    return warm


def _rates(
    cell: Cell,
    key: str,
    effective: Effective,
    done: Mapping[str, int],
    share: tuple[float, float],
    run: Run,
    design: Design,
    parts: Mapping[str, Any],
) -> Iterator[Violation]:
    optimizer = design.optimizer(run)
    critic = part(part(parts, "advantage"), "critic")
    rates = {"learning_rate": (optimizer.learning_rate, effective.learning_rate)}
    if critic:
        rates["critic_learning_rate"] = (
            critic.get("learning_rate", 0.0), effective.critic_learning_rate or 0.0
        )  # fmt: skip
    elif effective.critic_learning_rate is not None:
        rates["critic_learning_rate"] = (0.0, effective.critic_learning_rate)
    for name, (peak, found) in rates.items():
        low, high = sorted(rate_factor(optimizer, done[name], s) for s in share)
        slack = RATE_TOLERANCE * max(peak, found)
        if not peak * low - slack <= found <= peak * high + slack:
            yield violation(
                "effective", cell.id, f"{key}: effective.{name}",
                peak * high if low == high else [peak * low, peak * high], found,
                "the learning rate is not the setting times its schedule",
            )  # fmt: skip


def _weights(
    cell: Cell, key: str, effective: Effective, parts: Mapping[str, Any]
) -> Iterator[Violation]:
    """The loss's weights sum to what the aggregation says: the denominator was not changed."""
    sums = effective.weight_sum
    if sums is None:
        if not loop_of(parts):
            yield violation(
                MISSING, cell.id, f"{key}: effective.weight_sum", "a sum per optimizer step", None,
                "how the loss was weighed is not recorded",
            )  # fmt: skip
        return
    if len(sums) != effective.gradient_steps:
        yield violation(
            "effective", cell.id, f"{key}: effective.weight_sum",
            f"{effective.gradient_steps} sums", len(sums), "not one sum per optimizer step",
        )  # fmt: skip
    exclude = part(parts, "exclude")
    unit = part(parts, "aggregate").get("part") in UNIT_WEIGHTS
    for found in sums:
        if unit and exclude.get("denominator") == "kept":
            holds = close(found, 1, 0, WEIGHT_TOLERANCE) or found == 0
            expected = "1, or 0 where nothing is kept"
        elif unit and not exclude:
            holds, expected = close(found, 1, 0, WEIGHT_TOLERANCE), "1"
        else:
            holds, expected = found <= 1 + WEIGHT_TOLERANCE, "<= 1"
        if not holds:
            yield violation(
                "effective", cell.id, f"{key}: effective.weight_sum", expected, found,
                "the loss weights do not sum to what the aggregation declares",
            )  # fmt: skip
            return


def _mixed(
    cell: Cell, key: str, before: Spent, step: Step, parts: Mapping[str, Any]
) -> Iterator[Violation]:
    """As many inputs were mixed as the arm's share makes credible: one coin for each fed token."""
    mixing = part(part(parts, "sampling"), "mixing")
    declared, found = float(mixing.get("share", 0.0)), step.mixed_share
    if found is None:
        return  # where it applies, its absence is told below
    tokens = step.spent.completion_tokens - before.completion_tokens
    coins = tokens - (step.spent.completions - before.completions)
    if coins * divergence(found, declared) > LEAST_CREDIBLE:
        yield violation(
            "effective", cell.id, f"{key}: mixed_share", declared, found,
            f"of {coins} inputs another share was mixed than the arm declares",
        )  # fmt: skip


def divergence(p: float, q: float) -> float:
    """KL of two coins: a share p of n tosses of a coin of share q has odds below exp(-n KL)."""
    if (p > 0 and q == 0) or (p < 1 and q == 1):
        return math.inf
    heads = p * math.log(p / q) if p > 0 else 0.0
    tails = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
    return heads + tails


def _measured(
    cell: Cell, key: str, step: Step, parts: Mapping[str, Any], learned: bool, dense: bool
) -> Iterator[Violation]:
    """What applies to this step is there."""
    needed = ["score_mean", "reward_mean"] + ([] if learned else ["accuracy"])
    needed += [] if samples_itself(parts) else ["engine_gap"]
    if step.phase == "train":
        needed += ["policy_loss", "clip_fraction_high", "clip_fraction_low", "grad_norm"]
        needed += ["advantage_gap"] if loop_of(parts) else _OF_OUR_LOOP
        needed += (
            ["kl"] if part(parts, "kl").get("part") == "KLInLoss" and not loop_of(parts) else []
        )
        needed += ["imitation"] if parts.get("imitate") else []
    if part(parts, "kl").get("part") != "NoKL":
        needed.append("kl_to_reference")
    if part(parts, "advantage").get("part") == "ProcessSupervision" or dense:
        needed.append("worked_steps")
    if part(parts, "sampling").get("mixing"):
        needed.append("mixed_share")
    value = part(part(parts, "advantage"), "critic").get("part")
    if value is not None:
        needed += ["value_loss"] + ["critic_grad_norm"] * (value != SHARED_HEAD)
    for name in needed:
        if getattr(step, name) is None:
            yield violation(
                MISSING, cell.id, f"{key}: {Step.model_fields[name].alias or name}", "a number",
                None, "it applies to this step, and is not recorded",
            )  # fmt: skip


_OF_OUR_LOOP = ["surrogate", "approx_kl", "first_ratio_error"]


def _loss(
    cell: Cell, key: str, step: Step, run: Run, parts: Mapping[str, Any], design: Design
) -> Iterator[Violation]:
    """The scalar that was differentiated is its terms and nothing else."""
    if step.phase == "critic_warmup":
        for name in ("policy_loss", "grad_norm"):
            if getattr(step, name):
                yield violation(
                    "effective", cell.id, f"{key}: {Step.model_fields[name].alias or name}", 0,
                    getattr(step, name), "the policy was trained while it should stand still",
                )  # fmt: skip
        return
    tolerance = RATIO_TOLERANCE[design.spec.model.dtype]
    if step.first_ratio_error is not None and step.first_ratio_error > tolerance:
        yield violation(
            "effective", cell.id, f"{key}: first_ratio_error", f"<= {tolerance}",
            step.first_ratio_error, "the ratio was not 1 before the first update",
        )  # fmt: skip
    kind = part(parts, "kl").get("part")
    if kind in ("NoKL", "KLInReward") and step.kl:
        yield violation(
            "effective", cell.id, f"{key}: loss/kl", 0, step.kl,
            f"the loss has a KL term, and the arm declares {kind}",
        )  # fmt: skip
    if loop_of(parts):
        yield from _advantages(cell, key, step, run, parts, design)
    if "arm" in parts or step.surrogate is None or step.policy_loss is None:
        return  # a subclass of Arm may define a loss of its own, and is declared as one
    if not parts.get("imitate") and step.imitation:
        yield violation(
            "effective", cell.id, f"{key}: loss/imitation", 0, step.imitation,
            "the loss has a likelihood term, and the arm declares none",
        )  # fmt: skip
    terms = step.surrogate + (step.kl or 0.0) + (step.imitation or 0.0)
    size = max(abs(step.surrogate), abs(step.kl or 0.0), abs(step.imitation or 0.0))
    if not close(terms, step.policy_loss, 0, LOSS_TOLERANCE * max(size, 1.0)):
        yield violation(
            "effective", cell.id, f"{key}: loss/policy", terms, step.policy_loss,
            "the loss holds a term beside surrogate, KL and imitation",
        )  # fmt: skip


def _advantages(
    cell: Cell, key: str, step: Step, run: Run, parts: Mapping[str, Any], design: Design
) -> Iterator[Violation]:
    """The advantages that another trainer assigned are those of the declared parts.

    With a KL in the reward they hold log-probs of each side's own passes, every token of which may
    differ as the first ratio may.
    """
    tolerance = ADVANTAGE_TOLERANCE
    if part(parts, "kl").get("part") == "KLInReward":
        length = design.sampling(run).max_new_tokens
        token = RATIO_TOLERANCE[design.spec.model.dtype]
        tolerance += 2 * part(parts, "kl").get("kl_coef", 0.0) * length * token
    if step.advantage_gap is not None and step.advantage_gap > tolerance:
        yield violation(
            "effective", cell.id, f"{key}: advantage_gap", f"<= {tolerance}", step.advantage_gap,
            "the trainer assigned other advantages than the declared parts do",
        )  # fmt: skip
