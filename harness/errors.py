"""Errors a user can mend. Each says where, what was found and how to put it right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OK, CELL_FAILED, BAD_INPUT, NOT_CERTIFIED = 0, 1, 2, 3


class InputError(Exception):
    """Bad input: one line that names file or key, the value found, and the mend. Exit code 2."""


class CellError(Exception):
    """A cell cannot go on (NaN loss, full disk, ...): recorded in its folder; the rest goes on."""


class DivergedError(CellError):
    """Training went out of bounds (NaN): an outcome of a tuning trial, a failure of a final run."""


def suggest(name: str, known: Iterable[str]) -> str:
    """``' Did you mean …?'``, or what exists, for an unknown name."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""
