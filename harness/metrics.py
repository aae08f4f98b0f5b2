"""Pass@k, Maj@k, Avg@k, best-of-k: exact expectations over k of n samples, without replacement.

Each is computed for one problem and averaged over problems afterwards; pooling counts over problems
is another, wrong number. No torch, no pandas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np

from harness.errors import InputError

Tie = Literal["random", "optimistic", "pessimistic"]
TIES: tuple[Tie, ...] = ("random", "optimistic", "pessimistic")

_EXACT_UP_TO = 2000  # beyond it, binomials of n are longer than the answer needs


def _check(n: int, c: int, k: int) -> None:
    if n < 1 or not 0 <= c <= n:
        raise InputError(f"c = {c} correct of n = {n} samples is impossible; need 0 <= c <= n >= 1")
    if k < 1:
        raise InputError(f"k = {k}: at least one sample must be drawn")
    if k > n:
        raise InputError(f"k = {k} is more than the n = {n} samples; draw more samples or lower k")


def pass_at_k_exact(n: int, c: int, k: int) -> Fraction:
    """Probability that k of n samples, c of them correct, hold a correct one: exact.

    ``1 - C(n-c, k) / C(n, k)`` (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Raises:
        InputError: k > n, k < 1, or c outside 0..n.
    """
    _check(n, c, k)
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


def pass_at_k(n: int, c: int, k: int) -> float:
    """``pass_at_k_exact`` as a float, stable to n = 10^6 and beyond (relative error < 1e-12).

    Raises:
        InputError: as ``pass_at_k_exact``.
    """
    _check(n, c, k)
    if n <= _EXACT_UP_TO:
        return float(pass_at_k_exact(n, c, k))
    if c == 0:
        return 0.0
    if n - c < k:
        return 1.0
    # C(n-c,k)/C(n,k) = prod (1 - c/(n-j)), symmetric in c and k. In logarithms, so that neither a
    # tiny result (1 - almost 1) nor a long product loses digits.
    few, many = sorted((c, k))
    return -math.expm1(math.fsum(np.log1p(-many / (n - np.arange(few, dtype=np.float64)))))


def best_of_k(chosen_by: Sequence[float], worth: Sequence[float], k: int) -> float:
    """Expected worth of the one of k samples, drawn from n, that scores highest.

    The sample of rank i from the top is it with probability C(n-i, k-1) / C(n, k), the estimator
    of Nakano et al. 2021 (arXiv:2112.09332, appendix I); equal scores share theirs.

    Args:
        chosen_by: the score by which the best is chosen, of each of the n samples.
        worth: what is averaged: the same score, or another.
        k: samples drawn, without replacement.

    Raises:
        InputError: k > n, k < 1, or not one worth for each score.
    """
    n = len(chosen_by)
    if len(worth) != n:
        raise InputError(f"{n} scores and {len(worth)} worths: give one for each sample")
    _check(n, 0, k)
    tied: dict[float, list[float]] = {}
    for score, value in zip(chosen_by, worth, strict=True):
        tied.setdefault(score, []).append(value)
    total, above, ways = 0.0, 0, math.comb(n, k)
    for score in sorted(tied, reverse=True):
        values = tied[score]
        share = math.comb(n - above, k) - math.comb(n - above - len(values), k)
        total += share / ways * math.fsum(values) / len(values)
        above += len(values)
    return total


def avg_at_k_exact(n: int, c: int, k: int) -> Fraction:
    """Expected share of correct ones among k of n samples: c/n for every k.

    Raises:
        InputError: as ``pass_at_k_exact``.
    """
    _check(n, c, k)
    return Fraction(c, n)


def avg_at_k(n: int, c: int, k: int) -> float:
    """``avg_at_k_exact`` as a float."""
    return float(avg_at_k_exact(n, c, k))


def maj_at_k_exact(
    counts: Sequence[int],
    correct: Sequence[bool],
    unparsed: int,
    k: int,
    tie: Tie = "random",
) -> Fraction:
    """Probability that a majority vote among k of n samples is right: exact.

    Args:
        counts: samples in each answer class.
        correct: whether each class is correct; several may be.
        unparsed: samples without an answer. Each is a class of its own, and a wrong one: it can
            share a tie of single votes but never outvote anything.
        k: samples drawn, without replacement.
        tie: among classes with equally many votes ``random`` picks each with equal probability,
            ``optimistic`` a correct one if there is one, ``pessimistic`` a wrong one.

    Raises:
        InputError: k > n, k < 1, a negative count, or an unknown tie rule.
    """
    if tie not in TIES:
        raise InputError(f"tie = {tie!r} is unknown; use one of {', '.join(TIES)}")
    if len(counts) != len(correct) or unparsed < 0 or any(c < 0 for c in counts):
        raise InputError(
            f"vote counts {list(counts)} and unparsed = {unparsed} do not fit together"
        )
    _check(sum(counts) + unparsed, 0, k)
    right = Counter(c for c, ok in zip(counts, correct, strict=True) if ok and c)
    wrong = Counter(c for c, ok in zip(counts, correct, strict=True) if not ok and c)
    wrong[1] += unparsed
    return _vote(tuple(sorted(right.items())), tuple(sorted(wrong.items())), k, tie)


def maj_at_k(
    counts: Sequence[int], correct: Sequence[bool], unparsed: int, k: int, tie: Tie = "random"
) -> float:
    """``maj_at_k_exact`` as a float."""
    return float(maj_at_k_exact(counts, correct, unparsed, k, tie))


Sizes = tuple[tuple[int, int], ...]  # (samples in a class, number of such classes)


@lru_cache(maxsize=65_536)
def _vote(right: Sizes, wrong: Sizes, k: int, tie: Tie) -> Fraction:
    n = sum(size * many for size, many in right + wrong)
    draws = _Draws(n, k)
    top = min(k, max((size for size, _ in right), default=0))
    won = Fraction(0)
    if tie == "random":
        for size, many in right:
            for m in range(1, min(size, k) + 1):
                won += draws.won_by_one(size, many, right, wrong, m)
    for m in range(1, top + 1):
        if tie == "optimistic":  # a correct class is at the top, whoever else is
            won += draws.count(right, m, wrong, m) - draws.count(right, m - 1, wrong, m)
        elif tie == "pessimistic":  # correct classes alone are at the top
            won += draws.count(right, m, wrong, m - 1) - draws.count(right, m - 1, wrong, m - 1)
    return Fraction(won, math.comb(n, k))


class _Draws:
    """Counts the k-subsets of n samples by the votes that each class gets in them.

    A class of s samples gives v votes in C(s, v) ways, so the subsets are a coefficient of
    x^k in a product of polynomials sum_v C(s, v) x^v. A polynomial is packed into one integer, its
    coefficients in fields wide enough never to overflow: Python multiplies those fast and exactly.
    """

    def __init__(self, n: int, k: int) -> None:
        self.k = k
        self.width = n + 1  # every coefficient is at most 2^n
        self.mask = (1 << self.width * (k + 1)) - 1

    def ways(self, size: int, most: int) -> int:
        """Packed sum of C(size, v) x^v for v up to ``most``."""
        packed = 0
        for v in range(min(size, most, self.k), -1, -1):
            packed = (packed << self.width) | math.comb(size, v)
        return packed

    def product(self, sizes: Sizes, most: int) -> int:
        """The classes together, each with at most ``most`` votes."""
        whole = sum(size * many for size, many in sizes if size <= most)
        packed = self.ways(whole, self.k)  # classes too small to be limited: (1 + x)^whole
        for size, many in sizes:
            if size > most:
                for _ in range(many):
                    packed = (packed * self.ways(size, most)) & self.mask
        return packed

    def coefficient(self, packed: int, power: int) -> int:
        return (packed >> (self.width * power)) & ((1 << self.width) - 1)

    def count(self, right: Sizes, most_right: int, wrong: Sizes, most_wrong: int) -> int:
        """Subsets in which no class exceeds its side's limit."""
        both = self.product(right, most_right) * self.product(wrong, most_wrong) & self.mask
        return self.coefficient(both, self.k)

    def won_by_one(self, size: int, many: int, right: Sizes, wrong: Sizes, m: int) -> Fraction:
        """Subsets that ``many`` classes of ``size`` win with m votes, ties shared equally."""
        others = Counter(dict(right)) + Counter(dict(wrong))
        others[size] -= 1
        below = sum(s * times for s, times in others.items() if s < m)
        by_ties = [self.ways(below, self.k)]  # by the number of other classes that also have m
        for s, times in others.items():
            if s < m:
                continue
            fewer, tied = self.ways(s, m - 1), math.comb(s, m) << (self.width * m)
            for _ in range(times):
                most_ties = min(len(by_ties), self.k // m - 1)
                by_ties = [
                    (
                        (by_ties[t] * fewer if t < len(by_ties) else 0)
                        + (by_ties[t - 1] * tied if t else 0)
                    )
                    & self.mask
                    for t in range(most_ties + 1)
                ]
        shared = Fraction(0)
        for t, packed in enumerate(by_ties):
            shared += Fraction(self.coefficient(packed, self.k - m), t + 1)
        return shared * math.comb(size, m) * many


def zero_variance_probability(p: float, group_size: int) -> float:
    """Chance that all of ``group_size`` binary rewards are equal: p^G + (1-p)^G.

    ``1 / (1 - it)`` is the number of groups that dynamic sampling draws for each one it keeps.

    Raises:
        InputError: p outside 0..1, or a group of none.
    """
    if not 0 <= p <= 1 or group_size < 1:
        raise InputError(
            f"p = {p}, group_size = {group_size}: need 0 <= p <= 1 and group_size >= 1"
        )
    return p**group_size + (1 - p) ** group_size


def expected_best(scores: Sequence[float], n: int, replacement: bool) -> float:
    """Expected best validation score of n tuning trials, estimated from all that were run.

    With the scores in rising order and N of them, the i-th is the best of n drawn trials with
    probability ``(i/N)^n - ((i-1)/N)^n`` if they are drawn with replacement (Dodge et al. 2019,
    arXiv:1909.03004; biased low), ``C(i-1, n-1) / C(N, n)`` without (Tang et al. 2020,
    arXiv:2004.13705; unbiased).

    Args:
        scores: one per trial; of a trial that diverged, the score that it counts as.
        n: trials drawn; at most ``len(scores)`` without replacement.
        replacement: which of the two estimators.

    Raises:
        InputError: no scores, n < 1, or more trials drawn than there are.
    """
    total = len(scores)
    if n < 1 or total < 1 or (n > total and not replacement):
        raise InputError(
            f"expected best of n = {n} of {total} trials: need at least 1 of each, and no more "
            "drawn than were run unless they are drawn with replacement"
        )
    shares = best_shares(total, n, replacement)
    return math.fsum(score * share for score, share in zip(sorted(scores), shares, strict=True))


def best_shares(total: int, n: int, replacement: bool) -> list[float]:
    """Chance that the i-th lowest of ``total`` trials is the best of n drawn, i = 1..total."""
    if replacement:
        return [(i / total) ** n - ((i - 1) / total) ** n for i in range(1, total + 1)]
    ways = math.comb(total, n)
    return [math.comb(i - 1, n - 1) / ways for i in range(1, total + 1)]


def problem_clustered_se(correct: Sequence[Sequence[bool | int]]) -> float:
    """Standard error of Avg@k with problems as the units: sd of problem means / sqrt(problems).

    Samples of one problem are not independent of one another, so the binomial formula over all
    samples is too small. NaN for a single problem.

    Args:
        correct: for each problem, its samples' verdicts.
    """
    means = [sum(map(int, row)) / len(row) for row in correct]
    if len(means) < 2:
        return math.nan
    return float(np.std(means, ddof=1) / math.sqrt(len(means)))


@dataclass(frozen=True)
class ProblemMetrics:
    """One problem's exact metrics, keyed by k."""

    n: int
    correct: int
    unparsed: int
    pass_at: Mapping[int, Fraction]
    maj_at: Mapping[int, Fraction]

    @property
    def avg(self) -> Fraction:
        """Avg@k, for every k."""
        return Fraction(self.correct, self.n)


def problem_metrics(
    correct: Sequence[bool], answers: Sequence[str | None], ks: Sequence[int], tie: Tie = "random"
) -> ProblemMetrics:
    """Metrics of one problem from its samples.

    Args:
        correct: each sample's verdict.
        answers: each sample's canonical answer, None where it has none. Samples vote together when
            answer and verdict agree, so a class never mixes right and wrong.
        ks: numbers of samples to draw.

    Raises:
        InputError: a k above the number of samples.
    """
    n, c = len(correct), sum(map(bool, correct))
    classes = Counter(
        (answer, bool(ok))
        for answer, ok in zip(answers, correct, strict=True)
        if answer is not None or ok
    )
    counts, flags = list(classes.values()), [ok for _, ok in classes]
    unparsed = n - sum(counts)
    return ProblemMetrics(
        n=n,
        correct=c,
        unparsed=unparsed,
        pass_at={k: pass_at_k_exact(n, c, k) for k in ks},
        maj_at={k: maj_at_k_exact(counts, flags, unparsed, k, tie) for k in ks},
    )


@dataclass(frozen=True)
class DatasetMetrics:
    """Means over problems, exact, keyed by k."""

    problems: int
    pass_at: Mapping[int, Fraction]
    maj_at: Mapping[int, Fraction]
    avg: Fraction


def dataset_metrics(problems: Sequence[ProblemMetrics]) -> DatasetMetrics:
    """Average metrics over problems, each problem weighing the same whatever its samples.

    Raises:
        InputError: there is no problem.
    """
    if not problems:
        raise InputError("there are no problems to average over; give at least one")
    count, ks = len(problems), list(problems[0].pass_at)
    return DatasetMetrics(
        problems=count,
        pass_at={k: sum((p.pass_at[k] for p in problems), Fraction(0)) / count for k in ks},
        maj_at={k: sum((p.maj_at[k] for p in problems), Fraction(0)) / count for k in ks},
        avg=sum((p.avg for p in problems), Fraction(0)) / count,
    )
