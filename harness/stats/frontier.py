"""Reward against sequence KL: Pareto sets, hypervolume, local fits and intervals over runs.

KL on the axis is the sequence sum of k1 on fresh samples, by one estimator for every arm. An
envelope over more points is higher by chance alone, so arms are compared on equal numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import InputError
from harness.stats.bootstrap import Floats
from harness.stats.effects import CONFIDENCE

BANDWIDTH = 1.0  # of a local fit, in d: the same for every arm, however far it went
LEAST = 3.0  # points within it, by Kish's effective number; a line through fewer is not judged
BOTH_SIDES = 0.05  # least share of the weight on either side of a d; less is extrapolation


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


def local_fit(points: Sequence[Point], at: Sequence[float], value: Value = gold) -> Floats:
    """Local linear regression of reward on d, weighed by the tricube kernel (Cleveland, 1979).

    It looks no farther than ``BANDWIDTH``, so what an arm does far out cannot move what it is said
    to earn near the base. A rising least-squares fit can: where the gold falls far out, it pools
    the peak with the fall, and an arm that ran longer is read lower at every d before.

    Args:
        points: an arm's.
        at: values of d.
        value: which reward.

    Returns:
        (len(at),); NaN where too few points are near (``LEAST``), and where nearly all lie on
        one side (``BOTH_SIDES``): beyond them, or beside a stretch in which no run was evaluated.
    """
    x, y = np.array([p.d for p in points]), np.array([value(p) for p in points])
    found = np.full(len(at), np.nan)
    for i, d in enumerate(at):
        weight = np.clip(1 - np.abs((x - d) / BANDWIDTH) ** 3, 0, None) ** 3
        sides = weight[x < d].sum(), weight[x > d].sum()
        few = weight.sum() ** 2 < LEAST * (weight**2).sum()
        if few or min(sides) <= BOTH_SIDES * weight.sum():
            continue
        near = weight > 0
        w, u, v = weight[near] / weight.sum(), x[near] - d, y[near]
        centre, spread = w @ u, w @ (u - w @ u) ** 2
        slope = w @ ((u - centre) * v) / spread if spread > 0 else 0.0
        found[i] = w @ v - slope * centre
    return found


def reward_at(points: Sequence[Point], d: float, value: Value = gold) -> float | None:
    """The local fit at one d; None where it has none: nothing is extrapolated."""
    if not points:
        return None
    found = float(local_fit(points, [d], value)[0])
    return None if np.isnan(found) else found


def equal_numbers(arms: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
    """As many points of every arm as the arm with fewest has, at even places in its sequence.

    Raises:
        InputError: an arm without points.
    """
    if empty := [arm for arm, points in arms.items() if not points]:
        raise InputError(f"frontier: {empty} have no points")
    least = min(map(len, arms.values()))
    found = {}
    for arm, points in arms.items():
        places = np.linspace(0, len(points) - 1, least).round().astype(int)
        found[arm] = [points[i] for i in places]
    return found


@dataclass(frozen=True)
class Interval:
    """A statistic with its 95 % interval; ends None where the runs do not carry one."""

    value: float | None
    low: float | None
    high: float | None


def by_stratum(points: Sequence[Point]) -> list[list[str]]:
    """The names of the runs of each stratum."""
    runs: dict[str, dict[str, None]] = {}
    for point in points:
        runs.setdefault(point.stratum, {})[point.run] = None
    return [list(names) for names in runs.values()]


def jackknife(
    points: Sequence[Point], statistic: Callable[[Sequence[Point]], float | None]
) -> Interval:
    """A statistic of an arm's points, with Student's t interval from the stratified jackknife.

    Each run is left out in turn, with all its points; the variance is the sum over strata of
    (n - 1)/n times the squared deviations from the stratum's mean, its degrees of freedom are
    Satterthwaite's. For means it is the classical interval of a stratified sample. Percentiles of a
    bootstrap of whole runs cover far too seldom with two to four runs a stratum, and for envelopes
    end at the estimate itself: no resample has a better best point than the sample.

    The interval has no ends where the statistic does not exist without some run, or where no
    stratum has two runs. A stratum of one run adds no variance and so is taken as known.
    """
    from scipy import stats

    value = statistic(points)
    if value is None:
        return Interval(None, None, None)
    parts: list[tuple[float, int]] = []
    for runs in by_stratum(points):
        count = len(runs)
        if count < 2:
            continue
        without = [statistic([p for p in points if p.run != run]) for run in runs]
        known = np.array([x for x in without if x is not None])
        if len(known) < count:
            return Interval(value, None, None)
        spread = float(((known - known.mean()) ** 2).sum())
        parts.append((spread * (count - 1) / count, count - 1))
    variance = sum(part for part, _ in parts)
    if variance <= 0:
        return Interval(value, None, None)
    freedom = variance**2 / sum(part**2 / df for part, df in parts)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * variance**0.5
    return Interval(value, value - half, value + half)


def reward_interval(points: Sequence[Point], d: float, value: Value = gold) -> Interval:
    """The local fit at a d with its interval; no value where it rests on a single run.

    That is where it does not exist without some run, though a stratum has others.
    """
    found = jackknife(points, lambda some: reward_at(some, d, value))
    alone = found.low is None and any(len(runs) > 1 for runs in by_stratum(points))
    return Interval(None, None, None) if alone else found


def curve_band(
    points: Sequence[Point], at: Sequence[float], value: Value = gold
) -> tuple[Floats, Floats, Floats]:
    """``reward_interval`` at each d: value, low and high, NaN where there is none."""
    found = [reward_interval(points, d, value) for d in at]
    columns = [[i.value for i in found], [i.low for i in found], [i.high for i in found]]
    fit, low, high = np.array(columns, dtype=np.float64)  # None becomes NaN
    return fit, low, high
