"""Every figure of the report, drawn in one style and rendered as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.bars import flops_bars, memory_bars, tuning_points
from harness.report.curves import k_curves, learning_curves, step_panels, training_curves
from harness.report.ladder_plots import attribution_figure, ladder_figure
from harness.report.load import Experiment
from harness.report.scores import TestScores
from harness.report.style import render, styled
from harness.report.table_tuning import effort_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAND = (
    "Thick: mean over finished seeds with its 95 % band; thin: each seed; dotted grey: "
    "the untrained base; dashed grey: placebo."
)


@dataclass(frozen=True)
class Plot:
    """A rendered figure.

    Attributes:
        name: the files' stem.
        alt: what it shows, for a reader who cannot see it; the numbers stand in ``table``.
        images: ``png`` and ``svg`` -> bytes.
        measured: it depends on the machine, so two equal runs differ in it.
    """

    name: str
    title: str
    caption: str
    alt: str
    images: Mapping[str, bytes]
    panels: int = 1
    measured: bool = False


@dataclass(frozen=True)
class _Recipe:
    name: str
    title: str
    caption: str
    table: str  # where its numbers stand, or ""
    draw: Callable[[], Figure | None]
    measured: bool = False
    curves: bool = False  # an arm a curve, of those that can be told apart


def draw_plots(experiment: Experiment, scores: Sequence[TestScores]) -> list[Plot]:
    """All figures for which there are data, in the report's order."""
    found = []
    with styled():
        for recipe in _recipes(experiment, scores):
            figure = recipe.draw()
            if figure is not None:
                found.append(
                    Plot(
                        recipe.name,
                        recipe.title,
                        _caption(experiment, recipe),
                        _alt(experiment, recipe),
                        render(figure),
                        sum(axes.axison for axes in figure.axes),
                        recipe.measured,
                    )
                )
    return found


def _alt(experiment: Experiment, recipe: _Recipe) -> str:
    where = f" The numbers are in table {recipe.table}." if recipe.table else ""
    arms = experiment.drawn if recipe.curves else experiment.shown
    return f"{recipe.title}, for {', '.join(arms)}. {recipe.caption}{where}"


def _caption(experiment: Experiment, recipe: _Recipe) -> str:
    """With a word on the arms that are not drawn."""
    left_out = len(experiment.shown) - len(experiment.drawn)
    if not recipe.curves or not left_out:
        return recipe.caption
    return f"{recipe.caption} Drawn are the ladder's ends; {left_out} more arms are in the tables."


def _recipes(experiment: Experiment, scores: Sequence[TestScores]) -> Iterator[_Recipe]:
    for unit, title in (("flops", "FLOPs"), ("tokens", "tokens"), ("seconds", "seconds")):
        yield _Recipe(
            f"learning_{unit}",
            f"Learning curves against {title}",
            _BAND,
            "final",
            lambda unit=unit: learning_curves(experiment, scores, unit),
            measured=unit == "seconds",
            curves=True,
        )
    yield _Recipe(
        "pass_maj_at_k",
        "Pass@K and Maj@K against K",
        "Final evaluation, mean over seeds with its 95 % band.",
        "final",
        lambda: k_curves(experiment, scores),
        curves=True,
    )
    yield _Recipe(
        "ladder",
        "The ladder, rung by rung",
        "Each rung has one more change than the one above it; mean over seeds with its 95 % "
        "interval over seeds and problems. Right: the difference to the rung above, "
        "paired by seed and problem; bold where its interval leaves out 0.",
        "ladder",
        lambda: ladder_figure(experiment, scores),
    )
    yield _Recipe(
        "attribution",
        "What each axis accounts for",
        "Shapley values over all mixtures of the axes, paired by seed and problem, with their 95 % "
        "intervals (bold: leaves out 0); they sum to the total. Diamonds: main effects.",
        "attribution",
        lambda: attribution_figure(experiment, scores),
    )
    yield _Recipe(
        "training",
        "Training accuracy and reward against FLOPs",
        "Running mean over a twentieth of a run, then over finished seeds. Reward scales differ "
        "between arms that shape the reward.",
        "diagnostics",
        lambda: training_curves(experiment),
        curves=True,
    )
    yield _Recipe(
        "length_entropy",
        "Completion length and entropy against FLOPs",
        "Of all sampled completions; running mean, then mean over finished seeds.",
        "diagnostics",
        lambda: step_panels(
            experiment,
            {"length_mean": "completion length, tokens", "entropy": "entropy, nats/token"},
        ),
        curves=True,
    )
    yield _Recipe(
        "signal",
        "Groups without variance, and clipping, against FLOPs",
        "Share of sampled groups whose scores are all equal; shares of tokens whose ratio was "
        "clipped above and below.",
        "diagnostics",
        lambda: step_panels(
            experiment,
            {
                "zero_variance_share": "groups without variance, %",
                "truncated_share": "truncated completions, %",
                "clip_fraction_high": "clipped above, %",
                "clip_fraction_low": "clipped below, %",
            },
        ),
        curves=True,
    )
    yield _Recipe(
        "tuning",
        "Tuning: validation score of every trial",
        "The number is the trial, 0 the arm's own defaults; the ring marks the chosen one.",
        "tuning",
        lambda: tuning_points(experiment),
    )
    yield _Recipe(
        "effort",
        "Expected best validation score against tuning effort",
        "The best of n trials, averaged over all choices of n from those that were run; band: one "
        "standard deviation over the choices.",
        "effort",
        lambda: effort_figure(experiment),
        curves=True,
    )
    yield _Recipe(
        "flops",
        "Where the FLOPs went",
        "Mean over finished seeds.",
        "flops",
        lambda: flops_bars(experiment),
    )
    yield _Recipe(
        "memory",
        "Memory by model role, predicted",
        "What is held at the predicted peak, from shapes and the longest lengths allowed.",
        "memory",
        lambda: memory_bars(experiment, "predicted"),
    )
    yield _Recipe(
        "memory_measured",
        "Memory by model role, measured",
        "Tensors measured at the end of training, largest over seeds.",
        "memory_measured",
        lambda: memory_bars(experiment, "measured"),
        measured=True,
    )
