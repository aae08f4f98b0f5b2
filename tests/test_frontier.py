"""Reward against KL: fixtures with known areas, envelopes and parameters."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from harness.errors import InputError
from harness.stats.best_of_n import best_of_n, kl_bound, sequence_kl, weights
from harness.stats.frontier import (
    Point,
    band,
    equal_numbers,
    hypervolume,
    monotone,
    pareto,
    resampled,
    reward_at,
    reward_within,
)
from harness.stats.gao import D_MIN, curve, fit, peak

VECTORS = {
    v["name"]: v
    for v in json.loads((Path(__file__).parent / "golden/vectors.json").read_text())["vectors"]
}


def points(*pairs: tuple[float, float], run: str = "r", stratum: str = "s") -> list[Point]:
    return [Point(run, stratum, kl, 2 * reward, reward) for kl, reward in pairs]


FOUR = points((1.0, 0.2), (2.0, 0.5), (3.0, 0.4), (4.0, 0.9))


def test_the_pareto_set_leaves_out_what_is_beaten_in_both():
    assert [p.kl for p in pareto(FOUR)] == [1.0, 2.0, 4.0]
    assert [p.kl for p in pareto(points((1, 0.1), (1, 0.3), (1, 0.2)))] == [1]
    assert pareto(points((1, 0.3), (1, 0.3))) == points((1, 0.3))
    assert pareto([]) == []


def test_the_area_is_that_of_the_steps_by_hand():
    # From KL 1 to 2 at .2, from 2 to 4 at .5, from 4 to 5 at .9, above a floor of 0.
    assert hypervolume(FOUR, 5.0, 0.0) == pytest.approx(0.2 + 2 * 0.5 + 0.9)
    assert hypervolume(FOUR, 3.0, 0.0) == pytest.approx(0.2 + 0.5)
    assert hypervolume(FOUR, 5.0, 0.3) == pytest.approx(2 * 0.2 + 0.6)
    assert hypervolume(FOUR, 0.5, 0.0) == 0.0
    assert hypervolume(points((-0.1, 0.5)), 1.0, 0.0) == pytest.approx(0.5)  # an estimate below 0
    with pytest.raises(InputError, match="above 0"):
        hypervolume(FOUR, 0.0, 0.0)


def test_the_best_within_a_budget_and_the_rising_fit():
    assert reward_within(FOUR, 3.5) == 0.5
    assert reward_within(FOUR, 0.5) is None
    xs, ys = monotone(FOUR)
    assert xs.tolist() == [1, 2, 3, 4]
    assert ys.tolist() == pytest.approx([0.2, 0.45, 0.45, 0.9])  # .5 and .4 are pooled
    assert reward_at(FOUR, 1.5) == pytest.approx(0.325)
    assert reward_at(FOUR, 4.5) is None  # nothing beyond what was measured
    assert reward_at(FOUR, 0.9) is None


def test_arms_are_compared_on_equal_numbers_of_points():
    many = points(*((float(i), 0.1 * i) for i in range(9)))
    found = equal_numbers({"few": many[:3], "many": many})
    assert [p.kl for p in found["few"]] == [0, 1, 2]
    assert [p.kl for p in found["many"]] == [0, 4, 8]
    with pytest.raises(InputError, match="no points"):
        equal_numbers({"none": [], "many": many})


def test_runs_are_resampled_whole_and_within_their_stratum():
    rng = np.random.default_rng(0)
    data = [Point(f"{s}{r}", s, kl, kl, kl) for s in "ab" for r in range(3) for kl in (1.0, 2.0)]
    for _ in range(50):
        drawn = resampled(data, rng)
        assert len(drawn) == len(data)
        for stratum in "ab":
            mine = [p.run for p in drawn if p.stratum == stratum]
            assert len(mine) == 6
            assert all(mine.count(run) % 2 == 0 for run in mine)


def test_a_band_covers_its_statistic_at_about_its_level():
    """The mean of six runs: the percentile interval of few runs is narrow, and not wildly so."""
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        data = [Point(str(i), "s", 1.0, 0.0, x) for i, x in enumerate(rng.normal(size=6))]
        found = band(data, lambda drawn: float(np.mean([p.gold for p in drawn])), 200)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0 <= found.high
    assert 0.80 <= hits / 200 <= 0.97
    lone = [Point("0", "s", 1.0, 0.0, 1.0), Point("0", "s", 2.0, 0.0, 1.0)]
    assert band(lone, lambda drawn: 1.0, 10).low is None


# -- Gao et al. --------------------------------------------------------------------------------


def test_the_curves_and_peaks_are_the_reference_ones():
    vector = VECTORS["gao_overoptimization_curves"]
    inputs, expected = vector["inputs"], vector["expected"]
    for form in ("bon", "rl"):
        found = curve(form, inputs["alpha"], inputs["beta"], np.array(inputs["d"]))
        assert found.tolist() == pytest.approx(expected[form], abs=vector["tolerance"])
        top = peak(form, inputs["alpha"], inputs["beta"])
        assert top == pytest.approx((expected[f"{form}_peak_d"], expected[f"{form}_peak"]))
    assert curve("rl", 1.0, 0.3, 0.0) == 0
    assert peak("rl", 1.0, -0.1) is None
    assert peak("bon", -1.0, 0.1) is None


@pytest.mark.parametrize("form", ["bon", "rl"])
def test_fits_recover_the_parameters_that_made_the_data(form: str):
    rng = np.random.default_rng(1)
    d = rng.uniform(0, 5, 400)
    reward = 0.7 + curve(form, 1.2, 0.3, d) + 0.02 * rng.normal(size=400)  # type: ignore[arg-type]
    found = fit(form, d.tolist(), reward.tolist(), base=0.7)  # type: ignore[arg-type]
    assert found is not None
    assert found.alpha == pytest.approx(1.2, abs=0.01)
    assert found.beta == pytest.approx(0.3, abs=0.01)
    assert found.r2 > 0.95
    assert found.points == int((d >= D_MIN).sum()) < 400
    assert found.over_optimised == (form == "bon")  # peaks at 2 and at 20


def test_too_few_points_are_not_fitted():
    assert fit("bon", [1, 2, 3], [1, 1, 1], 0) is None
    assert fit("bon", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], 0) is None
    assert fit("rl", [0.1, 0.1, 0.2, 1.0, 2.0], [1, 1, 1, 1, 1], 0) is None


# -- best of n ---------------------------------------------------------------------------------


def test_the_bound_is_log_n_less_its_share():
    vector = VECTORS["best_of_n_kl"]
    found = [kl_bound(n) for n in vector["inputs"]["n"]]
    assert found == pytest.approx(vector["expected"]["kl"], abs=vector["tolerance"])
    with pytest.raises(InputError):
        kl_bound(0)


def test_expected_rewards_equal_enumeration_of_all_sets():
    rng = np.random.default_rng(2)
    proxies = rng.normal(size=(3, 7)).round(1)  # with ties
    golds = rng.normal(size=(3, 7))
    proxies[0, :3] = 0.5
    for n in (1, 2, 4, 7):
        gold, proxy = [], []
        for scores, values in zip(proxies, golds, strict=True):
            for chosen in itertools.combinations(range(7), n):
                top = max(scores[list(chosen)])
                best = [i for i in chosen if scores[i] == top]
                proxy.append(top)
                gold.append(np.mean(values[best]))
        found = best_of_n(proxies.tolist(), golds.tolist(), n)
        assert found.proxy == pytest.approx(np.mean(proxy))
        assert found.gold == pytest.approx(np.mean(gold))
        assert found.kl == pytest.approx(math.log(n) - (n - 1) / n)


def test_the_sampled_kl_tends_to_the_bound():
    proxies = np.random.default_rng(4).normal(size=(20, 2000))
    for n in (1, 2, 8, 32):
        found = best_of_n(proxies.tolist(), proxies.tolist(), n)
        assert found.sampled_kl == pytest.approx(kl_bound(n), abs=0.01)


def test_equal_scores_are_no_choice():
    """Where all tie, the chosen one is any, and lies at the base: the bound is then far off."""
    found = best_of_n([[1.0] * 4], [[0.0, 1.0, 2.0, 3.0]], 4)
    assert found.gold == pytest.approx(1.5)
    assert weights([1.0] * 4, 3).tolist() == pytest.approx([0.25] * 4)
    with pytest.raises(InputError, match="best of 5 of 4"):
        weights([1.0] * 4, 5)


def test_sequence_kl_is_the_sum_over_tokens():
    vector = VECTORS["sequence_level_kl_for_frontier"]
    inputs, expected = vector["inputs"], vector["expected"]
    found = sequence_kl(inputs["logp"], inputs["ref_logp"])
    assert found.tolist() == pytest.approx(expected["seq_kl"])
    assert float(found.mean()) == pytest.approx(expected["mean_seq_kl"])
