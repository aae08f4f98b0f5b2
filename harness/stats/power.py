"""How many seeds and problems a claim needs: exact power of the tests in ``verdict``.

A seed's mean difference varies for four reasons, which ``Noise`` names. What the evaluation adds to
what seeds do is sd^2 = seed^2 + (interaction^2 + within/samples)/problems; more samples or problems
shrink only the second term, more seeds shrink all of it.

Problems are *fixed* where the claim is about this test set: then sd is all there is. They are
*random* where it is about problems like these: then the mean difference has problem^2/problems
besides, which no number of seeds shrinks, and the test has the degrees of freedom of
``effects.crossed_half_width``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.errors import InputError
from harness.stats.bootstrap import Floats
from harness.stats.effects import mean_squares

ALPHA = 0.05
POWER = 0.8
_NEGLIGIBLE = 1e-12  # tail probability beyond which the integral is not taken


def superiority_power(n: int, sd: float, effect: float, alpha: float = ALPHA) -> float:
    """Chance that the two-sided paired t test over n seeds shows a difference of the right sign.

    Args:
        n: seeds.
        sd: standard deviation of a seed's mean difference.
        effect: true mean difference, in the same units.

    Exact for normal differences: one tail of the noncentral t.

    Raises:
        InputError: fewer than 2 seeds or a standard deviation that is not positive.
    """
    _check(n, sd)
    return _superiority(sd / math.sqrt(n), n - 1, effect, alpha)


def tost_power(n: int, sd: float, margin: float, true: float = 0.0, alpha: float = ALPHA) -> float:
    """Chance that TOST over n seeds shows equivalence when the true mean difference is ``true``.

    Exact for normal differences: Owen's Q, here by integrating over the standard error's chi
    distribution (Phillips 1990). At ``true = margin`` it is the test's size, at most alpha.

    Raises:
        InputError: fewer than 2 seeds, or a standard deviation or margin that is not positive.
    """
    _check(n, sd)
    if margin <= 0:
        raise InputError(f"margin = {margin}: need a positive number")
    return _tost(sd / math.sqrt(n), n - 1, margin, true, alpha)


def seeds_for(
    sd: float,
    *,
    effect: float | None = None,
    margin: float | None = None,
    true: float = 0.0,
    power: float = POWER,
    alpha: float = ALPHA,
    most: int = 10_000,
) -> int | None:
    """Fewest seeds that show a difference of ``effect``, or equivalence within ``margin``.

    Args:
        effect, margin: exactly one of them: which claim is planned.
        true: the true difference that equivalence is to be shown at; 0 is the kindest.
        power: wanted chance of showing it.
        most: where to give up.

    Returns:
        None where ``most`` seeds are too few.

    Raises:
        InputError: both or neither of effect and margin, or a true difference beyond the margin.
    """
    claim = _claim(effect, margin, true, alpha)
    return _fewest(lambda n: claim(sd / math.sqrt(n), n - 1) >= power, 2, most)


@dataclass(frozen=True)
class Noise:
    """Standard deviations that make up a paired difference on one problem and one seed.

    Attributes:
        seed: of a seed's true mean difference.
        interaction: of what a seed does to one problem in particular.
        within: variance that one sample of each arm leaves: p(1-p) of the one plus p(1-p) of the
            other, averaged over cells, where they sample independently.
        problem: of the problems' own mean difference, the same for all seeds.
    """

    seed: float
    interaction: float
    within: float
    problem: float = 0.0

    def rest(self, samples: int) -> float:
        """Variance in one cell besides seed and problem, with so many samples."""
        return self.interaction**2 + self.within / samples

    def sd(self, problems: int, samples: int) -> float:
        """Standard deviation of a seed's mean difference over these problems."""
        return math.sqrt(self.seed**2 + self.rest(samples) / problems)

    def error(self, seeds: int, problems: int, samples: int, random: bool) -> tuple[float, float]:
        """Standard error of the mean difference, and its degrees of freedom.

        Args:
            random: whether problems are a sample of what the claim is about.
        """
        by_seed = self.sd(problems, samples) / math.sqrt(seeds)
        if not random:
            return by_seed, seeds - 1
        rest = self.rest(samples)
        seed, problem = problems * self.seed**2 + rest, seeds * self.problem**2 + rest
        both = seed + problem - rest
        parts = (
            seed**2 / (seeds - 1)
            + problem**2 / (problems - 1)
            + rest**2 / ((seeds - 1) * (problems - 1))
        )
        df = both**2 / parts if parts > 0 else seeds - 1
        fewest = min(seeds, problems) - 1
        return math.sqrt(both / (seeds * problems)), max(df, fewest)


def noise_from(gaps: Floats, within: float, samples: int) -> Noise:
    """Components from a pilot's paired differences, by the method of moments.

    Args:
        gaps: (seeds x problems) differences, at least 2 of each.
        within: as in ``Noise``; for shares of n correct, the mean of s(1-s) n/(n-1) over cells and
            arms, times 2.
        samples: in each cell of the pilot.

    A component whose estimate is negative is 0: the pilot could not tell it from the rest. Few
    seeds estimate ``seed`` poorly: with 5 its own 95 % interval reaches from 0.6 to 2.9 times the
    estimate.

    Raises:
        InputError: fewer than 2 seeds or problems.
    """
    if min(gaps.shape) < 2:
        raise InputError(f"a pilot of {gaps.shape} seeds and problems: at least 2 of each")
    found = mean_squares(gaps[None])
    rest = float(found.rest[0])
    return Noise(
        seed=math.sqrt(max(0.0, float(found.seed[0]) - rest) / found.problems),
        interaction=math.sqrt(max(0.0, rest - within / samples)),
        within=within,
        problem=math.sqrt(max(0.0, float(found.problem[0]) - rest) / found.seeds),
    )


def problems_for(
    noise: Noise,
    seeds: int,
    samples: int,
    *,
    effect: float | None = None,
    margin: float | None = None,
    true: float = 0.0,
    random: bool = False,
    power: float = POWER,
    alpha: float = ALPHA,
    most: int = 1_000_000,
) -> int | None:
    """Fewest problems with which so many seeds show a difference, or equivalence.

    Arguments as in ``seeds_for`` and ``Noise.error``.

    Returns:
        None where ``most`` problems are too few: then it is seeds that are lacking.

    Raises:
        InputError: as ``seeds_for``; or fewer than 2 seeds, or no samples.
    """
    if seeds < 2 or samples < 1:
        raise InputError(f"{seeds} seeds, {samples} samples: need at least 2 and 1")
    claim = _claim(effect, margin, true, alpha)
    return _fewest(
        lambda problems: claim(*noise.error(seeds, problems, samples, random)) >= power, 2, most
    )


def power_of(
    noise: Noise,
    seeds: int,
    problems: int,
    samples: int,
    *,
    effect: float | None = None,
    margin: float | None = None,
    true: float = 0.0,
    random: bool = False,
    alpha: float = ALPHA,
) -> float:
    """Power of a design; arguments as in ``problems_for``. With random problems approximate."""
    if seeds < 2 or problems < 2 or samples < 1:
        raise InputError(
            f"{seeds} seeds, {problems} problems, {samples} samples: need at least 2, 2 and 1"
        )
    claim = _claim(effect, margin, true, alpha)
    return claim(*noise.error(seeds, problems, samples, random))


def _claim(
    effect: float | None, margin: float | None, true: float, alpha: float
) -> Callable[[float, float], float]:
    """(standard error, degrees of freedom) -> power of the one claim that is planned."""
    if effect is not None and margin is None:
        if effect == 0:
            raise InputError("effect = 0: no number of seeds shows a difference that is not there")
        return lambda se, df: _superiority(se, df, effect, alpha)
    if margin is None or effect is not None:
        raise InputError("give either effect (to show a difference) or margin (equivalence)")
    if not abs(true) < margin:
        raise InputError(
            f"true = {true} is not within margin = {margin}: no number of seeds shows equivalence"
        )
    return lambda se, df: _tost(se, df, margin, true, alpha)


def _superiority(se: float, df: float, effect: float, alpha: float) -> float:
    from scipy import stats

    if se == 0:
        return 1.0
    return float(stats.nct.sf(stats.t.ppf(1 - alpha / 2, df), df, abs(effect) / se))


def _tost(se: float, df: float, margin: float, true: float, alpha: float) -> float:
    from scipy import integrate, stats

    if se == 0:
        return 1.0
    critical = stats.t.ppf(1 - alpha, df)
    # Given the estimated standard error u se, the mean must lie within margin - critical u se.
    widest = margin / (critical * se)
    scale = 1 / math.sqrt(df)  # of u

    def shown(u: float) -> float:
        room = margin - critical * u * se
        inside = stats.norm.cdf((room - true) / se) - stats.norm.cdf((-room - true) / se)
        return float(inside * stats.chi.pdf(u, df, scale=scale))

    top = min(widest, float(stats.chi.isf(_NEGLIGIBLE, df, scale=scale)))
    bottom = min(top, float(stats.chi.ppf(_NEGLIGIBLE, df, scale=scale)))
    value, _ = integrate.quad(shown, bottom, top, limit=200, epsabs=1e-10)
    return float(np.clip(value, 0.0, 1.0))


def _fewest(enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """The least whole number that is enough; ``enough`` never turns false again."""
    high = least
    while not enough(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = max(least, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def _check(n: int, sd: float) -> None:
    if n < 2:
        raise InputError(f"n = {n}: a t test needs at least 2 seeds")
    if not sd > 0:
        raise InputError(f"sd = {sd}: need a positive standard deviation")
