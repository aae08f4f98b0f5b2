"""Whether the gold reward falls again while the proxy rises: where, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.stats.bootstrap import Floats
from harness.stats.effects import t_interval
from harness.stats.frontier import BANDWIDTH, Interval, Point, gold, jackknife, local_fit

PLACES = 200  # values of d among which the peak is sought


@dataclass(frozen=True)
class AfterPeak:
    """What runs do beyond the place where the gold reward is highest.

    Attributes:
        peak: d of the highest gold reward by the local fit; None where that is as far as it goes.
        runs: how many went beyond the peak of the others.
        gold, proxy: mean change of these runs from there to their farthest checkpoint.
    """

    peak: Interval
    runs: int
    gold: Interval
    proxy: Interval

    @property
    def over_optimised(self) -> bool:
        """Gold falls and proxy rises, both beyond what runs differ by."""
        falls = self.gold.high is not None and self.gold.high < 0
        return falls and self.proxy.low is not None and self.proxy.low > 0


def gold_peak(points: Sequence[Point]) -> float | None:
    """d where the local fit of the gold reward is highest; None where that is as far as it goes."""
    if not points:
        return None
    places = np.linspace(min(p.d for p in points), max(p.d for p in points), PLACES)
    fit = local_fit(points, places.tolist(), gold)
    known = np.flatnonzero(~np.isnan(fit))
    if len(known) == 0:
        return None
    top = known[np.argmax(fit[known])]
    return None if top == known[-1] else float(places[top])


def after_peak(points: Sequence[Point]) -> AfterPeak:
    """The changes of gold and proxy beyond the gold reward's peak.

    The best of many noisy checkpoints is better than what follows even where nothing falls. So a
    run's peak is the d at which the *other* runs peak: its change is from its own checkpoint
    nearest to that d (within ``BANDWIDTH``) to its farthest, and no checkpoint is chosen by its own
    gold reward. Intervals are Student's over runs.
    """
    changes = []
    for run in dict.fromkeys(p.run for p in points):
        at = gold_peak([p for p in points if p.run != run])
        if at is None:
            continue
        mine = sorted((p for p in points if p.run == run), key=lambda p: p.kl)
        near, far = mine[int(np.argmin([abs(p.d - at) for p in mine]))], mine[-1]
        if abs(near.d - at) <= BANDWIDTH and far.d > max(near.d, at):
            changes.append((far.gold - near.gold, far.proxy - near.proxy))
    golds, proxies = np.array(changes).reshape(-1, 2).T
    return AfterPeak(
        jackknife(points, gold_peak), len(changes), _over_runs(golds), _over_runs(proxies)
    )


def _over_runs(changes: Floats) -> Interval:
    if len(changes) == 0:
        return Interval(None, None, None)
    return Interval(float(changes.mean()), *t_interval(changes))
