"""Errors a user can mend. Each says where, what was found and how to put it right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

OK, CELL_FAILED, BAD_INPUT, NOT_CERTIFIED = 0, 1, 2, 3


class InputError(Exception):
    """Bad input: one line that names file or key, the value found, and the mend. Exit code 2."""


class CellError(Exception):
    """A cell cannot go on (NaN loss, full disk, ...): recorded in its folder; the rest goes on."""


class DivergedError(CellError):
    """Training went out of bounds (NaN): an outcome of a tuning trial, a failure of a final run."""


def counted(number: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``, ``1,000 seeds``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def shown(value: Any, limit: int = 80) -> str:
    """A value as one writes it in YAML (``null``, ``[1, true]``), cut to ``limit`` characters."""
    text = _yaml(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _yaml(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)


def suggest(name: str, known: Iterable[str]) -> str:
    """``' Did you mean …?'``, or what exists, for an unknown name."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""
