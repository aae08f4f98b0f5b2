"""Expected best of n trials against enumeration of all subsets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from harness.errors import InputError
from harness.stats.tuning import ranking, tuning_curve

SCORES = [0.31, 0.42, 0.28, 0.55, 0.47, 0.39, 0.42]


@pytest.mark.parametrize("n", range(1, 8))
def test_the_curve_is_the_enumeration_of_all_subsets(n):
    best = [max(subset) for subset in itertools.combinations(SCORES, n)]
    point = tuning_curve(SCORES)[n - 1]
    assert point.n == n
    assert point.mean == pytest.approx(np.mean(best), abs=1e-12)
    assert point.sd == pytest.approx(np.std(best), abs=1e-7)


def test_one_trial_is_the_mean_with_its_standard_error():
    point = tuning_curve(SCORES)[0]
    assert point.mean == pytest.approx(np.mean(SCORES))
    assert point.error == pytest.approx(np.std(SCORES, ddof=1) / math.sqrt(7))


def test_all_trials_leave_nothing_to_chance():
    last = tuning_curve(SCORES)[-1]
    assert (last.mean, last.sd, last.error) == (0.55, 0.0, None)


def test_cost_is_that_of_n_trials_drawn_at_random():
    costs = [1.0, 4, 2, 8, 3, 5, 5]
    points = tuning_curve(SCORES, costs)
    spent = [np.mean([sum(c) for c in itertools.combinations(costs, p.n)]) for p in points]
    assert [p.cost for p in points] == pytest.approx(spent)
    assert tuning_curve(SCORES)[0].cost is None


def test_the_curve_is_unbiased_and_its_error_not_too_small():
    """Trials uniform on 0..1: the best of 4 is 0.8 on average; 12 trials are run."""
    rng = np.random.default_rng(0)
    points = [tuning_curve(rng.uniform(size=12).tolist())[3] for _ in range(600)]
    means = np.array([p.mean for p in points])
    assert means.mean() == pytest.approx(0.8, abs=0.01)
    errors = math.sqrt(np.mean([p.error**2 for p in points]))
    assert means.std() <= errors <= 1.5 * means.std()


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (3, 2), (4, 5), (7, 5)])
def test_ranking_is_the_enumeration_of_pairs_of_subsets(n, m):
    theirs = [0.42, 0.5, 0.1, 0.44, 0.39]
    pairs = list(
        itertools.product(itertools.combinations(SCORES, n), itertools.combinations(theirs, m))
    )
    found = ranking(SCORES, theirs, n, m)
    assert found.above == pytest.approx(np.mean([max(a) > max(b) for a, b in pairs]), abs=1e-12)
    assert found.equal == pytest.approx(np.mean([max(a) == max(b) for a, b in pairs]), abs=1e-12)
    assert found.above + found.equal + found.below == pytest.approx(1)
    assert ranking(theirs, SCORES, m, n).ahead == pytest.approx(1 - found.ahead)


def test_who_leads_may_turn_with_the_number_of_trials():
    steady, lucky = [0.5] * 6, [0.1, 0.1, 0.1, 0.1, 0.1, 0.9]
    assert ranking(steady, lucky, 1).ahead == pytest.approx(5 / 6)
    assert ranking(steady, lucky, 6).ahead == 0.0


def test_impossible_draws_are_refused():
    with pytest.raises(InputError, match="at least one score"):
        tuning_curve([])
    with pytest.raises(InputError, match="7 trial scores with 2 costs"):
        tuning_curve(SCORES, [1.0, 2.0])
    with pytest.raises(InputError, match="best of 3 of 2"):
        ranking(SCORES, [0.1, 0.2], 3)
    with pytest.raises(InputError, match="best of 0"):
        ranking(SCORES, SCORES, 0)
