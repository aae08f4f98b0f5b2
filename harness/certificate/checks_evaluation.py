"""That all arms were judged alike: problems, protocol, moments, and counts that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from harness.certificate.checks_consumption import spend
from harness.certificate.compare import equal
from harness.certificate.design import Design
from harness.certificate.evidence import BASE, Cell, Evidence
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import Evaluation, Problem

# spent / limit and share * limit round differently.
SHARE_TOLERANCE = 1e-12


def check_evaluation(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Same problems, same protocol, same moments of the budget; every sample is accounted for."""
    asked: dict[str, tuple[Cell, list[tuple[Any, ...]]]] = {}
    drawn: dict[int | None, tuple[Cell, int]] = {}
    for cell in evidence.cells:
        if cell.evals is None or (cell.arm, cell.name) not in design.cells:
            continue
        if cell.diverged is not None and not cell.evals:
            continue
        yield from _moments(cell, cell.evals, design)
        for number, line in enumerate(cell.evals, 1):
            key = f"evals.jsonl line {number}"
            yield from _protocol(cell, key, line, design)
            yield from _when(cell, key, line, design)
            yield from _problems(cell, key, line, design, asked)
            value = line.protocol.seed
            other, expected = drawn.setdefault(cell.seed, (cell, value))
            if value != expected:
                yield violation(
                    "evaluation", sorted({other.id, cell.id}), f"{key}: protocol.seed",
                    expected, value, "two cells of one seed were evaluated on different draws",
                )  # fmt: skip


def _moments(cell: Cell, evals: tuple[Evaluation, ...], design: Design) -> Iterator[Violation]:
    """Exactly the promised evaluations."""
    tests = [f"test.{name}" for name in design.spec.data.test]
    if cell.trial is not None:
        expected = {(1.0, "validation")}
    elif cell.arm == BASE:
        expected = {(0.0, split) for split in tests}
    else:
        expected = {(at, split) for at in design.spec.budget.evaluate_at for split in tests}
    found = Counter((line.at, line.split) for line in evals)
    for at, split in sorted(expected - found.keys()):
        yield violation(
            "evaluation", cell.id, "evals.jsonl", f"{split} at {at}", None,
            "an evaluation that the spec asks for is not there",
        )  # fmt: skip
    for (at, split), count in sorted(found.items()):
        if (at, split) not in expected or count > 1:
            yield violation(
                "evaluation", cell.id, "evals.jsonl", int((at, split) in expected), count,
                f"evaluations of {split} at {at} that the spec does not ask for",
            )  # fmt: skip


def _protocol(cell: Cell, key: str, line: Evaluation, design: Design) -> Iterator[Violation]:
    spec, tuning = design.spec.evaluation, design.spec.tuning
    sampling = design.sampling(cell.run) if cell.run else design.spec.sampling
    purpose = line.purpose
    if cell.trial is not None and tuning is not None:
        purpose, samples = "tuning", tuning.samples
    elif cell.arm == BASE:
        purpose, samples = "final", spec.samples
    else:
        # Shares passed by one step share one evaluation, and the last decides its size.
        last = max((e.at for e in cell.evals or () if e.step == line.step), default=line.at)
        purpose = "final" if last == 1.0 else "curve"
        samples = spec.samples if purpose == "final" else spec.curve_samples
    expected: dict[str, Any] = {
        "samples": samples,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "max_new_tokens": sampling.max_new_tokens,
        "greedy": spec.greedy,
    }
    if line.protocol.stop is not None:
        expected["stop"] = list(sampling.stop)
    for name, value in expected.items():
        found = getattr(line.protocol, name)
        if not equal(value, found):
            yield violation(
                "evaluation", cell.id, f"{key}: protocol.{name}", value, found,
                "the evaluation was not done as the spec pins it",
            )  # fmt: skip
    if line.purpose != purpose:
        yield violation(
            "evaluation", cell.id, f"{key}: purpose", purpose, line.purpose,
            "the evaluation has another purpose than its moment",
        )  # fmt: skip


def _when(cell: Cell, key: str, line: Evaluation, design: Design) -> Iterator[Violation]:
    """The moment is the first step at which the share of the budget was spent."""
    if cell.arm == BASE or cell.steps is None:
        return
    spent = spend(cell, design.spec.budget.unit)
    if spent is None or not 1 <= line.step <= len(spent):
        yield violation(
            "evaluation", cell.id, f"{key}: step", f"1..{len(cell.steps)}", line.step,
            "the evaluation is of a step that the run did not record",
        )  # fmt: skip
        return
    if line.spent != cell.steps[line.step - 1].spent:
        yield violation(
            "evaluation", cell.id, f"{key}: spent",
            cell.steps[line.step - 1].spent.model_dump(), line.spent.model_dump(),
            "the evaluation's spend is not that of its step",
        )  # fmt: skip
    target = line.at * design.limit_of(cell)
    slack = SHARE_TOLERANCE * target
    before = spent[line.step - 2] if line.step > 1 else 0.0
    if spent[line.step - 1] < target - slack or before >= target + slack:
        yield violation(
            "evaluation", cell.id, f"{key}: step", f"the first step with {target} spent",
            f"step {line.step}, {before} before it and {spent[line.step - 1]} after",
            f"the policy was not evaluated at {line.at} of its budget",
        )  # fmt: skip


def _problems(
    cell: Cell,
    key: str,
    line: Evaluation,
    design: Design,
    asked: dict[str, tuple[Cell, list[tuple[Any, ...]]]],
) -> Iterator[Violation]:
    locked = design.lock.evaluation_problems.get(line.split)
    if locked is None:
        yield violation(
            MISSING, cell.id, f"spec.lock.yaml: evaluation_problems.{line.split}", "a hash", None,
            "the lock does not pin these problems",
        )  # fmt: skip
    elif line.problems_sha256 != locked:
        yield violation(
            "evaluation", cell.id, f"{key}: problems_sha256", locked, line.problems_sha256,
            f"other problems were asked than those of {line.split}",
        )  # fmt: skip
    names = [(p.id, p.level, p.subject) for p in line.problems]
    other, expected = asked.setdefault(line.split, (cell, names))
    if names != expected:
        where = next(
            (i for i, (a, b) in enumerate(zip(expected, names, strict=False)) if a != b),
            min(len(names), len(expected)),
        )
        yield violation(
            "evaluation", sorted({other.id, cell.id}), f"{key}: problems[{where}]",
            list(expected[where]) if where < len(expected) else None,
            list(names[where]) if where < len(names) else None,
            f"two cells were asked different problems of {line.split}",
        )  # fmt: skip
    if len({p.id for p in line.problems}) != len(line.problems):
        yield violation(
            "evaluation", cell.id, f"{key}: problems", "ids that occur once", None,
            "a problem is counted twice",
        )  # fmt: skip
    for problem in line.problems:
        yield from _counts(cell, key, problem, line)
        if design.spec.reward.learned is not None:
            yield from _both_scores(cell, key, problem, design.spec.reward.learned.success)


def _both_scores(cell: Cell, key: str, problem: Problem, success: float) -> Iterator[Violation]:
    """Each sample has both scores, and is right where its gold score says so."""
    for name, scores in (("gold", problem.gold), ("proxy", problem.proxy)):
        if scores is None or len(scores) != problem.n:
            yield violation(
                "evaluation", cell.id, f"{key}: problems[{problem.id}].{name}",
                f"{problem.n} scores", None if scores is None else len(scores),
                "a sample has no score of its own",
            )  # fmt: skip
    right = sum(score >= success for score in problem.gold or ())
    if problem.gold is not None and right != problem.correct:
        yield violation(
            "evaluation", cell.id, f"{key}: problems[{problem.id}].correct", right, problem.correct,
            "right samples are not those whose gold score reaches success",
        )  # fmt: skip


def _counts(cell: Cell, key: str, problem: Problem, line: Evaluation) -> Iterator[Violation]:
    """Every sample is in exactly one class."""
    right = sum(count for _, count, correct in problem.answers if correct)
    rules = [
        ("n", line.protocol.samples, problem.n, "not as many samples as the protocol says"),
        ("answers", problem.n - problem.unparsed, sum(count for _, count, _ in problem.answers),
         "answers and unparsed samples do not add up"),
        ("correct", right, problem.correct, "right answers are not those counted as correct"),
        ("outcomes", problem.n, sum(problem.outcomes.values()), "outcomes do not add up"),
        ("outcomes.correct", problem.correct, problem.outcomes.get("correct", 0),
         "right outcomes are not those counted as correct"),
        ("truncated", min(problem.truncated, problem.n), problem.truncated,
         "more were cut than sampled"),
        ("greedy", line.protocol.greedy, problem.greedy is not None,
         "the greedy answer is not there, or should not be"),
    ]  # fmt: skip
    for name, expected, found, why in rules:
        if expected != found:
            yield violation(
                "evaluation", cell.id, f"{key}: problems[{problem.id}].{name}",
                expected, found, why,
            )  # fmt: skip
    if problem.length_mean > line.protocol.max_new_tokens:
        yield violation(
            "evaluation", cell.id, f"{key}: problems[{problem.id}].length_mean",
            f"<= {line.protocol.max_new_tokens}", problem.length_mean,
            "samples are longer than the protocol allows",
        )  # fmt: skip
