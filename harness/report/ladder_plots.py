"""Figures of a declared ladder: the score at each rung, and what each axis accounts for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.report.load import Experiment
from harness.report.scores import AVG, TestScores
from harness.report.style import DARK, GREY, PALETTE, legend_below, panels
from harness.report.table_ladder import Rung, attributed, axis_words, ladder_rungs, step_to
from harness.report.tables import interval, signed
from harness.stats.effects import Difference, Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.0  # inches of a panel: a phone's width then shows its letters at their size in print
WRAP = 24  # letters of a label
ROW = 0.36  # inches of a rung
SMALL = 9


def ladder_figure(experiment: Experiment, scores: Sequence[TestScores]) -> Figure | None:
    """Score at each rung from top to bottom, each way a block; a panel for each test set.

    Beside each rung stands the paired difference to the one above.
    """
    rungs = ladder_rungs(experiment)
    tests = [t for t in scores if any(rung.arm in t.arms for rung in rungs)]
    if not tests:
        return None
    ways = list(dict.fromkeys(rung.way for rung in rungs))
    lines = _lines(rungs)
    figure, axes = panels(len(tests), _width(len(tests)), 0.6 + ROW * (max(lines) + 1))
    for panel, test in zip(axes, tests, strict=True):
        for place, way in enumerate(ways):
            block = [(y, r) for y, r in zip(lines, rungs, strict=True) if r.way == way]
            _block(panel, test, block, PALETTE[place], "os"[place])
        panel.set_yticks(
            lines, [_label(r.changed if r.before else f"{r.way}: {r.arm}") for r in rungs]
        )
        for label, rung in zip(panel.get_yticklabels(), rungs, strict=True):
            label.set_fontsize(SMALL)
            label.set_fontweight("normal" if rung.before else "bold")
        panel.set_ylim(max(lines) + 0.6, -1)
        panel.grid(axis="y", visible=False)
        panel.set_xlabel(f"{test.label(AVG)} on {test.name}, %")
        _beside(panel, -0.65, "step, points")
    return figure


def _width(count: int) -> float:
    """A single panel is drawn wider by ``panels``; here it should not be."""
    return WIDTH / 1.2 if count == 1 else WIDTH


def _lines(rungs: Sequence[Rung]) -> list[int]:
    """The line on which each rung stands: a blank one between the blocks."""
    ways = list(dict.fromkeys(rung.way for rung in rungs))
    return [place + ways.index(rung.way) for place, rung in enumerate(rungs)]


def _block(
    panel: Axes, test: TestScores, block: Sequence[tuple[int, Rung]], colour: str, marker: str
) -> None:
    there = [(y, rung) for y, rung in block if rung.arm in test.arms]
    found = [test.arms[rung.arm].estimates[AVG] for _, rung in there]
    means, lines = [100 * e.mean for e in found], [y for y, _ in there]
    panel.plot(means, lines, "-", color=colour, lw=1.0, alpha=0.5)
    panel.errorbar(
        means, lines, xerr=_bars(found), fmt=marker, color=colour, ms=5.5, lw=1.4, capsize=2.5
    )
    for y, rung in there:
        step = step_to(test, rung).get(AVG)
        if step is not None:
            _beside(panel, y, _shown(step), bold=step.excludes_zero)


def _beside(panel: Axes, y: float, text: str, *, bold: bool = False) -> None:
    """A text right of the panel, at a height in data."""
    panel.annotate(
        text, (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=SMALL,
        color=DARK, fontweight="bold" if bold else "normal", annotation_clip=False,
    )  # fmt: skip


def _shown(gap: Difference) -> str:
    e = gap.estimate
    return f"{signed(100 * e.mean)} {interval(e.low, e.high, sign=True)}"


def _bars(found: Sequence[Estimate]) -> list[list[float]]:
    """Distances of the intervals' ends from the means, as errorbar has them."""
    low = [100 * (e.mean - e.low) if e.low is not None else 0.0 for e in found]
    high = [100 * (e.high - e.mean) if e.high is not None else 0.0 for e in found]
    return [low, high]


def _label(text: str) -> str:
    """In lines: what changed, and below it what to what, where both do not fit on one."""
    if len(text) <= WRAP:
        return text
    lines = text.replace(": ", ":\n").splitlines()
    return "\n".join(part for x in lines for part in textwrap.wrap(x, WRAP + 6))


def attribution_figure(experiment: Experiment, scores: Sequence[TestScores]) -> Figure | None:
    """Each axis's Shapley value with its interval, and the total; a panel for each test set."""
    found = [(test, a) for test in scores if (a := attributed(experiment, test)) is not None]
    if not found:
        return None
    rows = len(found[0][1].design.axes) + 1
    figure, axes = panels(len(found), _width(len(found)), 1.0 + 0.46 * rows)
    for panel, (test, attribution) in zip(axes, found, strict=True):
        words, names = axis_words(experiment, attribution), attribution.design.axes
        gaps = [*(attribution.shapley[a][AVG] for a in names), attribution.total[AVG]]
        mains = [attribution.effects[frozenset({a})][AVG].estimate.mean for a in names]
        first, last = attribution.design.ends
        labels = [*(words[a] for a in names), f"total: {last} − {first}"]
        estimates = [gap.estimate for gap in gaps]
        panel.barh(
            range(rows), [100 * e.mean for e in estimates], height=0.55, label="Shapley value",
            color=[*["#7FB8D8"] * len(names), "#C4C4C4"], xerr=_bars(estimates),
            error_kw={"lw": 1.3, "capsize": 3, "ecolor": DARK},
        )  # fmt: skip
        panel.plot(
            [100 * mean for mean in mains], range(len(names)), "D", color=PALETTE[1], ms=5,
            mec="white", mew=0.6, label="main effect", zorder=4,
        )  # fmt: skip
        for y, gap in enumerate(gaps):
            _beside(panel, y, _shown(gap), bold=gap.excludes_zero)
        panel.axvline(0, color=DARK, lw=0.8)
        panel.axhline(len(names) - 0.5, color=GREY, lw=0.8)
        panel.set_yticks(range(rows), [_label(text) for text in labels], fontsize=SMALL)
        panel.set_ylim(rows - 0.5, -0.5)
        panel.grid(axis="y", visible=False)
        panel.set_xlabel(f"points of {test.label(AVG)} on {test.name}")
    legend_below(figure, axes[0])
    return figure
