"""Verdicts of paired comparisons: better, worse, equivalent or inconclusive, and why.

The unit is the seed: one mean difference each, on a given set of problems. A margin, declared
before the runs, is the smallest difference that matters. Two questions are asked of
the same numbers:

* *Is there a difference?* Paired t test of a mean of 0, two-sided (Student 1908).
* *Is it within the margin?* Two one-sided t tests at -margin and +margin (TOST; Schuirmann 1987);
  alone it is the same as the 1 - 2 alpha interval lying inside the margin.

How they combine: ``equivalent`` wins. A difference may be both shown to exist and shown to be
smaller than what matters; calling that *better* would turn any well-measured trifle into a finding.
It stays visible in ``differs``. Otherwise a shown difference is *better* or *worse*, and if neither
question is answered the verdict is *inconclusive*, which is not *equal*.

Error rates, each at most alpha over a declared family: of a difference claimed where there is none,
and of an equivalence claimed where the difference is at least the margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from harness.errors import InputError
from harness.stats.bootstrap import Floats
from harness.stats.effects import NO_SPREAD, sign_flip_p, smallest_p

Label = Literal["better", "worse", "equivalent", "inconclusive"]
ALPHA = 0.05


@dataclass(frozen=True)
class Tost:
    """Two one-sided t tests of a mean over seeds.

    Attributes:
        t_lower, p_lower: against a mean of -margin or less.
        t_upper, p_upper: against a mean of +margin or more.
        p: the larger of the two p-values.
    """

    t_lower: float
    p_lower: float
    t_upper: float
    p_upper: float
    p: float
    df: int


def tost(by_seed: Floats, margin: float) -> Tost:
    """Schuirmann's two one-sided tests; ``by_seed`` (seeds,) must have some spread."""
    from statsmodels.stats.weightstats import DescrStatsW

    p, lower, upper = DescrStatsW(np.asarray(by_seed)).ttost_mean(-margin, margin)
    return Tost(
        float(lower[0]), float(lower[1]), float(upper[0]), float(upper[1]), float(p), int(lower[2])
    )


@dataclass(frozen=True)
class Verdict:
    """The verdict on one paired difference, with what it follows from.

    Attributes:
        label: by the adjusted p-values.
        interval: of the mean difference at 1 - alpha; None without spread, as all that follows.
        interval_tost: at 1 - 2 alpha; inside the margin if and only if ``p_equivalence < alpha``.
            Neither interval is adjusted for the family.
        p_difference: two-sided paired t.
        p_equivalence: TOST's.
        p_difference_adjusted, p_equivalence_adjusted: Holm's over the family; of a comparison that
            stands alone, the same as without.
        p_sign_flip: exact, two-sided; free of the normal assumption; never below ``smallest_p``.
        family: comparisons adjusted for.
    """

    label: Label
    mean: float
    seeds: int
    margin: float
    alpha: float
    interval: tuple[float, float] | None
    interval_tost: tuple[float, float] | None
    p_difference: float | None
    p_equivalence: float | None
    p_difference_adjusted: float | None
    p_equivalence_adjusted: float | None
    p_sign_flip: float
    smallest_p: float
    family: int = 1

    @property
    def differs(self) -> bool:
        """Whether a difference is shown, be it within the margin or not."""
        return self.p_difference_adjusted is not None and self.p_difference_adjusted < self.alpha

    @property
    def equivalent(self) -> bool:
        """Whether the difference is shown to be within the margin."""
        return self.p_equivalence_adjusted is not None and self.p_equivalence_adjusted < self.alpha

    @property
    def beyond_margin(self) -> bool:
        """Whether the 1 - alpha interval lies wholly outside the margin: a difference that matters.

        For one comparison; not adjusted for a family.
        """
        if self.interval is None:
            return False
        return self.interval[0] > self.margin or self.interval[1] < -self.margin


def judge(by_seed: Floats, margin: float, alpha: float = ALPHA) -> Verdict:
    """The verdict on one comparison that stands alone.

    Args:
        by_seed: (seeds,) each seed's mean difference, treatment minus control.
        margin: smallest difference that matters, in the same units.
        alpha: level of either question.

    Without spread (one seed, or all equal) no t test can be made: inconclusive.

    Raises:
        InputError: no seeds, a value that is not finite, a margin that is not positive, or alpha
            outside (0, 0.5).
    """
    values = np.asarray(by_seed, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise InputError(f"differences by seed {values.tolist()}: need finite numbers, one a seed")
    if not (margin > 0 and np.isfinite(margin)):
        raise InputError(f"margin = {margin}: need a positive number, declared before the runs")
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha = {alpha}: need a number between 0 and 0.5")
    mean, count = float(values.mean()), len(values)
    found = Verdict(
        "inconclusive", mean, count, margin, alpha, None, None, None, None, None, None,
        sign_flip_p(values), smallest_p(count),
    )  # fmt: skip
    if count < 2 or np.ptp(values) < NO_SPREAD:
        return found
    from scipy import stats

    seeds: Any = stats.ttest_1samp(values, 0.0)
    p, q = float(seeds.pvalue), tost(values, margin).p
    found = replace(
        found,
        interval=_pair(seeds.confidence_interval(1 - alpha)),
        interval_tost=_pair(seeds.confidence_interval(1 - 2 * alpha)),
        p_difference=p,
        p_equivalence=q,
        p_difference_adjusted=p,
        p_equivalence_adjusted=q,
    )
    return replace(found, label=_label(found))


def judge_family(
    by_seed: Mapping[str, Floats], margin: float | Mapping[str, float], alpha: float = ALPHA
) -> dict[str, Verdict]:
    """The verdicts on a family of comparisons declared together.

    Holm's step-down (1979) adjusts the p-values of difference, and apart from them those of
    equivalence; a comparison without spread counts in the family with p = 1. To claim that *all* of
    the family are equivalent needs no adjustment: see ``all_equivalent``.

    Args:
        by_seed: name of a comparison -> (seeds,) differences.
        margin: one for all, or one for each by name.

    Raises:
        InputError: as ``judge``; or an empty family.
    """
    if not by_seed:
        raise InputError("a family without comparisons: declare at least one")
    alone = {
        name: judge(values, margin[name] if isinstance(margin, Mapping) else margin, alpha)
        for name, values in by_seed.items()
    }
    differences = holm([_or_one(v.p_difference) for v in alone.values()])
    equivalences = holm([_or_one(v.p_equivalence) for v in alone.values()])
    found = {}
    for (name, v), p, q in zip(alone.items(), differences, equivalences, strict=True):
        known = v.p_difference is not None
        adjusted = replace(
            v,
            p_difference_adjusted=p if known else None,
            p_equivalence_adjusted=q if known else None,
            family=len(alone),
        )
        found[name] = replace(adjusted, label=_label(adjusted))
    return found


def all_equivalent(family: Mapping[str, Verdict]) -> bool:
    """Whether every comparison is within its margin, claimed as one statement.

    An intersection-union test (Berger 1982): each at its own alpha, without adjustment.
    """
    return all(v.p_equivalence is not None and v.p_equivalence < v.alpha for v in family.values())


def holm(p_values: list[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given.

    Not statsmodels', which runs the garbage collector at each call: a tenth of a second, too long
    for ``sensitivity``, which judges a family hundreds of times.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    rising = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(rising, 1.0)
    return adjusted.tolist()


def _label(found: Verdict) -> Label:
    if found.equivalent:
        return "equivalent"
    if not found.differs:
        return "inconclusive"
    return "better" if found.mean > 0 else "worse"


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p


def _pair(interval: tuple[float, float]) -> tuple[float, float]:
    return float(interval[0]), float(interval[1])
