"""Sigmoids that are known, curves that are none, and crossings worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.errors import InputError
from harness.metrics import pass_at_k
from harness.stats.curves import NoFit, SigmoidFit, fit_sigmoid, pass_crossover

X = np.geomspace(0.1, 10, 15)


def sigmoid(asymptote=0.8, midpoint=1.5, rate=2.0, start=0.2):
    return start + (asymptote - start) / (1 + (midpoint / X) ** rate)


def test_an_exact_sigmoid_gives_its_parameters_back():
    found = fit_sigmoid(X, sigmoid()[None], 0.2)
    assert isinstance(found, SigmoidFit)
    assert found.asymptote.value == pytest.approx(0.8, abs=1e-6)
    assert found.midpoint.value == pytest.approx(1.5, abs=1e-5)
    assert found.rate.value == pytest.approx(2.0, abs=1e-5)
    assert found.asymptote.low is None  # one seed
    assert found.r2 == pytest.approx(1)
    assert found.reached == pytest.approx(10 / 1.5)
    assert found.at(X) == pytest.approx(sigmoid(), abs=1e-6)
    assert found.at(np.array([0.0])) == pytest.approx([0.2])


def test_intervals_over_seeds_hold_the_truth():
    rng, held = np.random.default_rng(0), []
    for _ in range(50):
        tops = 0.8 + 0.03 * rng.normal(size=5)
        mids = 1.5 * np.exp(0.1 * rng.normal(size=5))
        curves = np.array([sigmoid(a, m) for a, m in zip(tops, mids, strict=True)])
        found = fit_sigmoid(X, curves + 0.01 * rng.normal(size=curves.shape), 0.2, resamples=30)
        assert isinstance(found, SigmoidFit)
        assert found.fitted == 1.0
        for interval, truth in ((found.asymptote, 0.8), (found.midpoint, 1.5), (found.rate, 2.0)):
            held.append(interval.low <= truth <= interval.high)
    assert 0.9 <= np.mean(held) <= 0.99


@pytest.mark.parametrize(
    ("curves", "reason"),
    [
        (np.full((3, 15), 0.4), "flat"),
        (np.tile(0.2 + 0.05 * X, (3, 1)), "still rises"),  # a straight line
        (np.tile(sigmoid(0.95, 20.0), (3, 1)), "half-way"),
        (np.tile(sigmoid() + 0.2 * (-1) ** np.arange(15), (3, 1)), "explains"),
        (np.tile(np.where(X > 1, 0.8, 0.2), (3, 1)), "rate runs away"),  # a jump
        (np.ones((2, 15)), "flat"),
    ],
)
def test_what_is_no_sigmoid_gets_a_reason_and_no_numbers(curves, reason):
    found = fit_sigmoid(X, curves, 0.2)
    assert isinstance(found, NoFit)
    assert reason in found.reason


def test_too_few_points_or_seeds_that_disagree_are_no_fit():
    short = fit_sigmoid(X[:4], sigmoid()[None, :4], 0.2)
    assert isinstance(short, NoFit)
    assert "4 points" in short.reason
    torn = np.array([sigmoid(), np.full(15, 0.2), np.full(15, 0.2)])
    found = fit_sigmoid(X, torn, 0.2)  # a third of the resamples of seeds is flat
    assert isinstance(found, NoFit)
    assert "resamples" in found.reason


def test_curves_that_do_not_match_their_moments_are_refused():
    with pytest.raises(InputError, match="do not match"):
        fit_sigmoid(X, np.zeros((2, 3)), 0.2)
    with pytest.raises(InputError, match="leave the one at 0"):
        fit_sigmoid(np.arange(6.0), np.zeros((2, 6)), 0.2)


def test_a_crossing_by_hand():
    # The arm solves half of the problems always, the base every one in 4 of 8 samples:
    # 0.5 against 0.5, 0.786, ... at K = 1, 2; with 9 of 16 always, 0.5625 is overtaken at K = 2.
    trained = np.array([[8] * 9 + [0] * 7])
    base = np.array([[4] * 16])
    found = pass_crossover(trained, base, 8)
    assert found is not None
    assert found.k == 2
    assert found.gap[0] == pytest.approx(0.0625)
    assert found.gap[1] == pytest.approx(0.5625 - pass_at_k(8, 4, 2))
    assert found.low == 1  # 0.06 of 16 problems shows nothing


def test_no_crossing_is_none_and_nothing_to_overtake_too():
    better = pass_crossover(np.full((3, 20), 6), np.full((3, 20), 2), 8)
    assert better is not None
    # From K = 7 on both pass always: 2 of 8 cannot be missed by 7 draws.
    assert (better.k, better.low, better.high) == (None, 7, None)
    assert pass_crossover(np.full((3, 20), 2), np.full((3, 20), 6), 8) is None


def test_the_interval_holds_the_true_crossing():
    """The arm sharpens: of 150 problems 60 % near 0.9, the rest near 0; the base near 0.25."""
    rng, samples, ks = np.random.default_rng(1), 32, (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    solved = 0.6
    # arm: 0.6 (1 - 0.1^K); base: 1 - 0.75^K; equal between K = 3 (0.5994, 0.578) and 4 (0.6, 0.684)
    assert solved * (1 - 0.1**3) > 1 - 0.75**3
    assert solved * (1 - 0.1**4) < 1 - 0.75**4
    held, ends = [], []
    for _ in range(200):
        rate = np.where(rng.uniform(size=150) < solved, 0.9, 0.0)
        trained = rng.binomial(samples, np.tile(rate, (5, 1)))
        base = rng.binomial(samples, 0.25, size=(5, 150))
        found = pass_crossover(trained, base, samples, ks)
        assert found is not None
        assert found.low is not None
        held.append(found.low <= 4 and (found.high is None or found.high >= 4))
        ends.append((found.low, found.high or math.inf))
        assert found.low <= (found.k or math.inf) <= (found.high or math.inf)
    assert np.mean(held) >= 0.95
    assert np.median([high for _, high in ends]) <= 6  # and it is of use


def test_counts_of_other_problems_are_refused():
    with pytest.raises(InputError, match="same problems"):
        pass_crossover(np.zeros((2, 5), int), np.zeros((2, 6), int), 4)
