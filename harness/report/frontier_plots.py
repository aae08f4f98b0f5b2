"""The figures of the frontier: gold and proxy reward against distance from the base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.report.frontier import BEST_OF, Frontier
from harness.report.load import Experiment
from harness.report.plots import Plot
from harness.report.style import DARK, GREY, legend_below, looks, panels, render, styled
from harness.stats.bootstrap import SEED
from harness.stats.frontier import Point, Value, gold, pareto, proxy, resampled
from harness.stats.gao import D_MIN, fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWS = 300  # resamples of runs behind a band
FAR = 95  # percentile of d at which the axis ends, where single runs lie much farther out


def frontier_plots(found: Sequence[Frontier], experiment: Experiment) -> list[Plot]:
    """A figure of each test set's frontier, and one of its envelopes."""
    plots = []
    with styled():
        for f in found:
            plots.append(Plot(
                f"frontier_{f.test}",
                f"Gold and proxy reward against distance from the base, {f.test}",
                "Every checkpoint of every run and strength (points), with Gao's curve through "
                "them and its 95 % band over runs; dotted black: best-of-n from the base, at its "
                "sampled KL; grey: the base. d is the square root of the sequence KL in nats.",
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
            _arm(panel, points, value, start, style[arm], arm, end)
        xs = [max(b.sampled_kl, 0.0) ** 0.5 for b in f.reference]
        ys = [getattr(b, name) for b in f.reference]
        panel.plot(xs, ys, color=DARK, linestyle=":", marker=".", label=BEST_OF)
        panel.set_xlim(0, end * 1.03)
        panel.set_xlabel("d, square root of KL to the base")
        panel.set_ylabel(f"{name} reward")
    legend_below(figure, axes[0], [*f.arms, BEST_OF])
    return figure


def _arm(
    panel: Axes, points: Sequence[Point], value: Value, start: float, look: Any, arm: str,
    end: float,
) -> None:  # fmt: skip
    panel.scatter(
        [p.d for p in points], [value(p) for p in points], s=14, color=look.colour,
        marker=look.marker, alpha=0.45, linewidths=0,
    )  # fmt: skip
    made = fit("rl", [p.d for p in points], [value(p) for p in points], start)
    if made is None:
        panel.plot([], [], label=arm, **look.plain)
        return
    xs = np.linspace(D_MIN, min(made.reach, end), 80)
    panel.plot(xs, start + made.at(xs), label=arm, **look.plain)
    rng = np.random.default_rng(SEED)
    drawn = []
    for _ in range(DRAWS):
        some = resampled(points, rng)
        again = fit("rl", [p.d for p in some], [value(p) for p in some], start)
        if again is not None:
            drawn.append(start + again.at(xs))
    if len(drawn) > DRAWS / 2:
        low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
        panel.fill_between(xs, low, high, color=look.colour, alpha=0.1, lw=0)


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
