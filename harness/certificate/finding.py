"""What an audit finds: a rule that was checked, and where it was broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from harness.errors import shown

MISSING = "missing_evidence"
WIDTH = 160  # characters of a value shown in a message; the fields hold it whole


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Attributes:
        check: the rule's name; ``missing_evidence`` where the proof itself is not there.
        cells: the cells concerned, as paths below the results folder.
        key: the file and the key in it, with the line where the file has lines.
        expected: what the rule asks for, as plain JSON.
        found: what the record says, as plain JSON.
        message: all of it on one line.
    """

    check: str
    cells: tuple[str, ...]
    key: str
    expected: Any
    found: Any
    message: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"cells": list(self.cells)}


def violation(
    check: str, cells: str | Iterable[str], key: str, expected: Any, found: Any, why: str
) -> Violation:
    """A violation with its message: ``CELL/KEY: why (expected …, found …)``."""
    where = (cells,) if isinstance(cells, str) else tuple(cells)
    shown = f"{', '.join(where)}/{key}" if where else key
    message = f"{shown}: {why} (expected {_short(expected)}, found {_short(found)})"
    return Violation(check, where, key, expected, found, " ".join(message.split()))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else shown(value, WIDTH)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


@dataclass(frozen=True)
class Check:
    """One rule, with what it proves when it holds.

    Attributes:
        name: as violations call it.
        proves: one sentence.
        passed: it was carried out, and no violation was found.
    """

    name: str
    proves: str
    passed: bool
