"""Figures of a sweep: accuracy along each axis of the grid, a panel for each case of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.report.plots import Plot
from harness.report.scores import AVG
from harness.report.style import Look, legend_below, looks, panels, render, styled
from harness.report.sweep_load import CaseResults, SweepResults, leaf
from harness.report.tables import setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FROM = 4.0  # a positive axis whose ends are this far apart is drawn in powers of two


def sweep_plots(sweep: SweepResults) -> list[Plot]:
    """A figure for each test set and each axis of numbers; the first axis of the grid first."""
    along = [p for p, values in sweep.axes.items() if all(map(_is_number, values))]
    names = list(sweep.axes)
    found = []
    with styled():
        for test in sweep.tests:
            for place, path in enumerate(along):
                figure, count = _figure(sweep, test, path)
                others = " and ".join(leaf(p, names) for p in names if p != path)
                label = leaf(path, names)
                found.append(
                    Plot(
                        f"sweep_{test}" + (f"_{path.replace('.', '_')}" if place else ""),
                        f"Accuracy on {test} against {label}",
                        "Mean over seeds with its 95 % band over seeds and problems"
                        + (f"; a panel for each {others}." if others else ".")
                        + _caveat(sweep),
                        f"Accuracy against {label} for {', '.join(sweep.shown)}. The numbers are "
                        f"in table sweep_{test}.",
                        render(figure),
                        count,
                    )
                )
    return found


def _caveat(sweep: SweepResults) -> str:
    names = [case.name for case in sweep.cases if not case.certified]
    return f" Not certified: {', '.join(names)}." if names else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _figure(sweep: SweepResults, test: str, along: str) -> tuple[Figure, int]:
    found = _panels(sweep, along)
    names, values = list(sweep.axes), sorted(sweep.axes[along])
    figure, axes = panels(len(found))
    first = sweep.cases[0].experiment
    style = looks(replace(first, arms=sweep.arms))
    for panel, (held, cases) in zip(axes, found, strict=True):
        for arm in sweep.shown:
            _line(panel, cases, test, along, arm, style[arm])
        if values[0] > 0 and values[-1] / values[0] >= LOG_FROM:
            panel.set_xscale("log", base=2)
        panel.set_xticks(values, [setting(v) for v in values])
        panel.minorticks_off()
        panel.set_xlabel(leaf(along, names))
        panel.set_ylabel("accuracy, %")
        panel.set_title(", ".join(f"{leaf(p, names)} {setting(v)}" for p, v in held.items()))
    low, high = (f(panel.get_ylim()[i] for panel in axes) for i, f in ((0, min), (1, max)))
    for panel in axes:
        panel.set_ylim(low, high)
    legend_below(figure, axes[0], sweep.shown)
    return figure, len(found)


def _panels(sweep: SweepResults, along: str) -> list[tuple[Mapping[str, Any], list[CaseResults]]]:
    """The cases by what they set of the other axes, in the order of the grid."""
    found: list[tuple[Mapping[str, Any], list[CaseResults]]] = []
    for case in sweep.cases:
        held = {p: case.sets[p] for p in sweep.axes if p != along}
        same = next((cases for others, cases in found if others == held), None)
        if same is None:
            found.append((held, [case]))
        else:
            same.append(case)
    return found


def _line(
    panel: Axes, cases: Sequence[CaseResults], test: str, along: str, arm: str, look: Look
) -> None:
    points = []
    for case in cases:
        scores = case.scores.get(test)
        if scores is not None and arm in scores.arms:
            points.append((float(case.sets[along]), scores.arms[arm].estimates[AVG]))
    if not points:
        return
    points.sort(key=lambda point: point[0])
    xs, found = zip(*points, strict=True)
    panel.plot(xs, [100 * e.mean for e in found], label=arm, **look.curve)
    low = [100 * (e.mean if e.low is None else e.low) for e in found]
    high = [100 * (e.mean if e.high is None else e.high) for e in found]
    panel.fill_between(xs, low, high, color=look.colour, alpha=0.1, lw=0)
