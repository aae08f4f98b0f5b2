"""The command that puts several experiments side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.contexts import results_of
from harness.cli.show import print_json, print_table, say


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    results: Annotated[
        list[str],
        typer.Argument(
            help="Results folders or names of experiments; of a sweep, each of its cases.",
            metavar="RESULTS...",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="A folder for COMPARE.md and the tables.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Put experiments side by side: scores, verdicts, certificates, and what they differ in.

    Arms of different experiments are not matched; only differences within one are controlled.
    """
    from harness.report.compare import compare as put_together
    from harness.report.compare import write_comparison

    made = put_together([folder for one in results for folder in results_of(one, None)])
    written = write_comparison(made, out) if out is not None else ()
    if json:
        print_json(made.to_json())
        return
    for note in made.notes:
        say(f"note: {note}")
    for table in made.tables:
        if table.rows:
            say("")
            print_table(table.title, table.columns, table.rows)
            say(table.note)
    if written:
        say(f"\nwritten: {written[0]} and its tables")
