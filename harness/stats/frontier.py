"""Reward against sequence KL: Pareto sets, hypervolume, monotone fits and bands over runs.

KL on the axis is the sequence sum of k1 on fresh samples, by one estimator for every arm. An
envelope over more points is higher by chance alone, so arms are compared on equal numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from harness.errors import InputError
from harness.stats.bootstrap import SEED, Floats

RESAMPLES = 2000
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Point:
    """A policy: how far it is from the base, and what it earns.

    Attributes:
        run: which training run it is a checkpoint of; runs are what is resampled.
        stratum: what is held when runs are resampled (the strength of the penalty).
        kl: sequence KL to the base, nats; an estimate, which may fall a little below 0.
        kl_se: its standard error; None where it is exact.
        proxy, gold: mean rewards.
    """

    run: str
    stratum: str
    kl: float
    proxy: float
    gold: float
    kl_se: float | None = None

    @property
    def d(self) -> float:
        """The square root of the KL, the axis of Gao et al. (arXiv:2210.10760)."""
        return max(self.kl, 0.0) ** 0.5


Value = Callable[[Point], float]


def gold(point: Point) -> float:
    """The gold reward of a point."""
    return point.gold


def proxy(point: Point) -> float:
    """The proxy reward of a point."""
    return point.proxy


def pareto(points: Sequence[Point], value: Value = gold) -> list[Point]:
    """The points that no other beats in both, by rising KL; of equal ones the first."""
    best, found = float("-inf"), []
    for point in sorted(points, key=lambda p: (p.kl, -value(p))):
        if value(point) > best:
            best = value(point)
            found.append(point)
    return found


def hypervolume(points: Sequence[Point], limit: float, floor: float, value: Value = gold) -> float:
    """The area that the points dominate: KL up to ``limit``, reward above ``floor``.

    The reference point (limit, floor) is the same for every arm; divided by ``limit`` the area is
    the mean, over KL budgets up to it, of the best reward within the budget, less the floor.

    Raises:
        InputError: a limit that is not above 0.
    """
    if not limit > 0:
        raise InputError(f"hypervolume: limit {limit} of the KL must be above 0")
    front = [p for p in pareto(points, value) if p.kl < limit and value(p) > floor]
    ends = [max(p.kl, 0.0) for p in front[1:]] + [limit] * bool(front)
    return sum(
        (end - max(p.kl, 0.0)) * (value(p) - floor) for p, end in zip(front, ends, strict=True)
    )


def reward_within(points: Sequence[Point], kl: float, value: Value = gold) -> float | None:
    """The best reward of a point within a KL; None where all lie beyond it."""
    return max((value(p) for p in points if p.kl <= kl), default=None)


def monotone(points: Sequence[Point], value: Value = gold) -> tuple[Floats, Floats]:
    """The least-squares rising fit of reward on KL: sorted KL, fitted reward.

    Not an envelope: it averages where a later point earns less, and so is not higher for more
    points. Beyond the peak of an over-optimised reward it is flat.
    """
    ordered = sorted(points, key=lambda p: p.kl)
    fit = isotonic_regression([value(p) for p in ordered])
    return np.array([p.kl for p in ordered]), np.asarray(fit.x, dtype=np.float64)


def reward_at(points: Sequence[Point], kl: float, value: Value = gold) -> float | None:
    """The rising fit at a KL, between points; None outside their range: nothing is extrapolated."""
    if not points:
        return None
    xs, ys = monotone(points, value)
    if not xs[0] <= kl <= xs[-1]:
        return None
    return float(np.interp(kl, xs, ys))


def equal_numbers(arms: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
    """As many points of every arm as the arm with fewest has, spread evenly over each run.

    Raises:
        InputError: an arm without points.
    """
    if empty := [arm for arm, points in arms.items() if not points]:
        raise InputError(f"frontier: {empty} have no points")
    least = min(map(len, arms.values()))
    found = {}
    for arm, points in arms.items():
        places = np.unique(np.linspace(0, len(points) - 1, least).round().astype(int))
        found[arm] = [points[i] for i in places]
    return found


def resampled(points: Sequence[Point], rng: np.random.Generator) -> list[Point]:
    """Runs drawn with replacement within each stratum, each with all its points."""
    strata: dict[str, dict[str, list[Point]]] = {}
    for point in points:
        strata.setdefault(point.stratum, {}).setdefault(point.run, []).append(point)
    drawn: list[Point] = []
    for runs in strata.values():
        names = list(runs)
        for place in rng.integers(len(names), size=len(names)):
            drawn += runs[names[place]]
    return drawn


@dataclass(frozen=True)
class Interval:
    """A statistic with its percentile interval; ends None where too few replicates have it."""

    value: float | None
    low: float | None
    high: float | None


def band(
    points: Sequence[Point],
    statistic: Callable[[Sequence[Point]], float | None],
    resamples: int = RESAMPLES,
) -> Interval:
    """A statistic of an arm's points, and its 95 % percentile interval over runs.

    Replicates in which the statistic does not exist are left out; below half of them, so is the
    interval. With one run per stratum there is nothing to resample, and no interval.
    """
    value = statistic(points)
    sizes: dict[str, set[str]] = {}
    for point in points:
        sizes.setdefault(point.stratum, set()).add(point.run)
    if all(len(runs) < 2 for runs in sizes.values()):
        return Interval(value, None, None)
    rng = np.random.default_rng(SEED)
    found = [statistic(resampled(points, rng)) for _ in range(resamples)]
    known = [x for x in found if x is not None]
    if value is None or len(known) < resamples / 2:
        return Interval(value, None, None)
    low, high = np.percentile(known, PERCENTILES)
    return Interval(value, float(low), float(high))


def curve_band(
    points: Sequence[Point], at: Sequence[float], value: Value, resamples: int = 400
) -> list[Interval]:
    """The rising fit at each KL with its interval: what a figure shades."""
    return [band(points, lambda drawn, kl=kl: reward_at(drawn, kl, value), resamples) for kl in at]
