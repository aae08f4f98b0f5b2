"""How often intervals hold the truth, in simulated experiments of the shapes that are run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit

from harness.stats.bootstrap import crossed, hierarchical
from harness.stats.effects import clustered_wilson, crossed_half_width, wilson


@dataclass(frozen=True)
class World:
    """Logits of a sample's being right: a level, and normal effects of seed, problem and both.

    Attributes:
        gap, shift: of a second arm on the same problems, whose difference to the first is judged;
            shift is how much the gap differs between problems.
    """

    level: float
    seed: float
    problem: float
    both: float
    samples: int
    gap: float | None = None
    shift: float = 0.0

    def draw(self, rng, experiments: int, seeds: int, problems: int) -> np.ndarray:
        """(experiments x seeds x problems) shares correct, or differences of shares."""
        hard = self.level + self.problem * rng.normal(size=(experiments, 1, problems))

        def arm(lift):
            logits = hard + lift + self.seed * rng.normal(size=(experiments, seeds, 1))
            logits = logits + self.both * rng.normal(size=(experiments, seeds, problems))
            return rng.binomial(self.samples, expit(logits)) / self.samples

        if self.gap is None:
            return arm(0.0)
        return arm(self.gap + self.shift * rng.normal(size=hard.shape)) - arm(0.0)

    def truth(self) -> float:
        """The mean over seeds and problems, by Gauss-Hermite quadrature."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(101)

        def mean(level, *spreads):
            return float(weights @ expit(level + np.hypot(*spreads) * nodes) / weights.sum())

        own = np.hypot(self.seed, self.both)
        base = mean(self.level, self.problem, own)
        if self.gap is None:
            return base
        return mean(self.level + self.gap, np.hypot(self.problem, self.shift), own) - base


WORLDS = {
    "accuracy, problems vary most": World(1.5, 0.05, 1.5, 0.3, 32),
    "accuracy, both vary": World(1.5, 0.3, 1.5, 0.5, 32),
    "accuracy, seeds vary most": World(1.0, 0.5, 0.5, 0.3, 32),
    "greedy": World(2.5, 0.3, 1.5, 0.5, 1),
    "difference, seeds vary": World(1.5, 0.3, 1.5, 0.5, 32, gap=0.2),
    "difference, problems vary": World(1.5, 0.05, 1.5, 0.5, 32, gap=0.2, shift=0.5),
    "difference, greedy": World(1.5, 0.3, 1.5, 0.5, 1, gap=0.2, shift=0.3),
}


@pytest.mark.parametrize(("seeds", "problems"), [(5, 100), (5, 200), (10, 150)])
@pytest.mark.parametrize("name", WORLDS)
def test_the_interval_shown_covers_as_often_as_it_says(name, seeds, problems):
    world, rng = WORLDS[name], np.random.default_rng((seeds, problems))
    held = []
    for _ in range(4):  # in parts, for memory
        x = world.draw(rng, 500, seeds, problems)
        held.append(np.abs(x.mean(axis=(1, 2)) - world.truth()) <= crossed_half_width(x))
    assert 0.93 <= np.mean(held) <= 0.97


def test_it_errs_to_the_wide_side_where_evaluation_is_all_that_varies():
    world, rng = World(1.5, 0.0, 1.5, 0.0, 1, gap=0.0), np.random.default_rng(0)
    x = world.draw(rng, 2000, 5, 100)
    held = np.abs(x.mean(axis=(1, 2))) <= crossed_half_width(x)
    assert 0.95 <= held.mean() < 1


def test_the_percentile_bootstrap_covers_too_seldom_with_five_seeds():
    world, rng = WORLDS["accuracy, seeds vary most"], np.random.default_rng(1)
    x = world.draw(rng, 500, 5, 100)
    low, high = np.percentile(crossed(x, 500), [2.5, 97.5], axis=1)
    assert np.mean((low <= world.truth()) & (world.truth() <= high)) < 0.91


def test_one_seed_gives_the_t_interval_over_problems_and_conversely():
    x = np.random.default_rng(2).uniform(size=12)
    expected = stats.t.ppf(0.975, 11) * stats.sem(x)
    assert crossed_half_width(x[None, None])[0] == pytest.approx(expected)
    assert crossed_half_width(x[None, :, None])[0] == pytest.approx(expected)


def test_the_variance_by_hand():
    # Rows 0 4 / 2 10: whole 4, seeds -2 +2, problems -3 +3, rest ±1.
    # mean squares: 2 * (4 + 4) / 1 = 16, 2 * (9 + 9) / 1 = 36, 4 / 1 = 4; (16 + 36 - 4) / 4 = 12.
    # degrees of freedom: 48^2 / (256 + 1296 + 16) = 1.4694
    x = np.array([[[0.0, 4.0], [2.0, 10.0]]])
    expected = stats.t.ppf(0.975, 48**2 / 1568) * np.sqrt(12)
    assert crossed_half_width(x)[0] == pytest.approx(expected)


def test_redrawing_samples_counts_the_noise_of_evaluation_once_too_often():
    """Only chance in 4 samples varies: the mean's variance is 0.25 / (4 * 5 * 40)."""
    rng, true = np.random.default_rng(3), 0.25 / (4 * 5 * 40)
    without, thrice = [], []
    for _ in range(60):
        correct = rng.binomial(4, 0.5, size=(5, 40))
        without.append(crossed(correct[None] / 4, 400).var())
        thrice.append(hierarchical(correct, 4, lambda c: c / 4, 400).var())
    assert np.mean(without) >= true  # the noise is in it already
    # a binomial draw from c/4 has (4 - 1)/4 of the variance
    assert np.mean(thrice) - np.mean(without) == pytest.approx(0.75 * true, rel=0.3)


def test_redrawing_samples_moves_pass_at_k_down():
    correct, k = np.full((5, 40), 1), 4  # 1 of 8 right: Pass@4 is 1 - C(7, 4)/C(8, 4) = 0.5

    def pass_at_4(c):
        miss = [np.prod([(8 - x - j) / (8 - j) for j in range(k)]) for x in range(9)]
        return 1 - np.clip(np.array(miss), 0, 1)[c]

    assert pass_at_4(correct).mean() == pytest.approx(0.5)
    moved = hierarchical(correct, 8, pass_at_4, 200).mean()
    assert moved == pytest.approx(1 - (7 / 8) ** 4, abs=0.01)  # 0.414


def test_wilson_by_hand():
    # (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n) with p = 0.3, n = 10, z = 1.96
    z2 = 3.8414588
    middle, half = 0.3 + z2 / 20, np.sqrt(z2) * np.sqrt(0.021 + z2 / 400)
    expected = (middle - half) / (1 + z2 / 10), (middle + half) / (1 + z2 / 10)
    assert wilson(3, 10) == pytest.approx(expected)
    assert wilson(0, 10)[0] == pytest.approx(0, abs=1e-12)
    assert wilson(0, 10)[1] == pytest.approx(z2 / 10 / (1 + z2 / 10))


def test_samples_of_a_problem_are_no_independent_trials():
    """30 problems of 32 samples: the clustered interval holds the truth, the plain one does not."""
    world, rng = World(-1.0, 0.0, 2.0, 0.0, 32), np.random.default_rng(4)
    truth, plain, clustered = world.truth(), [], []
    for shares in world.draw(rng, 600, 1, 30)[:, 0]:
        for found, interval in ((plain, wilson(shares.sum() * 32, 30 * 32)),
                                (clustered, clustered_wilson(shares))):  # fmt: skip
            found.append(interval[0] <= truth <= interval[1])
    assert np.mean(plain) < 0.5
    assert 0.93 <= np.mean(clustered) <= 0.97


def test_a_small_set_all_right_is_not_certain():
    assert clustered_wilson(np.ones(30)) == wilson(30, 30)
    assert clustered_wilson(np.zeros(30)) == wilson(0, 30)
