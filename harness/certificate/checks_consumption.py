"""What the runs consumed: prompts, gradings, budget; each total against another record."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.certificate.checks_noise import SURELY, noise_as_declared
from harness.certificate.compare import FLOPS_TOLERANCE, MEAN_TOLERANCE, SCORE_TOLERANCE, close
from harness.certificate.design import Design, part
from harness.certificate.evidence import Cell, Evidence
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import Prompts, Spent, Step
from harness.errors import counted

LEARNED_TOLERANCE = 1e-5  # two float32 means of scores of unit variance
ZERO = Spent(
    prompts=0, completions=0, prompt_tokens=0, completion_tokens=0, tokens=0, updates=0,
    reward_calls=0, flops=0.0,
)  # fmt: skip


def before_and_after(steps: tuple[Step, ...]) -> Iterator[tuple[int, Spent, Step]]:
    """Each step with its line number and the totals before it."""
    previous = ZERO
    for line, step in enumerate(steps, 1):
        yield line, previous, step
        previous = step.spent


def check_prompts(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """One seed, one stream of prompts: every arm drew the same ones in the same order."""
    first_with: dict[tuple[int, str], tuple[Cell, str]] = {}
    for cell, run, steps in design.sampling_cells(evidence):
        locked = design.lock.streams.get(str(run.seed))
        if locked is None:
            yield violation(
                MISSING, cell.id, f"spec.lock.yaml: streams.{run.seed}", "hashes", None,
                "the lock does not pin this seed's prompts",
            )  # fmt: skip
        cursor = 0
        for line, step in enumerate(steps, 1):
            key = f"steps.jsonl line {line}: prompts"
            if step.prompts.cursor != cursor + step.prompts.drawn:
                yield violation(
                    "prompts", cell.id, f"{key}.cursor", cursor + step.prompts.drawn,
                    step.prompts.cursor, "prompts were skipped or drawn twice",
                )  # fmt: skip
            yield from _multiples(
                cell, key, cursor, step.prompts, design.sampling(run).prompts_per_step
            )
            cursor = step.prompts.cursor
            for count, value in step.prompts.stream.items():
                expected = (locked or {}).get(count)
                if locked is not None and expected is None:
                    yield violation(
                        MISSING, cell.id, f"{key}.stream.{count}", "a hash in the lock", None,
                        f"the lock's streams.{run.seed} do not reach this far",
                    )  # fmt: skip
                elif expected is not None and value != expected:
                    yield violation(
                        "prompts", cell.id, f"{key}.stream.{count}", expected, value,
                        f"the first {count} prompts are not those of seed {run.seed}",
                    )  # fmt: skip
                other, seen = first_with.setdefault((run.seed, count), (cell, value))
                if expected is None and seen != value:
                    yield violation(
                        "prompts", (other.id, cell.id), f"{key}.stream.{count}", seen, value,
                        f"two cells of seed {run.seed} drew different prompts",
                    )  # fmt: skip


def _multiples(
    cell: Cell, key: str, cursor: int, prompts: Prompts, every: int
) -> Iterator[Violation]:
    """A hash stands at every multiple passed, or a swap could hide between two."""
    passed = range(cursor // every * every + every, prompts.cursor + 1, every)
    expected, found = sorted(map(str, passed)), sorted(prompts.stream)
    if expected != found:
        yield violation(
            "prompts", cell.id, f"{key}.stream", expected, found,
            f"the stream is not hashed at every {every} prompts",
        )  # fmt: skip


def check_graded(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Every completion was graded once, and used or charged as dropped."""
    yield from noise_as_declared(evidence, design)
    for cell, run, steps in design.sampling_cells(evidence):
        size, batch = design.group_size(cell, run), design.batch(run)
        resamples = part(design.locked_parts(cell), "sampling").get("part") != "FixedGroups"
        for line, before, step in before_and_after(steps):
            drawn = step.spent.prompts - before.prompts
            completions = step.spent.completions - before.completions
            graded = step.spent.reward_calls - before.reward_calls
            used, dropped = step.used, step.dropped
            steps = step.worked_steps.graded if step.worked_steps else 0
            rules: list[tuple[str, int | str, int, str]] = [
                ("prompts.drawn", drawn, step.prompts.drawn, "prompts drawn are not those charged"),
                ("spent.completions", drawn * size, completions,
                 f"completions are not prompts x group size {size}"),
                ("spent.reward_calls", completions, graded, "gradings are not the completions"),
                ("spent.steps_graded", steps, step.spent.steps_graded - before.steps_graded,
                 "steps charged are not the steps graded"),
                ("outcomes", completions, sum(step.outcomes.values()),
                 "outcomes do not add up to the completions"),
                ("used", completions - dropped.completions, used,
                 "used and dropped completions do not add up to those sampled"),
                ("dropped.completions", dropped.groups * size, dropped.completions,
                 "dropped completions are not whole groups"),
                ("effective.completions_per_prompt", size,
                 step.effective.completions_per_prompt if step.effective else size,
                 "the group size is not the declared one"),
            ]  # fmt: skip
            if not resamples:
                rules.append(("used", batch, used, "the batch is not prompts_per_step x "
                              "completions_per_prompt"))  # fmt: skip
            elif used > batch:
                rules.append(("used", f"<= {batch}", used, "more was used than a batch"))
            for key, expected, found, why in rules:
                if expected != found:
                    yield violation(
                        "graded", cell.id, f"steps.jsonl line {line}: {key}", expected, found, why
                    )
            yield from _scores(cell, line, step, size, design)


def _scores(cell: Cell, line: int, step: Step, size: int, design: Design) -> Iterator[Violation]:
    """The mean score is what the spec's reward gives for the recorded accuracy."""
    if not step.used:
        return
    key = f"steps.jsonl line {line}"
    if design.learned:
        yield from _learned(cell, key, step, design)
        return
    if step.accuracy is None or step.score_mean is None:
        yield violation(
            MISSING, cell.id, f"{key}: accuracy, score_mean", "numbers",
            [step.accuracy, step.score_mean], "what the used completions scored is not recorded",
        )  # fmt: skip
        return
    right = step.accuracy * step.used
    surplus = step.outcomes.get("correct", 0) - round(right)
    # Dropped groups are all right or all wrong under the rules that drop; others are not dropped.
    if (
        not close(right, round(right), 0, SCORE_TOLERANCE * step.used)
        or not 0 <= surplus <= step.dropped.completions
        or (surplus % size and design.spec.reward.noise is None)
    ):
        yield violation(
            "graded", cell.id, f"{key}: accuracy", step.outcomes.get("correct", 0), right,
            "right completions by outcome are not accuracy x used, dropped groups apart",
        )  # fmt: skip
    reward, told = design.spec.reward, step.accuracy
    if reward.noise is not None:
        if step.noise is None or step.dropped.completions:
            return  # a placebo's verdicts are others'; dropped ones were told otherwise than kept
        told += (step.noise.wrong_turned - step.noise.right_turned) / step.used
    plain = reward.wrong + (reward.correct - reward.wrong) * told
    low, high = plain + min(reward.format, 0), plain + max(reward.format, 0)
    if reward.dense is not None:
        if step.worked_steps is None or step.dropped.completions:
            return  # the first is missing, which is a violation of its own; dropped ones are in one
        right_steps = step.worked_steps.per_completion * (step.worked_steps.right_share or 0.0)
        low, high = (reward.dense.outcome * end + reward.dense.steps * right_steps
                     for end in (low, high))  # fmt: skip
    slack = SCORE_TOLERANCE * max(abs(reward.correct), abs(reward.wrong), 1)
    if reward.noise is not None:
        slack += SURELY * reward.noise.sigma / step.used**0.5
    if not low - slack <= step.score_mean <= high + slack:
        yield violation(
            "graded", cell.id, f"{key}: score_mean", [low, high], step.score_mean,
            "the mean score is not what the pinned reward gives for this accuracy",
        )  # fmt: skip


def _learned(cell: Cell, key: str, step: Step, design: Design) -> Iterator[Violation]:
    """Both rewards are recorded, and the score is the one that the arm declares."""
    means = {name: getattr(step, name) for name in ("gold_mean", "proxy_mean", "score_mean")}
    for name, found in means.items():
        if found is None:
            yield violation(
                MISSING, cell.id, f"{key}: {name}", "a number", None,
                "what the completions scored under both rewards is not recorded",
            )  # fmt: skip
    told = design.locked_parts(cell).get("reward")
    if told or step.dropped.completions or None in means.values():
        return  # the gold score is put on another scale; dropped completions are in one mean only
    assert step.score_mean is not None
    assert step.proxy_mean is not None
    noise = design.spec.reward.noise
    slack = SURELY * noise.sigma / step.used**0.5 if noise and step.used else 0.0
    if not close(step.score_mean, step.proxy_mean, SCORE_TOLERANCE, LEARNED_TOLERANCE + slack):
        yield violation(
            "graded", cell.id, f"{key}: score_mean", step.proxy_mean, step.score_mean,
            "the mean score is not that of the reward model",
        )  # fmt: skip


def spend(cell: Cell, unit: str) -> list[float] | None:
    """Cumulative spend after each step, in the budget's unit; None where it is not recorded."""
    if cell.steps is None:
        return None
    if unit != "seconds":
        return [float(getattr(step.spent, unit)) for step in cell.steps]
    if cell.timing is None or len(cell.timing) != len(cell.steps):
        return None
    return [line.total_seconds for line in cell.timing]


def check_budget(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Equal budgets, spent to the end and not beyond the step that crosses it."""
    unit = design.spec.budget.unit
    for cell, _, steps in evidence.trained():
        yield from _consistent(cell, steps)
        limit, spent = design.limit_of(cell), spend(cell, unit)
        name = "timing.jsonl" if unit == "seconds" else "steps.jsonl"
        field = "total_seconds" if unit == "seconds" else f"spent.{unit}"
        if cell.diverged is not None and spent is not None and (not spent or spent[-1] < limit):
            continue
        if not spent:
            yield violation(
                MISSING, cell.id, f"{name}: {field}", "a line per step", None,
                "what the run spent is not recorded",
            )  # fmt: skip
            continue
        if spent[-1] < limit:
            yield violation(
                "budget", cell.id, f"{name} line {len(spent)}: {field}", f">= {limit}", spent[-1],
                "the run stopped before its budget was spent",
            )  # fmt: skip
        crossed = next((i for i, value in enumerate(spent, 1) if value >= limit), len(spent))
        if crossed < len(spent):
            yield violation(
                "budget", cell.id, f"{name} line {crossed + 1}: {field}",
                f"no step after the limit of {limit}", spent[-1],
                f"the run went on for {counted(len(spent) - crossed, 'step')} after its budget was "
                "spent",
            )  # fmt: skip


def _consistent(cell: Cell, steps: tuple[Step, ...]) -> Iterator[Violation]:
    """Totals never fall, and agree with each other."""
    counts = tuple(Spent.model_fields)
    for line, before, step in before_and_after(steps):
        key, now = f"steps.jsonl line {line}", step.spent
        for name in counts:
            if getattr(now, name) < getattr(before, name):
                yield violation(
                    "budget", cell.id, f"{key}: spent.{name}", f">= {getattr(before, name)}",
                    getattr(now, name), "a cumulative total fell",
                )  # fmt: skip
        if now.tokens != now.prompt_tokens + now.completion_tokens:
            yield violation(
                "budget", cell.id, f"{key}: spent.tokens",
                now.prompt_tokens + now.completion_tokens, now.tokens,
                "tokens are not prompt plus completion tokens",
            )  # fmt: skip
        if not close(sum(step.flops.values()), now.flops, FLOPS_TOLERANCE):
            yield violation(
                "budget", cell.id, f"{key}: spent.flops", sum(step.flops.values()), now.flops,
                "FLOPs are not the sum over roles and phases",
            )  # fmt: skip
        sampled = now.completion_tokens - before.completion_tokens
        completions = now.completions - before.completions
        mean = step.length_mean
        if completions and (not close(mean * completions, sampled, MEAN_TOLERANCE)):
            yield violation(
                "budget", cell.id, f"{key}: spent.completion_tokens",
                mean * completions, sampled,
                "completion tokens are not mean length x completions",
            )  # fmt: skip
    for line, (a, b) in enumerate(pairwise(steps), 2):
        for role in sorted(a.flops.keys() | b.flops.keys()):
            if b.flops.get(role, 0) < a.flops.get(role, 0):
                yield violation(
                    "budget", cell.id, f"steps.jsonl line {line}: flops.{role}",
                    f">= {a.flops[role]}", b.flops.get(role), "a cumulative total fell",
                )  # fmt: skip
