"""The figures of the frontier: gold and proxy reward against distance from the base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from statsmodels.nonparametric.smoothers_lowess import lowess

from harness.report.frontier import BEST_OF, Frontier
from harness.report.load import Experiment
from harness.report.plots import Plot
from harness.report.style import DARK, GREY, legend_below, looks, panels, render, styled
from harness.stats.bootstrap import SEED, Floats
from harness.stats.frontier import Point, Value, gold, pareto, proxy, resampled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWS = 200  # resamples of runs behind a band
GRID, SHARE, LEAST = 60, 0.5, 6  # points of a curve; share of points it looks at; fewest of them
FAR = 95  # percentile of d at which the axis ends, where single runs lie much farther out


def frontier_plots(found: Sequence[Frontier], experiment: Experiment) -> list[Plot]:
    """A figure of each test set's frontier, and one of its envelopes."""
    plots = []
    with styled():
        for f in found:
            plots.append(Plot(
                f"frontier_{f.test}",
                f"Gold and proxy reward against distance from the base, {f.test}",
                "Every checkpoint of every run and strength (points), with a local regression "
                "through them (lowess over half of them) and its 95 % band over runs; dotted "
                "black: best-of-n from the base, at its sampled KL; grey: the base. d is the "
                "square root of the sequence KL in nats.",
                f"Rewards of {', '.join(f.arms)} and {BEST_OF} against d. The numbers are in "
                f"tables frontier_{f.test} and gao_{f.test}.",
                render(_curves(f, experiment)),
                2,
            ))  # fmt: skip
            plots.append(Plot(
                f"envelope_{f.test}",
                f"The best gold reward within a KL, {f.test}",
                "Each arm's Pareto set over equal numbers of checkpoints, as steps: the best gold "
                "reward at no more than this KL. An envelope is chosen on the test set and so is "
                "optimistic, for all arms alike.",
                f"Envelopes of {', '.join(f.arms)} and {BEST_OF}. The areas are in table "
                f"frontier_area_{f.test}.",
                render(_envelopes(f, experiment)),
            ))  # fmt: skip
    return plots


def _curves(f: Frontier, experiment: Experiment) -> Figure:
    figure, axes = panels(2, height=4.2)
    style = looks(experiment)
    every = [p.d for points in f.arms.values() for p in points]
    end = max(float(np.percentile(every, FAR)), 1.0)
    for panel, value, name, start in (
        (axes[0], gold, "gold", f.base_gold), (axes[1], proxy, "proxy", f.base_proxy)
    ):  # fmt: skip
        panel.axhline(start, color=GREY, linestyle=(0, (1, 1.2)), lw=1.2)
        for arm, points in f.arms.items():
            _arm(panel, points, value, style[arm], arm, end)
        xs = [max(b.sampled_kl, 0.0) ** 0.5 for b in f.reference]
        ys = [getattr(b, name) for b in f.reference]
        panel.plot(xs, ys, color=DARK, linestyle=":", marker=".", label=BEST_OF)
        panel.set_xlim(0, end * 1.03)
        panel.set_xlabel("d, square root of KL to the base")
        panel.set_ylabel(f"{name} reward")
    legend_below(figure, axes[0], [*f.arms, BEST_OF])
    return figure


def _arm(
    panel: Axes, points: Sequence[Point], value: Value, look: Any, arm: str, end: float
) -> None:  # fmt: skip
    panel.scatter(
        [p.d for p in points], [value(p) for p in points], s=14, color=look.colour,
        marker=look.marker, alpha=0.45, linewidths=0,
    )  # fmt: skip
    if len({p.d for p in points}) < LEAST:
        panel.plot([], [], label=arm, **look.plain)
        return
    ds = [p.d for p in points]
    xs = np.linspace(min(ds), min(max(ds), end), GRID)  # nothing is extrapolated
    panel.plot(xs, _smooth(points, value, xs), label=arm, **look.plain)
    rng = np.random.default_rng(SEED)
    drawn = np.array([_smooth(resampled(points, rng), value, xs) for _ in range(DRAWS)])
    if len({p.run for p in points}) > 1:
        low, high = np.nanpercentile(drawn, (2.5, 97.5), axis=0)
        panel.fill_between(xs, low, high, color=look.colour, alpha=0.1, lw=0)


def _smooth(points: Sequence[Point], value: Value, xs: Floats) -> Floats:
    """A local linear regression through the points, at xs."""
    return np.asarray(
        lowess([value(p) for p in points], [p.d for p in points], frac=SHARE, it=0, xvals=xs)
    )


def _envelopes(f: Frontier, experiment: Experiment) -> Figure:
    figure, (panel,) = panels(1)
    style = looks(experiment)
    every = [p.kl for points in f.arms.values() for p in points]
    end = max(float(np.percentile(every, FAR)), 1.0)
    for arm, points in f.arms.items():
        front = pareto(points, gold)
        xs = [max(p.kl, 0.0) for p in front] + [end]
        ys = [p.gold for p in front] + [front[-1].gold]
        panel.step(xs, ys, where="post", label=arm, **style[arm].plain)
    panel.plot(
        [max(b.sampled_kl, 0.0) for b in f.reference], [b.gold for b in f.reference],
        color=DARK, linestyle=":", marker=".", label=BEST_OF,
    )  # fmt: skip
    panel.axhline(f.base_gold, color=GREY, linestyle=(0, (1, 1.2)), lw=1.2)
    panel.set_xlim(0, end)
    panel.set_xlabel("KL to the base, nats a completion")
    panel.set_ylabel("best gold reward within it")
    legend_below(figure, panel, [*f.arms, BEST_OF])
    return figure
