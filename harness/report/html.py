"""report.html: one file that asks the network for nothing and needs no script."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape

from harness.errors import counted
from harness.report.content import (
    Block,
    Facts,
    Folders,
    Samples,
    Section,
    Text,
    Warnings,
    certificate_line,
    facts,
)
from harness.report.load import Experiment
from harness.report.plots import Plot
from harness.report.samples import Written
from harness.report.stylesheet import CSS
from harness.report.tables import Table

_LONG = 16  # rows from which a table scrolls in its own box
_INTERVAL = re.compile(r"\[[^\[\]]*\]")
_SHORT = 24  # characters up to which a cell keeps to one line
_DENSE = 10  # columns from which they stand closer
_PHRASE, _PROSE = 32, 60  # from which it needs room to be read


def to_html(experiment: Experiment, sections: Sequence[Section], head: Facts | None = None) -> str:
    """The whole report; ``head``: the facts below its title, those of the experiment if None."""
    name = escape(experiment.name)
    question = escape(str(experiment.spec.get("question", "")))
    links = "\n".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in sections)
    body = "\n".join(_section(s) for s in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{name}: report</title>
<style>
{CSS}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header>
<p class="name">{name}</p>
<h1>{question or name}</h1>
{_badge(experiment)}
{_block(head or facts(experiment))}
<nav aria-label="Contents"><ul>
{links}
</ul></nav>
</header>
<main id="main">
{body}
</main>
</body>
</html>
"""


def _badge(experiment: Experiment) -> str:
    certificate = experiment.certificate
    if certificate is None:
        kind, text = "unknown", "not audited"
    elif certificate.get("certified") is True:
        kind, text = "yes", "certified"
    else:
        kind, text = "no", "NOT certified"
    title = escape(certificate_line(experiment), quote=True)
    return f'<p class="badge {kind}" title="{title}">{text}</p>'


def _section(section: Section) -> str:
    blocks = "\n".join(_block(b) for b in section.blocks)
    anchor = section.anchor
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-title">\n'
        f'<h2 id="{anchor}-title">{escape(section.title)}</h2>\n{blocks}\n</section>'
    )


def _block(block: Block) -> str:
    if isinstance(block, Text):
        kind = ' class="lead"' if block.strong else ""
        return f"<p{kind}>{escape(block.text)}</p>"
    if isinstance(block, Warnings):
        items = "\n".join(f"<li>{escape(item)}</li>" for item in block.items)
        return f'<ul class="warnings" role="note">\n{items}\n</ul>'
    if isinstance(block, Facts):
        items = "\n".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in block.items
        )
        return f'<dl class="facts">\n{items}\n</dl>'
    if isinstance(block, Folders):
        items = "\n".join(
            f"<li>{_folder_link(c.folder)} <span>{c.status}</span></li>" for c in block.cells
        )
        return f'<ul class="folders">\n{items}\n</ul>'
    if isinstance(block, Samples):
        return _samples(block)
    if isinstance(block, Plot):
        return _plot(block)
    return _table(block)


def _folder_link(folder: str) -> str:
    return f'<a href="{escape(folder, quote=True)}/">{escape(folder)}</a>'


def _plot(plot: Plot) -> str:
    data = base64.b64encode(plot.images["svg"]).decode()
    alt = escape(plot.alt, quote=True)
    wide = " wide" if plot.panels > 1 else ""
    links = " ".join(
        f'<a href="figures/{plot.name}.{kind}">{kind.upper()}</a>' for kind in ("png", "svg")
    )
    return (
        f'<figure id="figure-{plot.name}">\n<div class="picture{wide}" tabindex="0">'
        f'<img src="data:image/svg+xml;base64,{data}" alt="{alt}"></div>\n'
        f"<figcaption><b>{escape(plot.title)}.</b> {escape(plot.caption)} "
        f'<span class="files">{links}</span></figcaption>\n</figure>'
    )


def _table(table: Table) -> str:
    head = "".join(_head(table, place) for place in range(len(table.columns)))
    rows = "\n".join(f"<tr>{_cells(table, place)}</tr>" for place in range(len(table.rows)))
    long = " long" if len(table.rows) > _LONG else ""
    dense = ' class="dense"' if len(table.columns) >= _DENSE else ""
    title = escape(table.title)
    links = " ".join(
        f'<a href="tables/{table.name}.{kind}">{kind.upper()}</a>' for kind in ("csv", "md", "tex")
    )
    return (
        f'<div class="table" id="table-{table.name}">\n'
        f'<p class="title" id="title-{table.name}">{title}</p>\n'
        f'<div class="scroll{long}" tabindex="0" role="region" '
        f'aria-labelledby="title-{table.name}">\n'
        f'<table{dense} aria-labelledby="title-{table.name}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table>\n</div>\n"
        f'<p class="note">{escape(table.note)} <span class="files">{links}</span></p>\n'
        f"{_sources(table)}</div>"
    )


def _head(table: Table, place: int) -> str:
    kind = "" if place < table.labels else ' class="number"'
    return f'<th scope="col"{kind}>{escape(table.columns[place])}</th>'


def _cells(table: Table, row: int) -> str:
    found = []
    for place, text in enumerate(table.rows[row]):
        shown = escape(text)
        if place == 0:
            found.append(f'<th scope="row">{shown}</th>')
        else:
            kinds = [] if place < table.labels else ["number"]
            kinds += ["differs"] if text.startswith("≠") else []
            kinds += _width(text) if place < table.labels else []
            kind = f' class="{" ".join(kinds)}"' if kinds else ""
            if place >= table.labels:  # an interval may go to the next line, but never breaks
                shown = _INTERVAL.sub(r'<span class="word">\g<0></span>', shown)
            found.append(f"<td{kind}>{shown}</td>")
    return "".join(found)


def _width(text: str) -> list[str]:
    """The class of a label by its length: short ones keep to one line, long ones get room."""
    if len(text) <= _SHORT:
        return ["short"] if " " in text else ["short", "word"]
    if len(text) < _PHRASE:
        return []
    return ["prose"] if len(text) >= _PROSE else ["phrase"]


def _sources(table: Table) -> str:
    if not table.sources:
        return ""
    links = ", ".join(
        _folder_link(s) if s.startswith("runs/") else f'<a href="{s}">{s}</a>'
        for s in table.sources
    )
    count = len(table.sources)
    of = counted(count, "source")
    return f'<details class="sources"><summary>From {of}</summary><p>{links}</p></details>\n'


def _samples(block: Samples) -> str:
    found = []
    for c in block.comparisons:
        columns = "\n".join(_written(w) for w in c.written)
        found.append(
            f'<article class="sample">\n<h3>{escape(c.problem)}</h3>\n'
            f"<pre>{escape(c.question)}</pre>\n<p>Gold answer: <code>{escape(c.gold)}</code></p>\n"
            f'<div class="columns">\n{columns}\n</div>\n</article>'
        )
    return "\n".join(found)


def _written(written: Written) -> str:
    right = "right" if written.outcome == "correct" else "wrong"
    mark = "✓" if right == "right" else "✗"
    read = f", read as {written.extracted}" if written.extracted is not None else ""
    return (
        f'<div class="{right}"><h4>{escape(written.arm)}</h4>'
        f"<pre>{escape(written.completion)}</pre>"
        f'<p class="verdict">{mark} {escape(written.outcome.replace("_", " "))}{escape(read)}</p>'
        f'<p class="verdict">{_folder_link(written.folder)}</p></div>'
    )
