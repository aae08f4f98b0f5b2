"""Bootstrap draws of seeds, problems and samples.

Every seed answers the same problems, so the bootstrap is crossed, not nested: a replicate draws
seeds with replacement and, once for all of them, problems with replacement (Owen, The pigeonhole
bootstrap, Ann. Appl. Stat. 2007). Drawing problems afresh within each seed would average the
problems' own spread away. Generators are seeded by shape alone, so two arms with as many seeds and
problems meet the same draws.

**No third level for samples is needed.** Let a cell (seed s, problem p) hold the mean of n samples,
y_sp = mu + a_s + b_p + c_sp + e_sp, where e is what n samples leave to chance and
var(e) = within/n. The mean's variance is var(a)/S + var(b)/P + (var(c) + var(e))/(S P): the
evaluation's noise is already in the cells, and a cell that is drawn carries it along. The crossed
bootstrap even counts var(c) + var(e) up to three times (Owen, sec. 5): by seeds, by problems and by
both. Redrawing samples inside the cells adds var(e)/(S P) once more. What is more, it moves the
centre of a metric that is not linear in the counts: the mean of Pass@k over binomial counts is
1 - (1 - c/n)^k, below its unbiased estimate. ``hierarchical`` draws all three levels nevertheless,
for whoever wants to see the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

SEED = 20_240_915
_CHUNK_CELLS = 2_500_000  # replicates x problems held at once
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def crossed(values: Floats, resamples: int) -> Floats:
    """Bootstrap means (metrics x resamples) of (metrics x seeds x problems)."""
    metrics, seeds, problems = values.shape
    rows = values.reshape(metrics * seeds, problems).T
    seed_counts = _counts(np.random.default_rng((SEED, 1, seeds)), seeds, resamples)
    out = np.empty((metrics, resamples))
    start = 0
    for problem_counts in _problem_counts(problems, resamples):
        stop = start + len(problem_counts)
        by_row = (problem_counts @ rows).reshape(-1, metrics, seeds) / problems
        out[:, start:stop] = np.einsum("rms,rs->mr", by_row, seed_counts[start:stop]) / seeds
        start = stop
    return out


def hierarchical(
    correct: Ints, samples: int, value: Callable[[Ints], Floats], resamples: int
) -> Floats:
    """Bootstrap means (resamples) with seeds, problems and the samples in each cell redrawn.

    Args:
        correct: (seeds x problems) correct ones of ``samples`` each.
        value: the metric of an array of counts, element by element, such as ``lambda c: c / n``.

    For a paired difference take the difference of two calls: the draws of seeds and problems are
    the same, those of samples are not.
    """
    seeds, problems = correct.shape
    rng = np.random.default_rng((SEED, 3, seeds, problems, int(correct.sum())))
    seed_counts = _counts(np.random.default_rng((SEED, 1, seeds)), seeds, resamples)
    out = np.empty(resamples)
    start = 0
    for problem_counts in _problem_counts(problems, resamples):
        for counts in problem_counts:
            rows = np.repeat(np.arange(seeds), seed_counts[start].astype(int))
            columns = np.repeat(np.arange(problems), counts.astype(int))
            cells = correct[np.ix_(rows, columns)]  # a cell drawn twice is redrawn twice
            out[start] = value(rng.binomial(samples, cells / samples)).mean()
            start += 1
    return out


def stratified(
    scores: Floats, statistic: Callable[[Floats], Floats | float], resamples: int
) -> Floats:
    """A statistic on (runs x tasks) with runs redrawn within each task (Agarwal et al. 2021).

    Returns:
        (resamples, ...) with the statistic's own shape.
    """
    runs, tasks = scores.shape
    rng = np.random.default_rng((SEED, 4, runs, tasks))
    columns = np.arange(tasks)
    return np.array(
        [
            statistic(scores[rng.integers(runs, size=(runs, tasks)), columns])
            for _ in range(resamples)
        ]
    )


def _problem_counts(problems: int, resamples: int) -> Iterator[Floats]:
    rng = np.random.default_rng((SEED, 2, problems))
    size = max(1, _CHUNK_CELLS // problems)
    for start in range(0, resamples, size):
        yield _counts(rng, problems, min(size, resamples - start))


def _counts(rng: np.random.Generator, items: int, draws: int) -> Floats:
    """How often each of ``items`` is drawn in ``items`` draws with replacement, ``draws`` times."""
    picks = rng.integers(items, size=(draws, items))
    flat = (picks + items * np.arange(draws)[:, None]).ravel()
    return np.bincount(flat, minlength=draws * items).reshape(draws, items).astype(np.float64)
