"""Estimates and paired differences against hand-worked numbers, enumeration and scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.stats.effects import (
    Estimate,
    difference,
    estimate,
    estimates,
    sign_flip_p,
    smallest_p,
    t_interval,
)


@pytest.mark.parametrize("seed", range(4))
def test_sign_flip_is_the_enumeration_and_agrees_with_scipy(seed: int) -> None:
    values = np.random.default_rng(seed).normal(0.4, 1, size=7)
    means = [abs(np.dot(signs, values)) for signs in itertools.product((-1, 1), repeat=len(values))]
    by_hand = np.mean([m >= abs(values.sum()) - 1e-9 for m in means])
    library = scipy_stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip_p(values) == by_hand
    assert sign_flip_p(values) == pytest.approx(library.pvalue, abs=1e-12)


def test_five_seeds_cannot_reach_five_percent_and_six_can() -> None:
    assert sign_flip_p(np.array([1.0, 2, 3, 4, 5])) == smallest_p(5) == 0.0625
    assert sign_flip_p(np.array([1.0, 2, 3, 4, 5, 6])) == smallest_p(6) == 0.03125
    assert smallest_p(1) == 1.0


def test_sign_flip_counts_sums_that_differ_in_the_last_bits_as_equal() -> None:
    # 0.1 + 0.2 - 0.3 is not 0 in floats; as a sum of differences it is.
    assert sign_flip_p(np.array([0.1, 0.2, -0.3])) == 1.0
    assert sign_flip_p(np.zeros(5)) == 1.0


def test_many_seeds_fall_back_to_seeded_random_patterns() -> None:
    values = np.random.default_rng(3).normal(0.5, 1, size=20)
    exact = scipy_stats.permutation_test(
        (values,), lambda x, axis: x.mean(axis), permutation_type="samples",
        n_resamples=200_000, vectorized=True, rng=np.random.default_rng(0),
    ).pvalue  # fmt: skip
    assert sign_flip_p(values) == sign_flip_p(values)
    assert sign_flip_p(values) == pytest.approx(exact, abs=0.01)


def test_t_interval_by_hand() -> None:
    # mean 2, sd 1, standard error 1/sqrt(3) = 0.57735, t(0.975, 2) = 4.302653
    low, high = t_interval(np.array([1.0, 2.0, 3.0]))
    assert low == pytest.approx(2 - 4.302653 * 0.5773503, abs=1e-5)
    assert high == pytest.approx(2 + 4.302653 * 0.5773503, abs=1e-5)


def test_t_interval_claims_no_certainty_without_spread() -> None:
    assert t_interval(np.array([1.0])) == (None, None)
    assert t_interval(np.array([0.2, 0.2, 0.2])) == (None, None)


def test_seeds_alone_match_the_enumerated_bootstrap() -> None:
    by_seed = np.array([0.1, 0.4, 0.7])
    found = estimate(np.repeat(by_seed[:, None], 20, axis=1))
    means = [np.mean(draw) for draw in itertools.product(by_seed, repeat=3)]
    low, high = np.percentile(means, [2.5, 97.5], method="inverted_cdf")
    assert found.mean == pytest.approx(0.4)
    assert found.boot_low == pytest.approx(low, abs=1e-12)
    assert found.boot_high == pytest.approx(high, abs=1e-12)


def test_problems_alone_match_the_normal_approximation() -> None:
    values = (np.arange(400) % 4 == 0).astype(float)[None]  # a quarter right
    found = estimate(values)
    half = 1.96 * np.sqrt(0.25 * 0.75 / 400)
    assert found.mean == 0.25
    assert found.low == pytest.approx(0.25 - half, abs=0.004)
    assert found.high == pytest.approx(0.25 + half, abs=0.004)


def test_problems_are_crossed_with_seeds_so_more_seeds_do_not_average_them_away() -> None:
    row = np.random.default_rng(0).uniform(size=60)
    one, five = estimate(row[None]), estimate(np.tile(row, (5, 1)))
    assert one.low is not None
    assert one.high is not None
    assert five.low is not None
    assert five.high is not None
    # Drawing problems within each seed would shrink it by sqrt(5) = 2.2.
    assert (five.high - five.low) / (one.high - one.low) == pytest.approx(1, abs=0.05)


def test_pairing_removes_what_both_arms_share() -> None:
    control = np.random.default_rng(1).uniform(size=(4, 50))
    found = difference(control + 0.1, control)
    assert found.estimate.mean == pytest.approx(0.1)
    assert found.estimate.low == pytest.approx(0.1)
    assert found.estimate.high == pytest.approx(0.1)
    assert found.p == found.smallest_p == 0.125
    assert found.by_seed == pytest.approx((0.1,) * 4)
    assert found.excludes_zero


def test_arms_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="not paired"):
        difference(np.zeros((3, 10)), np.zeros((2, 10)))
    with pytest.raises(ValueError, match="nothing to estimate"):
        estimate(np.zeros((0, 10)))


def test_metrics_taken_together_or_alone_are_the_same() -> None:
    values = np.random.default_rng(2).uniform(size=(3, 4, 30))
    together = estimates(values)
    for metric, found in zip(values, together, strict=True):
        alone = estimate(metric)
        assert found.mean == pytest.approx(alone.mean, abs=1e-12)
        assert found.low == pytest.approx(alone.low, abs=1e-12)
        assert found.high == pytest.approx(alone.high, abs=1e-12)


def test_nothing_to_resample_has_no_interval_and_overlaps_everything() -> None:
    found = estimate(np.array([[0.5]]))
    assert (found.mean, found.low, found.high) == (0.5, None, None)
    assert found.overlaps(Estimate(9.0, 8.9, 9.1, 5, 5))
    assert not Estimate(0.1, 0.0, 0.2, 5, 5).overlaps(Estimate(0.4, 0.3, 0.5, 5, 5))
