"""Figures over what was spent, and over K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.report.load import Cell, Experiment
from harness.report.scores import Metric, TestScores, curve, score_matrix
from harness.report.style import Look, legend_below, looks, panels
from harness.report.table_machine import training_seconds
from harness.report.table_spent import training_steps
from harness.stats.effects import UNIT, Floats, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

X_LABELS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "training seconds, measured"}
CURVE_RESAMPLES = 2000
GRID = 80  # points at which training curves of several seeds are averaged
WINDOW = 0.05  # share of a run's steps that one point of a training curve averages


def learning_curves(
    experiment: Experiment, scores: Sequence[TestScores], unit: str
) -> Figure | None:
    """Accuracy on the test sets against what was spent: seeds thin, their mean with its band."""
    tests = [t.name for t in scores]
    if not tests:
        return None
    figure, axes = panels(len(tests))
    style = looks(experiment)
    drawn = 0
    for panel, test in zip(axes, tests, strict=True):
        split = f"test.{test}"
        base = {c.seed: curve(c, split)[:1] for c in experiment.seed_cells("base")}
        for arm in experiment.drawn:
            if arm != "base":
                cells = experiment.seed_cells(arm)
                drawn += _one_curve(panel, cells, split, unit, base, style[arm], arm)
        starts = [lines[0] for lines in base.values() if lines]
        if starts:
            level = float(score_matrix(starts).mean())
            panel.axhline(100 * level, label="base", **style["base"].plain)
        panel.set_title(test)
        panel.set_xlabel(X_LABELS[unit])
        panel.set_xlim(left=0)
    axes[0].set_ylabel("Avg@n on test, %")
    legend_below(figure, axes[0], experiment.drawn)
    return figure if drawn else None


def _one_curve(
    panel: Axes,
    cells: Sequence[Cell],
    split: str,
    unit: str,
    base: Mapping[int | None, list[Any]],
    look: Look,
    arm: str,
) -> int:
    """Draw an arm; returns how many seeds it has. The mean is over moments all seeds reached."""
    runs: list[dict[float, tuple[float, Any]]] = []
    for cell in cells:
        points = {line["at"]: (0.0, line) for line in base.get(cell.seed, [])}
        for line in curve(cell, split):
            x = _spent(cell, line, unit)
            if x is not None:
                points[line["at"]] = (x, line)
        if points:
            runs.append(points)
            ys = [100 * score_matrix([line]).mean() for _, line in points.values()]
            panel.plot([x for x, _ in points.values()], ys, lw=0.7, alpha=0.4, color=look.colour)
    moments = sorted(set.intersection(*(set(r) for r in runs))) if runs else []
    if not moments:
        return 0
    xs = [np.mean([run[at][0] for run in runs]) for at in moments]
    found = [
        estimate(score_matrix([run[at][1] for run in runs]), CURVE_RESAMPLES, UNIT)
        for at in moments
    ]
    panel.plot(xs, [100 * e.mean for e in found], label=arm, **look.curve)
    low = [100 * (e.mean if e.low is None else e.low) for e in found]
    high = [100 * (e.mean if e.high is None else e.high) for e in found]
    panel.fill_between(xs, low, high, color=look.colour, alpha=0.08, lw=0)
    return len(runs)


def _spent(cell: Cell, line: Mapping[str, Any], unit: str) -> float | None:
    if unit == "seconds":
        return training_seconds(cell, line["step"])
    return line["spent"].get(unit)


def training_curves(experiment: Experiment) -> Figure | None:
    """Accuracy of everything sampled, dropped groups included, and reward of what was used."""
    return step_panels(
        experiment,
        {"accuracy": "correct of all sampled, %", "reward_mean": "reward, used completions"},
    )


def step_panels(experiment: Experiment, keys: Mapping[str, str]) -> Figure | None:
    """Diagnostics against FLOPs, a panel each: mean over finished seeds of a running mean."""
    figure, axes = panels(len(keys))
    style, drawn = looks(experiment), 0
    for panel, (key, label) in zip(axes, keys.items(), strict=True):
        scale = 100 if label.endswith("%") else 1
        for arm in experiment.drawn:
            found = [run for c in experiment.seed_cells(arm) if (run := _series(c, key))]
            if not found:
                continue
            drawn += 1
            xs, ys = _mean_curve(found)
            every = max(1, len(xs) // 8)
            panel.plot(xs, scale * ys, label=arm, markevery=every, **style[arm].curve)
        panel.set_xlabel(X_LABELS["flops"])
        panel.set_ylabel(label)
        panel.set_xlim(left=0)
    legend_below(figure, _fullest(axes), experiment.drawn)
    return figure if drawn else None


def _fullest(axes: Sequence[Axes]) -> Axes:
    """The panel with the most arms: a critic's has one, its neighbours have all."""
    return max(axes, key=lambda a: len(a.get_legend_handles_labels()[1]))


def _series(cell: Cell, key: str) -> tuple[Floats, Floats] | None:
    """FLOPs and a diagnostic's running mean over a cell's training steps."""
    xs, ys = [], []
    for step in training_steps(cell):
        value = _graded_accuracy(step) if key == "accuracy" else step.get(key)
        if value is not None:
            xs.append(step["spent"]["flops"])
            ys.append(value)
    if not xs:
        return None
    width = max(1, round(WINDOW * len(ys)))
    sums = np.cumsum([0.0, *ys])
    starts = np.maximum(np.arange(len(ys)) - width + 1, 0)
    stops = np.arange(len(ys)) + 1
    return np.array(xs, dtype=float), (sums[stops] - sums[starts]) / (stops - starts)


def _graded_accuracy(step: Mapping[str, Any]) -> float | None:
    """Share correct of all completions graded: what an arm keeps would flatter or slander it."""
    outcomes = step.get("outcomes") or {}
    total = sum(outcomes.values())
    return outcomes.get("correct", 0) / total if total else None


def _mean_curve(runs: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """The mean over seeds where all of them have been."""
    start, stop = max(xs[0] for xs, _ in runs), min(xs[-1] for xs, _ in runs)
    grid = np.linspace(start, max(start, stop), GRID if stop > start else 1)
    return grid, np.mean([np.interp(grid, xs, ys) for xs, ys in runs], axis=0)


def k_curves(experiment: Experiment, scores: Sequence[TestScores]) -> Figure | None:
    """Pass@K and Maj@K against K, base included, a row for each test set."""
    scores = [t for t in scores if len({m.k for m in t.metrics if m.k}) > 1]
    if not scores:
        return None
    figure, axes = panels(2 * len(scores))
    style = looks(experiment)
    for place, test in enumerate(scores):
        for panel, kind in zip(axes[2 * place : 2 * place + 2], ("pass", "maj"), strict=True):
            metrics = [m for m in test.metrics if m.name == kind]
            for arm in experiment.drawn:
                if arm in test.arms:
                    _k_curve(panel, test, arm, metrics, style[arm])
            ks = [m.k for m in metrics if m.k]
            panel.set_xscale("log", base=2)
            panel.set_xticks(ks, [str(k) for k in ks])
            panel.minorticks_off()
            panel.set_xlabel("K, log scale")
            panel.set_ylabel(f"{kind.capitalize()}@K, %")
            panel.set_title(f"{test.name}: {kind.capitalize()}@K")
    legend_below(figure, axes[0], experiment.drawn)
    return figure


def _k_curve(
    panel: Axes, test: TestScores, arm: str, metrics: Sequence[Metric], look: Look
) -> None:
    found = [test.arms[arm].estimates[m] for m in metrics]
    ks = [m.k for m in metrics if m.k]
    panel.plot(ks, [100 * e.mean for e in found], label=arm, **look.curve)
    low = [100 * (e.mean if e.low is None else e.low) for e in found]
    high = [100 * (e.mean if e.high is None else e.high) for e in found]
    panel.fill_between(ks, low, high, color=look.colour, alpha=0.08, lw=0)
