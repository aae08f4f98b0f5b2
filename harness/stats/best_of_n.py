"""Best-of-n from samples of the base: what choosing by the proxy earns, and how far it goes.

All n of N samples of a problem are counted at once by order statistics, without replacement, as
pass@k counts them: the sample of rank i from the top by proxy (0 first) is chosen by
C(N - 1 - i, n - 1) of the C(N, n) sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import InputError
from harness.stats.bootstrap import Floats


@dataclass(frozen=True)
class BestOfN:
    """Choosing the best of n by proxy; means over problems.

    Attributes:
        kl: log n - (n - 1) / n, an upper bound of the KL to the base, exact where no two samples
            tie (Beirami et al., arXiv:2401.01879).
        sampled_kl: the mean of log(n F^(n-1)) over what is chosen, F the share of samples that a
            chosen one beats or ties by half; of the samples alone, so biased low for n near N.
        proxy, gold: expected rewards of the chosen sample.
    """

    n: int
    kl: float
    sampled_kl: float
    proxy: float
    gold: float


def kl_bound(n: int) -> float:
    """log n - (n - 1) / n (Gao et al., arXiv:2210.10760, sec. 2).

    Raises:
        InputError: n below 1.
    """
    if n < 1:
        raise InputError(f"best of {n}: choose from 1 or more")
    return math.log(n) - (n - 1) / n


def weights(proxy: Sequence[float], n: int) -> Floats:
    """How often each sample is the best of n of them; tied ones share.

    Raises:
        InputError: n below 1 or above the number of samples.
    """
    scores = np.asarray(proxy, dtype=np.float64)
    N = len(scores)
    if not 1 <= n <= N:
        raise InputError(f"best of {n} of {N} samples: choose from 1 to {N}")
    whole = math.comb(N, n)
    by_rank = np.array([math.comb(N - 1 - i, n - 1) / whole for i in range(N)])
    found = np.empty(N)
    found[np.argsort(-scores, kind="stable")] = by_rank
    for value in np.unique(scores):
        tied = scores == value
        found[tied] = found[tied].mean()
    return found


def best_of_n(proxy: Sequence[Sequence[float]], gold: Sequence[Sequence[float]], n: int) -> BestOfN:
    """Expected rewards of the best of n by proxy.

    Args:
        proxy: of each problem, its samples' proxy scores.
        gold: their gold scores.
        n: how many are chosen from.
    """
    chosen_proxy, chosen_gold, far = [], [], []
    for scores, golds in zip(proxy, gold, strict=True):
        w, x = weights(scores, n), np.asarray(scores, dtype=np.float64)
        beaten = (x[:, None] > x[None, :]).mean(1) + (x[:, None] == x[None, :]).mean(1) / 2
        chosen_proxy.append(float(w @ x))
        chosen_gold.append(float(w @ np.asarray(golds, dtype=np.float64)))
        far.append(float(w @ (math.log(n) + (n - 1) * np.log(beaten))))
    return BestOfN(
        n, kl_bound(n), float(np.mean(far)), float(np.mean(chosen_proxy)),
        float(np.mean(chosen_gold)),
    )  # fmt: skip


def sequence_kl(
    logprobs: Sequence[Sequence[float]], ref_logprobs: Sequence[Sequence[float]]
) -> Floats:
    """Each completion's sum of k1 over its tokens: log-ratio of the policy to the base."""
    return np.array(
        [
            sum(p - r for p, r in zip(mine, theirs, strict=True))
            for mine, theirs in zip(logprobs, ref_logprobs, strict=True)
        ]
    )
