"""Figures of a declared ladder: the score at each rung, and what each axis accounts for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.report.load import Experiment
from harness.report.scores import AVG, TestScores
from harness.report.stats import Estimate
from harness.report.style import DARK, GREY, PALETTE, legend_below, panels
from harness.report.table_ladder import attributed, axis_words, ladder_rungs
from harness.report.tables import interval, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.2  # inches of a panel: a phone's width shows its 9 pt letters at about 9 px
WRAP = 26  # letters of a label
ROW = 0.36  # inches of a rung
MEAN_EFFECT = "main effect"


def ladder_figure(experiment: Experiment, scores: Sequence[TestScores]) -> Figure | None:
    """Score at each rung, from top to bottom, a panel for each way and test set."""
    rungs = ladder_rungs(experiment)
    ways = list(dict.fromkeys(rung.way for rung in rungs))
    cells = [(test, way) for test in scores for way in ways]
    if not any(rung.arm in test.arms for test in scores for rung in rungs):
        return None
    longest = max(sum(rung.way == way for rung in rungs) for way in ways)
    figure, axes = panels(len(cells), WIDTH / (1.2 if len(cells) == 1 else 1), 0.9 + ROW * longest)
    found = [t.arms[r.arm].estimates[AVG] for t in scores for r in rungs if r.arm in t.arms]
    limits = _limits(found)
    for panel, (test, way) in zip(axes, cells, strict=True):
        chosen = [rung for rung in rungs if rung.way == way]
        estimates = {
            place: test.arms[rung.arm].estimates[AVG]
            for place, rung in enumerate(chosen)
            if rung.arm in test.arms
        }
        colour = PALETTE[ways.index(way)]
        places = list(estimates)
        means = [100 * e.mean for e in estimates.values()]
        panel.plot(means, places, "-", color=colour, lw=1.0, alpha=0.45)
        panel.errorbar(
            means, places, xerr=_bars(list(estimates.values())), fmt="os"[ways.index(way)],
            color=colour, ms=6, lw=1.6, capsize=3,
        )  # fmt: skip
        labels = [_label(r.arm if r.before is None else r.changed) for r in chosen]
        panel.set_yticks(range(len(chosen)), labels, fontsize=9)
        panel.get_yticklabels()[0].set_fontweight("bold")
        panel.set_ylim(len(chosen) - 0.5, -0.5)
        panel.set_xlim(*limits)
        panel.set_xlabel(f"{test.label(AVG)} on {test.name}, %")
        panel.set_title(f"{way}: {chosen[0].arm} to {chosen[-1].arm}", fontsize=10)
    return figure


def _limits(found: Sequence[Estimate]) -> tuple[float, float]:
    low = min(e.mean if e.low is None else e.low for e in found)
    high = max(e.mean if e.high is None else e.high for e in found)
    margin = 0.06 * (high - low) or 0.01
    return 100 * (low - margin), 100 * (high + margin)


def _bars(found: Sequence[Estimate]) -> list[list[float]]:
    """Distances of the intervals' ends from the means, as errorbar has them."""
    low = [100 * (e.mean - e.low) if e.low is not None else 0.0 for e in found]
    high = [100 * (e.high - e.mean) if e.high is not None else 0.0 for e in found]
    return [low, high]


def _label(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WRAP, break_on_hyphens=False))


def attribution_figure(experiment: Experiment, scores: Sequence[TestScores]) -> Figure | None:
    """Each axis's Shapley value with its interval, and the total; a panel for each test set."""
    found = [(test, a) for test in scores if (a := attributed(experiment, test)) is not None]
    if not found:
        return None
    rows = len(found[0][1].design.axes) + 1
    figure, axes = panels(len(found), WIDTH / (1.2 if len(found) == 1 else 1), 1.2 + 0.52 * rows)
    for panel, (test, attribution) in zip(axes, found, strict=True):
        words = axis_words(experiment, attribution)
        shares = [attribution.shapley[axis][AVG] for axis in attribution.design.axes]
        mains = [attribution.effects[frozenset({a})][AVG] for a in attribution.design.axes]
        first, last = attribution.design.ends
        every = [*shares, attribution.total[AVG]]
        labels = [*(words[axis] for axis in attribution.design.axes), f"total: {last} − {first}"]
        colours = [PALETTE[0]] * len(shares) + [GREY]
        _shapley_bars(panel, [gap.estimate for gap in every], colours)
        panel.plot(
            [100 * gap.estimate.mean for gap in mains], range(len(mains)), "D", color=PALETTE[1],
            ms=5, mec="white", mew=0.6, label=MEAN_EFFECT, zorder=4,
        )  # fmt: skip
        panel.axvline(0, color=DARK, lw=0.8)
        panel.axhline(len(shares) - 0.5, color=DARK, lw=0.6)
        panel.set_yticks(range(len(every)), [_label(text) for text in labels], fontsize=9)
        panel.set_ylim(len(every) - 0.5, -0.5)
        panel.grid(axis="y", visible=False)
        panel.set_xlabel(f"points of {test.label(AVG)} on {test.name}")
    legend_below(figure, axes[0])
    return figure


def _shapley_bars(panel: Axes, found: Sequence[Estimate], colours: Sequence[str]) -> None:
    panel.barh(
        range(len(found)), [100 * e.mean for e in found], height=0.5, color=colours, alpha=0.75,
        xerr=_bars(found), error_kw={"lw": 1.4, "capsize": 3, "ecolor": DARK},
        label="Shapley value",
    )  # fmt: skip
    for place, e in enumerate(found):
        shown = f"{signed(100 * e.mean)} {interval(e.low, e.high, sign=True)}"
        panel.annotate(
            shown, (0.5, place + 0.28), xycoords=("axes fraction", "data"), ha="center", va="top",
            fontsize=8, color=DARK,
        )  # fmt: skip
