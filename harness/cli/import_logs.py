"""``harness audit --import``: what the logs of another library show."""

from __future__ import annotations

from pathlib import Path

from harness.cli.show import print_json, print_table, say
from harness.errors import NOT_CERTIFIED, shown


def audit_logs(library: str, logs: list[str], results: Path | None, json: bool) -> int:
    """Audit logs, print what was found, and write it where a folder is named.

    Returns:
        The exit code: 0 if certified.

    Raises:
        InputError: a log is not there or cannot be read.
    """
    from harness.certificate.imported import audit_imported, write_imported

    found = audit_imported(library, logs)
    if results is not None:
        write_imported(found, results)
    if json:
        print_json(found.to_json())
        return 0 if found.certified else NOT_CERTIFIED
    print_table(
        "certified" if found.certified else "NOT certified",
        ["check", "result", "why not known"],
        [(check.name, check.status, "; ".join(check.why)) for check in found.checks],
    )
    for violation in found.violations:
        say(f"violation: {violation.message}")
    if found.differences:
        print_table(
            "what differs",
            ["setting", "kind", *found.runs],
            [
                (name, told["kind"], *(shown(told["values"][run]) for run in found.runs))
                for name, told in found.differences.items()
            ],
        )
    for note in found.notes:
        say(f"note: {', '.join(note.runs)}: {note.text}")
    return 0 if found.certified else NOT_CERTIFIED
