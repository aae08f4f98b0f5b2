"""What more tuning would have bought: expected best validation scores, and who leads at n trials.

All exact over the order statistics of the trials that were run: nothing is drawn. Trials are taken
as independent draws from the search space, which random search makes and a sequential tuner does
not: for such a one the curve speaks of its trials in random order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import InputError
from harness.metrics import best_shares, expected_best


@dataclass(frozen=True)
class TuningPoint:
    """The best of n trials, drawn without replacement from those that were run.

    Attributes:
        mean: unbiased expected best validation score (Tang et al. 2020, arXiv:2004.13705).
        sd: how much the best of n itself varies with which n trials one happens to run.
        error: standard error of ``mean``, by the jackknife over trials, which errs to the wide side
            (Efron and Stein 1981); None for n = N, where no trial can be left out.
        cost: expected cost of n trials, in the unit of the costs given; None without costs.
    """

    n: int
    mean: float
    sd: float
    error: float | None
    cost: float | None


def tuning_curve(
    scores: Sequence[float], costs: Sequence[float] | None = None
) -> list[TuningPoint]:
    """Expected best of n = 1..N trials, against trials and cost.

    Args:
        scores: one a trial, higher is better; of a trial that diverged, what it counts as.
        costs: one a trial.

    Near n = N the curve leans on the few best trials: its last point is simply the best of all.

    Raises:
        InputError: no scores, or costs of another number.
    """
    total = len(scores)
    if not total or (costs is not None and len(costs) != total):
        raise InputError(
            f"{total} trial scores with {total if costs is None else len(costs)} costs: give at "
            "least one score, and a cost for each or none at all"
        )
    ordered = sorted(float(score) for score in scores)
    each = None if costs is None else math.fsum(costs) / total
    points = []
    for n in range(1, total + 1):
        mean = expected_best(ordered, n, replacement=False)
        shares = best_shares(total, n, replacement=False)
        spread = math.fsum(
            share * (score - mean) ** 2 for share, score in zip(shares, ordered, strict=True)
        )
        cost = None if each is None else n * each
        points.append(TuningPoint(n, mean, math.sqrt(spread), _jackknife(ordered, n), cost))
    return points


@dataclass(frozen=True)
class Ranking:
    """Chances of how the best of n trials of one arm stands to the best of m of another."""

    above: float
    equal: float
    below: float

    @property
    def ahead(self) -> float:
        """Chance to lead, a tie counting half."""
        return self.above + self.equal / 2


def ranking(
    ours: Sequence[float], theirs: Sequence[float], n: int, m: int | None = None
) -> Ranking:
    """How often our best of n trials beats their best of m (n if not given).

    Exact: over every pair of subsets, by the chances of each order statistic to be the best. For
    equal cost rather than equal trials give n and m in proportion to the arms' cost of a trial.

    Raises:
        InputError: more trials than were run, or fewer than 1.
    """
    m = n if m is None else m
    for scores, drawn in ((ours, n), (theirs, m)):
        if not 1 <= drawn <= len(scores):
            raise InputError(f"best of {drawn} of {len(scores)} trials: draw from 1 to all of them")
    p = np.array(best_shares(len(ours), n, replacement=False))[:, None]
    q = np.array(best_shares(len(theirs), m, replacement=False))[None]
    gap = np.sort(np.asarray(ours, dtype=np.float64))[:, None] - np.sort(np.asarray(theirs))[None]
    chances = p * q
    return Ranking(*(float(chances[where].sum()) for where in (gap > 0, gap == 0, gap < 0)))


def _jackknife(scores: Sequence[float], n: int) -> float | None:
    total = len(scores)
    if n >= total:
        return None
    left_out = [
        expected_best([*scores[:i], *scores[i + 1 :]], n, replacement=False) for i in range(total)
    ]
    return math.sqrt((total - 1) * float(np.var(left_out)))
