"""The figures of the frontier: gold and proxy reward against distance from the base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from harness.report.frontier import BEST_OF, Frontier
from harness.report.load import Experiment
from harness.report.plots import Plot
from harness.report.style import DARK, GREY, Look, legend_below, looks, panels, render, styled
from harness.report.table_frontier import gao_fit, reference_points
from harness.stats.frontier import Point, Value, curve_band, gold, pareto, proxy
from harness.stats.gao import D_MIN, GaoFit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = 60  # points of a curve
FAR = 95  # percentile of d at which the axis ends, where single runs lie much farther out
ROOM = 0.12  # share of the points' range left above and below them; bands may leave the panel


def frontier_plots(found: Sequence[Frontier], experiment: Experiment) -> list[Plot]:
    """Of each test set: both rewards against d, the envelopes, and Gao's curves."""
    with styled():
        return [plot for f in found for plot in _plots(f, experiment)]


def _plots(f: Frontier, experiment: Experiment) -> list[Plot]:
    arms = f"{', '.join(f.arms)} and {BEST_OF}"
    return [
        Plot(
            f"frontier_{f.test}",
            f"Gold and proxy reward against distance from the base, {f.test}",
            "Every checkpoint of every run and strength (points; horizontal bars: one standard "
            "error of its d), with the table's local linear fit and its 95 % band over runs, "
            "broken where the table has no value; dotted black: best-of-n from the base, at its KL "
            "by ranks; grey: the base. d is the square root of the sequence KL in nats.",
            f"Rewards of {arms} against d. The numbers are in tables frontier_{f.test} and "
            f"frontier_peak_{f.test}.",
            render(_curves(f, experiment)),
            2,
        ),
        Plot(
            f"envelope_{f.test}",
            f"The best gold reward within a KL, {f.test}",
            "Each arm's Pareto set over equal numbers of checkpoints, as steps: the best gold "
            "reward at no more than this KL. An envelope is chosen on the test set and so is "
            "optimistic, for all arms alike. Left of the grey upright, which every arm reached, "
            "areas are compared.",
            f"Envelopes of {arms}. The areas are in table frontier_area_{f.test}.",
            render(_envelopes(f, experiment)),
        ),
        Plot(
            f"gao_{f.test}",
            f"Gao's curves through the gold reward, {f.test}",
            "Gain in gold reward over the base. Lines: d (alpha − beta log d) for the arms, "
            f"d (alpha − beta d) for best-of-n, fitted beyond d = {D_MIN} and drawn as far as each "
            "went; ringed: its peak, where it lies within that.",
            f"Curves of {arms}. The numbers are in table gao_{f.test}.",
            render(_gao(f, experiment)),
        ),
    ]


def _end(values: Sequence[float]) -> float:
    return max(float(np.percentile(values, FAR)), 1.0)


def _curves(f: Frontier, experiment: Experiment) -> Figure:
    figure, axes = panels(2, height=4.2)
    style = looks(experiment)
    every = [p for points in f.arms.values() for p in points]
    end = _end([p.d for p in every])
    for panel, value, name, start in (
        (axes[0], gold, "gold", f.base_gold), (axes[1], proxy, "proxy", f.base_proxy)
    ):  # fmt: skip
        panel.axhline(start, color=GREY, linestyle=(0, (1, 1.2)), lw=1.2)
        for arm, points in f.arms.items():
            _arm(panel, points, value, style[arm], arm, end)
        xs, ys = [r.d for r in f.reference], [getattr(r.pooled, name) for r in f.reference]
        panel.plot(xs, ys, color=DARK, linestyle=":", marker=".", label=BEST_OF)
        panel.set_xlim(0, end * 1.03)
        seen = [value(p) for p in every] + ys + [start]
        room = ROOM * (max(seen) - min(seen))
        panel.set_ylim(min(seen) - room, max(seen) + room)
        panel.set_xlabel("d, square root of KL to the base")
        panel.set_ylabel(f"{name} reward")
    legend_below(figure, axes[0], [*f.arms, BEST_OF])
    return figure


def _arm(
    panel: Axes, points: Sequence[Point], value: Value, look: Look, arm: str, end: float
) -> None:
    ds, ys = [p.d for p in points], [value(p) for p in points]
    bars = [_d_error(p) for p in points]
    panel.errorbar(ds, ys, xerr=bars, fmt="none", ecolor=look.colour, alpha=0.3, lw=0.8)
    panel.scatter(ds, ys, s=14, color=look.colour, marker=look.marker, alpha=0.45, linewidths=0)
    xs = np.linspace(min(ds), min(max(ds), end), GRID)  # nothing is extrapolated
    fit, low, high = curve_band(points, xs.tolist(), value)
    panel.plot(xs, fit, label=arm, **look.plain)
    panel.fill_between(xs, low, high, color=look.colour, alpha=0.1, lw=0)


def _d_error(point: Point) -> float:
    """Standard error of d, to first order; none at the base, where d has no slope."""
    return point.kl_se / (2 * point.d) if point.kl_se and point.d > 0 else 0.0


def _envelopes(f: Frontier, experiment: Experiment) -> Figure:
    figure, (panel,) = panels(1)
    style = looks(experiment)
    end = _end([p.kl for points in f.arms.values() for p in points])
    for arm, points in f.arms.items():
        front = pareto(points, gold)
        xs = [max(p.kl, 0.0) for p in front] + [end]
        ys = [p.gold for p in front] + [front[-1].gold]
        panel.step(xs, ys, where="post", label=arm, **style[arm].plain)
    panel.plot(
        [r.d**2 for r in f.reference], [r.pooled.gold for r in f.reference],
        color=DARK, linestyle=":", marker=".", label=BEST_OF,
    )  # fmt: skip
    panel.axhline(f.base_gold, color=GREY, linestyle=(0, (1, 1.2)), lw=1.2)
    panel.axvline(f.limit, color=GREY, lw=0.8)
    panel.set_xlim(0, end)
    panel.set_xlabel("KL to the base, nats a completion")
    panel.set_ylabel("best gold reward within it")
    legend_below(figure, panel, [*f.arms, BEST_OF])
    return figure


def _gao(f: Frontier, experiment: Experiment) -> Figure:
    figure, (panel,) = panels(1)
    style = looks(experiment)
    for arm, points in f.arms.items():
        panel.scatter(
            [p.d for p in points], [p.gold - f.base_gold for p in points], s=12, linewidths=0,
            color=style[arm].colour, marker=style[arm].marker, alpha=0.35,
        )  # fmt: skip
        _fitted(panel, gao_fit(f, points), style[arm].colour, style[arm].line, arm)
    reference = reference_points(f.reference)
    panel.plot([p.d for p in reference], [p.gold - f.base_gold for p in reference], ".", color=DARK)
    _fitted(panel, gao_fit(f, reference, "bon"), DARK, ":", BEST_OF)
    panel.axhline(0, color=GREY, linestyle=(0, (1, 1.2)), lw=1.2)
    panel.set_xlim(0, _end([p.d for points in f.arms.values() for p in points]) * 1.03)
    panel.set_xlabel("d, square root of KL to the base")
    panel.set_ylabel("gold reward over the base")
    legend_below(figure, panel, [*f.arms, BEST_OF])
    return figure


def _fitted(panel: Axes, found: GaoFit | None, colour: str, line: object, name: str) -> None:
    """A fitted curve over what was fitted; the peak ringed where it lies within."""
    if found is None:
        return
    xs = np.linspace(D_MIN, found.reach, GRID)
    panel.plot(xs, found.at(xs), color=colour, linestyle=line, label=name)
    if found.over_optimised and found.peak is not None:
        panel.plot(
            *found.peak, "o", markersize=9, markerfacecolor="none", markeredgecolor=colour,
            markeredgewidth=1.6,
        )  # fmt: skip
