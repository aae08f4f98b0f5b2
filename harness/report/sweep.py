"""The pooled report of a sweep: every case's scores side by side, and against what was swept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import counted
from harness.report.content import Block, Facts, Section, Text, Warnings, facts
from harness.report.frontier import Frontier, frontiers
from harness.report.frontier_plots import frontier_plots
from harness.report.html import to_html
from harness.report.load import Experiment
from harness.report.markdown import to_markdown
from harness.report.plots import Plot
from harness.report.sweep_load import SweepResults, load_sweep_results
from harness.report.sweep_plots import sweep_plots
from harness.report.sweep_tables import cases_table, change_table, metric_tables
from harness.report.table_frontier import frontier_tables, over_optimisation
from harness.report.tables import Table
from harness.stats.effects import smallest_p
from harness.store import write_bytes, write_text


@dataclass(frozen=True)
class SweepFiles:
    """What was written."""

    html: Path
    markdown: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]


def write_sweep_report(folder: Path) -> SweepFiles:
    """Write ``tables/``, ``figures/``, ``REPORT.md`` and ``report.html`` of a sweep's folder.

    Raises:
        InputError: no ``sweep.json``, or no case that has begun.
    """
    sweep = load_sweep_results(folder)
    cases = cases_table(sweep)
    changes = [table for test in sweep.tests if (table := change_table(sweep, test)).rows]
    scores = [table for test in sweep.tests for table in metric_tables(sweep, test)]
    plots = sweep_plots(sweep)
    found = frontiers([(case.name, case.experiment) for case in sweep.cases])
    kl = frontier_tables(found), frontier_plots(found, sweep.cases[0].experiment)
    page, head = _page(sweep), _facts(sweep)
    sections = _sections(sweep, cases, changes, scores, plots, _against_kl(found, *kl))
    texts = {
        folder / "tables" / f"{table.name}.{kind}": text
        for table in (cases, *changes, *scores, *kl[0])
        for kind, text in (
            ("csv", table.csv()), ("md", table.markdown()), ("tex", table.latex())
        )
    }  # fmt: skip
    images = {
        folder / "figures" / f"{plot.name}.{kind}": image
        for plot in (*plots, *kl[1])
        for kind, image in plot.images.items()
    }
    for path, text in texts.items():
        write_text(path, text)
    for path, image in images.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, image)
    html, markdown = folder / "report.html", folder / "REPORT.md"
    write_text(markdown, to_markdown(page, sections, head))
    write_text(html, to_html(page, sections, head))
    return SweepFiles(html, markdown, tuple(texts), tuple(images))


def _page(sweep: SweepResults) -> Experiment:
    """The sweep as the page's head shows it: certified where every case is."""
    first = sweep.cases[0].experiment
    spec = {**first.spec, "name": sweep.name, "question": sweep.question}
    certificate = {
        "certified": sweep.certified,
        "violations": [line for case in sweep.cases for line in _violations(case.experiment)],
    }
    return replace(first, path=sweep.path, spec=spec, certificate=certificate)


def _violations(experiment: Experiment) -> list[dict[str, str]]:
    return list((experiment.certificate or {}).get("violations") or [])


def _facts(sweep: SweepResults) -> Facts:
    """As of one experiment; where the cases differ, what each of them has."""
    found: dict[str, list[str]] = {}
    for case in sweep.cases:
        for name, value in facts(case.experiment).items:
            known = found.setdefault(name, [])
            if value not in known:
                known.append(value)
    return Facts(tuple((name, " / ".join(values)) for name, values in found.items()))


def _sections(
    sweep: SweepResults,
    cases: Table,
    changes: Sequence[Table],
    scores: Sequence[Table],
    plots: Sequence[Plot],
    against_kl: Sequence[Block],
) -> list[Section]:
    main = {name for test in sweep.tests for name in (f"sweep_{test}", f"sweep_paired_{test}")}
    found: list[tuple[str, Sequence[Block]]] = [
        ("What the data say", _lead(sweep)),
        ("Against what was swept", plots),
        ("Reward against KL", against_kl),
        ("Average accuracy by case", [t for t in scores if t.name in main]),
        ("What each change does", changes),
        ("Other metrics by case", [t for t in scores if t.name not in main]),
        ("Cases", [cases]),
    ]
    return [Section(title, tuple(blocks)) for title, blocks in found if blocks]


def _against_kl(
    found: Sequence[Frontier], tables: Sequence[Table], plots: Sequence[Plot]
) -> list[Block]:
    """Of cases with a learned reward: how far it was followed, and what that was worth."""
    said = [Text(sentence) for one in found for sentence in over_optimisation(one)]
    return [*said, *plots, *tables] if found else []


def _lead(sweep: SweepResults) -> list[Block]:
    certified = sum(case.certified for case in sweep.cases)
    total = len(sweep.cases) + len(sweep.missing)
    blocks: list[Block] = [
        Text(
            f"{counted(total, 'experiment')}, of which {certified} "
            f"{'is' if certified == 1 else 'are'} certified as matched. Within a certified one the "
            "arms differ only in what they declare; between cases, what the table of cases names "
            "was changed, for all arms alike unless it is a setting of one.",
            strong=True,
        )
    ]
    warnings = [f"Not begun: {', '.join(sweep.missing)}."] if sweep.missing else []
    for case in sweep.cases:
        if not case.certified:
            warnings.append(f"{case.name}: {case.state}. Nothing shows that its arms were matched.")
        messages = [str(line.get("message", line)) for line in _violations(case.experiment)]
        warnings += [f"{case.name}: violation: {message}" for message in messages[:3]]
        if len(messages) > 3:
            warnings.append(f"{case.name}: {counted(len(messages) - 3, 'more violation')}.")
    fewest = min(len(case.experiment.seeds) for case in sweep.cases)
    if smallest_p(fewest) > 0.05:
        warnings.append(
            f"{counted(fewest, 'seed')} a case: an exact test over seeds cannot fall below p = "
            f"{smallest_p(fewest):.3g}, so no single difference is significant by it. The "
            "intervals also use the spread over problems, and are not corrected for their number."
        )
    return [*blocks, *([Warnings(tuple(warnings))] if warnings else [])]
