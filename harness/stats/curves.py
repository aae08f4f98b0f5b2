"""Shapes of curves: a sigmoid through learning curves, and where Pass@K of base and arm cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import InputError
from harness.metrics import pass_at_k
from harness.stats.bootstrap import SEED, Floats, Ints
from harness.stats.effects import CONFIDENCE, NO_SPREAD, crossed_half_width

MIDPOINT_BEYOND = 4.0  # a midpoint may lie so many times outside the range of x, not further
RATE_RANGE = (0.05, 50.0)
LEAST_R2 = 0.8
LEAST_FITTED = 0.9  # share of resamples that a fit must survive
LEAST_POINTS = 5
NEAR_TOP = 0.9  # share of the rise that must be seen to believe an asymptote at the ceiling
AT_BOUND = 1e-3  # share of a bound's range within which a parameter counts as at it


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % interval; ends are None where there are too few seeds for one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class SigmoidFit:
    """y(x) = start + (asymptote - start) / (1 + (midpoint / x)^rate).

    A logistic curve in log x, at ``start`` for x = 0, half-way at ``midpoint``: the form in which
    ScaleRL describes accuracy against compute (Khatri et al. 2025, arXiv:2510.13786).

    Attributes:
        r2: share of the mean curve's variance that the fit explains.
        fitted: share of the resamples of seeds in which the fit succeeded too.
        reached: largest x seen, as a multiple of the midpoint; at least 1. Under about 3 the
            asymptote is extrapolated.
    """

    start: float
    asymptote: Interval
    midpoint: Interval
    rate: Interval
    r2: float
    fitted: float
    reached: float

    def at(self, x: Floats) -> Floats:
        """The fitted curve at x >= 0."""
        return _sigmoid(x, self.start, self.asymptote.value, self.midpoint.value, self.rate.value)


@dataclass(frozen=True)
class NoFit:
    """Why a sigmoid does not describe these curves; no numbers are given then."""

    reason: str


def fit_sigmoid(
    x: Floats,
    curves: Floats,
    start: float,
    *,
    ceiling: float = 1.0,
    resamples: int = 200,
    confidence: float = CONFIDENCE,
) -> SigmoidFit | NoFit:
    """Fit the seeds' mean learning curve, with intervals over seeds.

    Args:
        x: (points,) what was spent, rising, positive.
        curves: (seeds x points) scores at those moments.
        start: the score before training, which is measured and not fitted.
        ceiling: highest score there is; the asymptote is sought between the lowest score and it.
        resamples: of seeds. Intervals are value ± t sd sqrt(S/(S-1)), with sd over resamples and
            t of S - 1 degrees of freedom, in the logarithm for midpoint and rate: the percentile
            interval of a few seeds is too narrow.

    Returns:
        ``NoFit`` where the mean curve is flat or has not passed its midpoint, the optimiser fails,
        midpoint or rate ends on a bound, less than ``LEAST_R2`` is explained, or too many resamples
        fail.

    Raises:
        InputError: shapes that do not match, or x not positive and rising.
    """
    if curves.ndim != 2 or curves.shape[1] != len(x) or not len(curves):
        raise InputError(f"curves of shape {curves.shape} over {len(x)} moments do not match")
    if len(x) and (x[0] <= 0 or (np.diff(x) <= 0).any()):
        raise InputError("moments must be positive and rising; leave the one at 0 to start")
    if len(x) < LEAST_POINTS:
        return NoFit(f"{len(x)} points; at least {LEAST_POINTS} are needed for 3 parameters")
    found = _fit(x, curves.mean(axis=0), start, ceiling)
    if isinstance(found, NoFit):
        return found
    seeds = len(curves)
    kept, share = [], 1.0
    if seeds > 1:
        rng = np.random.default_rng((SEED, 5, seeds))
        for _ in range(resamples):
            drawn = curves[rng.integers(seeds, size=seeds)].mean(axis=0)
            again = _fit(x, drawn, start, ceiling)
            if not isinstance(again, NoFit):
                kept.append(again[:3])
        share = len(kept) / resamples
        if share < LEAST_FITTED:
            return NoFit(f"only {share:.0%} of the resamples of seeds could be fitted")
    values, r2 = np.array(found[:3]), found[3]
    intervals = _intervals(values, np.array(kept), seeds, confidence)
    return SigmoidFit(start, *intervals, r2=r2, fitted=share, reached=float(x[-1] / values[1]))


def _sigmoid(x: Floats, start: float, asymptote: float, midpoint: float, rate: float) -> Floats:
    from scipy.special import expit

    with np.errstate(divide="ignore"):
        return start + (asymptote - start) * expit(rate * (np.log(x) - math.log(midpoint)))


def _fit(
    x: Floats, y: Floats, start: float, ceiling: float
) -> tuple[float, float, float, float] | NoFit:
    """Asymptote, midpoint, rate and r2, by bounded least squares in log midpoint and log rate."""
    from scipy.optimize import curve_fit

    total = float(((y - y.mean()) ** 2).sum())
    if np.ptp(y) < NO_SPREAD:
        return NoFit("the curve is flat")
    low = [float(min(y.min(), start)), math.log(x[0] / MIDPOINT_BEYOND), math.log(RATE_RANGE[0])]
    high = [ceiling, math.log(x[-1] * MIDPOINT_BEYOND), math.log(RATE_RANGE[1])]
    if low[0] >= high[0]:
        return NoFit(f"scores reach the ceiling of {ceiling:g} at their lowest")
    end = float(y[-1])
    half = x[int(np.argmin(np.abs(y - (start + end) / 2)))]
    guess = np.clip([end, math.log(half), 0.0], np.array(low) + 1e-9, np.array(high) - 1e-9)
    try:
        best, _ = curve_fit(
            lambda x, a, m, r: _sigmoid(x, start, a, math.exp(m), math.exp(r)),
            x, y, guess, bounds=(low, high), max_nfev=2000,
        )  # fmt: skip
    except RuntimeError:
        return NoFit("the least-squares search did not converge")
    asymptote, midpoint, rate = float(best[0]), math.exp(best[1]), math.exp(best[2])
    for name, value, a, b in zip(("midpoint", "rate"), best[1:], low[1:], high[1:], strict=True):
        if min(value - a, b - value) < AT_BOUND * (b - a):
            return NoFit(f"the {name} runs away: the curve does not bend where it was seen")
    seen = float(_sigmoid(x[-1:], 0.0, 1.0, midpoint, rate)[0])  # share of the rise
    at_ceiling = ceiling - asymptote < AT_BOUND * (ceiling - low[0])
    if at_ceiling and seen < NEAR_TOP:
        return NoFit("the asymptote runs into the ceiling while the curve still rises")
    if midpoint > x[-1]:
        return NoFit("the curve has not come half-way to an asymptote, which stays unknown")
    r2 = 1 - float(((y - _sigmoid(x, start, asymptote, midpoint, rate)) ** 2).sum()) / total
    if r2 < LEAST_R2:
        return NoFit(f"a sigmoid explains {r2:.0%} of the curve, under {LEAST_R2:.0%}")
    return asymptote, midpoint, rate, r2


def _intervals(values: Floats, kept: Floats, seeds: int, confidence: float) -> list[Interval]:
    from scipy import stats

    if seeds < 2:
        return [Interval(float(v)) for v in values]
    scale = float(stats.t.ppf((1 + confidence) / 2, seeds - 1)) * math.sqrt(seeds / (seeds - 1))
    half = scale * np.concatenate([kept[:, :1], np.log(kept[:, 1:])], axis=1).std(axis=0, ddof=1)
    ends = [Interval(float(values[0]), float(values[0] - half[0]), float(values[0] + half[0]))]
    for value, h in zip(values[1:], half[1:], strict=True):
        ends.append(Interval(float(value), float(value / math.exp(h)), float(value * math.exp(h))))
    return ends


@dataclass(frozen=True)
class Crossover:
    """The K from which the base passes more problems than the trained model.

    Attributes:
        k: smallest K from which on the base is above; None where it never is up to ``largest``.
        low, high: 95 % interval: low is the smallest K at which the arm is no longer shown to be
            above, high the smallest from which the base is shown to be above. None: beyond
            ``largest``.
        largest: the largest K looked at.
        gap: (K,) mean difference arm - base at each K.
    """

    k: int | None
    low: int | None
    high: int | None
    largest: int
    ks: tuple[int, ...]
    gap: tuple[float, ...]


def pass_crossover(
    trained: Ints,
    base: Ints,
    samples: int,
    ks: Sequence[int] | None = None,
    confidence: float = CONFIDENCE,
) -> Crossover | None:
    """Where the base's Pass@K overtakes the trained model's (Yue et al. 2025, arXiv:2504.13837).

    Args:
        trained: (seeds x problems) correct ones of ``samples`` each.
        base: (seeds x problems), or (1 x problems) for a base evaluated once.
        ks: rising; every K from 1 to ``samples`` if not given. Near K = samples Pass@K is noisy;
            half of it is a good place to stop.

    The interval turns round the t interval of the gap at each K: a K is in it where the gap's
    interval holds 0. It covers the true crossing as often as the gap's interval covers, if the true
    gap falls with K.

    Returns:
        None where the arm is not above at the smallest K: there is nothing to be overtaken.

    Raises:
        InputError: shapes that do not match, or K beyond the samples.
    """
    ks = tuple(ks or range(1, samples + 1))
    if base.shape[1:] != trained.shape[1:] or base.shape[0] not in (1, trained.shape[0]):
        raise InputError(
            f"counts of shapes {trained.shape} and {base.shape}: give both on the same problems, "
            "and the base once or as often as the trained model"
        )
    table = np.array([[pass_at_k(samples, c, k) for c in range(samples + 1)] for k in ks])
    gaps = table[:, trained] - table[:, np.broadcast_to(base, trained.shape)]
    gap = gaps.mean(axis=(1, 2))
    if gap[0] <= 0:
        return None
    half = crossed_half_width(gaps, confidence)
    not_above = np.flatnonzero(gap - half <= 0)
    return Crossover(
        k=_from_here_on(gap < 0, ks),
        low=ks[not_above[0]] if len(not_above) else None,
        high=_from_here_on(gap + half < 0, ks),
        largest=ks[-1],
        ks=ks,
        gap=tuple(gap.tolist()),
    )


def _from_here_on(true: np.ndarray, ks: Sequence[int]) -> int | None:
    """The K from which on all are true."""
    false = np.flatnonzero(~true)
    first = 0 if not len(false) else int(false[-1]) + 1
    return ks[first] if first < len(ks) else None
