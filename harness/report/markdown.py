"""REPORT.md: the report for a terminal, a diff or a code host."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.content import (
    Block,
    Facts,
    Folders,
    Samples,
    Section,
    Text,
    Warnings,
    facts,
)
from harness.report.load import Experiment
from harness.report.plots import Plot
from harness.report.tables import Table


def to_markdown(
    experiment: Experiment, sections: Sequence[Section], head: Facts | None = None
) -> str:
    """The whole report; ``head``: the facts below its title, those of the experiment if None."""
    lines = [f"# {experiment.name}", "", str(experiment.spec.get("question", "")), ""]
    lines += [_block(head or facts(experiment)), ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [_block(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Warnings):
        return "\n".join(f"> **Note.** {item}\n>" for item in block.items).removesuffix("\n>")
    if isinstance(block, Facts):
        return "\n".join(f"- {name}: {value}" for name, value in block.items)
    if isinstance(block, Folders):
        return "\n".join(f"- [{c.folder}]({c.folder}/) ({c.status})" for c in block.cells)
    if isinstance(block, Samples):
        return _samples(block)
    if isinstance(block, Plot):
        image = f"![{block.title}](figures/{block.name}.svg)"
        return f"{image}\n\n*{block.title}.* {block.caption}"
    return _table(block)


def _table(table: Table) -> str:
    files = ", ".join(f"[{kind}](tables/{table.name}.{kind})" for kind in ("csv", "tex"))
    return f"{table.markdown()}\nFiles: {files}"


def _samples(block: Samples) -> str:
    lines = []
    for comparison in block.comparisons:
        lines += [f"### {comparison.problem}", "", _fenced(comparison.question), ""]
        lines += [f"Gold answer: `{comparison.gold}`", ""]
        for written in comparison.written:
            lines += [f"{written.arm} ({written.outcome}):", "", _fenced(written.completion), ""]
    return "\n".join(lines).rstrip()


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
