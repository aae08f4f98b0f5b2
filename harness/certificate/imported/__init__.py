"""The certificate of runs that another library trained, from the files they left.

Their files were not made to prove anything, so what they can do is contradict a comparison: a check
is ``VIOLATED`` where they do, ``holds`` where they show it, and ``unknown`` with the reason
otherwise. As long as a check is unknown, nothing is certified. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.certificate import CERTIFICATE, FORMAT, Violation
from harness.certificate.finding import violation
from harness.certificate.imported.checks import RULES, ImportedRule, Runs, differences
from harness.certificate.imported.notes import Note, notes
from harness.certificate.imported.openrlhf import read_openrlhf
from harness.certificate.imported.run import ImportedRun
from harness.certificate.imported.trl import read_trl
from harness.certificate.imported.verl import read_verl
from harness.errors import InputError, suggest
from harness.store import write_json

__all__ = ["LIBRARIES", "ImportedCertificate", "ImportedCheck", "audit_imported", "read_runs",
           "write_imported"]  # fmt: skip

LIBRARIES: dict[str, Callable[[str, Path], ImportedRun]] = {
    "trl": read_trl,
    "verl": read_verl,
    "openrlhf": read_openrlhf,
}
HOLDS, VIOLATED, UNKNOWN = "holds", "VIOLATED", "unknown"


@dataclass(frozen=True)
class ImportedCheck:
    """A check of the certificate.

    Attributes:
        name: as in any certificate.
        proves: what it shows of imported runs where it holds.
        status: ``holds``, ``VIOLATED`` or ``unknown``.
        why: what is not known, a reason each; also of a check that is violated.
    """

    name: str
    proves: str
    status: str
    why: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "proves": self.proves, "passed": self.status == HOLDS,
                "status": self.status, "why": list(self.why)}  # fmt: skip


@dataclass(frozen=True)
class ImportedCertificate:
    """What the files of imported runs show.

    Attributes:
        certified: every check holds. Logs as the libraries write them cannot reach that.
        runs: name -> library, algorithm and what was spent.
        checks: each check of the certificate.
        violations: what the files contradict, in the order of the checks.
        settings: run -> what its configuration records, under the names of ``run.py``.
        differences: setting or total -> its kind and its value in each run, where they differ.
        notes: what is known of the libraries' defaults, where the runs show that it applies.
    """

    certified: bool
    runs: dict[str, dict[str, Any]]
    checks: tuple[ImportedCheck, ...]
    violations: tuple[Violation, ...]
    settings: dict[str, dict[str, Any]]
    differences: dict[str, dict[str, Any]]
    notes: tuple[Note, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with the keys of any certificate and three of its own."""
        return {
            "format": FORMAT,
            "imported": self.runs,
            "certified": self.certified,
            "cells": len(self.runs),
            "checks": [check.to_json() for check in self.checks],
            "violations": [found.to_json() for found in self.violations],
            "declared_differences": {},  # nothing was declared
            "settings": self.settings,
            "diverged": sorted(
                {cell for v in self.violations if v.message.count("not finite") for cell in v.cells}
            ),
            "differences": self.differences,
            "notes": [note.to_json() for note in self.notes],
        }


def read_runs(library: str, logs: Sequence[str]) -> list[ImportedRun]:
    """The runs of these logs; ``LIBRARY:PATH`` says of one log that another library wrote it.

    Raises:
        InputError: an unknown library, a log that is not there or not of that library's, or one
            that is given twice.
    """
    asked = []
    for log in logs:
        prefix, colon, rest = log.partition(":")
        own = prefix if colon and prefix in LIBRARIES else library
        if own not in LIBRARIES:
            raise InputError(f"--import {own}: no such library.{suggest(own, LIBRARIES)}")
        path = Path(rest if own == prefix and colon else log)
        if not path.exists():
            raise InputError(f"{path} does not exist; give a run's folder or its log")
        asked.append((own, path))
    if len({path.resolve() for _, path in asked}) < len(asked):
        raise InputError("a log is given twice; give each run once")
    names = _names([path for _, path in asked])
    return [_read(own, name, path) for name, (own, path) in zip(names, asked, strict=True)]


def _read(library: str, name: str, path: Path) -> ImportedRun:
    try:
        run = LIBRARIES[library](name, path)
    except (AttributeError, TypeError, ValueError) as error:  # a key holds something else
        told = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path} is not as {library} writes it ({told}); give its own files"
        ) from error
    run.totals = {key: total for key, total in run.totals.items() if math.isfinite(total)}
    return run


def _names(paths: Sequence[Path]) -> list[str]:
    """As few last parts of each path as tell all of them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def audit_imported(library: str, logs: Sequence[str]) -> ImportedCertificate:
    """Check runs of another library, and compare them with each other.

    Args:
        library: trl, verl or openrlhf.
        logs: their folders or files.

    Raises:
        InputError: a log cannot be read at all.
    """
    runs = read_runs(library, logs)
    checks, violations = [], []
    for rule in RULES:
        check, broken = _carried_out(rule, runs)
        checks.append(check)
        violations += broken
    return ImportedCertificate(
        certified=all(check.status == HOLDS for check in checks),
        runs={
            run.name: {"library": run.library, "algorithm": run.algorithm, **run.totals}
            for run in runs
        },
        checks=tuple(checks),
        violations=tuple(violations),
        settings={run.name: dict(sorted(run.settings.items())) for run in runs},
        differences=differences(runs),
        notes=notes(runs),
    )


def _carried_out(rule: ImportedRule, runs: Runs) -> tuple[ImportedCheck, list[Violation]]:
    found: list[Violation | str] = []
    try:
        found += rule.find(runs)
    except Exception as error:  # fail closed: a check that stumbles proves nothing
        told = f"{type(error).__name__}: {error}"
        why = "the check could not be carried out"
        found.append(violation(rule.name, (), rule.name, "a check carried out", told, why))
    broken = [one for one in found if isinstance(one, Violation)]
    why = tuple(dict.fromkeys(one for one in found if isinstance(one, str)))
    status = VIOLATED if broken else UNKNOWN if why else HOLDS
    return ImportedCheck(rule.name, rule.proves, status, why), broken


def write_imported(certificate: ImportedCertificate, folder: Path) -> Path:
    """Write ``certificate.json`` into a folder, which is made if it is not there."""
    path = folder / CERTIFICATE
    write_json(path, certificate.to_json())
    return path
