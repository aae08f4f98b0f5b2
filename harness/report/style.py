"""One look for all figures: an arm keeps its colour, line and marker everywhere."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness.report.load import Experiment

# Okabe and Ito's palette without its yellow, which is too pale for a line on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (6, 2, 1, 2)), (0, (2, 1.5)), (0, (9, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LEGEND_LINE, FREE_LINES = 0.22, 4  # inches of a legend's line; lines that need no more room
GREY, DARK = "#767676", "#333333"
HATCHES = ("", "//", "\\\\", "--", "||", "xx", "++", "oo")

RC: Any = {
    "svg.hashsalt": "harness",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": DARK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "lines.markersize": 5,
    "hatch.linewidth": 0.6,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Look:
    """How one arm is drawn."""

    colour: str
    line: Any
    marker: str

    @property
    def curve(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker}

    @property
    def plain(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.line}


def looks(experiment: Experiment) -> dict[str, Look]:
    """Arm -> look: the arms by their order in the spec, the controls in grey."""
    found = {"base": Look(GREY, (0, (1, 1.2)), "."), "placebo": Look(GREY, (0, (5, 2)), "x")}
    for place, arm in enumerate(experiment.arms):
        around = place + place // len(PALETTE)  # a colour that comes again has another line
        found[arm] = Look(
            PALETTE[place % len(PALETTE)],
            LINES[around % len(LINES)],
            MARKERS[place % len(MARKERS)],
        )
    return found


def panels(count: int, width: float = 5.2, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, at most two abreast."""
    from matplotlib.figure import Figure

    columns = min(count, 2)
    width, height = (width * 1.2, height * 1.1) if count == 1 else (width, height)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def legend_below(figure: Figure, axes: Axes, order: Sequence[str] = ()) -> None:
    """One legend for the whole figure, below it, each name once."""
    handles, labels = axes.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))
    names = [n for n in order if n in found] + [n for n in found if n not in order]
    if names:
        columns = _columns(figure, names)
        lines = math.ceil(len(names) / columns)
        # What is drawn keeps its size: a legend of many lines is added to the figure's height.
        figure.set_figheight(figure.get_figheight() + LEGEND_LINE * max(0, lines - FREE_LINES))
        figure.legend(
            [found[n] for n in names],
            names,
            loc="outside lower center",
            ncols=columns,
            handlelength=3.2,
        )


def _columns(figure: Figure, names: Sequence[str]) -> int:
    """As many legend entries abreast as the figure is wide: lines take 5 em, letters 0.6."""
    em = RC["font.size"] / 72
    entry = em * (5.5 + 0.62 * max(map(len, names)))
    fit = max(1, int(figure.get_figwidth() / entry))
    rows = math.ceil(len(names) / fit)
    return math.ceil(len(names) / rows)


def render(figure: Figure) -> dict[str, bytes]:
    """The figure as PNG and SVG; equal figures give equal bytes."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def styled() -> Any:
    """The context in which figures are drawn and rendered, whatever the user's own settings."""
    return matplotlib.rc_context({**_defaults(), **RC})


def _defaults() -> dict[Any, Any]:
    from matplotlib import rcParamsDefault

    ours: dict[Any, Any] = dict(rcParamsDefault)
    for key in ("backend", "backend_fallback"):
        ours.pop(key, None)
    return ours
