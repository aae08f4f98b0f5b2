"""Commands on arms alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.show import print_json, print_table, say
from harness.errors import CELL_FAILED

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Plugins = Annotated[
    list[Path] | None, typer.Option("--plugin", help="A Python file that defines arms.")
]


def register(app: typer.Typer) -> None:
    app.command()(conformance)


def conformance(
    arms: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARM...", help="Default: the plugin's arms; without one, all."),
    ] = None,
    plugin: Plugins = None,
    json: AsJson = False,
) -> None:
    """Check that arms are what they say, by figures. Exit code 1 if a check fails."""
    from harness.arms import find_arms, list_arms
    from harness.conformance import Outcome, check_arm

    plugins = plugin or []
    found = find_arms(arms, plugins) if arms else list_arms(plugins)
    if plugins and not arms:
        found = {name: f for name, f in found.items() if f.origin.startswith("plugin ")}
    reports = []
    for item in found.values():
        report = check_arm(item.arm)
        reports.append(report)
        if not json:
            counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in Outcome)
            rows = [(f.outcome, f.check, f.detail) for f in report.findings]
            print_table(f"{report.arm}: {counts}", ["", "check", "figures, or why not"], rows)
            say("")
    broken = [report.arm for report in reports if not report.passed]
    if json:
        print_json([
            {"name": report.arm, "origin": item.origin, "passed": report.passed, "checks": [
                {"name": f.check, "outcome": f.outcome, "detail": f.detail}
                for f in report.findings
            ]}
            for report, item in zip(reports, found.values(), strict=True)
        ])  # fmt: skip
    elif len(reports) > 1 or broken:
        say(f"{len(reports) - len(broken)} of {len(reports)} arms conform"
            + (f"; not {', '.join(broken)}" if broken else ""))  # fmt: skip
    if broken:
        raise typer.Exit(CELL_FAILED)
