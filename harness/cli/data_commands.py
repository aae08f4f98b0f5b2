"""Commands on files of completions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.show import print_json, print_table
from harness.errors import InputError, counted

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def register(app: typer.Typer) -> None:
    app.command()(grade)
    app.command()(metrics)


def grade(
    file: Annotated[Path, typer.Argument(help="JSON lines of {id, gold, completion}.")],
    answer_format: Annotated[
        str, typer.Option(help="auto, boxed, gsm8k, last_number or marker: where answers stand.")
    ] = "auto",
    json: AsJson = False,
) -> None:
    """Grade completions: a row {id, correct, outcome, extracted} for each, in order."""
    import json as json_module

    from harness.grade_file import grade_rows

    rows = grade_rows(file, answer_format=answer_format)  # type: ignore[arg-type]
    if json:
        for row in rows:
            print(json_module.dumps(row, ensure_ascii=False))
        return
    columns = ["id", "correct", "outcome", "extracted"]
    print_table(str(file), columns, [[row[c] for c in columns] for row in rows])


def metrics(
    file: Annotated[Path, typer.Argument(help="JSON lines of {problem, correct, answer}.")],
    k: Annotated[str, typer.Option(help="Values of K, with commas.")] = "1",
    json: AsJson = False,
) -> None:
    """Exact Pass@K, Maj@K and Avg@K of samples, averaged over problems."""
    from harness.grade_file import metrics_rows

    found = metrics_rows(file, _numbers(k))
    if json:
        print_json(found)
        return
    rows: list[tuple[Any, ...]] = []
    for name in ("pass@k", "maj@k", "avg@k"):
        for at, value in found[name].items():
            rows.append((name.replace("k", at), f"{value:.6f}"))
    print_table(f"{file}: {counted(found['problems'], 'problem')}", ["metric", "value"], rows)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--k {text!r}: give whole numbers with commas, such as 1,2,4") from None
    if not found or min(found) < 1:
        raise InputError(f"--k {text!r}: every K is at least 1")
    return found
