"""Tables, figures and a report, as a pure function of the stored runs and the lock. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.report.content import compose
from harness.report.exploratory import marked
from harness.report.frontier import frontiers
from harness.report.frontier_plots import frontier_plots
from harness.report.html import to_html
from harness.report.load import Experiment, load_experiment
from harness.report.markdown import to_markdown
from harness.report.plots import Plot, draw_plots
from harness.report.samples import EXCERPT, excerpt, side_by_side
from harness.report.scores import TestScores, final_scores
from harness.report.table_checkpoints import checkpoints_table
from harness.report.table_curves import crossover_table, sigmoid_table
from harness.report.table_design import design_tables
from harness.report.table_exchange import exchange_table
from harness.report.table_frontier import frontier_tables
from harness.report.table_ladder import ladder_tables
from harness.report.table_machine import machine_tables
from harness.report.table_scores import score_tables
from harness.report.table_sensitivity import sensitivity_table
from harness.report.table_spent import spent_tables
from harness.report.table_tuning import effort_table
from harness.report.table_verdict import verdict_table
from harness.report.tables import Table
from harness.store import disk_errors, write_text

__all__ = ["ReportFiles", "write_report"]


@dataclass(frozen=True)
class ReportFiles:
    """What was written.

    Attributes:
        tables: CSV, Markdown and LaTeX of each table.
        figures: PNG and SVG of each figure.
        measured: those of the files above that depend on the machine, and so differ between two
            runs of the same seeds, as the two reports do.
    """

    html: Path
    markdown: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]
    measured: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.html, self.markdown, *self.tables, *self.figures)


def write_report(results: Path) -> ReportFiles:
    """Write ``tables/``, ``figures/``, ``REPORT.md`` and ``report.html`` of a results folder.

    The same stored files give the same bytes. Works on unfinished experiments: what is missing is
    listed, and enters no score.

    Raises:
        InputError: no such folder, no lock in it, or a stored file that is not what it should be.
        CellError: the disk is full or cannot be written.
    """
    experiment = load_experiment(results)
    scores = final_scores(experiment)
    tables = all_tables(experiment, scores)
    found = frontiers([("", experiment)])
    plots = [*draw_plots(experiment, scores), *frontier_plots(found, experiment)]
    comparisons = side_by_side(experiment)
    sections = compose(experiment, scores, tables, plots, comparisons)
    texts = _table_texts(results / "tables", tables)
    images = _plot_bytes(results / "figures", plots)
    for path, text in texts.items():
        write_text(path, text)
    for path, image in images.items():
        _write_bytes(path, image)
    if comparisons:
        write_text(results / EXCERPT, excerpt(comparisons))
    html, markdown = results / "report.html", results / "REPORT.md"
    write_text(markdown, to_markdown(experiment, sections))
    write_text(html, to_html(experiment, sections))
    measured = {x.name for x in [*tables, *plots] if x.measured}
    return ReportFiles(
        html,
        markdown,
        tuple(texts),
        tuple(images),
        tuple(path for path in (*texts, *images) if path.stem in measured),
    )


def all_tables(experiment: Experiment, scores: Sequence[TestScores]) -> list[Table]:
    """Every table of the report; what was not promised in advance is marked in each."""
    judging = [
        verdict_table(experiment, scores),
        checkpoints_table(experiment),
        exchange_table(experiment, scores),
        exchange_table(experiment, scores, measured=True),
        sensitivity_table(experiment, scores),
        effort_table(experiment),
        sigmoid_table(experiment, scores),
        crossover_table(experiment, scores),
    ]
    tables = [
        *design_tables(experiment),
        *score_tables(experiment, scores),
        *(table for table in judging if table.rows),
        *ladder_tables(experiment, scores),
        *spent_tables(experiment),
        *frontier_tables(frontiers([("", experiment)])),
        *machine_tables(experiment),
    ]
    return marked(experiment, tables)


def _table_texts(folder: Path, tables: Sequence[Table]) -> dict[Path, str]:
    return {
        folder / f"{table.name}.{kind}": text
        for table in tables
        for kind, text in (
            ("csv", table.csv()),
            ("md", table.markdown()),
            ("tex", table.latex()),
        )
    }


def _plot_bytes(folder: Path, plots: Sequence[Plot]) -> dict[Path, bytes]:
    return {
        folder / f"{plot.name}.{kind}": image
        for plot in plots
        for kind, image in plot.images.items()
    }


def _write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
