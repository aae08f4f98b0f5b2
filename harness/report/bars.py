"""Figures of amounts: memory by role, FLOPs by role and phase, tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.report.load import Experiment
from harness.report.style import DARK, HATCHES, PALETTE, legend_below, looks, panels
from harness.report.table_design import chosen_settings, chosen_trial, validation_score
from harness.report.table_machine import memory_by_role
from harness.report.table_spent import flops_shares

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory_bars(experiment: Experiment, which: str) -> Figure | None:
    """Bytes held at the peak by model role, stacked, an arm a bar."""
    by_role = memory_by_role(experiment, which)
    if not by_role:
        return None
    order = ("policy", "reference", "critic", "reward_model")
    largest = max(sum(bar.values()) for bar in by_role.values())
    unit = max(i for i in range(len(_UNITS)) if largest >= 1024**i or i == 0)
    scaled = {a: {r: n / 1024**unit for r, n in bar.items()} for a, bar in by_role.items()}
    return _stacked(experiment, scaled, order, f"{_UNITS[unit]}, {which}, by model role")


def flops_bars(experiment: Experiment) -> Figure | None:
    """Share of FLOPs by role and phase: where each arm's budget went."""
    shares = {
        arm: {key: 100 * value / sum(found.values()) for key, value in found.items()}
        for arm, found in flops_shares(experiment).items()
    }
    if not shares:
        return None
    order = (
        "policy/generate",
        "policy/score",
        "policy/train",
        "reference/score",
        "critic/score",
        "critic/train",
    )
    return _stacked(experiment, shares, order, "% of a run's FLOPs, by role/phase")


def _stacked(
    experiment: Experiment,
    bars: Mapping[str, Mapping[str, float]],
    order: Sequence[str],
    label: str,
) -> Figure:
    arms = [a for a in experiment.shown if a in bars]
    seen = {part for bar in bars.values() for part in bar}
    parts = [p for p in order if p in seen] + sorted(seen - set(order))
    figure, axes = panels(1, width=6.2, height=1.6 + 0.36 * len(arms))
    left = dict.fromkeys(arms, 0.0)
    for place, part in enumerate(parts):
        values = [bars[a].get(part, 0.0) for a in arms]
        axes[0].barh(
            arms,
            values,
            left=[left[a] for a in arms],
            label=part,
            color=PALETTE[place % (len(PALETTE) - 1)],
            hatch=HATCHES[place % len(HATCHES)],
            edgecolor="white",
            height=0.68,
        )
        for arm, value in zip(arms, values, strict=True):
            left[arm] += value
    axes[0].invert_yaxis()
    axes[0].grid(axis="y", visible=False)
    axes[0].set_xlabel(label)
    legend_below(figure, axes[0])
    return figure


def tuning_points(experiment: Experiment) -> Figure | None:
    """Validation score of every trial, arm by arm, the chosen one ringed."""
    figure, axes = panels(1, width=6.2, height=3.4)
    style, panel, drawn = looks(experiment), axes[0], 0
    for place, arm in enumerate(experiment.arms):
        trials = experiment.trial_cells(arm)
        chosen = chosen_trial(trials, chosen_settings(experiment, arm))
        count = max((c.trial or 0 for c in trials), default=0) + 1
        for cell in trials:
            score = validation_score(cell)
            if score is None:
                continue
            drawn += 1
            x = place + 0.6 * ((cell.trial or 0) + 0.5) / count - 0.3
            look = style[arm]
            panel.plot(x, 100 * score, look.marker, color=look.colour, ms=7)
            panel.annotate(
                str(cell.trial), (x, 100 * score), (0, 10), textcoords="offset points",
                ha="center", fontsize=8, color=DARK,
            )  # fmt: skip
            if cell.trial == chosen:
                panel.plot(x, 100 * score, "o", mfc="none", mec=DARK, ms=14, mew=1.3)
    panel.set_xticks(range(len(experiment.arms)), experiment.arms)
    panel.grid(axis="x", visible=False)
    panel.margins(x=0.08, y=0.18)
    panel.set_ylabel("score on validation, %")
    return figure if drawn else None
