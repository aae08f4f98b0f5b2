"""That the FLOPs charged follow from the lengths, and the lengths from the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.certificate.checks_consumption import before_and_after
from harness.certificate.compare import FLOPS_TOLERANCE, close
from harness.certificate.design import REWARD_MODEL, Design
from harness.certificate.evidence import Cell, Evidence
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import Run, Spent, Step
from harness.cost.flops import Generation, Lengths
from harness.cost.shape import ModelShape
from harness.errors import InputError
from harness.ledger import convention, generation_from, shape_from, step_flops
from harness.tasks import TASKS


def check_flops(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """FLOPs computed again from recorded lengths and shapes are the FLOPs charged."""
    for cell, run, steps in design.sampling_cells(evidence):
        try:
            shapes = shapes_of(run)
        except (TypeError, KeyError, ValueError, InputError):
            continue  # the pinned check reports shapes that cannot be read
        charged: Mapping[str, float] = {}
        for line, before, step in before_and_after(steps):
            try:
                yield from _step(cell, line, before, step, charged, shapes, run, design)
            except (TypeError, KeyError, ValueError, AttributeError) as error:
                yield violation(
                    MISSING, cell.id, f"steps.jsonl line {line}: lengths",
                    "the sums that FLOPs follow from", f"{type(error).__name__}: {error}",
                    "the lengths cannot be read",
                )  # fmt: skip
            charged = step.flops


def shapes_of(run: Run) -> dict[str, ModelShape]:
    records = {
        "policy": run.shapes.policy,
        "critic": run.shapes.critic,
        "reference": run.shapes.reference,
        REWARD_MODEL: run.shapes.reward_model,
    }
    return {role: shape_from(record) for role, record in records.items() if record is not None}


def _step(
    cell: Cell,
    line: int,
    before: Spent,
    step: Step,
    charged: Mapping[str, float],
    shapes: Mapping[str, ModelShape],
    run: Run,
    design: Design,
) -> Iterator[Violation]:
    key = f"steps.jsonl line {line}"
    needed = needed_charges(step, design.models_of(cell))
    if set(step.lengths) != needed:
        yield violation(
            "flops", cell.id, f"{key}: lengths", sorted(needed), sorted(step.lengths),
            "not every model that the arm needs was charged, or one that it does not need was",
        )  # fmt: skip
    yield from charges_follow(cell, key, step, charged, shapes, design)
    yield from _lengths(cell, key, before, step, run, design)


def charges_follow(
    cell: Cell,
    key: str,
    step: Step,
    charged: Mapping[str, float],
    shapes: Mapping[str, ModelShape],
    design: Design,
) -> Iterator[Violation]:
    """What a step adds to ``charged`` is what its lengths cost in models of these shapes."""
    expected = step_flops(step.lengths, shapes, convention(design.spec.model))
    for role in sorted(expected.keys() | step.flops.keys() | charged.keys()):
        found = step.flops.get(role, 0) - charged.get(role, 0)
        # The difference of two totals is as exact as the totals are.
        slack = FLOPS_TOLERANCE * max(abs(step.flops.get(role, 0)), 1)
        if not close(found, expected.get(role, 0), FLOPS_TOLERANCE, slack):
            yield violation(
                "flops", cell.id, f"{key}: flops.{role}", expected.get(role, 0), found,
                "the FLOPs of this step do not follow from its lengths and the model's shape",
            )  # fmt: skip


def needed_charges(step: Step, models: set[str]) -> set[str]:
    """The roles and phases that a step cannot do without, with these models beside the policy."""
    needed = {"policy/generate"}
    if REWARD_MODEL in models:
        needed.add(_REWARDED)  # dropped completions too
    if not step.used:
        return needed
    needed.add("policy/score")
    if step.phase == "train":
        needed.add("policy/train")
    for role in models - {REWARD_MODEL}:
        needed |= {"critic/score", "critic/train"} if role == "critic" else {f"{role}/score"}
    return needed


_REWARDED = f"{REWARD_MODEL}/score"


def _lengths(
    cell: Cell, key: str, before: Spent, step: Step, run: Run, design: Design
) -> Iterator[Violation]:
    """The sums of lengths agree with the tokens charged, and with each other."""
    drawn = generation_from(step.lengths["policy/generate"])
    completions = step.spent.completions - before.completions
    rules: list[tuple[str, Any, Any, str]] = [
        ("prefill.sequences", step.spent.prompts - before.prompts, drawn.prefill.sequences,
         "prompts read are not the prompts charged"),
        ("prefill.tokens", step.spent.prompt_tokens - before.prompt_tokens - drawn.given,
         drawn.prefill.tokens, "prompt tokens read are not the prompt tokens charged"),
        ("sampled", step.spent.completion_tokens - before.completion_tokens, drawn.sampled,
         "tokens sampled are not the completion tokens charged"),
        ("decoded", drawn.sampled + drawn.given - completions, drawn.decoded,
         "every token but each completion's last is fed back once"),
    ]  # fmt: skip
    if TASKS[design.spec.data.train.task].environment is None:
        rules.append(("given", 0, drawn.given, "no environment writes in this task"))
    for name, expected, found, why in rules:
        if expected != found:
            yield violation(
                "flops", cell.id, f"{key}: lengths.policy/generate.{name}", expected, found, why
            )
    mixed = round((step.mixed_share or 0.0) * drawn.decoded)
    if not min(mixed, 1) <= drawn.searched <= mixed:
        yield violation(
            "flops", cell.id, f"{key}: lengths.policy/generate.searched",
            f"{min(mixed, 1)} to {mixed}", drawn.searched,
            "each input that was mixed has an anchor, and each anchor is searched for once a draw",
        )  # fmt: skip
    if _REWARDED in step.lengths:
        yield from _rewarded(cell, key, step, drawn, design.group_size(cell, run))
    if step.used:
        yield from _scored(cell, key, step, drawn, run, design)


def _rewarded(
    cell: Cell, key: str, step: Step, drawn: Generation, size: int
) -> Iterator[Violation]:
    """The reward model read every completion that was sampled, and its head every token."""
    record = step.lengths[_REWARDED]
    lengths = Lengths(**record["lengths"])
    tokens = size * drawn.prefill.tokens + drawn.sampled + drawn.given
    for name, expected, found in (
        ("lengths.sequences", size * drawn.prefill.sequences, lengths.sequences),
        ("lengths.tokens", tokens, lengths.tokens),
        ("lengths.squared", _squared(drawn, size), lengths.squared),
        ("head_tokens", tokens, record["head_tokens"]),
    ):
        if expected != found:
            yield violation(
                "flops", cell.id, f"{key}: lengths.{_REWARDED}.{name}", expected, found,
                "what the reward model scored is not what was sampled",
            )  # fmt: skip


def _squared(drawn: Generation, size: int) -> int:
    """Of whole sequences: with p and c of each row, contexts = sum p (c - 1) + c (c - 1) / 2."""
    return (
        2 * drawn.contexts
        + drawn.sampled
        + drawn.given
        + size * (drawn.prefill.squared + 2 * drawn.prefill.tokens)
    )


def _scored(
    cell: Cell, key: str, step: Step, drawn: Generation, run: Run, design: Design
) -> Iterator[Violation]:
    """What is scored and trained on is what was used, for every role alike."""
    size = design.group_size(cell, run)
    records = {k: v for k, v in step.lengths.items() if k not in ("policy/generate", _REWARDED)}
    sums = {k: (Lengths(**v["lengths"]), v["head_tokens"]) for k, v in records.items()}
    one = sums["policy/score"]
    for name, found in sums.items():
        if found != one:
            yield violation(
                "flops", cell.id, f"{key}: lengths.{name}", records["policy/score"],
                records[name], "two models read different completions",
            )  # fmt: skip
        pinned = design.optimizer(run).epochs
        epochs = records[name]["epochs"] if name.endswith("/train") else pinned
        if epochs != pinned:
            yield violation(
                "flops", cell.id, f"{key}: lengths.{name}.epochs", pinned,
                epochs, "the epochs charged are not the pinned ones",
            )  # fmt: skip
    lengths, head = one
    dropped, limit = step.dropped.completions, design.sampling(run).max_new_tokens
    rules: list[tuple[str, Any, Any, bool]] = [
        ("lengths.sequences", step.used, lengths.sequences, lengths.sequences == step.used),
        ("head_tokens", f"{drawn.sampled} less 1 to {limit} tokens for each of {dropped} dropped",
         head, dropped <= drawn.sampled - head <= dropped * limit),
    ]  # fmt: skip
    if not dropped:
        tokens = size * drawn.prefill.tokens + drawn.sampled + drawn.given
        squared = _squared(drawn, size)
        rules += [
            ("lengths.tokens", tokens, lengths.tokens, lengths.tokens == tokens),
            ("lengths.squared", squared, lengths.squared, lengths.squared == squared),
        ]
    for name, expected, found, holds in rules:
        if not holds:
            yield violation(
                "flops", cell.id, f"{key}: lengths.policy/score.{name}", expected, found,
                "what was scored is not what was sampled and kept",
            )  # fmt: skip
