"""Estimates on (seeds x problems): intervals, paired differences, exact tests.

The training seed is the unit of replication, and every seed answers the same problems. The interval
to show is ``crossed_interval``: Student's t with seeds and problems as crossed random factors. It
covers 93 to 98 % where it says 95, down to five seeds; the percentile bootstrap (``boot_low``,
``boot_high``) covers as little as 85 % with five seeds whose spread outweighs the problems'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import InputError
from harness.stats.bootstrap import SEED, Floats, crossed, stratified

RESAMPLES = 10_000
CONFIDENCE = 0.95
NO_SPREAD = 1e-12  # values closer than this are equal but for rounding
UNIT = (0.0, 1.0)  # the range of an accuracy


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and problems with its intervals.

    Attributes:
        low, high: ends of the 95 % interval to show; None where there is nothing to judge by.
        boot_low, boot_high: ends of the crossed bootstrap's 95 % percentile interval.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    problems: int
    boot_low: float | None = None
    boot_high: float | None = None

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals share a point; unknown intervals do."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return True
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Difference:
    """A mean difference paired by seed and problem.

    Attributes:
        estimate: of the differences by seed and problem.
        t_low, t_high: Student's t interval over the seeds' mean differences; None for one seed.
        p: exact two-sided sign-flip p-value over seeds.
        smallest_p: the least value that p can take with so many seeds: 2 / 2^seeds.
        by_seed: the seeds' mean differences, in the order given.
    """

    estimate: Estimate
    t_low: float | None
    t_high: float | None
    p: float
    smallest_p: float
    by_seed: tuple[float, ...]

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval over seeds and problems lies on one side of 0."""
        low, high = self.estimate.low, self.estimate.high
        return low is not None and high is not None and (low > 0 or high < 0)


def estimate(
    values: Floats, resamples: int = RESAMPLES, support: tuple[float, float] | None = None
) -> Estimate:
    """Mean of a (seeds x problems) matrix with its intervals."""
    return estimates(values[None], resamples, support)[0]


def estimates(
    values: Floats, resamples: int = RESAMPLES, support: tuple[float, float] | None = None
) -> list[Estimate]:
    """``estimate`` for each of the leading axis of (metrics x seeds x problems).

    Args:
        support: the metric's own range, such as ``UNIT``; the interval is cut to it, at no loss of
            coverage. None for differences.

    Raises:
        ValueError: no seeds or no problems.
    """
    _, seeds, problems = values.shape
    if not seeds or not problems:
        raise ValueError(f"nothing to estimate from: {seeds} seeds, {problems} problems")
    means = values.mean(axis=(1, 2))
    if seeds == 1 and problems == 1:
        return [Estimate(float(m), None, None, 1, 1) for m in means]
    half = crossed_half_width(values)
    low, high = means - half, means + half
    if support is not None:
        low, high = np.clip(low, *support), np.clip(high, *support)
    tail = 100 * (1 - CONFIDENCE) / 2
    boot_low, boot_high = np.percentile(crossed(values, resamples), [tail, 100 - tail], axis=1)
    rows = zip(means, low, high, boot_low, boot_high, strict=True)
    return [
        Estimate(float(m), float(lo), float(hi), seeds, problems, float(blo), float(bhi))
        for m, lo, hi, blo, bhi in rows
    ]


@dataclass(frozen=True)
class MeanSquares:
    """Mean squares of a two-way layout with one value a cell, each (metrics,).

    Their expectations, with S seeds and P problems: ``seed`` P var(a) + r, ``problem``
    S var(b) + r, ``rest`` r, where r = var(c) + var(e): interaction and evaluation noise.
    """

    seed: Floats
    problem: Floats
    rest: Floats
    seeds: int
    problems: int


def mean_squares(values: Floats) -> MeanSquares:
    """Mean squares of (metrics x seeds x problems); 0 where a factor has a single level."""
    _, seeds, problems = values.shape
    whole = values.mean(axis=(1, 2), keepdims=True)
    by_seed = values.mean(axis=2, keepdims=True) - whole
    by_problem = values.mean(axis=1, keepdims=True) - whole
    rest = values - whole - by_seed - by_problem
    return MeanSquares(
        problems * (by_seed**2).sum(axis=(1, 2)) / max(1, seeds - 1),
        seeds * (by_problem**2).sum(axis=(1, 2)) / max(1, problems - 1),
        (rest**2).sum(axis=(1, 2)) / max(1, (seeds - 1) * (problems - 1)),
        seeds,
        problems,
    )


def crossed_half_width(values: Floats, confidence: float = CONFIDENCE) -> Floats:
    """Half the width of Student's t interval with seeds and problems as crossed random factors.

    The variance of the mean is (seed + problem - rest)/(S P) in mean squares, never taken below
    what seeds or problems alone give; its degrees of freedom are Satterthwaite's (Biometrics
    Bulletin 1946), never fewer than the scarcer factor's. With one seed it is the t interval over
    problems, and conversely.

    Returns:
        (metrics,) for (metrics x seeds x problems); 0 where all values of a metric are equal.
    """
    from scipy import stats

    found = mean_squares(values)
    S, P = found.seeds, found.problems
    either = np.maximum(found.seed, found.problem)
    both = found.seed + found.problem - found.rest
    variance = np.maximum(both, either)
    parts = (
        found.seed**2 / max(1, S - 1)
        + found.problem**2 / max(1, P - 1)
        + found.rest**2 / max(1, (S - 1) * (P - 1))
    )
    fewest = min(n - 1 for n in (S, P) if n > 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        df = np.where(parts > 0, variance**2 / parts, fewest)
    return stats.t.ppf((1 + confidence) / 2, np.maximum(df, fewest)) * np.sqrt(variance / (S * P))


def difference(treatment: Floats, control: Floats, resamples: int = RESAMPLES) -> Difference:
    """Treatment minus control; both (seeds x problems) over the same seeds and problems."""
    return differences(treatment[None], control[None], resamples)[0]


def differences(treatment: Floats, control: Floats, resamples: int = RESAMPLES) -> list[Difference]:
    """``difference`` for each metric of two (metrics x seeds x problems) arrays.

    Raises:
        ValueError: the arrays are of different shapes, so they cannot be paired.
    """
    if treatment.shape != control.shape:
        raise ValueError(f"not paired: {treatment.shape} against {control.shape}")
    gaps = treatment - control
    found = []
    for gap, whole in zip(gaps.mean(axis=2), estimates(gaps, resamples), strict=True):
        low, high = t_interval(gap)
        found.append(
            Difference(whole, low, high, sign_flip_p(gap), smallest_p(len(gap)), tuple(gap))
        )
    return found


def t_interval(values: Floats) -> tuple[float | None, float | None]:
    """Student's t interval of a mean over seeds.

    (None, None) for fewer than two seeds, or where all are equal: no spread was seen to judge by.
    """
    from scipy import stats

    if len(values) < 2 or np.ptp(values) < NO_SPREAD:
        return None, None
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values)
    return float(values.mean() - half), float(values.mean() + half)


def sign_flip_p(values: Floats) -> float:
    """Two-sided p-value of a mean of 0, over all sign patterns of the seeds' differences.

    Exact up to 16 seeds; beyond, over 2^16 seeded random patterns.
    """
    count = len(values)
    if count <= 16:
        bits = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        signs = 1 - 2 * bits
    else:
        signs = np.random.default_rng(SEED).choice((-1, 1), size=(2**16, count))
        signs[0] = 1
    flipped, observed = np.abs(signs @ values), abs(values.sum())
    tolerance = 1e-9 * max(1.0, float(np.abs(values).sum()))  # equal sums differ in the last bits
    return float((flipped >= observed - tolerance).mean())


def smallest_p(seeds: int) -> float:
    """The least two-sided p-value that a sign-flip test over so many seeds can give."""
    return min(1.0, 2.0 / 2**seeds)


def iqm(scores: Floats) -> float:
    """Interquartile mean: of (runs x tasks), all pooled, less a quarter cut from either end.

    Agarwal et al. 2021, arXiv:2108.13264, sec. 4.3. Of n values floor(n/4) are cut at each end.
    """
    from scipy import stats

    return float(stats.trim_mean(scores.ravel(), proportiontocut=0.25))


def probability_of_improvement(treatment: Floats, control: Floats) -> float:
    """P(a run of the treatment beats one of the control), ties half, averaged over tasks.

    Both (runs x tasks), of the same tasks; runs may differ in number and are not paired: every
    run meets every other (Agarwal et al. 2021, sec. 4.3: Mann and Whitney's U over the product of
    the numbers of runs).

    Raises:
        InputError: other numbers of tasks.
    """
    if treatment.shape[1:] != control.shape[1:]:
        raise InputError(
            f"probability of improvement over {treatment.shape[1:]} tasks against "
            f"{control.shape[1:]}: give both arms the same tasks"
        )
    gaps = treatment[:, None] - control[None]
    return float(((gaps > 0) + 0.5 * (gaps == 0)).mean())


def performance_profile(scores: Floats, thresholds: Floats) -> Floats:
    """Share of (runs x tasks) that score above each threshold (Agarwal et al. 2021, sec. 4.2)."""
    return (scores[..., None] > thresholds).mean(axis=(0, 1))


def stratified_interval(
    scores: Floats,
    statistic: Callable[[Floats], Floats | float],
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> tuple[Floats, Floats]:
    """Percentile interval of ``iqm`` or a profile over (runs x tasks), runs redrawn by task.

    As in Agarwal et al. 2021: tasks are fixed, and a run's results on two tasks are taken to be
    independent. With under ten runs it is too narrow, like any percentile bootstrap.
    """
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(stratified(scores, statistic, resamples), [tail, 100 - tail], axis=0)
    return low, high


def mcnemar_p(treatment: Sequence[bool], control: Sequence[bool]) -> float:
    """Exact two-sided McNemar p-value of two models' verdicts on the same problems.

    One answer a problem (greedy, or the majority). It compares two *models*, not two methods: a
    method's seeds are not in it.
    """
    from statsmodels.stats.contingency_tables import mcnemar

    if len(treatment) != len(control):
        raise InputError(
            f"McNemar of {len(treatment)} verdicts against {len(control)}: give both on the same "
            "problems"
        )
    ours, theirs = np.asarray(treatment, bool), np.asarray(control, bool)
    table = [[np.sum(a & b) for b in (theirs, ~theirs)] for a in (ours, ~ours)]
    found: Any = mcnemar(np.array(table), exact=True)
    return float(found.pvalue)


def wilson(correct: float, total: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval (1927) of a share of independent trials; usable down to a few of them."""
    from statsmodels.stats.proportion import proportion_confint

    found: Any = proportion_confint(correct, total, alpha=1 - confidence, method="wilson")
    return float(found[0]), float(found[1])


def clustered_wilson(shares: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval of the mean over problems of one model's shares correct.

    For small sets such as AIME's 30 problems, where samples of a problem are alike: the number of
    trials is the effective one, m(1-m)/var(mean), with the mean m and var(mean) the problems'
    variance over their number (Kish's design effect). Student's t replaces the normal quantile by
    scaling that number with (z/t)^2 (Korn and Graubard 1998). All right or all wrong, each problem
    counts as one trial.

    Raises:
        InputError: fewer than two problems.
    """
    from scipy import stats

    problems = len(shares)
    if problems < 2:
        raise InputError(f"an interval over {problems} problem: at least 2 are needed")
    mean = float(shares.mean())
    variance = float(shares.var(ddof=1)) / problems
    trials = float(problems)
    if variance > NO_SPREAD and 0 < mean < 1:
        tail = (1 + confidence) / 2
        scale = float(stats.norm.ppf(tail)) / float(stats.t.ppf(tail, problems - 1))
        trials = mean * (1 - mean) / variance * scale**2
    return wilson(mean * trials, trials, confidence)
