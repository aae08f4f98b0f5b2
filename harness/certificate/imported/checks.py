"""The certificate's checks, of runs that another library logged.

A check yields a violation where the files contradict it, and a reason where they do not show it. It
holds if it yields neither. Nothing is taken for granted: a setting that no file records is not
known, whatever the library's default is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.certificate.compare import RATE_TOLERANCE, close, equal
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.imported.run import (
    ALGORITHM,
    CONTROLS,
    OWN_WORDS,
    SEEDS,
    TOTALS,
    ImportedRun,
)
from harness.errors import shown

Runs = Sequence[ImportedRun]
Found = Violation | str
CONSOLE_DIGITS = 5e-4  # half of the last of three decimals
NOT_KNOWN = "unknown"


@dataclass(frozen=True)
class ImportedRule:
    """A check by its name in the certificate, and what it shows of imported runs."""

    name: str
    proves: str
    find: Callable[[Runs], Iterator[Found]]


def kinds(runs: Runs) -> dict[str, list[ImportedRun]]:
    """Runs by library and algorithm: the seeds of one arm."""
    found: dict[str, list[ImportedRun]] = {}
    for run in runs:
        found.setdefault(run.kind, []).append(run)
    return found


def values(runs: Runs, name: str) -> dict[str, Any]:
    """A setting or total in each run that records it."""
    return {
        run.name: (run.totals if name in TOTALS else run.settings)[name]
        for run in runs
        if name in (run.totals if name in TOTALS else run.settings)
    }


def differ(found: Collection[Any]) -> bool:
    """Whether any two of these are unequal, as JSON values."""
    first, *others = found or (None,)
    return any(not equal(first, other) for other in others)


def _unequal(check: str, runs: Runs, names: Iterable[str], why: str) -> Iterator[Found]:
    for name in names:
        groups = [runs]
        if name in OWN_WORDS:
            libraries = sorted({run.library for run in runs})
            groups = [[run for run in runs if run.library == library] for library in libraries]
            if len(groups) > 1 and len(values(runs, name)) > 1:
                yield f"{name} of {' and '.join(libraries)} cannot be held together: own words"
        for group in groups:
            yield from _unequal_in(check, group, name, why)


def _unequal_in(check: str, runs: Runs, name: str, why: str) -> Iterator[Found]:
    told = values(runs, name)
    if len(told) > 1 and differ(told.values()):
        first, *_ = told.values()
        cells = [run for run, value in told.items() if not equal(value, first)]
        yield violation(check, [next(iter(told)), *cells], name, first, told[cells[0]], why)
    bare = [run for run in runs if run.name not in told]
    if name in CONTROLS and bare:
        yield _unrecorded(name, bare)


def _unrecorded(name: str, runs: Runs) -> str:
    run = runs[0]
    said = run.not_told.get(name)
    if name in run.assumed:
        value, source = run.assumed[name]
        said = f"its code sets {shown(value)} ({source})"
    return f"{name} is not recorded of {', '.join(r.name for r in runs)}" + (
        f": {said}" if said else ""
    )


def check_missing(runs: Runs) -> Iterator[Found]:
    for run in runs:
        yield from (f"{run.name}: {missing}" for missing in run.missing)
        for where in run.damaged:
            yield violation(MISSING, run.name, where, "JSON", "damage", "a line cannot be read")
        for row in run.rows:
            for key, value in row.items():
                if not math.isfinite(value):
                    where = f"step {run.step_of(row)}: {key}"
                    yield violation(MISSING, run.name, where, "a number", str(value), "not finite")
    yield "logs hold means over steps: neither prompts nor completions nor tokens are in them"


def check_matrix(runs: Runs) -> Iterator[Found]:
    for run in runs:
        if run.finished is False:
            limit, last = run.settings.get("step_limit"), max(run.steps, default=0)
            why = "the run stopped before what was asked for was done"
            yield violation("matrix", run.name, "step_limit", limit, last, why)
    by_kind = kinds(runs)
    told = {kind: [r.settings.get("seed", NOT_KNOWN) for r in own] for kind, own in by_kind.items()}
    for kind, seeds in told.items():
        sure = [seed for seed in seeds if seed != NOT_KNOWN]
        twice = sorted({seed for seed in sure if sure.count(seed) > 1}, key=str)
        if twice:
            cells = [run.name for run in by_kind[kind]]
            yield violation(
                "matrix", cells, "seed", "each seed once", twice, "a seed was run twice"
            )
    sets = {kind: sorted(map(str, seeds)) for kind, seeds in told.items()}
    if NOT_KNOWN not in {seed for seeds in sets.values() for seed in seeds} and len(sets) > 1:
        first, *others = sets
        for other in others:
            if sets[other] != sets[first]:
                cells = [run.name for kind in (first, other) for run in by_kind[kind]]
                why = f"{first} and {other} ran other seeds"
                yield violation("matrix", cells, "seed", sets[first], sets[other], why)
    yield "there is no lock: runs that were made and not given here cannot be seen"


def check_records(runs: Runs) -> Iterator[Found]:
    for run in runs:
        for before, after in pairwise(run.training_steps):
            if after <= before:
                why = "steps are logged twice or out of order: resumed, or put together"
                yield violation("records", run.name, run.step, f"above {before}", after, why)
                break
    yield "the logs carry no hashes: whether a line was edited or taken out cannot be seen"


def check_pinned(runs: Runs) -> Iterator[Found]:
    yield from _alone(runs)
    yield from _unequal("pinned", runs, CONTROLS, "a control differs between the runs")


def _alone(runs: Runs) -> Iterator[Found]:
    if len(runs) < 2:
        yield "there is one run, and nothing to compare it with"


def check_arms(runs: Runs) -> Iterator[Found]:
    for run in runs:
        if run.algorithm is None:
            yield f"{run.name}: nothing tells its algorithm"
    for kind, own in kinds(runs).items():
        yield from _unequal("arms", own, ALGORITHM, f"two runs of {kind} are not one algorithm")
    yield "a configuration names options: what the code of that version made of them is not shown"


def check_hashes(runs: Runs) -> Iterator[Found]:
    for name in ("model", "data", "reward"):
        found = _unequal("hashes", runs, [name], f"two runs name another {name}")
        yield from (one for one in found if isinstance(one, Violation))
    yield "no hashes of data, model, tokenizer, reward or code, and no versions, are in the logs"


def check_prompts(runs: Runs) -> Iterator[Found]:
    for kind, own in kinds(runs).items():
        for run in own:
            if "data_seed" not in run.settings:
                yield f"{run.name}: the seed of the prompts' order is not recorded ({kind})"
    yield "the logs do not name the prompts of a step"


def check_graded(runs: Runs) -> Iterator[Found]:
    yield "the logs hold mean scores: not which completion was graded, by what, or how often"


def check_budget(runs: Runs) -> Iterator[Found]:
    yield from _alone(runs)
    drawn = values(runs, "completions")
    same = "the runs did not spend the same"
    yield from _unequal("budget", runs, ("completions", "optimizer_steps"), same)
    bare = [run for run in runs if run.name not in drawn]
    if bare:
        yield _unrecorded("completions", bare)
    for run in runs:
        if run.finished is None:
            yield f"{run.name}: whether it reached its end cannot be told"
        elif not run.finished:
            limit, last = run.settings.get("step_limit"), max(run.steps, default=0)
            yield violation("budget", run.name, run.step, limit, last, "the budget was not spent")


def check_flops(runs: Runs) -> Iterator[Found]:
    yield "no lengths of single completions and no shapes of models are logged, so no FLOPs follow"


def check_effective(runs: Runs) -> Iterator[Found]:
    for run in runs:
        yield from _effective_rate(run)
        yield from _effective_kl(run)
    yield "temperature, passes and terms of the loss are in the configuration, and not in the log"


def _effective_rate(run: ImportedRun) -> Iterator[Found]:
    """A rate that is declared constant has to be logged as such, and none may pass its peak."""
    peak, shape = run.settings.get("learning_rate"), run.settings.get("lr_scheduler")
    rows = run.training_rows
    if not rows or not isinstance(peak, int | float):
        yield f"{run.name}: no learning rate to hold the log against"
        return
    slack = CONSOLE_DIGITS if run.rounded else 0.0
    constant = shape == "constant" and not run.settings.get("warmup", 1)
    for row in rows:
        rate = row[run.rate_key]
        over = rate > peak and not close(rate, peak, RATE_TOLERANCE, slack)
        if over or (constant and not close(rate, peak, RATE_TOLERANCE, slack)):
            where = f"step {run.step_of(row)}: {run.rate_key}"
            expected = peak if constant else f"at most {peak}"
            why = "the logged learning rate is not the configured one"
            yield violation("effective", run.name, where, expected, rate, why)
            return
    if run.rounded:
        yield f"{run.name}: console output rounds the learning rate away"


def _effective_kl(run: ImportedRun) -> Iterator[Found]:
    coef, place = run.settings.get("kl_coef"), run.settings.get("kl_place")
    rows = run.training_rows
    measured = any(key in row for key in run.measured_kl for row in rows)
    # TRL measures the KL only if it loads a reference, and loads none at 0.
    if place == "none" and run.library == "trl" and measured:
        why = "a KL to the reference was measured, which this configuration would not load"
        yield violation("effective", run.name, "kl", None, "a column of the log", why)
    if place not in (None, "none") and rows and not measured:
        yield f"{run.name}: a KL penalty is configured, and no KL is logged"
    if run.kl_key and isinstance(coef, int | float) and place == "loss":
        slack = CONSOLE_DIGITS if run.rounded else 0.0
        for row in rows:
            if run.kl_key in row and not close(row[run.kl_key], coef, RATE_TOLERANCE, slack):
                where = f"step {run.step_of(row)}: {run.kl_key}"
                why = "the logged KL coefficient is not the configured one"
                yield violation("effective", run.name, where, coef, row[run.kl_key], why)
                return


def check_tuning(runs: Runs) -> Iterator[Found]:
    yield "how the settings were found, with how many trials and on what data, is not logged"


def check_evaluation(runs: Runs) -> Iterator[Found]:
    at = {run.name: sorted(_evaluated(run)) for run in runs}
    first, *others = at
    for other in others:
        if at[first] and at[other] and at[first] != at[other]:
            why = "the runs were evaluated at other steps"
            yield violation("evaluation", [first, other], "steps", at[first], at[other], why)
    yield "problems, samples and decoding of the evaluations are not in the logs"


def _evaluated(run: ImportedRun) -> set[int]:
    marks = ("eval_", "eval/", "val-core/", "val-aux/", "val/")
    return {
        step for row in run.rows
        if (step := run.step_of(row)) is not None and any(key.startswith(marks) for key in row)
    }  # fmt: skip


def check_controls(runs: Runs) -> Iterator[Found]:
    yield "no base and no placebo is among the runs: what training alone does is not shown"


def check_ladder(runs: Runs) -> Iterator[Found]:
    yield "no ladder is declared: a difference in results belongs to no one of the settings"


def check_amendments(runs: Runs) -> Iterator[Found]:
    yield "nothing was declared before the runs, so nothing shows what was declared after them"


RULES = (
    ImportedRule(MISSING, "Every file of the runs is there and readable, and every number finite.",
                 check_missing),
    ImportedRule("matrix", "Every algorithm ran the same seeds, once, to the end, and no run was "
                 "left out.", check_matrix),
    ImportedRule("records", "No logged step was edited, cut or taken away.", check_records),
    ImportedRule("pinned", "By their configurations, all runs have the same value in every "
                 "control.", check_pinned),
    ImportedRule("arms", "Runs of one algorithm ran one algorithm.", check_arms),
    ImportedRule("hashes", "Data, model, tokenizer, reward and code are the same.", check_hashes),
    ImportedRule("prompts", "Runs of one seed drew the same prompts.", check_prompts),
    ImportedRule("graded", "Every completion was graded once by one reward.", check_graded),
    ImportedRule("budget", "By their logs, all runs drew as many completions, took as many "
                 "optimizer steps, and went on to the end.", check_budget),
    ImportedRule("flops", "The FLOPs follow from lengths and shapes.", check_flops),
    ImportedRule("effective", "What was configured is what the log shows.", check_effective),
    ImportedRule("tuning", "Every algorithm was tuned alike.", check_tuning),
    ImportedRule("evaluation", "All runs were evaluated alike.", check_evaluation),
    ImportedRule("controls", "A base and a placebo were run.", check_controls),
    ImportedRule("ladder", "Each difference is accounted for by itself.", check_ladder),
    ImportedRule("amendments", "What was declared late is told as such.", check_amendments),
)  # fmt: skip


def differences(runs: Runs) -> dict[str, dict[str, Any]]:
    """Setting or total -> its kind, and its value in each run, where the runs are not all alike.

    A value that is not recorded shows as ``unknown``, or as the library's source has it; a setting
    that is unknown of every run is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    groups: dict[str, Mapping[str, str]] = {
        "control": CONTROLS, "algorithm": ALGORITHM, "seed": SEEDS, "budget": TOTALS,
    }  # fmt: skip
    for kind, names in groups.items():
        for name in names:
            told = {run.name: believed(run, name) for run in runs}
            if any(value != NOT_KNOWN for value in told.values()) and differ(told.values()):
                marked = {run.name: _marked(run, name, told[run.name]) for run in runs}
                found[name] = {"kind": kind, "values": marked}
    return found


def believed(run: ImportedRun, name: str) -> Any:
    """A setting or total as recorded, else as the library's source fixes it, else ``unknown``."""
    told = values([run], name)
    if told:
        return told[run.name]
    return run.assumed[name][0] if name in run.assumed else NOT_KNOWN


def _marked(run: ImportedRun, name: str, value: Any) -> Any:
    if values([run], name) or value == NOT_KNOWN:
        return value
    return f"{shown(value)} (not recorded: its code)"
