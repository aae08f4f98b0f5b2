"""What the report says, in order, free of any markup; HTML and Markdown spell it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import counted
from harness.report.exploratory import amendment_sentences
from harness.report.frontier import FRONTIER, frontiers
from harness.report.load import Cell, Experiment
from harness.report.notices import notices, summary
from harness.report.plots import Plot
from harness.report.samples import Comparison
from harness.report.scores import TestScores
from harness.report.table_checkpoints import selected_checkpoints
from harness.report.table_frontier import over_optimisation
from harness.report.table_ladder import ladder_sentences
from harness.report.table_tuning import effort_sentence
from harness.report.table_verdict import verdict_sentences
from harness.report.tables import Table, budget, setting


@dataclass(frozen=True)
class Text:
    """A paragraph; ``strong`` for the sentence the report turns on."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Warnings:
    """Sentences that stand out."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Folders:
    """Links to the folders of cells."""

    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Samples:
    """Completions side by side."""

    comparisons: tuple[Comparison, ...]


Block = Text | Warnings | Facts | Folders | Samples | Table | Plot


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower()).strip("-")


def compose(
    experiment: Experiment,
    scores: Sequence[TestScores],
    tables: Sequence[Table],
    plots: Sequence[Plot],
    comparisons: Sequence[Comparison],
) -> list[Section]:
    """The report's sections; those with nothing to show are left out."""
    by_table, by_plot = {t.name: t for t in tables}, {p.name: p for p in plots}

    def pick(*names: str) -> list[Block]:
        """By name: ``t:`` a table that has rows, ``p:`` a figure."""
        found: list[Block] = []
        for name in names:
            kind, _, stem = name.partition(":")
            block = (by_table if kind == "t" else by_plot).get(stem)
            if block is not None and not (isinstance(block, Table) and not block.rows):
                found.append(block)
        return found

    sections = [
        ("What the data say", _lead(experiment, scores)),
        ("Verdicts", pick("t:verdict", "t:sensitivity")),
        ("Score at matched budget", pick("t:final", "p:learning_flops", "t:paired", "t:gain",
                                         "t:checkpoints")),
        ("Reward against KL", _against_kl(experiment, tables, plots)),
        ("Equal in another unit", pick("t:exchange")),
        ("The ladder", _ladder(experiment, scores, pick(
            "p:ladder", "t:ladder", "p:attribution", "t:attribution"))),
        ("Pass@K and Maj@K", pick("p:pass_maj_at_k", "t:crossover")),
        ("By level and subject", pick("t:levels")),
        ("How the arms differ", pick("t:arms", "t:controls", "t:data")),
        ("Tuning", _effort(experiment, pick("t:tuning", "p:tuning", "p:effort", "t:effort"))),
        ("Training", pick("p:training", "p:learning_tokens", "t:sigmoid", "t:diagnostics",
                          "p:length_entropy", "p:signal", "t:outcomes")),
        ("Cost", pick("t:flops", "p:flops", "t:budget", "t:memory", "p:memory")),
        ("Measured on this machine", _measured(pick(
            "p:learning_seconds", "t:exchange_measured", "t:seconds", "t:memory_measured",
            "p:memory_measured"))),
        ("Samples", _samples(comparisons)),
        ("Failed and missing cells", pick("t:failures") or [Text("Every cell is finished.")]),
        ("How this was made", _provenance(experiment)),
    ]  # fmt: skip
    return [Section(title, tuple(blocks)) for title, blocks in sections if blocks]


def _lead(experiment: Experiment, scores: Sequence[TestScores]) -> list[Block]:
    blocks: list[Block] = [Text(summary(experiment, scores), strong=True)]
    blocks += [Text(sentence) for sentence in verdict_sentences(experiment, scores)]
    blocks.append(Text(certificate_line(experiment)))
    certificate = experiment.certificate or {}
    broken = [v.get("message", str(v)) for v in certificate.get("violations") or []]
    if broken:
        blocks.append(Warnings(tuple(f"Violation: {message}" for message in broken)))
    found = [*amendment_sentences(experiment), *selected_checkpoints(experiment)]
    if found := [*found, *notices(experiment, scores)]:
        blocks.append(Warnings(tuple(found)))
    return blocks


def _against_kl(
    experiment: Experiment, tables: Sequence[Table], plots: Sequence[Plot]
) -> list[Block]:
    """Of an experiment on a learned reward; nothing of another."""
    said = [Text(s) for f in frontiers([("", experiment)]) for s in over_optimisation(f)]
    return [
        *said,
        *(p for p in plots if p.name.startswith(FRONTIER)),
        *(t for t in tables if t.name.startswith(FRONTIER)),
    ]


def certificate_line(experiment: Experiment) -> str:
    """Whether the arms were shown to be matched."""
    certificate = experiment.certificate
    if certificate is None:
        return "Certificate: not audited. Nothing here shows that the arms were matched."
    if certificate.get("certified") is True:
        checks = len(certificate.get("checks") or [])
        passed = f" ({checks} checks)" if checks else ""
        return (
            f"Certificate: certified{passed}. From the records, the arms differ only in what "
            "they declare."
        )
    count = len(certificate.get("violations") or [])
    return (
        f"Certificate: NOT certified ({counted(count, 'violation')}). The comparison is "
        "not shown to be controlled."
    )


def facts(experiment: Experiment) -> Facts:
    """The experiment in a few lines."""
    spec = experiment.spec
    tuning = spec.get("tuning")
    named = [arm for arm in experiment.drawn if arm in experiment.arms]
    more = len(experiment.arms) - len(named)
    effort = "none"
    if tuning:
        share = setting(tuning["budget_fraction"])
        effort = f"{counted(tuning['trials'], 'trial')} an arm, each at {share} of the budget"
    return Facts(
        (
            ("Arms", ", ".join(named) + (f" and {more} more" if more else "")),
            ("Controls", ", ".join(experiment.controls) or "none"),
            ("Baseline", experiment.baseline),
            ("Model", str(spec["model"]["name"])),
            ("Test sets", ", ".join(spec["data"]["test"])),
            ("Seeds", setting(list(experiment.seeds))),
            ("Budget", f"{budget(spec)} a run"),
            ("Tuning", effort),
        )
    )


def _ladder(
    experiment: Experiment, scores: Sequence[TestScores], blocks: list[Block]
) -> list[Block]:
    """What the ladder's arms say, and why nothing is said where they cannot say it."""
    if not experiment.ladder:
        return []
    return [*(Text(sentence) for sentence in ladder_sentences(experiment, scores)), *blocks]


def _effort(experiment: Experiment, blocks: list[Block]) -> list[Block]:
    sentence = effort_sentence(experiment) if blocks else None
    return [Text(sentence), *blocks] if sentence else blocks


def _measured(blocks: list[Block]) -> list[Block]:
    if not blocks:
        return []
    note = "Seconds and measured memory depend on the machine; a second run differs in them alone."
    return [Text(note), *blocks]


def _samples(comparisons: Sequence[Comparison]) -> list[Block]:
    if not comparisons:
        return []
    note = (
        "Each arm's first completion of the same problems at the final evaluation, one seed; the "
        "problems stand at even distances through the test set and were not picked by hand."
    )
    return [Text(note), Samples(tuple(comparisons))]


def _provenance(experiment: Experiment) -> list[Block]:
    name = experiment.name
    hashes = experiment.lock.get("hashes") or {}
    items = [
        (
            "Command",
            f"make run EXP={name}, with --set, --plugin and --results where they were given: "
            "spec.lock.yaml holds the spec as run",
        ),
        ("This report again", "harness report, with the path of this folder"),
        *environment(experiment),
        *((f"SHA-256 of {key}", str(value)) for key, value in sorted(hashes.items())),
    ]
    begun = tuple(c for c in experiment.cells if c.status != "missing")
    return [
        Facts(tuple(items)),
        Text("Every number is computed from the files in these folders and spec.lock.yaml:"),
        Folders(begun),
    ]


def environment(experiment: Experiment) -> list[tuple[str, str]]:
    """Where the cells ran; a line with several values means that they ran in several places."""
    values: dict[str, list[str]] = {}
    for cell in experiment.cells:
        for key, value in _flat(cell.environment):
            known = values.setdefault(key, [])
            if value not in known:
                known.append(value)
    return [(key, "; ".join(found)) for key, found in values.items()]


def _flat(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            found.append((key, ", ".join(f"{k} {v}" for k, v in sorted(value.items()))))
        else:
            found.append((key, setting(value)))
    return found
