"""What a reader must know before believing a number, in plain sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import counted
from harness.knobs import FEW_TRIALS_PER_KNOB, is_thin
from harness.report.load import MANY, Experiment
from harness.report.scores import AVG, TestScores, paired
from harness.report.table_design import parts_of, searched
from harness.report.table_spent import (
    kl_to_base,
    late_mean,
    mean_of_steps,
    outcome_counts,
    training_steps,
)
from harness.report.tables import budget, fixed, in_percent, in_points, interval, number, percent
from harness.stats.effects import Difference, Estimate

FEW_UPDATES = 10
MOSTLY_FLAT = 0.8
MUCH_TRUNCATED = 0.2
OVERSPENT = 0.03
LARGE_KL = 10.0  # nats a completion: the base would hardly ever write what the policy writes
WEAK_CRITIC = 0.2  # of the variance of returns, over the last half of training
RARELY_CLIPPED = 0.005  # of tokens
ENOUGH_TRIED = 4  # of fewer values, most are at an edge
ALPHA = 0.05


def summary(experiment: Experiment, scores: Sequence[TestScores]) -> str:
    """What the data say about the first test set: ranges and overlaps, never a winner."""
    if not scores or not any(a in scores[0].arms for a in experiment.arms):
        return "No arm has a finished seed yet, so there is nothing to compare."
    test = scores[0]
    named = [a for a in experiment.drawn if a in experiment.arms and a in test.arms]
    found = {a: test.arms[a].estimates[AVG] for a in named}
    listed = ", ".join(f"{arm} {in_percent(e)}" for arm, e in found.items())
    label = test.label(AVG)
    text = (
        f"On {test.name}, after {budget(experiment.spec)} a run, "
        f"{label} in percent with 95 % intervals was: {listed}"
    )
    if "base" in test.arms:
        text += f"; the untrained base {in_percent(test.arms['base'].estimates[AVG])}"
    more = len(test.arms.keys() & set(experiment.arms)) - len(found)
    rest = f" {more} more arms, between the ends of the ladder, are in the tables." if more else ""
    return f"{text}. {_overlap(found)} {_paired_sentence(experiment, test)}{rest}"


def _overlap(found: dict[str, Estimate]) -> str:
    if len(found) < 2:
        return "With a single arm finished there is no comparison."
    arms = list(found)
    apart = [
        f"{a} and {b}"
        for i, a in enumerate(arms)
        for b in arms[i + 1 :]
        if not found[a].overlaps(found[b])
    ]
    if not apart:
        return "The arms' intervals all overlap."
    return f"Intervals that do not overlap: {'; '.join(apart)}."


def _paired_sentence(experiment: Experiment, test: TestScores) -> str:
    baseline = experiment.baseline
    if baseline not in test.arms:
        return f"The baseline {baseline} has no finished seed, so nothing is paired with it."
    gaps = {
        arm: gap
        for arm in experiment.drawn
        if arm in experiment.arms
        if arm != baseline and arm in test.arms and (gap := paired(test, arm, baseline).get(AVG))
    }
    if not gaps:
        return f"No other arm shares a finished seed with {baseline}."
    listed = ", ".join(f"{arm} {_points(gap)}" for arm, gap in gaps.items())
    fewest = min(gap.estimate.seeds for gap in gaps.values())
    least = max(gap.smallest_p for gap in gaps.values())
    text = f"Paired by seed, in points against {baseline}: {listed}."
    if least > ALPHA:
        reach = f"With {counted(fewest, 'seed')} the exact test cannot fall below "
        return f"{text} {reach}p = {number(least)}; the verdicts rest on t tests over seeds."
    shown = ", ".join(f"{arm} p = {number(gap.p)}" for arm, gap in gaps.items())
    return f"{text} Exact sign-flip test, not corrected for several comparisons: {shown}."


def _points(gap: Difference) -> str:
    return f"{in_points(gap)} {interval(gap.estimate.low, gap.estimate.high, sign=True)}"


def notices(experiment: Experiment, scores: Sequence[TestScores]) -> list[str]:
    """Plain warnings about the run itself; empty where there is nothing to warn of."""
    return [
        *_incomplete(experiment),
        *_few_updates(experiment),
        *_overspent(experiment),
        *_by_arm(experiment),
        *_clips(experiment),
        *_thin(experiment),
        *_edges(experiment),
        *_graders(experiment),
        *_placebo(experiment, scores),
        *_problems(scores),
        *_contamination(experiment),
    ]


def _incomplete(experiment: Experiment) -> Iterator[str]:
    absent = [c for c in experiment.cells if c.status != "done"]
    if absent:
        names = ", ".join(f"{c.arm}/{c.name} ({c.status})" for c in absent[:6])
        more = f" and {len(absent) - 6} more" if len(absent) > 6 else ""
        of = f"{len(absent)} of {counted(len(experiment.cells), 'cell')}"
        yield (
            f"{of} {_are(len(absent))} not finished: {names}{more}. "
            "Scores and differences use finished seeds only."
        )
    if 0 < len(experiment.seeds) < 3:
        yield (
            f"{counted(len(experiment.seeds), 'seed')} cannot show how "
            "much training varies; read the intervals as spread over problems."
        )


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _few_updates(experiment: Experiment) -> Iterator[str]:
    counts = {
        arm: min(counts)
        for arm in experiment.arms
        if (counts := [len(training_steps(c)) for c in experiment.seed_cells(arm)])
    }
    few = {arm: n for arm, n in counts.items() if n < FEW_UPDATES}
    if few:
        listed = _listed(few, str)
        yield (
            f"Very few training steps (fewest of any seed: {listed}): this shows that the pipeline "
            "runs, and can show little about the algorithms."
        )


def _overspent(experiment: Experiment) -> Iterator[str]:
    unit, limit = experiment.spec["budget"]["unit"], experiment.spec["budget"]["limit"]
    shares = {
        arm: sum(found) / len(found)
        for arm in experiment.arms
        if (
            found := [
                c.spent[unit] / limit for c in experiment.seed_cells(arm) if c.spent.get(unit)
            ]
        )
    }
    if shares and max(shares.values()) > 1 + OVERSPENT:
        listed = _listed(shares, lambda share: f"{percent(share)} %")
        yield (
            f"A run stops after the step that spends its budget, and steps are large here: the "
            f"arms spent, on average, {listed} of it."
        )


def _by_arm(experiment: Experiment) -> Iterator[str]:
    """What holds for single arms; where it holds for several, they are told together."""
    found: dict[_Kind, dict[str, float]] = {}
    for arm in experiment.shown:
        flat, _ = mean_of_steps(experiment, arm, "zero_variance_share")
        group, _ = mean_of_steps(experiment, arm, "completions_per_prompt")
        if flat is not None and flat > MOSTLY_FLAT and group != 1:  # one score always agrees
            found.setdefault(_FLAT, {})[arm] = flat
        cut, _ = mean_of_steps(experiment, arm, "truncated_share")
        if cut is not None and cut > MUCH_TRUNCATED:
            found.setdefault(_CUT, {})[arm] = cut
        explained = late_mean(experiment, arm, "explained_variance")
        if explained is not None and explained < WEAK_CRITIC:
            found.setdefault(_WEAK if explained >= 0 else _WORSE, {})[arm] = explained
        kl = kl_to_base(experiment, arm)
        if kl is not None and kl > LARGE_KL:
            found.setdefault(_FAR, {})[arm] = kl
    for kind, values in found.items():
        if len(values) > MANY:
            yield f"{len(values)} arms: {kind.before}{_listed(values, kind.show)}{kind.after}"
        else:
            told = (f"{arm}: {kind.before}{kind.show(v)}" for arm, v in values.items())
            yield "; ".join(told) + kind.after


@dataclass(frozen=True)
class _Kind:
    """A sentence about a number of an arm."""

    before: str
    show: Callable[[float], str]
    after: str


def _whole_percent(share: float) -> str:
    return f"{percent(share, 0)} %"


_FLAT = _Kind(
    "", _whole_percent, " of sampled groups had equal scores throughout, so most completions "
    "carried no learning signal from the group.",
)  # fmt: skip
_CUT = _Kind(
    "", _whole_percent, " of training completions were cut at the length limit; scores partly "
    "measure that limit.",
)  # fmt: skip
_WEAK = _Kind(
    "the critic explained ", _whole_percent, " of the variance of returns over the last half of "
    "training; so weak a critic gives the arm little of what sets it apart.",
)  # fmt: skip
_WORSE = _Kind(
    "the critic's explained variance averaged ", lambda v: fixed(v, 2), " over the last half of "
    "training; below 0 it predicts worse than a constant, so its baseline adds noise.",
)  # fmt: skip
_FAR = _Kind(
    "the final policy is ", fixed, " nats a completion from the base, a large distance; look at "
    "its samples.",
)  # fmt: skip


def _listed(values: Mapping[str, float], show: Callable[[Any], str]) -> str:
    """Each arm with its value; of many, the least and the largest."""
    if len(values) <= MANY:
        return ", ".join(f"{arm} {show(value)}" for arm, value in values.items())
    least, most = (end(values, key=lambda arm: values[arm]) for end in (min, max))
    return f"from {show(values[least])} ({least}) to {show(values[most])} ({most})"


def _clips(experiment: Experiment) -> Iterator[str]:
    """Arms that differ in a clip which hardly ever binds are nearly the same arm."""
    baseline = experiment.baseline
    for arm in experiment.arms:
        mine, theirs = (parts_of(experiment, a).get("clip") for a in (arm, baseline))
        if arm == baseline or mine == theirs or None in (mine, theirs):
            continue
        shares = [
            mean_of_steps(experiment, a, f"clip_fraction_{side}")[0] or 0.0
            for a in (arm, baseline)
            for side in ("high", "low")
        ]
        if max(shares) < RARELY_CLIPPED:
            yield (
                f"{arm} and {baseline} differ in their clip, which cut at most "
                f"{percent(max(shares), 2)} % of tokens on either side: little of a difference "
                "between them can come from it."
            )


def _thin(experiment: Experiment) -> Iterator[str]:
    """Arms whose tuning had few trials for the numbers that it searched."""
    tuning = experiment.spec.get("tuning")
    if not tuning:
        return
    found = {arm: len(searched(experiment, arm) or ()) for arm in experiment.arms}
    thin = {arm: knobs for arm, knobs in found.items() if is_thin(tuning["trials"], knobs)}
    if thin:
        yield (
            f"The search is thin: {counted(tuning['trials'], 'trial')} an arm, fewer than "
            f"{FEW_TRIALS_PER_KNOB} for each knob that was searched (knobs: {_listed(thin, str)}); "
            "these arms may well have better settings that were never tried."
        )


def _edges(experiment: Experiment) -> Iterator[str]:
    """A shared setting chosen at the end of what was tried may be better still beyond it."""
    for path in (experiment.spec.get("tuning") or {}).get("shared", {}):
        at_edge = []
        for arm in experiment.arms:
            tried = [
                c.run["settings"][path]
                for c in experiment.cells
                if c.arm == arm and c.kind == "trial" and path in c.run.get("settings", {})
            ]
            chosen = [c.run["settings"].get(path) for c in experiment.seed_cells(arm) if c.run]
            if len(set(tried)) >= ENOUGH_TRIED and chosen and chosen[0] in (min(tried), max(tried)):
                at_edge.append(arm)
        if at_edge:
            yield (
                f"{path} was chosen at the edge of what was tried by {', '.join(at_edge)}: a wider "
                "search might serve these arms better."
            )


def _graders(experiment: Experiment) -> Iterator[str]:
    for outcome, what in (("timeout", "timed out"), ("error", "failed")):
        counts = {
            arm: sum(part.get(outcome, 0) for part in outcome_counts(experiment, arm).values())
            for arm in experiment.shown
        }
        listed = ", ".join(f"{arm} {n}" for arm, n in counts.items() if n)
        if listed:
            yield (
                f"The grader {what} on some completions ({listed}); they score as wrong without "
                "having been judged."
            )


def _meaning(gap: Difference) -> str:
    """What a placebo that moved says: a rise throws doubt on every gain, a fall on none."""
    if gap.estimate.mean > 0:
        return "a gain of that size need not come from the reward."
    return "training on noise does harm at these settings; a gain is not what any training gives."


def _placebo(experiment: Experiment, scores: Sequence[TestScores]) -> Iterator[str]:
    for test in scores:
        if "placebo" not in test.arms or "base" not in test.arms:
            continue
        gap = paired(test, "placebo", "base").get(AVG)
        if gap is not None and gap.excludes_zero:
            yield (
                f"The placebo, trained on random reward, moved on {test.name} by {_points(gap)} "
                f"points from the base: {_meaning(gap)} (One such interval in twenty excludes 0 by "
                "chance.)"
            )


def _problems(scores: Sequence[TestScores]) -> Iterator[str]:
    for test in scores:
        if test.left_out:
            problems = f"{counted(test.left_out, 'problem')} of {test.name}"
            yield (
                f"{problems} {_are(test.left_out)} not in every evaluation, and left out: the arms "
                "were not tested on the same problems."
            )


def _contamination(experiment: Experiment) -> Iterator[str]:
    for name, overlap in (experiment.lock.get("contamination") or {}).items():
        shared = len(overlap.get("exact") or ())
        if name.startswith("test.") and shared:
            stand = "stands" if shared == 1 else "stand"
            problems = f"{counted(shared, 'problem')} of {name}"
            yield f"{problems} {stand} in the training split too: see Data."
