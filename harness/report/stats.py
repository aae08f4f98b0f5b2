"""Statistics as pure functions on (seeds x problems): intervals, paired differences, exact tests.

The training seed is the unit of replication. Every seed answers the same problems, so the
bootstrap is crossed, not nested: a replicate draws seeds with replacement and, once for all of
them, problems with replacement (Owen, The pigeonhole bootstrap, Ann. Appl. Stat. 2007, which is
never too narrow in the limit). Drawing problems afresh within each seed would average the
problems' own spread away. Generators are seeded by shape alone, so two arms with as many seeds
and problems meet the same draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
CONFIDENCE = 0.95
_SEED = 20_240_915
_CHUNK_CELLS = 2_500_000  # replicates x problems held at once
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and problems with its interval.

    Attributes:
        low, high: ends of the 95 % interval; None where there is nothing to resample.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    problems: int

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals share a point; unknown intervals do."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return True
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Difference:
    """A mean difference paired by seed and problem.

    Attributes:
        estimate: with the paired bootstrap's interval.
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
        """Whether the bootstrap interval lies on one side of 0."""
        low, high = self.estimate.low, self.estimate.high
        return low is not None and high is not None and (low > 0 or high < 0)


def estimate(values: Floats, resamples: int = RESAMPLES) -> Estimate:
    """Mean of a (seeds x problems) matrix with its crossed-bootstrap percentile interval."""
    return estimates(values[None], resamples)[0]


def estimates(values: Floats, resamples: int = RESAMPLES) -> list[Estimate]:
    """``estimate`` for each of the leading axis of (metrics x seeds x problems).

    Raises:
        ValueError: no seeds or no problems.
    """
    metrics, seeds, problems = values.shape
    if not seeds or not problems:
        raise ValueError(f"nothing to estimate from: {seeds} seeds, {problems} problems")
    means = values.mean(axis=(1, 2))
    if seeds == 1 and problems == 1:
        return [Estimate(float(m), None, None, 1, 1) for m in means]
    replicates = _replicates(values, resamples)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(replicates, [tail, 100 - tail], axis=1)
    return [
        Estimate(float(means[i]), float(low[i]), float(high[i]), seeds, problems)
        for i in range(metrics)
    ]


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

    if len(values) < 2 or np.ptp(values) < 1e-12:
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
        signs = np.random.default_rng(_SEED).choice((-1, 1), size=(2**16, count))
        signs[0] = 1
    flipped, observed = np.abs(signs @ values), abs(values.sum())
    tolerance = 1e-9 * max(1.0, float(np.abs(values).sum()))  # equal sums differ in the last bits
    return float((flipped >= observed - tolerance).mean())


def smallest_p(seeds: int) -> float:
    """The least two-sided p-value that a sign-flip test over so many seeds can give."""
    return min(1.0, 2.0 / 2**seeds)


def _replicates(values: Floats, resamples: int) -> Floats:
    """Bootstrap means (metrics x resamples) of (metrics x seeds x problems)."""
    metrics, seeds, problems = values.shape
    rows = values.reshape(metrics * seeds, problems).T
    seed_counts = _counts(np.random.default_rng((_SEED, 1, seeds)), seeds, resamples)
    out = np.empty((metrics, resamples))
    start = 0
    for problem_counts in _problem_counts(problems, resamples):
        stop = start + len(problem_counts)
        by_row = (problem_counts @ rows).reshape(-1, metrics, seeds) / problems
        out[:, start:stop] = np.einsum("rms,rs->mr", by_row, seed_counts[start:stop]) / seeds
        start = stop
    return out


def _problem_counts(problems: int, resamples: int) -> Iterator[Floats]:
    rng = np.random.default_rng((_SEED, 2, problems))
    size = max(1, _CHUNK_CELLS // problems)
    for start in range(0, resamples, size):
        yield _counts(rng, problems, min(size, resamples - start))


def _counts(rng: np.random.Generator, items: int, draws: int) -> Floats:
    """How often each of ``items`` is drawn in ``items`` draws with replacement, ``draws`` times."""
    picks = rng.integers(items, size=(draws, items))
    flat = (picks + items * np.arange(draws)[:, None]).ravel()
    return np.bincount(flat, minlength=draws * items).reshape(draws, items).astype(np.float64)
