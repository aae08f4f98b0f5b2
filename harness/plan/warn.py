"""What a reader of the results would object to, said before they are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise

from harness.errors import counted
from harness.knobs import is_thin
from harness.plan.speed import wants_gpu
from harness.plan.value import SMALL_P, ArmPlan, Plan
from harness.spec.schema import ExperimentSpec

FEW_STEPS = 10
FEW_PROBLEMS = 100
MANY_PASSES = 3.0
LONG_WARMUP = 0.25


def warnings_of(spec: ExperimentSpec, plan: Plan, width: int) -> tuple[str, ...]:
    """One line each; none of them stops a run."""
    return (
        *_statistics(spec, plan),
        *_steps(plan),
        *_tuning(spec, plan),
        *_data(spec, plan),
        *_reproducibility(spec),
        *_machine(spec, plan, width),
    )


def _statistics(spec: ExperimentSpec, plan: Plan) -> Iterator[str]:
    n, p = plan.seeds, plan.smallest_p
    if p > SMALL_P:
        needed = next(m for m in range(n, 60) if 2 / 2**m <= SMALL_P)
        yield (
            f"{counted(n, 'seed')}: the smallest p that an exact sign-flip test can give "
            f"is {p:.3g}, so no difference between arms can reach {SMALL_P}; {needed} seeds would "
            f"give {2 / 2**needed:.3g}"
        )
    largest, samples = max(spec.evaluation.k), spec.evaluation.samples
    if samples < 2 * largest:
        yield (
            f"evaluation.samples {samples} is below 2 x k = {2 * largest}: pass@{largest} is "
            "unbiased but noisy; raise samples or drop that k"
        )
    small = [s for s in plan.data if s.name.startswith("test.") and s.problems < FEW_PROBLEMS]
    if small:
        least = min(s.problems for s in small)
        names = ", ".join(f"{s.name.removeprefix('test.')} {s.problems}" for s in small)
        yield (
            f"small test sets ({names}): at {least} problems one of them is {100 / least:.1f} "
            f"points, and accuracy has a standard error of up to {50 / least**0.5:.1f} points"
        )


def _steps(plan: Plan) -> Iterator[str]:
    for arm in plan.arms:
        for cell in arm.cells:
            if arm.step is None:
                continue
            if cell.steps < FEW_STEPS:
                yield (
                    f"arm {arm.name}: a {cell.kind}'s budget pays for "
                    f"{counted(cell.steps, 'step')} only; "
                    f"under {FEW_STEPS}, little can be learnt or told apart"
                )
            share = cell.warmup_steps / cell.steps
            if share > LONG_WARMUP:
                yield (
                    f"arm {arm.name}: critic warm-up takes {cell.warmup_steps} of a "
                    f"{cell.kind}'s {counted(cell.steps, 'step')} ({share:.0%}), in which the "
                    "policy does not learn"
                )
    spread = {a.name: c.steps for a in plan.arms if a.step and (c := a.cell("seed"))}
    if spread and max(spread.values()) > 1.25 * min(spread.values()):
        least, most = min(spread, key=lambda a: spread[a]), max(spread, key=lambda a: spread[a])
        yield (
            f"the budget in {plan.budget['unit']} buys {least} {counted(spread[least], 'step')} "
            f"and {most} {spread[most]}: arms differ in cost, which is what this unit is there to "
            "compare"
        )


def never_refreshed(plan: Plan, every: Mapping[str, int]) -> Iterator[str]:
    """Arms whose runs end before their first new reference, by steps between two of them."""
    for arm in plan.arms:
        for cell in arm.cells:
            if arm.name in every and cell.steps <= every[arm.name]:
                yield (
                    f"arm {arm.name}: a {cell.kind} has {counted(cell.steps, 'step')} and "
                    f"replaces its reference after {every[arm.name]}, so it never does; "
                    "lower kl.refresh.every or raise the budget"
                )


def _tuning(spec: ExperimentSpec, plan: Plan) -> Iterator[str]:
    if spec.tuning is None:
        yield "no tuning: arms run at their declared settings, which may suit one better"
        return
    spaces: dict[str, list[ArmPlan]] = {}
    for arm in plan.arms:
        dimensions = len(arm.space)
        if dimensions:
            spaces.setdefault(str(dimensions), []).append(arm)
        if is_thin(spec.tuning.trials, dimensions):
            yield (
                f"arm {arm.name}: {counted(spec.tuning.trials, 'trial')} for "
                f"{counted(dimensions, 'dimension')} ({', '.join(arm.space)}); the search is thin"
            )
    if len(spaces) > 1:
        counts = "; ".join(f"{d}: {', '.join(a.name for a in arms)}" for d, arms in spaces.items())
        yield (
            f"arms have unequal numbers of tuned dimensions at equal trials ({counts}); the "
            "report shows each arm's score against trials"
        )


def _data(spec: ExperimentSpec, plan: Plan) -> Iterator[str]:
    problems = next(split.problems for split in plan.data if split.name == "train")
    drawn = {a.name: c.training.prompts for a in plan.arms if a.step and (c := a.cell("seed"))}
    most = max(drawn, key=lambda a: drawn[a], default=None)
    if most is not None and drawn[most] > MANY_PASSES * problems:
        yield (
            f"training problems repeat: arm {most} draws {drawn[most]:,.0f} prompts a seed, "
            f"{drawn[most] / problems:.1f} passes over {problems:,}"
        )
    over = spec.data.max_prompt_tokens
    for split in plan.data:
        if split.prompt_longest > over and not split.prompt_counted:
            yield (
                f"data.{split.name}: the longest prompt is estimated at {split.prompt_longest} "
                f"tokens, above data.max_prompt_tokens {over}; a run counts and may refuse it"
            )
        found = split.contamination
        if found is None:
            continue
        if found["exact"]:
            yield (
                f"data.{split.name}: {len(found['exact'])} of {split.problems} problems stand in "
                f"the training data (first: {found['exact'][0][0]})"
            )
        if found["n"] is not None and found["flagged"]:
            yield (
                f"data.{split.name}: {found['flagged']} of {split.problems} problems "
                f"({found['flagged_share']:.1%}) share at least {found['threshold']:.0%} of their "
                f"{found['n']}-grams with training problems"
            )


def _reproducibility(spec: ExperimentSpec) -> Iterator[str]:
    at = spec.budget.evaluate_at
    if spec.budget.unit == "seconds":
        yield "budget.unit seconds: steps depend on the machine, so runs are not reproducible"
    elif any(b - a < 0.02 for a, b in pairwise(at)):
        yield f"budget.evaluate_at {list(at)}: shares closer than 2 % may fall on one step"


def _machine(spec: ExperimentSpec, plan: Plan, width: int) -> Iterator[str]:
    free, what = plan.memory_available
    biggest = plan.biggest
    if biggest is not None:
        peak = biggest.memory["peak"]  # type: ignore[index]
        held = peak if wants_gpu(spec) else peak * width
        if held > free:
            yield (
                f"arm {biggest.name}: predicted peak {peak / 1e9:.1f} GB a cell is more than "
                f"{free / 1e9:.0f} GB ({what}); lower optimizer.micro_batch, "
                "sampling.engine_batch or the cells at once"
            )
    if spec.sampling.engine == "vllm":
        yield (
            f"sampling.engine vllm holds weights of its own ({_weights(spec, plan):.1f} GB) and "
            "sizes its cache itself; neither is in the predicted memory"
        )
        if find_spec("vllm") is None:
            yield "sampling.engine vllm: not installed here; install the extra `vllm` before a run"
    if spec.model.gguf_file:
        yield "model.gguf_file: weights are expanded to model.dtype; memory is that of the latter"


def _weights(spec: ExperimentSpec, plan: Plan) -> float:
    return plan.model["parameters"] * (2 if spec.model.dtype == "bfloat16" else 4) / 1e9
