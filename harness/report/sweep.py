"""The pooled report of a sweep: every case's scores side by side, and against what was swept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import InputError, counted
from harness.report.content import Block, Section, Text, Warnings
from harness.report.frontier import Frontier, frontier_tables, frontiers, over_optimisation
from harness.report.frontier_plots import frontier_plots
from harness.report.html import to_html
from harness.report.load import Experiment, load_experiment
from harness.report.markdown import to_markdown
from harness.report.plots import Plot
from harness.report.scores import AVG, TestScores, final_scores, paired
from harness.report.style import legend_below, looks, panels, render, styled
from harness.report.tables import Table, in_percent, in_points, setting
from harness.store import SWEEP_FILE, write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FROM = 4.0  # a positive axis whose ends are this far apart is drawn in powers of two


@dataclass(frozen=True)
class CaseResults:
    """One case of a sweep as it stands on disk."""

    name: str
    sets: Mapping[str, Any]
    experiment: Experiment

    @cached_property
    def scores(self) -> dict[str, TestScores]:
        return {test.name: test for test in final_scores(self.experiment)}

    @property
    def certified(self) -> bool:
        certificate = self.experiment.certificate
        return bool(certificate and certificate.get("certified") is True)


@dataclass(frozen=True)
class SweepResults:
    """A sweep's folder; ``cases`` are those that have begun.

    ``missing``: names of those that have not.
    """

    path: Path
    name: str
    question: str
    axes: Mapping[str, Sequence[Any]]
    cases: tuple[CaseResults, ...]
    missing: tuple[str, ...]

    @property
    def shown(self) -> tuple[str, ...]:
        """Controls and arms, in the first case's order."""
        return tuple(dict.fromkeys(a for case in self.cases for a in case.experiment.shown))

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for case in self.cases for name in case.scores))


@dataclass(frozen=True)
class SweepFiles:
    """What was written."""

    html: Path
    markdown: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]


def load_sweep_results(folder: Path) -> SweepResults:
    """Read a sweep's results folder.

    Raises:
        InputError: no ``sweep.json``, or no case that has begun.
    """
    file = folder / SWEEP_FILE
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        cases = [(str(case["name"]), dict(case["sets"])) for case in made["cases"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); run the sweep again") from error
    begun = [(name, sets) for name, sets in cases if (folder / name / "spec.lock.yaml").is_file()]
    if not begun:
        raise InputError(f"{folder}: no case of the sweep has begun; run it first")
    found = tuple(CaseResults(n, sets, load_experiment(folder / n)) for n, sets in begun)
    missing = tuple(name for name, _ in cases if name not in {n for n, _ in begun})
    return SweepResults(folder, made["name"], made["question"], made["axes"], found, missing)


def write_sweep_report(folder: Path) -> SweepFiles:
    """Write ``tables/``, ``figures/``, ``REPORT.md`` and ``report.html`` of a sweep's folder.

    Raises:
        InputError: as ``load_sweep_results``.
    """
    sweep = load_sweep_results(folder)
    found = frontiers([(case.name, case.experiment) for case in sweep.cases])
    tables = [table for test in sweep.tests for table in _tables(sweep, test)]
    tables += frontier_tables(found)
    plots = [*_plots(sweep), *frontier_plots(found, sweep.cases[0].experiment)]
    page = _page(sweep)
    sections = _sections(sweep, tables, plots, found)
    texts = {
        folder / "tables" / f"{table.name}.{kind}": text
        for table in (*tables, _cases_table(sweep))
        for kind, text in (
            ("csv", table.csv()), ("md", table.markdown()), ("tex", table.latex())
        )
    }  # fmt: skip
    images = {
        folder / "figures" / f"{plot.name}.{kind}": image
        for plot in plots
        for kind, image in plot.images.items()
    }
    for path, text in texts.items():
        write_text(path, text)
    for path, image in images.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, image)
    html, markdown = folder / "report.html", folder / "REPORT.md"
    write_text(markdown, to_markdown(page, sections))
    write_text(html, to_html(page, sections))
    return SweepFiles(html, markdown, tuple(texts), tuple(images))


def _page(sweep: SweepResults) -> Experiment:
    """The sweep as the page's head shows it: certified where every case is."""
    first = sweep.cases[0].experiment
    whole = all(case.certified for case in sweep.cases) and not sweep.missing
    spec = {**first.spec, "name": sweep.name, "question": sweep.question}
    certificate = {**(first.certificate or {}), "certified": whole}
    if not whole:
        certificate["violations"] = [
            violation
            for case in sweep.cases
            for violation in (case.experiment.certificate or {}).get("violations", [])
        ]
    cells = tuple(cell for case in sweep.cases for cell in case.experiment.cells)
    return replace(first, path=sweep.path, spec=spec, certificate=certificate, cells=cells)


def _sections(
    sweep: SweepResults,
    tables: Sequence[Table],
    plots: Sequence[Plot],
    found: Sequence[Frontier],
) -> list[Section]:
    lead: list[Block] = [
        Text(
            f"{counted(len(sweep.cases), 'matched experiment')}, of which "
            f"{sum(case.certified for case in sweep.cases)} are certified: within each, all arms "
            "had the same data, reward, budget and settings; between them, what the table of "
            "cases names was changed.",
            strong=True,
        )
    ]
    if sweep.missing:
        lead.append(Warnings((f"Not begun: {', '.join(sweep.missing)}.",)))
    return [
        Section("What was swept", (*lead, *(p for p in plots if _swept(p)))),
        *_frontier_section(tables, plots, found),
        Section("Scores by case", tuple(t for t in tables if _swept(t))),
        Section("Cases", (_cases_table(sweep),)),
    ]


def _swept(block: Table | Plot) -> bool:
    """Whether it is of the sweep, rather than of the frontier."""
    return block.name.startswith("sweep_")


def _frontier_section(
    tables: Sequence[Table], plots: Sequence[Plot], found: Sequence[Frontier]
) -> list[Section]:
    if not found:
        return []
    said = [Text(sentence) for f in found for sentence in over_optimisation(f)]
    blocks = [*said, *(p for p in plots if not _swept(p)), *(t for t in tables if not _swept(t))]
    return [Section("Reward against KL", tuple(blocks))]


def _cases_table(sweep: SweepResults) -> Table:
    paths = list(dict.fromkeys(path for case in sweep.cases for path in case.sets))
    rows = [
        [
            case.name,
            *(setting(case.sets[path]) if path in case.sets else "–" for path in paths),
            "certified" if case.certified else "NOT certified",
            f"{case.name}/report.html",
        ]
        for case in sweep.cases
    ]
    return Table(
        "cases",
        "The cases of the sweep",
        "Each is an experiment with a lock, a certificate and a report of its own.",
        ("case", *paths, "certificate", "report"),
        rows,
        labels=1,
        sources=[case.name for case in sweep.cases],
    )


def _tables(sweep: SweepResults, test: str) -> list[Table]:
    """Score and paired difference, arm by case."""
    return [
        _table(
            sweep, test, "sweep", f"Average accuracy on {test} at the end, by case, %",
            "Mean over seeds and problems with its 95 % interval; accuracy averaged over samples.",
            lambda scores, arm, _: (
                in_percent(scores.arms[arm].estimates[AVG]),
                _numbers(scores.arms[arm].estimates[AVG]),
            ),
        ),
        _table(
            sweep, test, "sweep_paired", f"Difference to the baseline on {test}, by case, points",
            f"Arm less {sweep.cases[0].experiment.baseline}, paired by seed and problem, with its "
            "95 % interval.",
            _paired_cell,
        ),
    ]  # fmt: skip


Entry = tuple[str, dict[str, Any]]


def _paired_cell(scores: TestScores, arm: str, experiment: Experiment) -> Entry | None:
    if arm == experiment.baseline or experiment.baseline not in scores.arms:
        return None
    gap = paired(scores, arm, experiment.baseline).get(AVG)
    return None if gap is None else (in_points(gap), _numbers(gap.estimate))


def _numbers(e: Any) -> dict[str, Any]:
    return {"mean": e.mean, "low": e.low, "high": e.high, "seeds": e.seeds, "problems": e.problems}


def _table(
    sweep: SweepResults,
    test: str,
    name: str,
    title: str,
    note: str,
    cell: Callable[[TestScores, str, Experiment], Entry | None],
) -> Table:
    rows, records = [], []
    for arm in sweep.shown:
        row = [arm]
        for case in sweep.cases:
            scores = case.scores.get(test)
            made = None
            if scores is not None and arm in scores.arms:
                made = cell(scores, arm, case.experiment)
            row.append("–" if made is None else made[0])
            if made is not None:
                records.append({"case": case.name, "arm": arm, **case.sets, **made[1]})
        if any(text != "–" for text in row[1:]):
            rows.append(row)
    return Table(
        f"{name}_{test}", title, note, ("arm", *(case.name for case in sweep.cases)), rows,
        records=records, sources=[case.name for case in sweep.cases],
    )  # fmt: skip


def _plots(sweep: SweepResults) -> list[Plot]:
    """A figure of each test set, where a grid gives an axis to draw along."""
    numeric = [p for p, values in sweep.axes.items() if all(_is_number(v) for v in values)]
    if not numeric:
        return []
    along, *others = numeric
    found = []
    with styled():
        for test in sweep.tests:
            figure, count = _figure(sweep, test, along, others[0] if others else None)
            found.append(
                Plot(
                    f"sweep_{test}",
                    f"Accuracy on {test} against {along}",
                    "Mean over seeds with its 95 % interval over seeds and problems"
                    + (f"; a panel for each {others[0]}." if others else "."),
                    f"Accuracy against {along} for {', '.join(sweep.shown)}. The numbers are in "
                    f"table sweep_{test}.",
                    render(figure),
                    count,
                )
            )
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _figure(sweep: SweepResults, test: str, along: str, by: str | None) -> tuple[Figure, int]:
    values = list(sweep.axes[by]) if by else [None]
    figure, axes = panels(len(values))
    style = looks(sweep.cases[0].experiment)
    for panel, value in zip(axes, values, strict=True):
        chosen = [case for case in sweep.cases if by is None or case.sets.get(by) == value]
        for arm in sweep.shown:
            _line(panel, chosen, test, along, arm, style[arm])
        if _spread_out(sweep.axes[along]):
            panel.set_xscale("log", base=2)
        panel.set_xticks(list(sweep.axes[along]), [setting(v) for v in sweep.axes[along]])
        panel.minorticks_off()
        panel.set_xlabel(along)
        panel.set_ylabel("accuracy, %")
        if by:
            panel.set_title(f"{by} {setting(value)}")
    low, high = (f(panel.get_ylim()[i] for panel in axes) for i, f in ((0, min), (1, max)))
    for panel in axes:
        panel.set_ylim(low, high)
    legend_below(figure, axes[0], sweep.shown)
    return figure, len(values)


def _spread_out(values: Sequence[Any]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= LOG_FROM


def _line(
    panel: Axes, cases: Sequence[CaseResults], test: str, along: str, arm: str, look: Any
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
