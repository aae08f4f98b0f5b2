"""Verdicts against golden vectors, scipy's own t tests, hand-made families and simulated errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from harness.errors import InputError
from harness.stats.verdict import all_equivalent, holm, judge, judge_family, tost


def test_tost_golden(golden):
    v = golden("tost_paired_by_seed")
    x, expected, tolerance = np.array(v["inputs"]["differences"]), v["expected"], v["tolerance"]
    found = tost(x, v["inputs"]["margin"])
    for key in ("t_lower", "t_upper", "p_lower", "p_upper", "df"):
        assert getattr(found, key) == pytest.approx(expected[key], abs=tolerance)
    verdict = judge(x, v["inputs"]["margin"], v["inputs"]["alpha"])
    assert verdict.mean == pytest.approx(expected["mean"], abs=tolerance)
    assert verdict.p_equivalence == pytest.approx(expected["p_tost"], abs=tolerance)
    assert verdict.p_difference == pytest.approx(expected["p_diff_two_sided"], abs=tolerance)
    assert verdict.interval_tost == pytest.approx(expected["ci90"], abs=tolerance)
    assert verdict.equivalent is expected["equivalent"]
    assert verdict.label == "equivalent"


def test_holm_golden(golden):
    v = golden("holm_adjusted_p")
    found = holm(v["inputs"]["p"])
    assert found == pytest.approx(v["expected"]["adjusted"], abs=v["tolerance"])
    assert [p < 0.05 for p in found] == v["expected"]["reject_at_0p05"]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_holm_is_statsmodels(count):
    p = np.random.default_rng(count).uniform(0, 0.3, size=count).round(1).tolist()  # with ties
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1].tolist())


def seeds(mean: float, sd: float, n: int = 8) -> np.ndarray:
    """n numbers of exactly this mean and standard deviation."""
    x = np.arange(n) - (n - 1) / 2
    return mean + sd * x / x.std(ddof=1)


# With 8 seeds of sd 1: se = 0.3536, t(.975, 7) = 2.3646, t(.95, 7) = 1.8946, so a difference shows
# beyond 0.836, and the interval for equivalence is the mean ± 0.670.
@pytest.mark.parametrize(
    ("mean", "margin", "label", "differs", "beyond"),
    [
        (0.84, 1.0, "better", True, False),
        (-0.84, 1.0, "worse", True, False),
        (0.83, 1.0, "inconclusive", False, False),
        (0.0, 0.67, "equivalent", False, False),
        (0.0, 0.66, "inconclusive", False, False),
        (0.9, 1.58, "equivalent", True, False),  # not 0, but shown to be too small to matter
        (0.9, 1.56, "better", True, False),
        (-0.9, 1.58, "equivalent", True, False),
        (1.9, 1.0, "better", True, True),  # 1.9 - 0.836 > 1
        (-1.9, 1.0, "worse", True, True),
    ],
)
def test_labels_at_their_borders(mean, margin, label, differs, beyond):
    verdict = judge(seeds(mean, 1.0), margin)
    assert (verdict.label, verdict.differs, verdict.beyond_margin) == (label, differs, beyond)
    low, high = verdict.interval_tost or (0, 0)
    assert verdict.equivalent == (-margin < low and high < margin)
    assert verdict.interval == pytest.approx((mean - 0.8360, mean + 0.8360), abs=1e-4)
    assert (verdict.interval[0] > 0 or verdict.interval[1] < 0) == differs


def test_mirrored_differences_give_the_mirrored_verdict():
    x = np.array([0.31, 0.72, 0.55, 0.1, 0.64, 0.48, 0.9])
    there, back = judge(x, 0.1), judge(-x, 0.1)
    assert (there.label, back.label) == ("better", "worse")
    assert there.p_difference == pytest.approx(back.p_difference)
    assert there.p_equivalence == pytest.approx(back.p_equivalence)


@pytest.mark.parametrize("values", [[0.3], [0.2, 0.2, 0.2], [0.0, 0.0]])
def test_without_spread_there_is_no_verdict(values):
    verdict = judge(np.array(values), 1.0)
    assert verdict.label == "inconclusive"
    assert verdict.interval is verdict.p_difference is verdict.p_equivalence_adjusted is None
    assert not verdict.beyond_margin
    assert verdict.mean == pytest.approx(values[0])


def test_a_family_is_judged_more_strictly_than_its_members():
    # se = 0.3536; two-sided p of means 1.4, 0.9 and 0: 0.0055, 0.0384, 1.
    family = {"a": seeds(1.4, 1), "b": seeds(0.9, 1), "c": seeds(0.0, 1)}
    alone = {name: judge(x, 0.8) for name, x in family.items()}
    assert [v.label for v in alone.values()] == ["better", "better", "equivalent"]
    found = judge_family(family, 0.8)
    p = [2 * stats.t.sf(m * 8**0.5, 7) for m in (1.4, 0.9)]
    assert found["a"].p_difference_adjusted == pytest.approx(3 * p[0])
    assert found["b"].p_difference_adjusted == pytest.approx(2 * p[1])  # 0.077
    # P(t_7 > 0.8 / 0.3536) = 0.029, times 3
    assert found["c"].p_equivalence_adjusted == pytest.approx(3 * stats.t.sf(0.8 * 8**0.5, 7))
    assert {name: v.label for name, v in found.items()} == {
        "a": "better", "b": "inconclusive", "c": "inconclusive",
    }  # fmt: skip
    assert {v.family for v in found.values()} == {3}
    assert found["a"].interval == alone["a"].interval


def test_a_family_may_have_margins_of_its_own_and_members_without_spread():
    family = {"a": seeds(0, 1), "b": seeds(0, 1), "same": np.zeros(8)}
    found = judge_family(family, {"a": 5.0, "b": 0.1, "same": 1.0})
    assert [v.label for v in found.values()] == ["equivalent", "inconclusive", "inconclusive"]
    assert found["a"].p_equivalence_adjusted == pytest.approx(3 * stats.t.sf(5 * 8**0.5, 7))
    assert found["same"].p_difference_adjusted is None


def test_that_all_are_equivalent_needs_no_adjustment():
    family = {name: seeds(0, 1) for name in "abc"}
    found = judge_family(family, 0.8)  # p = 0.029 each; 0.088 adjusted
    assert all_equivalent(found)
    assert not any(v.equivalent for v in found.values())
    assert not all_equivalent(judge_family(family | {"d": seeds(0.3, 1)}, 0.8))


@pytest.mark.parametrize(
    ("values", "margin", "alpha", "says"),
    [
        ([], 1.0, 0.05, "finite numbers"),
        ([0.1, np.nan], 1.0, 0.05, "finite numbers"),
        ([[0.1, 0.2]], 1.0, 0.05, "one a seed"),
        ([0.1, 0.2], 0.0, 0.05, "margin = 0.0"),
        ([0.1, 0.2], np.nan, 0.05, "margin = nan"),
        ([0.1, 0.2], 1.0, 0.5, "alpha = 0.5"),
    ],
)
def test_what_cannot_be_judged_is_refused(values, margin, alpha, says):
    with pytest.raises(InputError, match=says):
        judge(np.array(values), margin, alpha)


def test_an_empty_family_is_refused():
    with pytest.raises(InputError, match="declare at least one"):
        judge_family({}, 1.0)


def simulated(x: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """(shown to differ, shown equivalent) of (experiments x seeds), by scipy's own t tests."""
    p = stats.ttest_1samp(x, 0.0, axis=1).pvalue
    low = stats.ttest_1samp(x, -margin, axis=1, alternative="greater").pvalue
    high = stats.ttest_1samp(x, margin, axis=1, alternative="less").pvalue
    return p < 0.05, np.maximum(low, high) < 0.05


def by_seed(rng, experiments: int, n: int, true: float) -> np.ndarray:
    """Paired differences by seed as a design gives them: 100 problems, 8 binary samples each.

    The arms share the problems; each seed has its own accuracy, and ``true`` is the mean gap. Where
    the arms are alike the differences are not normal, only nearly so.
    """
    spread = 0.02
    level = rng.beta(2, 1, size=(1, 1, 100)) * 0.8 + 0.1
    level = level - level.mean() + 0.55
    drift = spread * rng.standard_t(5, size=(2, experiments, n, 1)) / np.sqrt(5 / 3)
    ours = np.clip(level + drift[0] + true, 0, 1)
    theirs = np.clip(level + drift[1], 0, 1)
    # the mean over 100 problems of Binomial(8, p)/8, drawn by its normal limit for speed
    out = ours.mean(axis=2) - theirs.mean(axis=2)
    noise = np.sqrt((ours * (1 - ours) + theirs * (1 - theirs)).sum(axis=2) / 8) / 100
    return out + noise * rng.normal(size=out.shape)


@pytest.mark.parametrize("n", [5, 10])
def test_errors_are_no_more_frequent_than_alpha(n):
    rng = np.random.default_rng(n)
    same = by_seed(rng, 20_000, n, 0.0)
    assert np.mean(simulated(same, 0.05)[0]) <= 0.055
    margin = 0.05
    apart = by_seed(rng, 20_000, n, margin)
    apart += margin - apart.mean()  # clipping pulls the gap in: the border is what is tested
    shown = np.mean(simulated(apart, margin)[1])
    assert shown <= 0.055
    assert shown >= 0.01  # the border is reached, not avoided


def test_judge_decides_as_the_simulated_tests_do():
    x = by_seed(np.random.default_rng(0), 150, 6, 0.02)
    differs, equivalent = simulated(x, 0.04)
    assert 0 < differs.mean() < 1
    assert 0 < equivalent.mean() < 1
    for row, d, e in zip(x, differs, equivalent, strict=True):
        verdict = judge(row, 0.04)
        assert (verdict.differs, verdict.equivalent) == (d, e)


def test_a_family_of_nulls_seldom_claims_anything():
    """Five comparisons with one control, which makes them alike; no difference in any."""
    rng = np.random.default_rng(11)
    arms = rng.normal(size=(4000, 6, 8))
    gaps = arms[:, 1:] - arms[:, :1]
    p = stats.ttest_1samp(gaps, 0.0, axis=2).pvalue
    # Under nulls alone Holm claims something where the smallest p is under alpha over 5.
    false = p.min(axis=1) < 0.05 / 5
    assert [min(holm(list(row))) < 0.05 for row in p] == false.tolist()
    assert false.mean() <= 0.055
    assert (p < 0.05).any(axis=1).mean() > 0.12  # what the adjustment is for
