"""Planned power against simulation, tables of the noncentral t, and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate, stats
from statsmodels.stats.power import TTestPower

from harness.errors import InputError
from harness.stats.effects import crossed_half_width
from harness.stats.power import (
    Noise,
    noise_from,
    power_of,
    problems_for,
    seeds_for,
    superiority_power,
    tost_power,
)


@pytest.mark.parametrize(("n", "effect"), [(5, 1.0), (8, 0.7), (30, 0.4)])
def test_superiority_is_one_tail_of_the_noncentral_t(n, effect):
    library = TTestPower().power(effect, n, 0.025, alternative="larger")
    assert superiority_power(n, 2.0, 2 * effect) == pytest.approx(float(library), abs=1e-9)
    assert superiority_power(n, 2.0, -2 * effect) == superiority_power(n, 2.0, 2 * effect)


@pytest.mark.parametrize(
    ("n", "margin", "true"), [(5, 2.0, 0.0), (8, 1.0, 0.3), (10, 1.0, 0.0), (20, 0.6, -0.2)]
)
def test_equivalence_power_within_two_points_of_simulation(n, margin, true):
    rng = np.random.default_rng(n)
    x = rng.normal(true, 1.0, size=(40_000, n))
    half = stats.t.ppf(0.95, n - 1) * x.std(axis=1, ddof=1) / math.sqrt(n)
    shown = np.mean(np.abs(x.mean(axis=1)) + half < margin)
    assert tost_power(n, 1.0, margin, true) == pytest.approx(shown, abs=0.01)


def test_equivalence_power_by_another_integral():
    """Over the mean instead of the standard error: the chi-square cdf of what is allowed."""
    n, sd, margin, true = 9, 1.3, 1.1, 0.2
    se, df, critical = sd / 3, 8, stats.t.ppf(0.95, 8)

    def shown(m):
        u = (margin - abs(m)) / (critical * se)
        return stats.norm.pdf(m, true, se) * stats.chi2.cdf(df * u**2, df)

    expected = integrate.quad(shown, -margin, margin, points=[0], epsabs=1e-11)[0]
    assert tost_power(n, sd, margin, true) == pytest.approx(expected, abs=1e-8)


def test_at_the_margin_power_is_the_size_of_the_test():
    assert tost_power(50, 0.01, 1.0, true=1.0) == pytest.approx(0.05, abs=1e-4)
    assert tost_power(6, 2.0, 1.0, true=1.0) < 0.05
    assert tost_power(5, 100.0, 1.0) < 1e-4  # an interval that never fits


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_seeds_agree_with_the_normal_formula(ratio):
    """n ~ (z(1 - alpha) + z(1 - beta/2))^2 sd^2 / margin^2; Student's t asks for 1 to 3 more."""
    approximate = (1.6449 + 1.2816) ** 2 / ratio**2
    found = seeds_for(1.0, margin=ratio)
    assert approximate <= found <= approximate + 3.5
    assert tost_power(found, 1.0, ratio) >= 0.8 > tost_power(found - 1, 1.0, ratio)


def test_seeds_for_a_difference():
    found = seeds_for(1.0, effect=-1.0, power=0.9)
    library = TTestPower().solve_power(1.0, alpha=0.05, power=0.9)
    assert found == math.ceil(library)
    assert seeds_for(1.0, effect=0.001, most=500) is None
    assert seeds_for(1e-6, effect=1.0) == 2


def test_what_the_evaluation_adds():
    noise = Noise(seed=0.01, interaction=0.1, within=0.32)
    # 0.01^2 + (0.1^2 + 0.32/8)/200 = 1e-4 + 2.5e-4
    assert noise.sd(200, 8) == pytest.approx(math.sqrt(3.5e-4))
    assert noise.error(7, 200, 8, random=False) == (pytest.approx(math.sqrt(5e-5)), 6)
    wide = Noise(seed=0.01, interaction=0.1, within=0.32, problem=0.2)
    # problem^2/problems = 2e-4 comes on top, undivided by seeds
    se, df = wide.error(7, 200, 8, random=True)
    assert se == pytest.approx(math.sqrt(5e-5 + 2e-4))
    assert 6 <= df <= 199


def test_more_problems_until_seeds_are_what_is_lacking():
    noise = Noise(seed=0.01, interaction=0.1, within=0.32)
    found = problems_for(noise, 5, 8, effect=0.03)
    assert power_of(noise, 5, found, 8, effect=0.03) >= 0.8
    assert power_of(noise, 5, found - 1, 8, effect=0.03) < 0.8
    assert problems_for(noise, 5, 32, effect=0.03) < found
    assert problems_for(noise, 5, 8, effect=0.005) is None  # seeds alone vary too much
    assert problems_for(noise, 5, 8, margin=0.04) > 2
    random = Noise(seed=0.01, interaction=0.1, within=0.32, problem=0.2)
    assert problems_for(random, 5, 8, effect=0.03, random=True) > found
    assert problems_for(random, 5, 8, effect=0.03, random=False) == found


def gaps(rng, noise: Noise, experiments: int, seeds: int, problems: int, samples: int, true=0.0):
    def normal(sd, *shape):
        return sd * rng.normal(size=(experiments, *shape))

    return (
        true
        + normal(noise.seed, seeds, 1)
        + normal(noise.problem, 1, problems)
        + normal(math.sqrt(noise.rest(samples)), seeds, problems)
    )


NOISE = Noise(seed=0.02, interaction=0.15, within=0.3, problem=0.2)


@pytest.mark.parametrize(("seeds", "problems"), [(5, 100), (10, 200)])
@pytest.mark.parametrize("random", [False, True])
def test_the_planner_is_within_two_points_of_simulated_experiments(seeds, problems, random):
    rng = np.random.default_rng((seeds, random))
    noise = NOISE if random else replace(NOISE, problem=0.0)  # of fixed problems: in the effect
    for effect in (0.03, 0.06):
        x = gaps(rng, noise, 4000, seeds, problems, 4, effect)
        if random:
            shown = np.mean(x.mean(axis=(1, 2)) > crossed_half_width(x))
        else:
            tests = stats.ttest_1samp(x.mean(axis=2), 0, axis=1, alternative="greater")
            shown = np.mean(tests.pvalue < 0.025)
        planned = power_of(NOISE, seeds, problems, 4, effect=effect, random=random)
        assert planned == pytest.approx(shown, abs=0.02)


def test_components_come_back_from_a_pilot():
    rng = np.random.default_rng(5)
    found = [noise_from(x, 0.3, 4) for x in gaps(rng, NOISE, 300, 8, 120, 4)]
    for name in ("seed", "interaction", "problem"):
        mean_square = np.mean([getattr(n, name) ** 2 for n in found])
        assert math.sqrt(mean_square) == pytest.approx(getattr(NOISE, name), rel=0.1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tost_power(1, 1.0, 1.0), "at least 2 seeds"),
        (lambda: superiority_power(5, 0.0, 1.0), "positive standard deviation"),
        (lambda: tost_power(5, 1.0, 0.0), "margin = 0.0"),
        (lambda: seeds_for(1.0), "give either effect"),
        (lambda: seeds_for(1.0, effect=1.0, margin=1.0), "give either effect"),
        (lambda: seeds_for(1.0, effect=0.0), "not there"),
        (lambda: seeds_for(1.0, margin=1.0, true=1.0), "not within margin"),
        (lambda: problems_for(NOISE, 1, 8, effect=1.0), "at least 2 and 1"),
        (lambda: power_of(NOISE, 5, 1, 8, effect=1.0), "at least 2, 2 and 1"),
        (lambda: noise_from(np.zeros((1, 9)), 0.1, 4), "at least 2 of each"),
    ],
)
def test_impossible_plans_are_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
