"""Reward against KL: fixtures with known areas, envelopes and parameters."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import isotonic_regression

from harness.errors import InputError
from harness.stats.best_of_n import best_of_n, kl_bound, sequence_kl, weights
from harness.stats.frontier import (
    Interval,
    Point,
    curve_band,
    equal_numbers,
    hypervolume,
    jackknife,
    local_fit,
    pareto,
    proxy,
    reward_at,
    reward_interval,
)
from harness.stats.gao import D_MIN, curve, fit, peak
from harness.stats.over_optimisation import after_peak, gold_peak

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


def path(ds: Sequence[float], reward: Callable[[float], float], run: str = "r") -> list[Point]:
    return [Point(run, "s", d * d, 2 * reward(d), reward(d)) for d in ds]


def test_the_local_fit_of_a_line_is_the_line():
    found = path(np.linspace(0.2, 3, 12).tolist(), lambda d: 0.3 - 0.2 * d)
    at = [0.5, 1.0, 1.7, 2.6]
    assert local_fit(found, at).tolist() == pytest.approx([0.3 - 0.2 * d for d in at])
    assert local_fit(found, at, proxy).tolist() == pytest.approx([0.6 - 0.4 * d for d in at])


def test_what_an_arm_does_far_out_does_not_move_what_it_earns_near():
    """A rising fit fails this: it pools the peak with the fall behind it."""
    near = path(np.linspace(0.2, 3, 15).tolist(), lambda d: 0.2 * d)
    far = path(np.linspace(3.6, 6, 15).tolist(), lambda d: 0.6 - 0.3 * (d - 3))
    assert reward_at(near + far, 2.5) == pytest.approx(reward_at(near, 2.5))
    assert reward_at(near + far, 2.5) == pytest.approx(0.5)
    rising = isotonic_regression([p.gold for p in near + far]).x
    assert rising[12] < 0.35  # at d = 2.6, where 0.52 is earned


def test_nothing_is_extrapolated():
    found = path([0.2, 0.4, 0.6, 0.8, 2.9, 3.1, 3.3, 3.5], lambda d: d)
    assert reward_at(found, 0.5) == pytest.approx(0.5)
    assert reward_at(found, 1.7) is None  # nothing within reach of it
    assert reward_at(found, 1.2) is None  # all on one side
    assert reward_at(found, 0.2) is None
    assert reward_at(found, 9.0) is None
    assert reward_at([], 1.0) is None
    assert reward_at(path([1, 2], lambda d: d), 1.5) is None  # a line through two is no fit


def test_arms_are_compared_on_equal_numbers_of_points():
    many = points(*((float(i), 0.1 * i) for i in range(9)))
    found = equal_numbers({"few": many[:3], "many": many})
    assert [p.kl for p in found["few"]] == [0, 1, 2]
    assert [p.kl for p in found["many"]] == [0, 4, 8]
    with pytest.raises(InputError, match="no points"):
        equal_numbers({"none": [], "many": many})


def mean_gold(drawn: Sequence[Point]) -> float:
    return float(np.mean([p.gold for p in drawn]))


def test_the_interval_of_a_mean_is_the_classical_one():
    """One stratum: Student's t over the runs' means, however many checkpoints each has."""
    values = np.random.default_rng(0).normal(size=(5, 3))
    data = [Point(str(r), "s", 1, 0, x) for r, row in enumerate(values) for x in row]
    found, means = jackknife(data, mean_gold), values.mean(1)
    half = stats.t.ppf(0.975, 4) * stats.sem(means)
    assert (found.value, found.low, found.high) == pytest.approx(
        (means.mean(), means.mean() - half, means.mean() + half)
    )


def test_strata_are_held_and_their_degrees_of_freedom_are_satterthwaites():
    """Two strata of two runs, 0 and 2, 10 and 16: the mean of their means has variance 1/4 + 9/4.

    The strata's own distance, 12, adds nothing.
    """
    data = [Point(f"{s}{x}", s, 1, 0, x) for s, xs in (("a", (0, 2)), ("b", (10, 16))) for x in xs]

    def middle(drawn: Sequence[Point]) -> float:
        return float(np.mean([mean_gold([p for p in drawn if p.stratum == s]) for s in "ab"]))

    found = jackknife(data, middle)
    df = (0.25 + 2.25) ** 2 / (0.25**2 + 2.25**2)
    assert found.value == pytest.approx(7)
    assert found.high is not None
    assert found.high - 7 == pytest.approx(stats.t.ppf(0.975, df) * 2.5**0.5)


def test_what_rests_on_one_run_has_no_interval_and_is_not_shown():
    data = [Point(str(r), "s", 1, 0, r) for r in range(3)]
    found = jackknife(data, lambda drawn: 1.0 if any(p.run == "1" for p in drawn) else None)
    assert found == Interval(1.0, None, None)
    assert jackknife(data, lambda drawn: None) == Interval(None, None, None)
    assert jackknife(data[:1], mean_gold) == Interval(0.0, None, None)
    alone = path([1, 1.2, 1.4, 1.6], lambda d: d)
    assert reward_interval(alone, 1.3).value == pytest.approx(1.3)
    others = path([4, 5], lambda d: d, run="other")
    assert reward_interval(alone + others, 1.3) == Interval(None, None, None)
    fit, low, _ = curve_band(alone, [1.3, 3.0])
    assert fit[0] == pytest.approx(1.3)
    assert np.isnan([fit[1], *low]).all()


def experiment(rng: np.random.Generator, fall: float, runs: int = 4) -> list[Point]:
    """Runs of eight checkpoints; gold rises to 0.6 at d = 3 and then has slope ``-fall``."""
    found = []
    for run in range(runs):
        shift = rng.normal(0, 0.04)
        for share in (0.03, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0):
            d = 5.4 * share**0.5 * float(np.exp(rng.normal(0, 0.08)))
            gold = 0.6 * math.sin(d / 3 * math.pi / 2) if d < 3 else 0.6 - fall * (d - 3)
            proxy = 2 * math.tanh(d / 2) + rng.normal(0, 0.02)
            found.append(Point(str(run), "s", d * d, proxy, gold + shift + rng.normal(0, 0.04)))
    return found


def test_intervals_cover_and_that_of_an_area_does_not_end_at_the_area():
    def area(drawn: Sequence[Point]) -> float:
        return hypervolume(drawn, 12.0, 0.0) / 12

    rng = np.random.default_rng(6)
    expected = np.mean([area(experiment(rng, 0.07)) for _ in range(500)])
    truth, hits = 0.6 * math.sin(2 / 3 * math.pi / 2), {"area": 0, "reward": 0}
    for _ in range(100):
        data = experiment(rng, 0.07)
        for name, statistic, value in (
            ("area", area, expected), ("reward", lambda some: reward_at(some, 2.0), truth)
        ):  # fmt: skip
            found = jackknife(data, statistic)
            assert found.low is not None
            assert found.high is not None
            assert found.value is not None
            assert found.low < found.value < found.high
            hits[name] += found.low <= value <= found.high
    assert min(hits.values()) >= 85  # of a percentile bootstrap over runs: 49 and 80


# -- over-optimisation -------------------------------------------------------------------------


def test_changes_beyond_the_peak_by_hand():
    """Three runs along one path: gold 0 to 3 at d = 3 and down to 1 at d = 5, proxy twice d."""
    ds = [float(d) for d in np.arange(0, 5.01, 0.25)]
    runs = [
        Point(run, "s", d * d, 2 * d, (d if d <= 3 else 6 - d) + shift)
        for run, shift in (("a", 0.0), ("b", 0.1), ("c", -0.1)) for d in ds
    ]  # fmt: skip
    runs.append(Point("c", "s", 5.5**2, 11.0, 0.5 - 0.1))
    found = after_peak(runs)
    assert found.peak.value == pytest.approx(3.0, abs=0.15)
    assert found.runs == 3
    assert found.gold.value == pytest.approx((-2 - 2 - 2.5) / 3)
    assert found.proxy.value == pytest.approx((4 + 4 + 5) / 3)
    assert found.over_optimised
    rising = after_peak([p for p in runs if p.d <= 3])
    assert rising.peak.value is None
    assert rising.runs == 0
    assert not rising.over_optimised
    assert gold_peak([]) is None


def test_a_gold_reward_that_only_levels_off_is_not_called_over_optimised():
    """Best against last would call a quarter of such arms so; the level here is 2.5 %."""
    rng = np.random.default_rng(5)
    level = sum(after_peak(experiment(rng, 0.0)).over_optimised for _ in range(40))
    falls = sum(after_peak(experiment(rng, 0.07)).over_optimised for _ in range(20))
    assert level <= 4
    assert falls >= 10


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
