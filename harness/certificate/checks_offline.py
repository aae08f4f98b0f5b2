"""Arms that learn from preference pairs: what they read, paid and used.

They sample nothing, so the checks of prompts, gradings and rollouts do not apply to them; these
stand in their place, under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.certificate.checks_consumption import before_and_after
from harness.certificate.checks_flops import charges_follow, shapes_of
from harness.certificate.checks_update import (
    RATIO_TOLERANCE,
    coefficients,
    rate_factor,
    share_before,
)
from harness.certificate.compare import RATE_TOLERANCE, equal
from harness.certificate.design import Design, part
from harness.certificate.evidence import Cell, Evidence
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import OfflineStep, Run, Spent, Step
from harness.errors import InputError

CHARGES = {"reference/score", "policy/train"}
PREFERENCES = "preferences"  # among the lock's hashes
# By loss: how TRL calls it.
LOSSES = {"SigmoidLoss": (["sigmoid"], 0.0)}


def offline_steps(cell: Cell, steps: tuple[Step, ...]) -> Iterator[tuple[str, Spent, OfflineStep]]:
    """The steps that are of an offline arm, with their place and the totals before them."""
    for line, before, step in before_and_after(steps):
        if isinstance(step, OfflineStep):
            yield f"steps.jsonl line {line}", before, step


def check_pairs(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Runs of a seed read the same pairs of the same data in the same order, skipping none."""
    data: tuple[Cell, tuple[int, str]] | None = None
    first_with: dict[tuple[int, int], tuple[Cell, str | None]] = {}
    for cell, run, steps in design.offline_cells(evidence):
        cursor, batch = 0, design.batch(run) // 2
        for key, _, step in offline_steps(cell, steps):
            pairs = step.pairs
            found = (pairs.count, pairs.sha256)
            data = data or (cell, found)
            rules: list[tuple[str, Any, Any, str]] = [
                ("pairs.read", batch, pairs.read, "a step does not read as many completions as a "
                 "rollout batch has, in pairs"),
                ("pairs.cursor", cursor + batch, pairs.cursor, "pairs were skipped or read twice"),
                ("pairs.stream", [str(pairs.cursor)], sorted(pairs.stream),
                 "what was read is not hashed"),
                ("pairs.sha256", data[1], found, "two cells read other preference data"),
            ]  # fmt: skip
            locked = design.lock.hashes.get(PREFERENCES)
            if locked is not None:
                rules.append(("pairs.sha256", locked, pairs.sha256, "it is not the locked data"))
            for name, expected, value, why in rules:
                if expected != value:
                    yield violation("prompts", cell.id, f"{key}: {name}", expected, value, why)
            cursor = pairs.cursor
            value = pairs.stream.get(str(cursor))
            other, seen = first_with.setdefault((run.seed, cursor), (cell, value))
            if seen != value:
                yield violation(
                    "prompts", (other.id, cell.id), f"{key}: pairs.stream.{cursor}", seen, value,
                    f"two cells of seed {run.seed} read different pairs",
                )  # fmt: skip


def check_nothing_sampled(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """An arm that samples nothing was charged for no sample, and graded none."""
    for cell, _, steps in design.offline_cells(evidence):
        for line, step in enumerate(steps, 1):
            counts = step.spent.model_dump()
            sampled = {k: v for k, v in counts.items() if k not in ("updates", "flops") and v}
            if sampled:
                yield violation(
                    "graded", cell.id, f"steps.jsonl line {line}: spent", {}, sampled,
                    "the arm learns from pairs, and something was sampled or graded",
                )  # fmt: skip


def check_pair_flops(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """The reference and the policy's updates were charged for the pairs that were read."""
    for cell, run, steps in design.offline_cells(evidence):
        try:
            shapes = shapes_of(run)
        except (TypeError, KeyError, ValueError, InputError):
            continue  # the pinned check reports shapes that cannot be read
        charged: Mapping[str, float] = {}
        for key, _, step in offline_steps(cell, steps):
            try:
                yield from _charges(cell, key, step)
                yield from charges_follow(cell, key, step, charged, shapes, design)
            except (TypeError, KeyError, ValueError, AttributeError) as error:
                yield violation(
                    MISSING, cell.id, f"{key}: lengths", "the sums that FLOPs follow from",
                    f"{type(error).__name__}: {error}", "the lengths cannot be read",
                )  # fmt: skip
            charged = step.flops


def _charges(cell: Cell, key: str, step: OfflineStep) -> Iterator[Violation]:
    if set(step.lengths) != CHARGES:
        yield violation(
            "flops", cell.id, f"{key}: lengths", sorted(CHARGES), sorted(step.lengths),
            "not every model that the arm needs was charged, or one that it does not need was",
        )  # fmt: skip
        return
    trained, scored = step.lengths["policy/train"], step.lengths["reference/score"]
    rules = [
        ("policy/train.epochs", 1, trained["epochs"]),
        ("policy/train.lengths", scored["lengths"], trained["lengths"]),
        ("policy/train.head_tokens", scored["head_tokens"], trained["head_tokens"]),
        ("policy/train.lengths.sequences", 2 * step.pairs.read, trained["lengths"]["sequences"]),
    ]
    for name, expected, found in rules:
        if expected != found:
            yield violation(
                "flops", cell.id, f"{key}: lengths.{name}", expected, found,
                "what was trained on is not each pair once, as the reference read it",
            )  # fmt: skip


def check_offline_effective(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Each step used the pinned optimizer, and its loss is the declared one."""
    for cell, run, steps in design.offline_cells(evidence):
        parts = design.parts_of(cell, run)
        yield from coefficients(cell, steps, parts)
        for line, step in enumerate(steps, 1):
            if not isinstance(step, OfflineStep):
                yield violation(
                    "effective", cell.id, f"steps.jsonl line {line}: phase", "offline", step.phase,
                    "the arm learns from pairs, and a step sampled",
                )  # fmt: skip
        charged: Mapping[str, float] = {}
        for key, before, step in offline_steps(cell, steps):
            yield from _settings(cell, key, before, step, run, parts, design)
            yield from _rate(cell, key, before, step, charged, run, design)
            yield from _declared_loss(cell, key, step, design)
            charged = step.flops


def _settings(
    cell: Cell,
    key: str,
    before: Spent,
    step: OfflineStep,
    run: Run,
    parts: Mapping[str, Any],
    design: Design,
) -> Iterator[Violation]:
    optimizer, used = design.optimizer(run), step.offline
    kind = str(part(parts, "preference").get("part"))
    loss_type, smoothing = LOSSES.get(kind, (None, None))
    rules: list[tuple[str, Any, Any]] = [
        ("offline.betas", list(optimizer.betas), used.betas),
        ("offline.eps", optimizer.eps, used.eps),
        ("offline.weight_decay", optimizer.weight_decay, used.weight_decay),
        ("offline.max_grad_norm", optimizer.max_grad_norm, used.max_grad_norm),
        ("offline.gradient_steps", optimizer.minibatches, used.gradient_steps),
        ("spent.updates", used.gradient_steps, step.spent.updates - before.updates),
        ("offline.pairs_per_gradient_step", step.pairs.read,
         used.pairs_per_gradient_step * used.gradient_steps),
        ("offline.loss_type", loss_type, used.loss_type),
        ("offline.label_smoothing", smoothing, used.label_smoothing),
        ("reference_step", 0, step.reference_step),
    ]  # fmt: skip
    for name, expected, found in rules:
        if not equal(expected, found):
            yield violation(
                "effective", cell.id, f"{key}: {name}", expected, found,
                "the step used another value than the experiment pins or the arm declares",
            )  # fmt: skip


def _rate(
    cell: Cell,
    key: str,
    before: Spent,
    step: OfflineStep,
    charged: Mapping[str, float],
    run: Run,
    design: Design,
) -> Iterator[Violation]:
    optimizer, found = design.optimizer(run), step.offline.learning_rate
    shares = share_before(cell, step, before, charged, design)
    low, high = sorted(rate_factor(optimizer, before.updates, share) for share in shares)
    low, high = optimizer.learning_rate * low, optimizer.learning_rate * high
    slack = RATE_TOLERANCE * max(high, found)
    if not low - slack <= found <= high + slack:
        yield violation(
            "effective", cell.id, f"{key}: offline.learning_rate",
            high if low == high else [low, high], found,
            "the learning rate is not the setting times its schedule",
        )  # fmt: skip


def _declared_loss(cell: Cell, key: str, step: OfflineStep, design: Design) -> Iterator[Violation]:
    """The trainer's loss of a batch is what the declared parts give for the same weights."""
    for name in ("policy_loss", "grad_norm"):
        if getattr(step, name) is None:
            yield violation(
                MISSING, cell.id, f"{key}: {Step.model_fields[name].alias or name}", "a number",
                None, "it applies to this step, and is not recorded",
            )  # fmt: skip
    tolerance = RATIO_TOLERANCE[design.spec.model.dtype]
    if step.loss_gap > tolerance:
        yield violation(
            "effective", cell.id, f"{key}: loss_gap", f"<= {tolerance}", step.loss_gap,
            "the trainer's loss is not the declared one",
        )  # fmt: skip
